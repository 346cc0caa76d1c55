"""transformers loads the exported model and tokenizer of a run, and stops where documents end."""

import json
import random
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from composer3d import cli
from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.manifest import Manifest, file_entry
from composer3d.convert.assets import _longest_sequence, make_assets
from composer3d.convert.convert import convert
from composer3d.facts.tokenizer_file import make_byte_tokenizer
from composer3d.recipe.resolve import load
from composer3d.runtime import log
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build
from composer3d.training.loop import train
from tests.convert.sample_checkpoints import SHAPE, make_hf
from tests.data.sample_chats import MARKED, write_chats, write_tokenizer

END = "<|endoftext|>"
TEXT = "def f(x):\n    return 'äöü 中文 🙂' + str(x)\n"


def run_recipe(path: str, out: str) -> None:
    """Train a recipe on one rank, to its end."""
    resolved = load(path, [f"run.out_dir={out}"])
    with pool_world() as device:
        train(build(resolved.recipe, device, resolved.to_toml()))


def write_recipe(path: Path, data: str, **tables: str) -> Path:
    model = 'preset = "debug-tiny"\nn_layers = 2\nvocab = 512'
    path.write_text(
        f'[run]\nname = "x"\nsteps = {tables.pop("steps", "1")}\ndevice = "cpu"\n'
        f"[model]\n{tables.pop('model', model)}\n"
        f"[data]\nseq_len = 24\nglobal_batch = 2\n{data}\n"
        "[metrics]\ntensorboard = false\n"
        + "".join(f"[{t}]\n{rest}\n" for t, rest in tables.items())
    )
    return path


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a byte-level BPE that truncates texts, which prepare must not do."""
    coder = tokenizers.Tokenizer(tokenizers.models.BPE())
    coder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    coder.train_from_iterator([TEXT * 9], trainer)
    coder.enable_truncation(5)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    coder.save(str(path))
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    """Make token files of a few documents."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": TEXT * 20}) + "\n" for _ in range(9))
    )
    command = ["prepare", str(folder / "text.jsonl"), "-o", str(folder / "tokens")]
    assert cli.main([*command, "--tokenizer", str(tokenizer_file)]) == 0
    return folder / "tokens"


