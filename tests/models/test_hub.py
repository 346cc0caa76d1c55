"""Checkpoints by their name on a Hub, which is a server on this machine."""

import builtins
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm.std import TqdmDefaultWriteLock, tqdm

from composer3d import cli
from composer3d.facts.bars import share_bars_by_threads
from composer3d.facts.errors import CheckpointError, RecipeError
from composer3d.models import hub
from composer3d.recipe.draft import parse_document
from composer3d.recipe.resolve import load
from tests.hub import COMMIT, Hub, serve
from tests.imports.configurations import DEEPSPEED
from tests.runtime.test_environment import free_port
from tools.prove.paths import ROOT

NAME = "hf://org/tiny"
PINNED = f"{NAME}@{COMMIT}"
NAMES = ("hub", "folder")  # of two runs
RECIPE = """
[run]
steps = 2
[optim]
warmup = 0
[data]
seq_len = 16
global_batch = 2
micro_batch = 1
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder of a model that a run has made."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "x.toml").write_text(RECIPE)
    run = ("--set", "model.preset=debug-tiny", "--set", f"run.out_dir={folder}/runs")
    assert cli.main(["train", f"{folder}/x.toml", *run, "--set", "run.name=made"]) == 0
    assert cli.main(["convert", f"{folder}/runs/made", f"{folder}/hf", "--to", "hf"]) == 0
    (folder / "hf" / "pytorch_model.bin").write_bytes(b"not read")
    (folder / "hf" / "LICENSE").write_text("as you like")
    for name in ("additional_chat_templates/rag.jinja", "original/model.safetensors"):
        (folder / "hf" / name).parent.mkdir()
        (folder / "hf" / name).write_text("x")
    # So that the numbers in config.json say which token ends a text.
    (folder / "hf" / "tokenizer_config.json").unlink()
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / "hf" / name).read_text())
        (folder / "hf" / name).write_text(json.dumps(content | {"eos_token_id": 7}))
    return folder / "hf"


@pytest.fixture
def server(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with this model. The working folder has a recipe and nothing else."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(RECIPE)
    with serve({"org/tiny": files}) as running:
        # What the library has read from HF_ENDPOINT and HF_HOME when it was imported.
        files_url = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files_url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield running


def test_a_name_is_pinned_to_a_commit_and_loaded_once(server: Hub) -> None:
    assert hub.pinned(NAME) == PINNED
    folder = hub.folder(PINNED)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not {"pytorch_model.bin", "original"} & names
    assert (folder / "additional_chat_templates/rag.jinja").read_text() == "x"
    server.asked.clear()
    assert hub.folder(PINNED) == folder
    assert server.asked == []


def test_a_lost_connection_leaves_what_was_loaded(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder = hub.folder(NAME)
    server.asked.clear()
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    files_url = f"{nowhere}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files_url)
    assert hub.folder(NAME) == folder
    assert server.asked == []
    with pytest.raises(CheckpointError, match="hf://org/other: "):
        hub.folder("hf://org/other")


def test_what_the_hub_does_not_have_is_named(server: Hub) -> None:
    with pytest.raises(CheckpointError, match="hf://org/none: RepositoryNotFoundError: "):
        hub.folder("hf://org/none")
    with pytest.raises(CheckpointError, match="hf://org/tiny@v9: RevisionNotFoundError: "):
        hub.folder(f"{NAME}@v9")


@pytest.mark.parametrize("text", ["hf://tiny", "hf://../../etc", f"{NAME}@../x", f"{NAME}\n"])
def test_a_malformed_name_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="is no name on the Hub; write hf://ORGANISATION"):
        hub.folder(text)


def test_commands_read_a_name(server: Hub, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", NAME, "copy.pt", "--to", "torch"]) == 0
    assert cli.main(["inspect", PINNED]) == 0
    capsys.readouterr()
    printed = []
    for source in (NAME, str(files)):
        arguments = ["generate", source, "--prompt", "def", "--max-tokens", "5", "--json"]
        assert cli.main([*arguments, "--tokenizer", NAME]) == 0
        (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["completions"]
        printed.append(result["tokens"])
    assert printed[0] == printed[1]
    assert len(printed[0]) == 5


def test_a_run_starts_from_the_commit_that_it_keeps(
    server: Hub, files: Path, tmp_path: Path
) -> None:
    assert cli.main(["train", "x.toml", "--set", f"model.hf={NAME}", "--set", "run.name=hub"]) == 0
    folder = ["--set", f"model.hf={files}", "--set", "run.name=folder"]
    assert cli.main(["train", "x.toml", *folder]) == 0
    losses = [
        [json.loads(line)["loss"] for line in lines if '"loss"' in line]
        for name in NAMES
        for lines in [(tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    ]
    assert losses[0] == losses[1]
    assert f'hf = "{PINNED}"' in (tmp_path / "runs/hub/recipe.toml").read_text()
    # Its checkpoints have the files of the model, as those of a run from a folder.
    assets = [tmp_path / "runs" / name / "checkpoints/step-00000002/assets" for name in NAMES]
    contents = [
        {file.name: file.read_bytes() for file in each.rglob("*") if file.is_file()}
        for each in assets
    ]
    assert contents[0] == contents[1]
    assert {"LICENSE", "rag.jinja"} <= contents[0].keys()


def test_a_resumed_run_keeps_its_commit(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"model.hf={NAME}"
    assert cli.main(["train", "x.toml", "--set", name, "--set", "run.steps=1"]) == 0
    other = "f" * 40
    monkeypatch.setattr(server, "commit", other)
    assert load("x.toml", [name], may_import=True).recipe.model.hf == PINNED
    assert load("x.toml", [f"{name}@{other}"], may_import=True).recipe.model.hf == f"{NAME}@{other}"
    new = load("x.toml", [name, "run.name=new"], may_import=True)
    assert new.recipe.model.hf == f"{NAME}@{other}"


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_run_that_begins_anew_takes_the_commit_of_now(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    """Without a checkpoint, its weights come from what the recipe names."""
    sets = [f"model.hf={NAME}", "run.steps=1", "run.name=anew"]
    sets += [f"checkpoint.folder=file://{tmp_path}/kept"] if is_elsewhere else []
    assert cli.main(["train", "x.toml", *(word for text in sets for word in ("--set", text))]) == 0
    other = "f" * 40
    monkeypatch.setattr(server, "commit", other)
    assert load("x.toml", sets, may_import=True).recipe.model.hf == PINNED
    run = tmp_path / "runs/anew"
    if is_elsewhere:  # it ended before it had saved
        events = (run / "events.jsonl").read_text().splitlines(keepends=True)
        (run / "events.jsonl").write_text("".join(line for line in events if "save" not in line))
    else:  # its only save was killed
        checkpoint = run / "checkpoints/step-00000001"
        checkpoint.rename(checkpoint.with_suffix(".tmp"))
    assert load("x.toml", sets, may_import=True).recipe.model.hf == f"{NAME}@{other}"


def test_a_commit_replaces_no_size_that_is_written_out(server: Hub, tmp_path: Path) -> None:
    # The launcher gives ranks the commit, which is not another model than the recipe names.
    whole = load("x.toml", [f"model.hf={NAME}"], may_import=True).to_toml()
    whole = whole.replace("norm_eps = 1e-05", "norm_eps = 1e-06")
    (tmp_path / "whole.toml").write_text(whole.replace(PINNED, NAME))
    recipe = load("whole.toml", [f"model.hf={PINNED}"], may_import=True).recipe
    assert (recipe.model.hf, recipe.model.norm_eps) == (PINNED, 1e-6)
    (tmp_path / "whole.toml").write_text(whole.replace(PINNED, "hf://org/other"))
    with pytest.raises(RecipeError, match=r"model\.norm_eps = 1e-06"):
        load("whole.toml", [f"model.hf={PINNED}"], may_import=True)


def test_a_tokenizer_has_the_files_beside_it(server: Hub, files: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text\n")
    for name, tokenizer in (("hub", NAME), ("folder", str(files))):
        arguments = ["prepare", "text.txt", "-o", name, "--tokenizer", tokenizer]
        assert cli.main(arguments) == 0
    tokens = [
        [file.read_bytes() for file in sorted((tmp_path / name).glob("*.bin"))] for name in NAMES
    ]
    assert tokens[0] == tokens[1] != []


def test_layouts_of_a_stranger_load_nothing(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "layouts.txt").write_text(f"model.hf={NAME}\n")
    assert cli.main(["verify", "x.toml", "--steps", "1", "--layouts", "layouts.txt"]) == 1
    assert server.asked == []


def test_a_recipe_that_nobody_names_loads_nothing(server: Hub) -> None:
    assert load("x.toml", [f"model.hf={NAME}"], may_import=True).recipe.model.hf == PINNED
    server.asked.clear()
    with pytest.raises(RecipeError, match="only for a recipe that you name yourself"):
        load("x.toml", [f"model.hf={NAME}"])
    assert server.asked == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match=r"pip install composer3d\[hub\]"):
        hub.folder(NAME)
    assert hub.folder("a/folder") == Path("a/folder")


def test_an_import_reads_the_name_that_the_user_sets(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    command = ["import", "ds.json", "--gpus", "1", "-o", "made.toml", "--set", f"model.hf={NAME}"]
    assert cli.main(command) == 0
    assert f'hf = "{PINNED}"' in (tmp_path / "made.toml").read_text()
    assert cli.main(["check", "made.toml"]) == 0
    assert any("/org/tiny/" in path for path in server.asked)


def test_no_bar_makes_a_semaphore(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tqdm, "_lock", raising=False)
    share_bars_by_threads.cache_clear()
    made: list[str] = []
    monkeypatch.setattr(TqdmDefaultWriteLock, "mp_lock", None, raising=False)
    monkeypatch.setattr(TqdmDefaultWriteLock, "create_mp_lock", lambda: made.append("one"))
    hub.folder(NAME)
    assert made == []


def test_a_name_that_only_a_file_gives_is_not_loaded(server: Hub) -> None:
    document = parse_document(f'{RECIPE}[model]\nhf = "{NAME}"\n', "theirs.toml")
    for names in ((), ("hf://org/other",)):
        with pytest.raises(RecipeError, match="only for a recipe that you name yourself"):
            load(document, hub_names=names)
    assert server.asked == []
    assert load(document, hub_names=(NAME,)).recipe.model.hf == PINNED


def test_ranks_ask_the_hub_for_nothing_that_is_known(server: Hub, tmp_path: Path) -> None:
    command = ["train", "x.toml", "--set", f"model.hf={NAME}", "--set", "mesh.dp_shard=2"]
    environment = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "composer3d", *command, "--set", "run.name=two"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr  # as Python 3.14 says of semaphores that a rank leaves
    assert server.asked.count("/api/models/org/tiny/revision/main") == 1
    # By HEAD, and by GET.
    assert server.asked.count(f"/org/tiny/resolve/{COMMIT}/model.safetensors") == 2
