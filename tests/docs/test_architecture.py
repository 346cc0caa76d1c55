"""``docs/architecture.md``: its list of files is the path of a batch, and it names every module."""

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import composer3d
from composer3d.data import Batch
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.training import loop
from composer3d.training.build import build
from tools.prove.paths import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = Path(composer3d.__file__).parent
LAYERS = [
    "cli",
    "commands",
    "report",
    "full",
    "verify",
    "dryrun",
    "draw",
    "doctor",
    "generate",
    "training",
    "reliability",
    "convert",
    "checkpoint",
    "parallel",
    "data",
    "runtime",
    "imports",
    "planner",
    "recipe",
    "models",
    "facts",
]
NUMBERS = {7: "seven", 8: "eight", 9: "nine", 10: "ten"}


class _GradientsAreThereError(Exception):
    """Ends a training after the gradients of its first step."""


class _Trace:
    """The files of the package whose functions are called, from the loader to the first kernel.

    Attributes:
        files: in the order of the first call, the loop first.
        stack: the files of the nested calls that lead to the kernel.
    """

    def __init__(self) -> None:
        self.files = ["training/loop.py"]
        self.stack: list[str] = []

    def batches(self, loader: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of ``loader``; the trace begins before the first one.

        It includes the thread that makes the batch.
        """
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        yield from loader

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (file := file_of(frame)) is None:
            return
        if file not in self.files and not file.startswith("training/observers/"):
            self.files.append(file)
        if frame.f_code.co_name == "attend_block" and not self.stack:
            files = []
            caller: FrameType | None = frame
            while caller is not None:
                files.append(file_of(caller))
                caller = caller.f_back
            path = [name for name in reversed(files) if name is not None]
            self.stack = list(dict.fromkeys(path[path.index("training/loop.py") :]))
            sys.setprofile(None)


def file_of(frame: FrameType) -> str | None:
    """The file of a frame in the package, or None."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


def trace_a_step(recipe: str, out_dir: str) -> tuple[list[str], list[str]]:
    """Train one step on this rank; returns the traced files and the nested ones."""
    trace = _Trace()

    def stop(*_: Any, **__: Any) -> None:
        raise _GradientsAreThereError

    resolved = load(recipe, [f"run.out_dir={out_dir}"])
    update, loop.update = loop.update, stop
    try:
        with pool_world() as device:
            run = build(resolved.recipe, device, "")
            run.loader = trace.batches(run.loader)  # type: ignore[assignment]
            with pytest.raises(_GradientsAreThereError):
                loop.train(run)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        loop.update = update
    return trace.files, trace.stack


def test_the_list_is_the_path_of_a_batch(pool: Pool, tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "debug-2-cp.toml"
    assert f"`{recipe.relative_to(ROOT)}`" in PAGE
    arguments = {"recipe": str(recipe), "out_dir": str(tmp_path)}
    for files, stack in pool.run(trace_a_step, arguments, world_size=2):
        listed = re.findall(r"^\d+\. (\*\*)?`([\w/]+\.py)`", PAGE, re.MULTILINE)
        assert files == [file for _, file in listed]
        assert stack == [file for bold, file in listed if bold]
        assert f"passes through {len(files)} files" in PAGE
        assert f"{NUMBERS[len(stack)]} files deep" in PAGE


def test_the_numbers_of_the_list_count_up() -> None:
    section = PAGE.partition("## From the loop to the kernel")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", section, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_files_that_are_named_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(named) > 60
    missing = [
        name
        for name in named
        if not (PACKAGE / name).is_file()
        and not (ROOT / name).is_file()
        and not ("/" not in name and list(PACKAGE.rglob(name)))
    ]
    assert missing == []


def test_every_module_is_named() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]
    named = PAGE.partition("## Files")[2].partition("### Beside the package")[0]
    unnamed = [
        path.relative_to(PACKAGE).as_posix()
        for path in modules
        if f"`{path.relative_to(PACKAGE).as_posix()}`" not in named
        and f"`{path.name}`" not in folder_row(named, path)
        and path.parent.name != "commands"
    ]
    assert unnamed == []


def folder_row(text: str, path: Path) -> str:
    """The row of a table that names the folder of ``path``, or an empty text."""
    folder = re.escape(path.parent.relative_to(PACKAGE).as_posix())
    row = re.search(rf"^\| `{folder}/` \|.*$", text, re.MULTILINE)
    return row[0] if row else ""


def test_the_layers_are_those_of_the_contract() -> None:
    configured = (ROOT / "pyproject.toml").read_text().partition("\nlayers = [\n")[2]
    names = re.findall(r"[a-z]+", configured.partition("]")[0])
    assert names == LAYERS
    picture = PAGE.partition("## The layers")[2].partition("```")[2].partition("```")[0]
    # The layer at the start of a line, and the one beside it after a bar.
    drawn = re.findall(r"^(\w+)|\| (\w+)", picture, re.MULTILINE)
    words = [beside or first for first, beside in drawn if (beside or first) in LAYERS]
    assert list(dict.fromkeys(words)) == LAYERS
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(LAYERS) - {"cli"}
