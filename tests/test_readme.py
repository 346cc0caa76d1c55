"""The README is true where a program can tell: its Python runs, its commands parse, what it names is there."""

import os
import re
import shlex
import socket
from typing import Any

import pytest
import tomli
import torch

from composer3d import cli
from composer3d.recipe.values import FIELDS
from composer3d.runtime.launch import Pool
from tools.prove.paths import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


COMMANDS = [
    line.partition(" #")[0].strip()
    for block in blocks("bash")
    for line in block.splitlines()
    if line.strip()
]


def run_block(text: str, port: int) -> dict[str, Any]:
    """A task: one block as a program of its own, and the numbers that it leaves, of tensors as lists."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "README.md", "exec"), names)
    numbers = {
        name: value for name, value in names.items() if isinstance(value, torch.Tensor | float)
    }
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in numbers.items()
    }


def run(pool: Pool, text: str, world_size: int) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return pool.run(run_block, {"text": text, "port": port}, world_size=world_size)


def test_there_are_two_programs() -> None:
    assert len(blocks("python")) == 2
    assert len(COMMANDS) > 20


def test_the_composition_runs_as_printed(pool: Pool) -> None:
    (alone,) = run(pool, blocks("python")[0], 1)
    first, second = run(pool, blocks("python")[0], 2)
    assert alone["loss"] == pytest.approx(
        torch.tensor(256.0).log().item(), rel=0.05
    )  # of a model that knows nothing
    assert first["loss"] == second["loss"] == pytest.approx(alone["loss"], rel=1e-3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_attention_runs_as_printed(pool: Pool, world_size: int) -> None:
    for names in run(pool, blocks("python")[1], world_size):
        ids_BT = torch.tensor(names["ids_BT"])
        mask = (ids_BT[:, None, :, None] == ids_BT[:, None, None, :]).tril()
        q, k, v = (torch.tensor(names[name]) for name in ("q_BHTD", "k_BHTD", "v_BHTD"))
        whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(torch.tensor(names["whole_BHTD"]), whole)


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if "composer3d " in line], ids=lambda line: line[:60]
)
def test_a_command_parses(command: str) -> None:
    words = shlex.split(command)
    at = next(
        n for n, word in enumerate(words) if word == "composer3d" or word.endswith("/composer3d")
    )
    arguments = words[at + 1 :]
    if arguments and arguments[0].startswith("-") and arguments[0] != "--version":
        pytest.fail(f"{command}: no command")
    given = vars(cli._parser().parse_args(arguments))
    for each in given.get("sets", []):
        assert each.partition("=")[0] in FIELDS


@pytest.mark.parametrize("block", blocks("toml"))
def test_keys_of_a_recipe_exist(block: str) -> None:
    for table, content in tomli.loads(block).items():
        assert {f"{table}.{name}" for name in content} <= FIELDS.keys()


def test_what_is_named_is_there() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    words = [word for line in COMMANDS for word in shlex.split(line)]
    words += re.findall(r"`([^`\s]+)`", README)
    paths = [
        word for word in words if re.match(r"(recipes|tests|tools|composer3d)/[\w./-]+$", word)
    ]
    assert len(links) > 5
    assert len(paths) > 10
    assert [path for path in (*links, *paths) if not (ROOT / path).exists()] == []


def test_keys_in_the_text_exist() -> None:
    tables = {key.split(".")[0] for key in FIELDS}
    named = re.findall(r"`(?:\[(\w+)\] )?([a-z]+\.[a-z_]+)(?: = [^`]*)?`", README)
    keys = [
        key
        for _, key in named
        if key.split(".")[0] in tables and not key.endswith((".jsonl", ".toml", ".json"))
    ]
    assert len(keys) > 15
    assert [key for key in keys if key not in FIELDS] == []
