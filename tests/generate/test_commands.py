"""``composer3d generate`` and ``eval`` as a user runs them, on one process and on ranks."""

import importlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from composer3d import cli
from composer3d.facts.errors import UserError
from composer3d.facts.tokenizer_file import make_byte_tokenizer
from composer3d.generate.evaluate import Windows, check_data, default_windows
from composer3d.generate.load import open_checkpoint
from composer3d.models.llama.shape import ModelShape
from composer3d.models.moe.shape import MoeShape
from composer3d.models.shape import DecoderShape
from composer3d.runtime.launch import Pool
from tests.data.remote_folders import upload
from tests.data.sample_chats import MARKED, PLAIN, write_tokenizer
from tests.generate.jobs import (
    answer_of,
    greedy,
    make_checkpoint,
    random_model,
    run_command,
)
from tools.object_store import new_folder
from tools.prove.paths import ROOT

SHAPE = ModelShape(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn=96, vocab=256, rope_theta=1e4)
ASSETS: dict[str, Any] = {
    "config.json": {"max_position_embeddings": 64},
    "generation_config.json": {"eos_token_id": [0, 700]},
    "tokenizer.json": make_byte_tokenizer(),
}
PROMPTS = ["def f(", "é", "import os, sys\n"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("c") / "dcp", "llama", SHAPE, assets=ASSETS)


def greedy_completions(name: str, shape: DecoderShape) -> list[list[int]]:
    """The 12 greedy tokens after each of PROMPTS, up to the end of a text."""
    model = random_model(name, shape)
    head: Any = model.last.head.weight  # type: ignore[union-attr]
    found = [greedy(model, list(text.encode()), 12, head) for text in PROMPTS]
    return [tokens[: tokens.index(0) + 1] if 0 in tokens else tokens for tokens in found]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return greedy_completions("llama", SHAPE)


def generate(*arguments: object) -> list[str]:
    return ["generate", *map(str, arguments), "--device", "cpu", "--max-tokens", "12"]


def with_prompts() -> list[str]:
    return [argument for text in PROMPTS for argument in ("--prompt", text)]