@pytest.fixture(scope="module")
def trained(pool: Pool, tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    """Train one step on those token files; return the run's folder."""
    folder = tmp_path_factory.mktemp("run")
    recipe = write_recipe(folder / "x.toml", f'source = "tokens"\npath = "{prepared}"')
    pool.run(run_recipe, {"path": str(recipe), "out": str(folder)}, world_size=1)
    return folder / "x"


def load_export(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Load the model and the tokenizer of an export, without a network."""
    transformers = pytest.importorskip("transformers")

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("an export must load offline")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


def always_predict(model: Any, token: int) -> None:
    """Change the weights so that the model predicts ``token`` after any input."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(1)
        model.model.norm.weight.fill_(1)
        model.lm_head.weight[token] = 1


def count_generated(model: Any, tokenizer: Any, prompt: str) -> int:
    """Generate at most nine tokens; return how many the model generated."""
    batch = tokenizer(prompt, return_tensors="pt")
    whole = model.generate(**batch, max_new_tokens=9, do_sample=False)
    return whole.shape[1] - batch["input_ids"].shape[1]


def test_transformers_loads_a_run_and_stops_at_the_end_of_a_document(
    trained: Path, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = convert(trained, tmp_path / "out", "hf")
    assert report["carried"] == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (tmp_path / "out/tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    model, tokenizer = load_export(tmp_path / "out", monkeypatch)
    coder = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    coder.no_truncation()
    assert tokenizer(TEXT)["input_ids"] == coder.encode(TEXT).ids
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (END, 2)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1)
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 24
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    always_predict(model, 2)
    assert count_generated(model, tokenizer, "def f") == 1
    always_predict(model, 3)
    assert count_generated(model, tokenizer, "def f") == 9


def assert_it_must_insist(pool: Pool, folder: Path, data: str, refusal: str, **tables: str) -> None:
    """Check that a run is refused, and that it trains with data.other_tokenizer = true."""
    for insists in (False, True):
        line = f"{data}other_tokenizer = {str(insists).lower()}"
        recipe = write_recipe(folder / "x.toml", line, **tables)
        arguments = {"path": str(recipe), "out": str(folder)}
        if insists:
            pool.run(run_recipe, arguments, world_size=1)
            assert (folder / "x/checkpoints/step-00000001").is_dir()
        else:
            with pytest.raises(Exception, match=refusal):
                pool.run(run_recipe, arguments, world_size=1)


@pytest.mark.parametrize("key", ["init", "resume"])
def test_weights_of_another_tokenizer_are_refused(
    pool: Pool, trained: Path, tmp_path: Path, key: str
) -> None:
    """A checkpoint of weights alone is no run to resume, but a model like any other."""
    (tmp_path / "a.txt").write_text(TEXT * 9)
    command = ["prepare", str(tmp_path / "a.txt"), "-o", str(tmp_path / "data")]
    assert cli.main([*command, "--tokenizer", "bytes"]) == 0
    data = f'source = "tokens"\npath = "{tmp_path}/data"\n'
    refusal = r"with another tokenizer than the data: token 0 "
    weights = trained
    if key == "resume":
        weights = tmp_path / "weights"
        convert(trained, tmp_path / "hf", "hf")
        convert(tmp_path / "hf", weights, "dcp")
    assert_it_must_insist(pool, tmp_path, data, refusal, checkpoint=f'{key} = "{weights}"')


def test_bytes_are_refused_for_weights_of_another_tokenizer(
    pool: Pool, tokenizer_file: Path, tmp_path: Path
) -> None:
    """A recipe that names no data is refused when its training starts, too."""
    folder = start_folder(tmp_path, tokenizer_file.read_bytes())
    refusal = r"makes each byte a token, but model\.hf = .* token"
    assert_it_must_insist(pool, tmp_path, "", refusal, model=f'hf = "{folder}"')


def test_a_run_on_conversations_stops_at_the_end_of_a_turn(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    coder = write_tokenizer(tmp_path / "tok")
    end, end_of_turn = map(coder.token_to_id, (END, "<|im_end|>"))
    source = write_chats(tmp_path / "x.jsonl")
    command = ["prepare", str(source), "--tokenizer", str(tmp_path / "tok"), "--kind", "chat"]
    recipe = write_recipe(tmp_path / "x.toml", f'source = "tokens"\npath = "{tmp_path}/data"')
    # The run resumes with the same conversations in shards of another size.
    for steps, shard_tokens in ((1, "1"), (2, "1000")):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        assert cli.main([*command, "-o", f"{tmp_path}/data", "--shard-tokens", shard_tokens]) == 0
        recipe.write_text(recipe.read_text().replace("steps = 1", f"steps = {steps}"))
        pool.run(run_recipe, {"path": str(recipe), "out": str(tmp_path)}, world_size=1)
    assert manifests.read(tmp_path / "x/checkpoints/step-00000002").step == 2

    convert(tmp_path / "x", tmp_path / "out", "hf")
    model, tokenizer = load_export(tmp_path / "out", monkeypatch)
    assert model.generation_config.eos_token_id == [end, end_of_turn]
    for token, count in ((end, 1), (end_of_turn, 1), (end_of_turn + 1, 9)):
        always_predict(model, token)
        assert count_generated(model, tokenizer, "hello") == count
        if token == end:
            continue
        model.save_pretrained(tmp_path / "out")
        capsys.readouterr()
        generating = ["generate", f"{tmp_path}/out", "--prompt", "<s>hello", "--json"]
        assert cli.main([*generating, "--max-tokens", "9", "--device", "cpu"]) == 0
        printed = capsys.readouterr()
        (completion,) = json.loads(printed.out.splitlines()[-1])["completions"]
        assert completion["tokens"] == [token] * count
        assert completion["prompt_tokens"] == coder.encode("hello").ids
        assert "note: 1 prompts begin with the token that begins a text" in printed.err


def test_the_byte_tokenizer_of_an_export_is_exact(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 9)
    recipe = write_recipe(tmp_path / "x.toml", f'source = "text"\npath = "{tmp_path}/text.txt"')
    pool.run(run_recipe, {"path": str(recipe), "out": str(tmp_path)}, world_size=1)
    convert(tmp_path / "x/checkpoints", tmp_path / "out", "hf")
    model, tokenizer = load_export(tmp_path / "out", monkeypatch)
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert (
        tokenizer.eos_token_id
        == model.config.eos_token_id
        == model.generation_config.eos_token_id
        == 0
    )
    # Otherwise transformers would not train the embedding of the end of documents.
    assert model.config.pad_token_id is None
    assert (model.config.bos_token_id, model.generation_config.pad_token_id) == (None, 0)
    always_predict(model, 0)
    assert count_generated(model, tokenizer, "abc") == 1
    always_predict(model, 2)
    assert count_generated(model, tokenizer, "abc") == 9


def test_ids_of_byte_tokens_are_the_bytes() -> None:
    coder = tokenizers.Tokenizer.from_buffer(make_byte_tokenizer())
    assert coder.get_vocab_size() == 256
    draw = random.Random(5)
    ranges = ((0, 0x80), (0, 0x250), (0x2000, 0xD800), (0xE000, 0x110000))
    for _ in range(500):
        text = "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(60)))
        text += draw.choice(["", "\0", "<|endoftext|>", "Ā", " \n\t", "<0x00>"])
        assert coder.encode(text).ids == list(text.encode())
        assert coder.decode(list(text.encode()), skip_special_tokens=False) == text


def test_a_checkpoint_holds_the_files_of_its_model(trained: Path, tokenizer_file: Path) -> None:
    (step,) = (trained / "checkpoints").iterdir()
    saved = manifests.read(step)
    assert manifests.find_damage(step, saved) == []
    assert [name for name in saved.files if name.startswith("assets/")] == [
        "assets/config.json",
        "assets/generation_config.json",
        "assets/tokenizer.json",
        "assets/tokenizer_config.json",
    ]
    assert (step / "assets/tokenizer.json").read_bytes() == tokenizer_file.read_bytes()


def recipe_of(tmp_path: Path, data: str, **tables: str) -> Any:
    return load(write_recipe(tmp_path / "r.toml", data, **tables), [], check_files=False).recipe


def ids(assets: dict[str, bytes], name: str) -> tuple[Any, Any, Any]:
    """Return the ids of the tokens bos, eos and pad in the file ``name``."""
    content = json.loads(assets[name])
    return content["bos_token_id"], content["eos_token_id"], content["pad_token_id"]


def start_folder(tmp_path: Path, tokenizer: bytes) -> Path:
    """Make a Hugging Face folder with this tokenizer.json and the token ids of a chat model."""
    folder = make_hf(tmp_path / "start", replace(SHAPE, vocab=512))
    config = json.loads((folder / "config.json").read_text()) | {"notes": "mine", "pad_token_id": 0}
    (folder / "config.json").write_text(
        json.dumps(config | {"eos_token_id": [7, 2], "bos_token_id": 1})
    )
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 7}')
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return folder


@pytest.fixture
def told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What the log of the package says."""
    monkeypatch.setattr(log.get(), "propagate", True)
    return caplog


def test_a_run_that_starts_from_a_folder_carries_its_files(
    tmp_path: Path, prepared: Path, tokenizer_file: Path, told: pytest.LogCaptureFixture
) -> None:
    """The tokenizer of the data is a copy that another version of the library has saved."""
    copy = json.loads(tokenizer_file.read_bytes())
    copy["truncation"] = None
    copy["model"]["merges"] = [" ".join(pair) for pair in copy["model"]["merges"]]
    folder = start_folder(tmp_path, json.dumps(copy).encode())
    data = f'source = "tokens"\npath = "{prepared}"'
    recipe = recipe_of(tmp_path, data, model=f'hf = "{folder}"')
    assets = make_assets(recipe, 2, None)
    assert told.messages == []
    assert {"tokenizer.model", "special_tokens_map.json"} <= assets.keys()
    assert assets["tokenizer_config.json"] == b'{"chat_template": "x"}'
    config = json.loads(assets["config.json"])
    assert (config["notes"], config["max_position_embeddings"]) == ("mine", 99)
    # Generation stops at the end of a document, and at the tokens that the folder names.
    assert ids(assets, "config.json") == (1, [7, 2], 0)
    assert ids(assets, "generation_config.json") == (1, [2, 7], 0)
    assert json.loads(assets["generation_config.json"])["temperature"] == 0.6


def test_another_chat_template_than_that_of_the_data_is_said(
    tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path / "tok")
    source = write_chats(tmp_path / "x.jsonl")
    command = ["prepare", str(source), "--tokenizer", f"{tmp_path}/tok", "--kind", "chat"]
    assert cli.main([*command, "-o", f"{tmp_path}/data"]) == 0
    folder = start_folder(tmp_path, (tmp_path / "tok/tokenizer.json").read_bytes())
    data = f'source = "tokens"\npath = "{tmp_path}/data"'
    recipe = recipe_of(tmp_path, data, model=f'hf = "{folder}"')
    make_assets(recipe, 2, None)
    (line,) = told.messages
    assert line.startswith("the conversations of the data were rendered with another chat template")
    (folder / "chat_template.jinja").write_text(MARKED)
    make_assets(recipe, 2, None)
    assert told.messages == [line]


def test_the_tokenizer_of_the_data_replaces_that_of_the_folder(
    tmp_path: Path, prepared: Path, told: pytest.LogCaptureFixture
) -> None:
    folder = start_folder(tmp_path, make_byte_tokenizer())
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rag.jinja").write_text("x")
    data = f'source = "tokens"\npath = "{prepared}"'
    recipe = recipe_of(tmp_path, data, model=f'hf = "{folder}"')
    assets = make_assets(recipe, 2, None)
    assert not [name for name in assets if "jinja" in name]
    assert assets["tokenizer.json"] == (prepared / "tokenizer.json").read_bytes()
    assert "chat_template" not in json.loads(assets["tokenizer_config.json"])
    assert not {"tokenizer.model", "special_tokens_map.json"} & assets.keys()
    assert ids(assets, "config.json") == ids(assets, "generation_config.json") == (1, 2, 0)
    assert "temperature" not in json.loads(assets["generation_config.json"])
    assert told.messages == [
        "the data has another tokenizer than the model's files: checkpoints carry that of the "
        "data; left out of the model's files: tokenizer.json, tokenizer_config.json, "
        "tokenizer.model, special_tokens_map.json, additional_chat_templates/rag.jinja, "
        "generation_config.json, "
        "bos_token_id, eos_token_id, pad_token_id in config.json"
    ]


def test_a_resumed_run_keeps_the_assets_of_its_checkpoint(
    tmp_path: Path, prepared: Path, tokenizer_file: Path
) -> None:
    folder = start_folder(tmp_path, tokenizer_file.read_bytes())
    data = f'source = "tokens"\npath = "{prepared}"'
    recipe = recipe_of(tmp_path, data, model=f'hf = "{folder}"')
    first = make_assets(recipe, 2, None)
    (tmp_path / "step/assets").mkdir(parents=True)
    for name, content in first.items():
        (tmp_path / "step/assets" / name).write_bytes(content)
    folder.rename(tmp_path / "gone")
    entries = {f"assets/{name}": file_entry(tmp_path / "step/assets" / name) for name in first}
    manifests.write(tmp_path / "step", Manifest(step=1, model={}, files=entries))
    # A file that somebody has put there is not of the checkpoint.
    (tmp_path / "step/assets/LICENSE").write_text("of another")
    assert make_assets(recipe, 2, tmp_path / "step") == first
    # A link in place of the folder is not followed.
    (tmp_path / "step/assets").rename(tmp_path / "elsewhere")
    (tmp_path / "step/assets").symlink_to(tmp_path / "elsewhere")
    assert "special_tokens_map.json" not in make_assets(recipe, 2, tmp_path / "step")


def test_the_longest_sequence(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    data = f'source = "text"\npath = "{tmp_path}/text.txt"'
    model = 'preset = "debug-tiny"\n'
    for rope, longest in (
        ("", 24),
        ("rope_factor = 2.0\nrope_context = 100", 200),
        ("rope_context = 9", 24),
        ('rope_scaling = "yarn"\nrope_factor = 2.0\nrope_context = 100', 200),
        ('rope_scaling = "linear"\nrope_factor = 2.0', 24),
        ('rope_scaling = "dynamic"\nrope_factor = 2.0\nrope_context = 100', 100),
    ):
        recipe = recipe_of(tmp_path, data, model=model + rope)
        assert (
            json.loads(make_assets(recipe, 0, None)["config.json"])["max_position_embeddings"]
            == longest
        )
    # A model of the last kind computes no more, whatever its files said before.
    assert _longest_sequence(recipe, {"max_position_embeddings": 500}) == 100


def test_a_checkpoint_without_assets_converts_with_a_note(trained: Path, tmp_path: Path) -> None:
    (step,) = (trained / "checkpoints").iterdir()
    old = tmp_path / "old"
    old.mkdir()
    for path in step.iterdir():
        if path.is_file():
            (old / path.name).write_bytes(path.read_bytes())
    saved = manifests.read(step)
    files = {name: entry for name, entry in saved.files.items() if not name.startswith("assets/")}
    manifests.write(old, replace(saved, files=files))
    report = convert(old, tmp_path / "out", "hf")
    assert report["carried"] == []
    assert f"{old} has no assets: no tokenizer is copied" in report["notes"]
    config = json.loads((tmp_path / "out/config.json").read_text())
    # Without the key, transformers would take the token of another model.
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert config[key] is None
