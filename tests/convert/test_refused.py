"""Incomplete, damaged and malicious checkpoints are refused with a line, and leave no DST."""

import errno
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from composer3d.checkpoint.manifest import TensorSpec
from composer3d.convert import convert as module
from composer3d.convert import formats, targets
from composer3d.convert.convert import convert
from composer3d.convert.formats import Format, Source, open_source
from composer3d.convert.inspect import inspect
from composer3d.runtime.progress import Progress
from tests.convert.changes import (
    Change,
    flip,
    refusal,
    rewrite_json,
    rewrite_safetensors,
    rewrite_torch,
)
from tests.convert.sample_checkpoints import SHAPE, make_dcp, make_hf, weights

Damage = Callable[[Path], object]
NORM = "model.norm.weight"


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def tensors(change: Change, file: str = "model.safetensors") -> Damage:
    return lambda folder: rewrite_safetensors(folder / file, change)


def norm_of(tensor: Tensor, file: str = "model.safetensors") -> Damage:
    """Put another tensor in place of the last norm, or a second one into another file."""
    return tensors(lambda held: held.update({NORM: tensor}), file)


def index_with(name: str, file: Any) -> Damage:
    """Say in the index that a tensor is in ``file``."""
    return lambda folder: rewrite_json(
        folder / "model.safetensors.index.json",
        lambda index: index["weight_map"].update({name: file}),
    )


def meta(change: Change) -> Damage:
    return lambda folder: rewrite_torch(folder / "consolidated.00.pth", change)


def torch_file(change: Change) -> Damage:
    return lambda path: rewrite_torch(path, change)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