def test_generate_prints_json_text_and_lines(
    checkpoint: Path,
    expected: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.jsonl"
    command = generate(checkpoint, *with_prompts(), "--batch", 2)
    assert cli.main([*command, "--json", "--out", str(out)]) == 0
    answer = answer_of(capsys.readouterr().out)
    assert [entry["tokens"] for entry in answer["completions"]] == expected
    assert [entry["prompt_tokens"] for entry in answer["completions"]] == [
        list(text.encode()) for text in PROMPTS
    ]
    assert answer["new_tokens"] == sum(map(len, expected))
    lines = sorted(map(json.loads, out.read_text().splitlines()), key=lambda line: line["number"])
    assert [{"number": n, **entry} for n, entry in enumerate(answer["completions"])] == lines

    assert cli.main(command) == 0
    printed = capsys.readouterr()
    texts = [bytes(token for token in tokens if token) for tokens in expected]
    assert printed.out == "".join(
        f"--- --prompt number {n}: {PROMPTS[n - 1].strip()}".replace("\n", "\\n")
        + ("\\n" if PROMPTS[n - 1].endswith("\n") else "")
        + f"\n{text.decode(errors='replace')}\n"
        for n, text in enumerate(texts, 1)
    )
    assert re.search(r"\d+ tokens in .* tokens/s; stopped by: ", printed.err)

    assert cli.main([*command, "--out", str(out)]) == 2
    assert "out.jsonl: the file exists; name another one" in capsys.readouterr().err


def test_a_failure_leaves_no_empty_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise UserError("the logits are not finite")

    monkeypatch.setattr("composer3d.generate.generator.Generator.generate", fail)
    out = tmp_path / "out.jsonl"
    assert cli.main(generate(checkpoint, *with_prompts(), "--out", out)) == 2
    assert not out.exists()


def test_one_prompt_is_streamed_to_a_terminal(
    checkpoint: Path,
    expected: list[list[int]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(generate(checkpoint, "--prompt", PROMPTS[0])) == 0
    text = bytes(token for token in expected[0] if token).decode(errors="replace")
    assert capsys.readouterr().out == text + "\n"


def test_a_tokenizer_of_a_stranger_does_not_reach_a_terminal(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streamed or at the end, escaped on a terminal, and raw into a pipe or a file."""
    text = "\x1b]0;PWN\x07\x1b[2J\x9b2J\u202e\u2066\u200b\r\ta\n"
    content = json.loads(make_byte_tokenizer())
    content["decoder"] = {"type": "Replace", "pattern": {"Regex": ".+"}, "content": text}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    for prompts in (["--prompt", "a"], ["--prompt", "a", "--prompt", "b"]):
        command = generate(checkpoint, *prompts, "--tokenizer", file)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
        assert cli.main(command) == 0
        assert text in capsys.readouterr().out
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert cli.main(command) == 0
        shown = capsys.readouterr().out
        assert r"\x1b]0;PWN\x07\x1b[2J\x9b2J\u202e\u2066\u200b\r" in shown
        assert all(char.isprintable() or char in "\n\t" for char in shown)


def test_prompts_that_cannot_be_used_are_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": ""}\n{"prompt": [256]}\n'
        + json.dumps({"prompt": "x" * 64})
        + "\n"
        + json.dumps({"prompt": "x" * 63})
        + "\n"
    )
    assert cli.main(generate(checkpoint, "--prompts", tmp_path / "p.jsonl")) == 2
    name = tmp_path / "p.jsonl"
    assert capsys.readouterr().err.splitlines() == [
        f"{name}:1: the prompt has no tokens; give some text",
        f"{name}:2: token 256 is beyond the model's vocabulary of 256; give the model's own "
        "tokenizer",
        f"{name}:3: the prompt has 64 tokens, and the longest sequence of the model has 64, of "
        "which at least one must follow; shorten the prompt",
    ]


def test_a_missing_tokenizer_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", SHAPE)
    assert cli.main(generate(plain, "--prompt", "a")) == 2
    assert "has no tokenizer.json: give the model's with --tokenizer FILE" in (
        capsys.readouterr().err
    )
    assert cli.main(generate(plain, "--prompt", "a", "--tokenizer", tmp_path / "no")) == 2
    assert "No such file or directory; give bytes, or the path" in capsys.readouterr().err
    assert cli.main(generate(plain, "--prompt", "a", "--tokenizer", "bytes")) == 0
    (tmp_path / "p.jsonl").write_text('{"prompt": [1, 2]}\n')
    capsys.readouterr()
    assert cli.main(generate(plain, "--prompts", tmp_path / "p.jsonl")) == 0
    assert re.fullmatch(r"\d+( \d+)*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("config", "generation", "longest", "ends"),
    [
        ({}, {}, None, ()),
        ({"max_position_embeddings": 64, "eos_token_id": 3}, {}, 64, (3,)),
        ({"eos_token_id": 3}, {"eos_token_id": [0, 700, -1, True, "a", None]}, None, (0,)),
        ({"max_position_embeddings": True}, {"eos_token_id": {"a": 1}}, None, ()),
        ({"max_position_embeddings": -5, "eos_token_id": [[1]]}, [], None, ()),
    ],
)
def test_files_of_strangers_give_the_longest_sequence_and_the_ends(
    config: Any, generation: Any, longest: int | None, ends: tuple[int, ...], tmp_path: Path
) -> None:
    assets = {"config.json": config, "generation_config.json": json.dumps(generation).encode()}
    opened = open_checkpoint(make_checkpoint(tmp_path / "a", "llama", SHAPE, assets=assets))
    assert (opened.longest, opened.end_tokens) == (longest, ends)


def test_dynamic_positions_end_where_the_model_has_learned(tmp_path: Path) -> None:
    """Whatever its files say: the angles would depend on the length of the sequence."""
    shape = replace(SHAPE, rope_scaling="dynamic", rope_factor=4.0, rope_context=20)
    path = make_checkpoint(tmp_path / "step", "llama", shape, assets=ASSETS)
    assert open_checkpoint(path).longest == 20


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--temperature", "-1"], "must be from 0 to 1000, got -1"),
        (["--top-p", "0"], "must be above 0 and at most 1, got 0"),
        (["--top-p", "nan"], "must be a number, got nan"),
        (["--top-k", "-1"], "must be a whole number of at least 0, got -1"),
        (["--seed", "-3"], "must be a whole number of at least 0, got -3"),
        (["--max-tokens", "0"], "must be a whole number above 0"),
        ([], "there is no prompt; give one"),
        (["--prompt", "a", "--recipe", "none.toml"], "none.toml"),
    ],
)
def test_wrong_arguments_have_one_line(
    arguments: list[str], problem: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(checkpoint), *arguments]) == 2
    assert problem in capsys.readouterr().err.splitlines()[-1]


def test_tokens_are_the_same_over_tp(
    checkpoint: Path, expected: list[list[int]], pool: Pool
) -> None:
    arguments = generate(checkpoint, *with_prompts(), "--batch", 2, "--json")
    results = pool.run(run_command, {"arguments": arguments}, world_size=2)
    assert [status for status, _, _ in results] == [0, 0], results
    assert results[1][1] == ""
    completions = answer_of(results[0][1])["completions"]
    assert [entry["tokens"] for entry in completions] == expected


@pytest.mark.parametrize(("tp", "experts", "has_gate"), [(2, 3, False), (4, 6, True)])
def test_tokens_of_experts_are_the_same_over_tp(
    tp: int, experts: int, has_gate: bool, tmp_path: Path, pool: Pool
) -> None:
    """Where tp does not divide them, ranks hold the same ones. A dense layer, a shared expert."""
    sizes = {"experts": experts, "experts_per_token": 2, "moe_every": 2, "shared_ffn": 32}
    shape = MoeShape(**{**vars(SHAPE), **sizes, "shared_gate": has_gate})
    checkpoint = make_checkpoint(tmp_path / "moe", "moe", shape, assets=ASSETS)
    arguments = generate(checkpoint, *with_prompts(), "--batch", 2, "--json")
    results = pool.run(run_command, {"arguments": arguments}, world_size=tp)
    assert [status for status, _, _ in results] == [0] * tp, results
    completions = answer_of(results[0][1])["completions"]
    assert [entry["tokens"] for entry in completions] == greedy_completions("moe", shape)


def test_a_layout_that_does_not_fit_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(generate(checkpoint, "--prompt", "a", "--tp", 3)) == 2
    assert capsys.readouterr().err.splitlines()[0] == (
        "mesh.tp = 3 must divide model.n_heads = 4; use 1, 2 or 4"
    )


# --- a user's own architecture ---


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """The model of docs/own_model.md: the name of its architecture, and its recipe."""
    page = (ROOT / "docs" / "own_model.md").read_text()
    code, recipe = (
        re.search(rf"```{kind}\n(.*?)```", page, re.S)[1] for kind in ("python", "toml")
    )
    (tmp_path / "their_generating_gpt.py").write_text(code)
    name = "their_generating_gpt:ARCHITECTURE"
    (tmp_path / "gpt.toml").write_text(recipe.replace("my_models.gpt:ARCHITECTURE", name))
    monkeypatch.syspath_prepend(tmp_path)
    yield name, tmp_path / "gpt.toml"
    sys.modules.pop("their_generating_gpt", None)


def test_the_model_of_the_library_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of docs/library.md, whose constructor needs a dtype."""
    page = (ROOT / "docs" / "library.md").read_text()
    code = next(
        text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "class Tiny" in text
    )
    (tmp_path / "their_tiny.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    name = "their_tiny:TINY"
    shape = importlib.import_module("their_tiny").TINY.shape(
        dim=32, n_layers=2, n_heads=2, n_kv_heads=2, ffn=64, vocab=256
    )
    folder = make_checkpoint(tmp_path / "dcp", name, shape)
    recipe = tmp_path / "tiny.toml"
    values = "".join(
        f"{key} = {value}\n" for key, value in vars(shape).items() if value is not None
    )
    recipe.write_text(f'[model]\narchitecture = "{name}"\n{values}')
    command = generate(folder, "--prompt", "def", "--tokenizer", "bytes", "--json")
    assert cli.main([*command, "--recipe", str(recipe)]) == 0, capsys.readouterr().err
    sys.modules.pop("their_tiny")


def test_an_architecture_of_ones_own_generates_with_its_recipe(
    own: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, recipe = own
    module = importlib.import_module("their_generating_gpt")
    values = {"n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "ffn": 256, "vocab": 256}
    shape = module.Shape(dim=64, max_positions=512, **values)
    folder = make_checkpoint(tmp_path / "dcp", name, shape)
    model = random_model(name, shape)
    head: Any = model.last.head.weight  # type: ignore[union-attr]
    expected = greedy(model, list(b"def"), 12, head)

    command = generate(folder, "--prompt", "def", "--tokenizer", "bytes", "--json")
    sys.modules.pop("their_generating_gpt")
    assert cli.main(command) == 2  # and nothing that the checkpoint names is imported
    assert "their_generating_gpt" not in sys.modules
    assert "--recipe" in capsys.readouterr().err

    assert cli.main([*command, "--recipe", str(recipe)]) == 0
    (completion,) = answer_of(capsys.readouterr().out)["completions"]
    assert completion["tokens"] == expected[: len(completion["tokens"])]
    assert len(completion["tokens"]) == 12 or completion["stopped"] == "end"

    text = recipe.read_text()
    recipe.write_text(
        text.replace("n_heads = 4", "n_heads = 8").replace("_kv_heads = 8", "_kv_heads = 4")
    )
    assert cli.main([*command, "--recipe", str(recipe)]) == 2
    assert "has model.n_heads = 4, but the recipe has 8" in capsys.readouterr().err


# --- eval ---


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of 4 documents, 239 tokens with their ends."""
    folder = tmp_path_factory.mktemp("tokens")
    generator = torch.Generator().manual_seed(3)
    lines = []
    for length in (100, 7, 90, 38):
        text = bytes(torch.randint(97, 123, (length,), generator=generator).tolist()).decode()
        lines.append(json.dumps({"text": text}) + "\n")
    (folder / "text.jsonl").write_text("".join(lines))
    command = ["prepare", str(folder / "text.jsonl"), "-o", str(folder / "tokens")]
    assert cli.main([*command, "--tokenizer", "bytes"]) == 0
    return folder / "tokens"


def evaluate(*arguments: object) -> list[str]:
    return ["eval", *map(str, arguments), "--device", "cpu", "--json", "--seq-len", "32"]


def loss_by_hand(tokens: Path, packing: str) -> tuple[float, int]:
    """The mean loss over windows of 32 tokens, one after another in float64; and the tokens."""
    model = random_model("llama", SHAPE, torch.float64)
    has_mask = (tokens / "mask-00000.bin").exists()
    content = (tokens / ("tokens-00000.bin" if has_mask else "tokens.bin")).read_bytes()
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint16).long()
    all_labels = whole.clone()
    if has_mask:
        mask = torch.tensor(list((tokens / "mask-00000.bin").read_bytes()))
        all_labels[mask == 0] = -100
    total, count = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(whole) - 1, 32):
            inputs, labels = whole[begin : begin + 33][:-1], all_labels[begin + 1 : begin + 33]
            cuts = [0, len(inputs)]
            if packing == "documents":
                cuts = [0, *(torch.nonzero(inputs == 0)[:, 0] + 1).tolist(), len(inputs)]
            for first, last in pairwise(cuts):
                if first == last:
                    continue
                part, label = inputs[first:last][None], labels[first:last][None].clone()
                if packing == "documents":
                    label[part == 0] = -100
                total += model(part, label, torch.arange(last - first)[None]).item()
                count += int((label != -100).sum())
    return total / count, count


@pytest.mark.parametrize(
    ("packing", "world_size", "arguments"),
    [
        ("none", 2, ["--batch", "3", "--set", "mesh.cp=2"]),
        ("documents", 4, ["--batch", "3", "--set", "mesh.cp=2", "--set", "mesh.tp=2"]),
        ("documents", 4, ["--batch", "1", "--set", "mesh.pp=2"]),
    ],
)
def test_every_token_counts_once_on_every_layout(
    packing: str,
    world_size: int,
    arguments: list[str],
    checkpoint: Path,
    tokens: Path,
    pool: Pool,
) -> None:
    """Layouts whose batches do not divide the eight windows, the last of which is shorter."""
    loss, count = loss_by_hand(tokens, packing)
    assert count == (238 if packing == "none" else 235)
    command = evaluate(checkpoint, tokens, "--packing", packing, "--dtype", "float64")
    results = pool.run(run_command, {"arguments": [*command, *arguments]}, world_size=world_size)
    assert [status for status, _, _ in results] == [0] * world_size, results
    answer = answer_of(results[0][1])
    assert answer["loss"] == pytest.approx(loss, rel=1e-12)
    assert answer["perplexity"] == pytest.approx(math.exp(loss), rel=1e-11)
    assert (answer["tokens"], answer["windows"]) == (count, 8)


@pytest.mark.parametrize(
    ("packing", "world_size", "arguments"),
    [("none", 1, []), ("documents", 2, ["--set", "mesh.cp=2"])],
)
def test_only_learned_tokens_count(
    packing: str,
    world_size: int,
    arguments: list[str],
    checkpoint: Path,
    tmp_path: Path,
    pool: Pool,
) -> None:
    """The first two windows have nothing to learn."""
    entries = [{"prompt": "x" * length, "answer": "y" * (length // 4)} for length in (70, 9, 40)]
    lines = [json.dumps(entry) + "\n" for entry in entries]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    command = ["prepare", str(tmp_path / "x.jsonl"), "-o", str(tmp_path / "masked")]
    assert cli.main([*command, "--tokenizer", "bytes", "--kind", "answers"]) == 0
    loss, count = loss_by_hand(tmp_path / "masked", packing)
    assert count == 17 + 2 + 10 + 3
    command = evaluate(checkpoint, tmp_path / "masked", "--packing", packing, "--dtype", "float64")
    command += ["--batch", "2", *arguments]
    results = pool.run(run_command, {"arguments": command}, world_size=world_size)
    assert [status for status, _, _ in results] == [0] * world_size, results
    answer = answer_of(results[0][1])
    assert answer["loss"] == pytest.approx(loss, rel=1e-12)
    assert answer["tokens"] == count
    # The speed is that of all tokens: it does not depend on what is learned.
    computed = answer["tokens_per_s"] * answer["seconds"]
    assert computed == pytest.approx(32 * answer["windows"], rel=1e-9)


def run_with(arguments: list[str], variables: dict[str, str]) -> tuple[int, str, str]:
    """A task: run a command with variables in its environment."""
    os.environ |= variables
    return run_command(arguments)


def test_a_folder_in_a_store_has_the_loss_of_one_on_a_disk(
    checkpoint: Path, tokens: Path, pool: Pool
) -> None:
    arguments = ["--packing", "documents", "--dtype", "float64", "--batch", "3"]
    folders = (tokens, upload(tokens, new_folder()))
    names = [name for name in os.environ if name.startswith("AWS_")]
    variables = {name: os.environ[name] for name in names}
    results = []
    for folder in folders:
        options = {"arguments": evaluate(checkpoint, folder, *arguments), "variables": variables}
        ((status, out, errors),) = pool.run(run_with, options, world_size=1)
        assert status == 0, errors
        results.append(answer_of(out))
    assert results[0]["loss"] == results[1]["loss"]
    assert results[0]["tokens"] == results[1]["tokens"] == 235


def test_an_evaluation_in_which_nothing_is_learned_is_refused(
    checkpoint: Path, tmp_path: Path, pool: Pool
) -> None:
    """Its loss would be 0, as if the model were perfect."""
    (tmp_path / "x.jsonl").write_text('{"prompt": "", "answer": ""}\n' * 2)
    command = ["prepare", str(tmp_path / "x.jsonl"), "-o", str(tmp_path / "empty")]
    assert cli.main([*command, "--tokenizer", "bytes", "--kind", "answers"]) == 0
    command = evaluate(checkpoint, tmp_path / "empty", "--packing", "documents")
    ((status, _, errors),) = pool.run(run_command, {"arguments": command}, world_size=1)
    assert status == 2
    assert "empty has no token that is learned after another one" in errors


def test_windows_are_those_of_the_run_unless_given(tmp_path: Path, tokens: Path) -> None:
    recipe = '[data]\nseq_len = 48\npacking = "documents"\n'
    folder = make_checkpoint(tmp_path / "a", "llama", SHAPE, recipe=recipe, assets=ASSETS)
    opened = open_checkpoint(folder)
    assert default_windows(opened) == Windows(seq_len=48, packing="documents")
    assert check_data(opened, str(tokens), default_windows(opened)) == []
    # Without a config.json, no longest sequence is known.
    unknown = open_checkpoint(make_checkpoint(tmp_path / "c", "llama", SHAPE, recipe=recipe))
    assert default_windows(unknown) == Windows(seq_len=48, packing="documents")
    endless = recipe.replace("48", str(2**40))
    unknown = open_checkpoint(make_checkpoint(tmp_path / "d", "llama", SHAPE, recipe=endless))
    assert default_windows(unknown) == Windows(seq_len=2048, packing="documents")
    for number, wrong in enumerate(("[data", "[data]\nseq_len = 1e9\npacking = []", "data = 3")):
        folder = make_checkpoint(
            tmp_path / f"b{number}", "llama", SHAPE, recipe=wrong, assets=ASSETS
        )
        assert default_windows(open_checkpoint(folder)) == Windows(seq_len=64, packing="none")


def test_data_that_does_not_fit_is_refused(
    checkpoint: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(checkpoint), str(tmp_path)]) == 2
    assert "has no tokens.json; give a folder that composer3d prepare made" in (
        capsys.readouterr().err
    )
    assert cli.main(["eval", str(checkpoint), str(tokens), "--seq-len", "65"]) == 2
    assert "--seq-len 65: the longest sequence of the model has 64 tokens" in (
        capsys.readouterr().err
    )
    small = make_checkpoint(
        tmp_path / "small", "llama", ModelShape(**{**vars(SHAPE), "vocab": 200}), assets=ASSETS
    )
    assert cli.main(["eval", str(small), str(tokens)]) == 2
    assert "has a vocabulary of 256 tokens, more than the 200 of the model" in (
        capsys.readouterr().err
    )
    for wrong in ("model.n_layers=2", "data.path=other", "optim.lr=5", "checkpoint.init=x"):
        assert cli.main(["eval", str(checkpoint), str(tokens), "--set", wrong]) == 2
        assert f"--set {wrong}: eval computes the checkpoint as it is" in capsys.readouterr().err
    assert cli.main(["eval", str(checkpoint), str(tokens), "--set", "mesh.tp=3"]) == 2
    assert "mesh.tp = 3 must divide model.n_heads = 4" in capsys.readouterr().err


def test_another_tokenizer_is_noted(tmp_path: Path, tokens: Path) -> None:
    again = tokenizers.Tokenizer.from_buffer(make_byte_tokenizer()).to_str().encode()
    assert again != make_byte_tokenizer()
    saved = make_checkpoint(tmp_path / "b", "llama", SHAPE, assets={"tokenizer.json": again})
    assert check_data(open_checkpoint(saved), str(tokens), Windows(seq_len=8, packing="none")) == []
    other = tokenizers.Tokenizer(tokenizers.models.BPE()).to_str().encode()
    assets = {**ASSETS, "tokenizer.json": other}
    opened = open_checkpoint(make_checkpoint(tmp_path / "a", "llama", SHAPE, assets=assets))
    (note,) = check_data(opened, str(tokens), default_windows(opened))
    assert "a loss of other tokens says nothing" in note


def prompt_tokens_of(done: dict[str, Any]) -> list[int]:
    (completion,) = done["completions"]
    tokens: list[int] = completion["prompt_tokens"]
    return tokens


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_chat_renders_prompts_as_transformers_does(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the template that came with the checkpoint, or by that of another folder."""
    write_tokenizer(tmp_path / "tokenizer", template)
    files = {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
    shape = replace(SHAPE, vocab=512)
    path = make_checkpoint(tmp_path / "step", "llama", shape, assets=files)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    expected = reference.apply_chat_template(
        [{"role": "user", "content": "hello there"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert expected[0] == reference.bos_token_id
    arguments = ["generate", str(path), "--prompt", "hello there", "--max-tokens", "1", "--json"]
    assert cli.main([*arguments, "--chat"]) == 0
    assert prompt_tokens_of(answer_of(capsys.readouterr().out)) == expected
    others = ["--tokenizer", str(tmp_path / "tokenizer")]
    assert cli.main([*arguments, "--chat", *others]) == 0
    assert prompt_tokens_of(answer_of(capsys.readouterr().out)) == expected
    assert cli.main(arguments) == 0
    assert prompt_tokens_of(answer_of(capsys.readouterr().out)) != expected


def test_chat_needs_text_and_a_template_that_works(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(*arguments: str) -> str:
        assert cli.main(["generate", str(checkpoint), "--chat", *arguments]) == 2
        return capsys.readouterr().err

    write_tokenizer(tmp_path / "none", None)
    write_tokenizer(tmp_path / "fails", "{{ raise_exception('no user, please') }}")
    (tmp_path / "tokens.jsonl").write_text('{"prompt": [1, 2]}\n')
    write_tokenizer(tmp_path / "named", None)
    (tmp_path / "named/additional_chat_templates").mkdir()
    (tmp_path / "named/additional_chat_templates/rag.jinja").write_text("x")
    prompt = ["--prompt", "hello"]
    assert "has no chat template, neither chat_template.jinja nor in" in error_of(*prompt)
    assert "has no chat template" in error_of(*prompt, "--tokenizer", str(tmp_path / "none"))
    named = error_of(*prompt, "--tokenizer", str(tmp_path / "named"))
    assert "has chat templates of the names rag, and no default one; leave --chat out, or" in named
    assert "no user, please" in error_of(*prompt, "--tokenizer", str(tmp_path / "fails"))
    assert "a tokenizer of bytes does not have" in error_of(*prompt, "--tokenizer", "bytes")
    assert "given as tokens; give text" in error_of("--prompts", str(tmp_path / "tokens.jsonl"))
