"""Commands that are given token files in an object store by their URL."""

import sys
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.facts.errors import RecipeError
from composer3d.facts.remote import RemotePath
from composer3d.recipe.draft import parse_document
from composer3d.recipe.resolve import load
from tests.commands.conftest import Ask
from tests.data.remote_folders import requests, upload, write_shards
from tools.object_store import new_folder
from tools.prove.paths import ROOT

RECIPE = str(ROOT / "recipes" / "debug-1-single.toml")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "tokens", has_mask=True)


@pytest.fixture
def remote(local: Path) -> RemotePath:
    return upload(local, new_folder())


def check(capsys: pytest.CaptureFixture[str], *sets: str) -> list[str]:
    """Return the lines of the errors of ``composer3d check``."""
    overrides = ["data.source=tokens", "data.seq_len=32", "validation.every=0", *sets]
    cli.main(["check", RECIPE, *(f"--set={override}" for override in overrides)])
    return capsys.readouterr().err.splitlines()


def test_check_reads_one_manifest_and_one_list(
    remote: RemotePath, capsys: pytest.CaptureFixture[str]
) -> None:
    with requests() as seen:
        assert check(capsys, f"data.path={remote}") == []
    assert seen.calls == ["head_object", "get_object", "list_objects_v2"]
    (line,) = check(capsys, f"data.path={remote}", "data.seq_len=1000")
    assert f'data.seq_len = 1000 needs 1001 tokens, but data.path = "{remote}" has 1000;' in line


def test_check_reads_all_paths(
    local: Path, remote: RemotePath, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = f'data.sources=[{{path="{remote}", weight=1}}, {{path="{local}", weight=2}}]'
    held_out = [f"validation.path={remote}", "validation.every=5"]
    assert check(capsys, sources, *held_out) == []
    (remote / "mask-00003.bin").remove()
    first, second = check(capsys, sources, *held_out)
    problem = f"cannot be used: {remote}/mask-00003.bin is missing, but tokens.json says 1 bytes"
    assert problem in first
    assert f'data.sources: path = "{remote}" ' in first
    assert f'validation.path = "{remote}" {problem}' in second


def test_check_says_what_is_wrong_with_a_url(
    remote: RemotePath, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = check(capsys, f"data.path={remote.parent}/nothing")
    assert f"{remote.parent}/nothing has no tokens.json; give a folder that" in line
    (line,) = check(capsys, "data.path=s3://name:word@bucket/x")
    assert "or the URL of a folder in an object store: KIND://BUCKET/PATH" in line
    (line,) = check(capsys, "data.path=hdfs://host/x")
    assert "or the URL of a folder in an object store" in line
    (line,) = check(capsys, f"data.path={remote}", "data.cache_dir=s3://bucket/cache")
    assert "must be a path of 1 to 4096 characters on a disk" in line
    (line,) = check(capsys, f"data.path={remote}", "data.cache_gib=3")
    assert "data.cache_gib = 3.0 is not used without data.cache_dir; remove it, or set" in line
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    (line,) = check(capsys, "data.path=gs://bucket/x")
    assert "(needs gcsfs: pip install composer3d[gs]); look at the connection" in line


def test_text_is_not_read_from_a_store(
    remote: RemotePath, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = 'is in an object store, and only data.source = "tokens" is read from there; copy it'
    (line,) = check(capsys, "data.source=text", f"data.path={remote}")
    assert f'data.path = "{remote}" {wrong}' in line
    sources = f'data.sources=[{{path="{remote}", weight=1}}]'
    (line,) = check(capsys, "data.source=jsonl", sources)
    assert f'data.sources: path = "{remote}" {wrong}' in line
    held_out = [f"validation.path={remote}", "validation.every=5", f"data.path={ROOT}"]
    lines = check(capsys, "data.source=text", *held_out)
    assert f'validation.path = "{remote}" {wrong}' in lines[0]


def test_the_recipe_of_a_stranger_reaches_no_store(
    tmp_path: Path, remote: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    text = Path(RECIPE).read_text()
    sets = ["data.source=tokens", "validation.every=0", "data.seq_len=32", f"data.path={remote}"]
    load(parse_document(text, "x.toml"), sets, may_import=True)
    sets.append(f"model.hf={tmp_path}/hf")
    with requests() as seen, pytest.raises(RecipeError) as refusal:
        load(parse_document(text, "x.toml"), sets)
    assert seen.calls == []
    assert any(
        "is in an object store, which is read only for a recipe that you name yourself" in line
        for line in refusal.value.lines
    )


def test_inspect_reads_a_folder_where_it_is(local: Path, remote: RemotePath, ask: Ask) -> None:
    for more in ([], ["--full"]):
        status, report = ask("inspect", str(local), *more)
        with requests() as seen:
            assert ask("inspect", str(remote), *more) == (status, report | {"path": str(remote)})
        assert status == 0
        # Without --full, no tokens are read but those that are shown.
        n_bytes = sum(size for name, _, size in seen.ranges if name.startswith("tokens-"))
        assert (n_bytes >= 2000) == bool(more)


@pytest.mark.parametrize("name", ["tokens-00006.bin", "mask-00006.bin", "documents-00006.bin"])
def test_inspect_finds_damage(remote: RemotePath, name: str, ask: Ask) -> None:
    path = remote / name
    content = path.read(1 << 20)
    path.write(content[:-1] + bytes([content[-1] ^ 1]))
    assert ask("inspect", str(remote), "--full", "--samples", "0")[1]["problems"][0].startswith(
        f"{path} is damaged between bytes 0 and "
    )
    path.write(content[:-1])
    status, report = ask("inspect", str(remote), "--samples", "0")
    assert status == 1
    assert f"{path} has {len(content) - 1} bytes, but tokens.json says" in report["problems"][0]


def test_prepare_reads_from_no_store(
    remote: RemotePath, capsys: pytest.CaptureFixture[str]
) -> None:
    with requests() as seen:
        assert cli.main(["prepare", str(remote), "-o", "x", "--tokenizer", "bytes"]) == 2
        assert "prepare reads text from a disk only" in capsys.readouterr().err
    assert seen.calls == []