FIRST, SECOND, THIRD = (f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3))
NO_MAP = "index.json has no weight_map from names to files; download it again"
# The variant of the checkpoint, its damage, and a part of what refuses it. Missing, misshapen and
# quantized tensors are in ``test_convert_moe.py``.
SOURCES: dict[str, tuple[str, Damage, str]] = {
    "no weights": (
        "hf",
        without("model.safetensors"),
        "a is not a checkpoint: it has none of ",
    ),
    "no config": ("hf", without("config.json"), "config.json cannot be read ("),
    "cut off": (
        "hf",
        lambda f: cut_off(f / "model.safetensors"),
        "; cut off, or no safetensors: copy it again",
    ),
    "extra tensor": (
        "hf",
        tensors(lambda t: t.update(score=torch.ones(2))),
        "a holds 'score', which its model does not have; remove or rename it",
    ),
    "missing shard": (
        "sharded",
        without(SECOND),
        f"index.json names '{SECOND}', which is not there; download it as well",
    ),
    "outside": (
        "sharded",
        index_with("x", "../b.safetensors"),
        'names "../b.safetensors", which is not the name of a file in its folder; it is not opened',
    ),
    "not in its shard": (
        "sharded",
        index_with(NORM, FIRST),
        f"{FIRST} has no 'model.norm.weight', which the index says is there; download it again",
    ),
    "twice": (
        "sharded",
        norm_of(torch.ones(32), FIRST),
        f"a holds 'model.norm.weight' twice, once in {THIRD}; remove one",
    ),
    "broken index": (
        "sharded",
        lambda f: (f / "model.safetensors.index.json").write_text("[]"),
        NO_MAP,
    ),
    "scalar": (
        "meta",
        meta(lambda t: t.update({"output.weight": torch.tensor(1.0)})),
        "consolidated.00.pth holds no matrix 'output.weight', which its model needs; copy it again",
    ),
    "params lack": (
        "meta",
        lambda f: rewrite_json(f / "params.json", lambda p: p.pop("dim")),
        "params.json lacks dim",
    ),
    "missing rank": (
        "meta",
        lambda f: (f / "consolidated.00.pth").rename(f / "consolidated.01.pth"),
        "a has consolidated.01.pth, but no consolidated.00.pth; copy all of them",
    ),
    "ranks differ": (
        "meta",
        lambda f: torch.save({}, f / "consolidated.01.pth"),
        "consolidated.01.pth does not hold the names that consolidated.00.pth holds; copy it again",
    ),
    "another torch file": (
        "torch",
        lambda f: torch.save({"model": weights()}, f),
        "a cannot be read: KeyError: 'composer3d'; put a Hugging Face file into a folder, "
        "as pytorch_model.bin ",
    ),
    "torch of no model": (
        "torch",
        torch_file(lambda t: t["composer3d"].update(model={})),
        "a: the shape of its model cannot be read: KeyError: 'model.dim'",
    ),
    "no manifest": (
        "dcp",
        without("manifest.json"),
        "a is not a checkpoint: it has no manifest.json; name a step-* folder",
    ),
    "flipped bit": (
        "dcp",
        lambda f: flip(f / "__0_0.distcp", -1),
        "__0_0.distcp has another digest than the manifest says",
    ),
    "nothing": ("dcp", shutil.rmtree, "a does not exist; give another path"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make a checkpoint of each variant once: those of hf are "hf" and "sharded"."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant in made:
            return made[variant]
        folder = tmp_path_factory.mktemp("whole")
        path = folder / "a"
        if variant == "dcp":
            make_dcp(path)
        elif variant == "hf":
            make_hf(path)
        else:
            make_hf(folder / "hf")
            to = "hf" if variant == "sharded" else variant
            convert(folder / "hf", path, cast(Format, to), shard=30_000)
        convert(path, folder / "copy", "torch")
        made[variant] = path
        return path

    return make


@pytest.mark.parametrize(("variant", "damage", "message"), SOURCES.values(), ids=SOURCES)
def test_a_source_that_is_incomplete_or_wrong_is_refused(
    tmp_path: Path, whole: Callable[[str], Path], variant: str, damage: Damage, message: str
) -> None:
    path = tmp_path / "a"
    copy = shutil.copytree if whole(variant).is_dir() else shutil.copy
    copy(whole(variant), path)
    damage(path)
    before = sorted(tmp_path.iterdir())
    lines = refusal(path, tmp_path / "b", "torch")
    assert any(message in line for line in lines), lines
    assert sorted(tmp_path.iterdir()) == before
    if path.exists() and " is not a checkpoint: it has none of " not in lines[0]:
        report = inspect(path)
        assert not report["whole"]
        assert any(message in line for line in report["problems"])


def test_links_in_the_folder_of_a_run_are_no_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (tmp_path / "other/step-00000009").mkdir(parents=True)
    (run / "checkpoints/step-00000001").mkdir()
    (run / "checkpoints/step-00000009").symlink_to(tmp_path / "other/step-00000009")
    assert formats.list_checkpoints(run) == [run / "checkpoints/step-00000001"]
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/checkpoints").symlink_to(run / "checkpoints")
    assert formats.list_checkpoints(tmp_path / "linked") == []


def test_one_file_of_safetensors_is_no_checkpoint(tmp_path: Path) -> None:
    file = make_hf(tmp_path / "hf") / "model.safetensors"
    assert refusal(file, tmp_path / "b", "dcp") == [
        f"{file} is one file of a checkpoint; give its folder, {tmp_path / 'hf'}"
    ]


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hf(tmp_path / "a")
    reason = PermissionError(errno.EACCES, "Permission denied", "x")
    monkeypatch.setattr(formats, "read_carried_files", lambda *_: (_ for _ in ()).throw(reason))
    (line,) = refusal(tmp_path / "a", tmp_path / "b", "dcp")
    assert "a as hf cannot be read: PermissionError: " in line
    assert "Permission denied: 'x'" in line


def test_problems_of_one_kind_are_one_line(tmp_path: Path) -> None:
    make_hf(tmp_path / "a")
    kept = {f"model.layers.{number}.input_layernorm.weight": torch.ones(32) for number in range(2)}
    save_file({"x": torch.ones(1), **kept}, tmp_path / "a/model.safetensors")
    missing, unknown = refusal(tmp_path / "a", tmp_path / "b", "dcp")
    assert "has no 'model.embed_tokens.weight' (67, 32)" in missing
    assert missing.endswith("(so it is with 18 more tensors)")
    assert "holds 'x', which its model does not have" in unknown


DST_EXISTS = "b exists; give a DST that does not exist, or remove it"
STAGING_EXISTS = (
    "b.tmp exists: another conversion is writing it, or one was interrupted; "
    "if none is running, remove it"
)


EXISTING: dict[str, tuple[Damage, str]] = {
    "dst": (lambda folder: (folder / "b").mkdir(), DST_EXISTS),
    "link": (lambda folder: (folder / "b").symlink_to("nowhere"), DST_EXISTS),
    "staging": (lambda folder: (folder / "b.tmp").mkdir(), STAGING_EXISTS),
}


@pytest.mark.parametrize(("prepare", "message"), EXISTING.values(), ids=EXISTING)
def test_nothing_is_overwritten(tmp_path: Path, prepare: Damage, message: str) -> None:
    make_hf(tmp_path / "a")
    prepare(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert refusal(tmp_path / "a", tmp_path / "b", "torch") == [f"{tmp_path}/{message}"]
    assert sorted(tmp_path.iterdir()) == before


def test_dst_must_lie_in_a_folder_outside_of_src(tmp_path: Path) -> None:
    make_hf(tmp_path / "a")
    folder = tmp_path / "a"
    assert "is not a folder; make it first" in refusal(folder, tmp_path / "none/b", "dcp")[0]
    assert "; give a DST outside of it" in refusal(folder, folder / "b", "dcp")[0]


def test_meta_cannot_hold_every_model(tmp_path: Path) -> None:
    make_hf(tmp_path / "a", replace(SHAPE, qk_norm=True))
    assert "convert to hf" in refusal(tmp_path / "a", tmp_path / "b", "meta")[0]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_numbers_beyond_the_range_of_a_dtype_are_refused(tmp_path: Path) -> None:
    folder, out = make_hf(tmp_path / "a"), tmp_path / "b"
    for beside in (1.0, torch.nan, torch.inf):
        norm_of(torch.tensor([beside, 1e5]).repeat(16))(folder)
        (line,) = refusal(folder, out, "hf", dtype="float16")
        assert "last.norm.weight holds numbers beyond the range of float16" in line
        assert line.endswith("convert to bfloat16 or float32")
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
    norm_of(torch.full((32,), torch.inf))(folder)
    convert(folder, out, "hf", dtype="float16")


def test_numbers_that_become_zero_in_a_dtype_are_counted(tmp_path: Path) -> None:
    folder = make_hf(tmp_path / "a")
    norm_of(torch.tensor([0.0, 1.0, 1e-6, 1e-9]).repeat(8))(folder)
    assert not any("too small" in note for note in convert(folder, tmp_path / "b", "hf")["notes"])
    notes = convert(folder, tmp_path / "c", "hf", dtype="float16")["notes"]
    (note,) = [note for note in notes if "too small" in note]
    assert "too small for float16, and are 0 in the copy; 8 of them in model.last.norm" in note


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, to: str) -> None:
    """A limit on the size of files stands for a full disk: writing fails at several places.

    torch.save hides the reason, which the error must name.
    """
    make_hf(tmp_path / "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (1000, 9000, 70_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            line = refusal(tmp_path / "a", tmp_path / "b", to)[0]
            assert re.search(r"b cannot be written \(.*\); nothing is left of it", line)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_tensor_with_two_differences_is_named_once(tmp_path: Path) -> None:
    source = open_source(make_hf(tmp_path / "a"))
    name = "model.last.norm.weight"
    specs = source.specs() | {name: TensorSpec((32,), "bfloat16")}
    progress = Progress("convert", 0, "B")
    arguments = source, tmp_path / "a", specs, {name: "another digest"}, progress
    assert refusal(*arguments, function=module._prove_copy) == [
        f"the copy differs from the source in {name}; check the disk for errors"
    ]


def test_the_proof_finds_tensors_that_were_written_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hf(tmp_path / "a")
    bytes_of = targets.bytes_of

    def wrong(tensor: Tensor) -> memoryview:
        return bytes_of(tensor * 2 if len(tensor) == 67 else tensor)

    monkeypatch.setattr(targets, "bytes_of", wrong)
    assert refusal(tmp_path / "a", tmp_path / "b", "hf") == [
        "the copy differs from the source in model.first.embed.weight, model.last.head.weight; "
        "check the disk for errors"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_the_proof_counts_reads_and_writes(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = make_hf(tmp_path / "a"), tmp_path / "b"
    read, stream, skipped = module.Source.read, module._read_tensors, "model.last.norm.weight"

    def read_twice(source: Source, name: str) -> Tensor:
        read(source, name)
        return read(source, name)

    def all_but_one(*arguments: Any) -> Iterator[tuple[str, Tensor]]:
        return (pair for pair in stream(*arguments) if pair[0] != skipped)

    def each_twice(*arguments: Any) -> Iterator[tuple[str, Tensor]]:
        return (pair for pair in stream(*arguments) for _ in range(2))

    with monkeypatch.context() as patch:
        patch.setattr(module.Source, "read", read_twice)
        assert "is not complete" in refusal(folder, out, to)[0]
    monkeypatch.setattr(module, "_read_tensors", all_but_one)
    assert f"is not complete: ['{skipped}'] not written" in refusal(folder, out, to)[0]
    monkeypatch.setattr(module, "_read_tensors", each_twice)
    with pytest.raises(KeyError):
        convert(folder, out, to)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_logits_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hf(tmp_path / "a")
    logits = iter([torch.ones(3), torch.tensor([1, 1, 1.001])])
    monkeypatch.setattr(module, "_logits", lambda side: next(logits))
    (line,) = refusal(tmp_path / "a", tmp_path / "b", "torch", logits=True)
    assert "the copy's logits differ from the source's: relative error 0.000577" in line
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
