"""Incomplete, damaged and malicious checkpoints are refused with a line, and leave no DST."""

import errno
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.manifest import TensorSpec
from composer3d.cli import main
from composer3d.convert import convert as module
from composer3d.convert import formats, targets
from composer3d.convert.convert import convert
from composer3d.convert.formats import open_source
from composer3d.convert.inspect import inspect
from composer3d.facts.errors import CheckpointError
from composer3d.runtime.progress import Progress
from tests.convert.sample_checkpoints import SHAPE, make_dcp, make_hf, weights


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda number: None)


def rewrite_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rewrite_safetensors(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    held = load_file(path)
    change(held)
    save_file(held, path)


def rewrite_torch(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    held = torch.load(path, weights_only=True)
    change(held)
    torch.save(held, path)


def index_of(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def set_index_entry(folder: Path, name: str, file: str) -> None:
    rewrite_json(index_of(folder), lambda index: index["weight_map"].update({name: file}))


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def swap(folder: Path) -> None:
    """Put in the metadata of a smaller checkpoint, and adapt the manifest to it."""
    other = make_dcp(folder.with_name("other"), replace(SHAPE, vocab=66))
    shutil.copy(other / ".metadata", folder)
    saved = manifests.read(folder)
    files = saved.files | {".metadata": manifests.read(other).files[".metadata"]}
    manifests.write(folder, replace(saved, files=files))


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
SOURCES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no weights": (
        "hf",
        lambda f: (f / "model.safetensors").unlink(),
        "a is not a checkpoint: it has none of ",
    ),
    "no config": ("hf", lambda f: (f / "config.json").unlink(), "config.json cannot be read ("),
    "unknown model": (
        "hf",
        lambda f: rewrite_json(f / "config.json", lambda c: c.update(model_type="bert")),
        "is not supported",
    ),
    "cut off": (
        "hf",
        lambda f: cut_off(f / "model.safetensors"),
        "; cut off, or no safetensors: copy it again",
    ),
    "empty file": (
        "hf",
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "a/model.safetensors cannot be read: ",
    ),
    "missing tensor": (
        "hf",
        lambda f: rewrite_safetensors(f / "model.safetensors", lambda t: t.pop(NORM)),
        "a has no 'model.norm.weight' (32,), which its model needs; copy it again",
    ),
    "extra tensor": (
        "hf",
        lambda f: rewrite_safetensors(
            f / "model.safetensors", lambda t: t.update(score=torch.ones(2))
        ),
        "a holds 'score', which its model does not have; remove or rename it",
    ),
    "wrong shape": (
        "hf",
        lambda f: rewrite_safetensors(
            f / "model.safetensors", lambda t: t.update({NORM: torch.ones(31)})
        ),
        "a holds 'model.norm.weight' as (31,), but its model needs (32,)",
    ),
    "quantized": (
        "hf",
        lambda f: rewrite_safetensors(
            f / "model.safetensors", lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)})
        ),
        "a holds 'model.norm.weight' in int8; it must be one of float32, bfloat16, float16, "
        "float64, and not quantized",
    ),
    "another head": (
        "tied",
        lambda f: rewrite_safetensors(
            f / "model.safetensors", lambda t: t.update({"lm_head.weight": t[EMBED] + 1})
        ),
        "a holds an 'lm_head.weight' that is not the embedding, but its config.json ties "
        "them: set ",
    ),
    "missing shard": (
        "sharded",
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        "index.json names 'model-00002-of-00003.safetensors', which is not there; download "
        "it as well",
    ),
    "outside": (
        "sharded",
        lambda f: set_index_entry(f, "x", "../b.safetensors"),
        'names "../b.safetensors", which is not the name of a file in its folder; it is not opened',
    ),
    "not in its shard": (
        "sharded",
        lambda f: set_index_entry(f, NORM, "model-00001-of-00003.safetensors"),
        "model-00001-of-00003.safetensors has no 'model.norm.weight', which the index says "
        "is there; download it again",
    ),
    "twice": (
        "sharded",
        lambda f: rewrite_safetensors(
            f / "model-00001-of-00003.safetensors", lambda t: t.update({NORM: torch.ones(32)})
        ),
        "a holds 'model.norm.weight' twice, once in model-00003-of-00003.safetensors; remove one",
    ),
    "broken index": (
        "sharded",
        lambda f: index_of(f).write_text("[]"),
        "index.json has no weight_map from names to files; download it again",
    ),
    "names no file": (
        "sharded",
        lambda f: rewrite_json(index_of(f), lambda index: index["weight_map"].update(x=5)),
        "index.json has no weight_map from names to files; download it again",
    ),
    "sizes beyond all": (
        "hf",
        lambda f: rewrite_json(f / "config.json", lambda c: c.update(hidden_size=10**18)),
        "config.json: hidden_size = 1000000000000000000 must be from 1 to ",
    ),
    "bool": (
        "hf",
        lambda f: rewrite_safetensors(
            f / "model.safetensors", lambda t: t.update({NORM: torch.ones(32) > 0})
        ),
        "a holds 'model.norm.weight' in bool; it must be one of float32, bfloat16, float16, "
        "float64, and not quantized",
    ),
    "scalar": (
        "meta",
        lambda f: rewrite_torch(
            f / "consolidated.00.pth", lambda t: t.update({"output.weight": torch.tensor(1.0)})
        ),
        "consolidated.00.pth holds no matrix 'output.weight', which its model needs; copy it again",
    ),
    "sparse": (
        "torch",
        lambda f: rewrite_torch(
            f, lambda t: t["model"].update({"last.norm.weight": torch.ones(32).to_sparse()})
        ),
        "a cannot be read: it names 'torch._utils._rebuild_sparse_tensor', which is "
        "refused: nothing of it was run",
    ),
    "width in words": (
        "torch",
        lambda f: rewrite_torch(
            f, lambda t: t["composer3d"]["model"].update({"model.head_dim": "8"})
        ),
        'head_dim = "8" must be an integer or null',
    ),
    "no params": (
        "meta",
        lambda f: (f / "params.json").unlink(),
        "a/params.json cannot be read: FileNotFoundError: ",
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
    "meta lacks": (
        "meta",
        lambda f: rewrite_torch(f / "consolidated.00.pth", lambda t: t.pop("norm.weight")),
        "a has no 'norm.weight' (32,), which its model needs",
    ),
    "not a torch file": ("torch", lambda f: f.write_bytes(b"abc"), "a cannot be read: "),
    "torch cut off": ("torch", cut_off, "a cannot be read: "),
    "another torch file": (
        "torch",
        lambda f: torch.save({"model": weights()}, f),
        "a cannot be read: KeyError: 'composer3d'; put a Hugging Face file into a folder, "
        "as pytorch_model.bin ",
    ),
    "torch of no model": (
        "torch",
        lambda f: rewrite_torch(f, lambda t: t["composer3d"].update(model={})),
        "a: the shape of its model cannot be read: KeyError: 'model.dim'",
    ),
    "no manifest": (
        "dcp",
        lambda f: (f / "manifest.json").unlink(),
        "a is not a checkpoint: it has no manifest.json; name a step-* folder",
    ),
    "flipped bit": (
        "dcp",
        lambda f: (f / "__0_0.distcp").write_bytes((f / "__0_0.distcp").read_bytes()[:-1] + b"x"),
        "__0_0.distcp has another digest than the manifest says",
    ),
    "missing file": (
        "dcp",
        lambda f: (f / "__0_0.distcp").unlink(),
        "__0_0.distcp cannot be read (No such file",
    ),
    "file too many": ("dcp", lambda f: (f / "junk").touch(), "a/junk is not in the manifest"),
    "another's metadata": (
        "dcp",
        swap,
        "a holds 'model.first.embed.weight' as (66, 32), but its model needs (67, 32)",
    ),
    "one file": (
        "dcp",
        lambda f: (shutil.rmtree(f), f.mkdir(), (f / "x").touch()),
        "a is not a checkpoint: it has none of ",
    ),
    "nothing": ("dcp", shutil.rmtree, "a does not exist; give another path"),
}


def make(tmp_path: Path, variant: str) -> Path:
    """Make a checkpoint in a format; variants of hf are "hf", "tied" and "sharded"."""
    path = tmp_path / "a"
    if variant == "dcp":
        return make_dcp(path)
    make_hf(tmp_path / "hf", replace(SHAPE, tied=variant == "tied"))
    if variant == "sharded":
        convert(tmp_path / "hf", path, "hf", shard=30_000)
    elif variant in ("meta", "torch"):
        convert(tmp_path / "hf", path, variant)
    else:
        (tmp_path / "hf").rename(path)
    return path


# torch 2.15 warns of this when the test makes its sparse tensor.
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
@pytest.mark.parametrize("case", SOURCES)
def test_a_source_that_is_incomplete_or_wrong_is_refused(tmp_path: Path, case: str) -> None:
    variant, damage, message = SOURCES[case]
    path = make(tmp_path, variant)
    convert(path, tmp_path / "whole", "torch")
    damage(path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        convert(path, tmp_path / "b", "torch")
    assert message in "\n".join(caught.value.lines), caught.value.lines
    assert sorted(tmp_path.iterdir()) == before
    if path.exists() and " is not a checkpoint: it has none of " not in caught.value.lines[0]:
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
    with pytest.raises(CheckpointError) as caught:
        convert(file, tmp_path / "b", "dcp")
    assert caught.value.lines == (
        f"{file} is one file of a checkpoint; give its folder, {tmp_path / 'hf'}",
    )


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hf(tmp_path / "a")
    reason = PermissionError(errno.EACCES, "Permission denied", "x")
    monkeypatch.setattr(formats, "read_carried_files", lambda folder: (_ for _ in ()).throw(reason))
    with pytest.raises(
        CheckpointError, match=r"a as hf cannot be read: PermissionError: .*Permission denied: 'x'"
    ):
        convert(tmp_path / "a", tmp_path / "b", "dcp")


def test_problems_of_one_kind_are_one_line(tmp_path: Path) -> None:
    make_hf(tmp_path / "a")
    kept = {f"model.layers.{number}.input_layernorm.weight": torch.ones(32) for number in range(2)}
    save_file({"x": torch.ones(1), **kept}, tmp_path / "a/model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "a", tmp_path / "b", "dcp")
    missing, unknown = caught.value.lines
    assert "has no 'model.embed_tokens.weight' (67, 32)" in missing
    assert missing.endswith("(so it is with 18 more tensors)")
    assert "holds 'x', which its model does not have" in unknown


class Evil:
    """Its pickle is a program that makes the file ``marker``."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("form", ["bin", "meta", "torch", "dcp", "chunk"])
def test_a_program_in_a_pickle_is_not_run(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "marker"
    evil = Evil(marker)
    if form == "bin":
        path = make_hf(tmp_path / "a")
        (path / "model.safetensors").unlink()
        torch.save({"x": torch.ones(1), "y": evil}, path / "pytorch_model.bin")
    elif form in ("meta", "torch"):
        path = make(tmp_path, form)
        file = path if form == "torch" else path / "consolidated.00.pth"
        held = torch.load(file, weights_only=True)
        torch.save(held | {"more": evil}, file)
    else:
        path = make_dcp(tmp_path / "a")
        saved = manifests.read(path)
        if form == "dcp":
            (path / ".metadata").write_bytes(pickle.dumps(evil))
        else:
            # The metadata is valid, but the tensor that it points to is a program, which is as long
            # as the tensor that it replaces.
            metadata = pickle.loads((path / ".metadata").read_bytes())
            with open(path / "__0_0.distcp", "r+b") as stream:
                torch.save([evil, torch.ones(2048)], stream)
                place = metadata.storage_data[MetadataIndex("model.first.embed.weight", [0, 0])]
                place.offset, place.length = 0, stream.tell()
            (path / ".metadata").write_bytes(pickle.dumps(metadata))
        files = {
            name: ((path / name).stat().st_size, manifests.digest_file(path / name))
            for name in saved.files
        }
        manifests.write(path, replace(saved, files=files))
    assert main(["convert", str(path), str(tmp_path / "b"), "--to", "hf"]) == 2
    assert "posix.system" in capsys.readouterr().err
    assert main(["inspect", str(path)]) == 1
    assert "posix.system" in capsys.readouterr().out
    assert not marker.exists()
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "b.tmp").exists()
    os.system(f"touch {marker}")  # the program would have worked
    assert marker.exists()


DST_EXISTS = "b exists; give a DST that does not exist, or remove it"
STAGING_EXISTS = (
    "b.tmp exists: another conversion is writing it, or one was interrupted; "
    "if none is running, remove it"
)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda t: (t / "b").mkdir(), DST_EXISTS),
        (lambda t: (t / "b").symlink_to("nowhere"), DST_EXISTS),
        (lambda t: (t / "b.tmp").mkdir(), STAGING_EXISTS),
    ],
    ids=["dst", "link", "staging"],
)
def test_nothing_is_overwritten(
    tmp_path: Path, prepare: Callable[[Path], object], message: str
) -> None:
    make_hf(tmp_path / "a")
    prepare(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "a", tmp_path / "b", "torch")
    assert caught.value.lines == (f"{tmp_path}/{message}",)
    assert sorted(tmp_path.iterdir()) == before


def test_dst_must_lie_in_a_folder_outside_of_src(tmp_path: Path) -> None:
    make_hf(tmp_path / "a")
    with pytest.raises(CheckpointError, match="is not a folder; make it first"):
        convert(tmp_path / "a", tmp_path / "none/b", "dcp")
    with pytest.raises(CheckpointError, match="; give a DST outside of it"):
        convert(tmp_path / "a", tmp_path / "a/b", "dcp")


def test_meta_cannot_hold_every_model(tmp_path: Path) -> None:
    make_hf(tmp_path / "a", replace(SHAPE, qk_norm=True))
    with pytest.raises(CheckpointError, match="convert to hf"):
        convert(tmp_path / "a", tmp_path / "b", "meta")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_numbers_beyond_the_range_of_a_dtype_are_refused(tmp_path: Path) -> None:
    make_hf(tmp_path / "a")
    for beside in (1.0, torch.nan, torch.inf):
        norm = torch.tensor([beside, 1e5]).repeat(16)
        rewrite_safetensors(
            tmp_path / "a/model.safetensors", lambda t, norm=norm: t.update({NORM: norm})
        )
        with pytest.raises(
            CheckpointError,
            match=r"last\.norm\.weight holds numbers beyond the range of float16; "
            "convert to bfloat16",
        ):
            convert(tmp_path / "a", tmp_path / "b", "hf", dtype="float16")
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
    rewrite_safetensors(
        tmp_path / "a/model.safetensors", lambda t: t.update({NORM: torch.full((32,), torch.inf)})
    )
    convert(tmp_path / "a", tmp_path / "b", "hf", dtype="float16")


@pytest.mark.parametrize("to", ["hf", "meta", "torch", "dcp"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, to: str) -> None:
    """A limit on the size of files stands for a full disk: writing fails at several places.

    torch.save hides the reason, which the error must name.
    """
    make_hf(tmp_path / "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (1000, 9000, 70_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            with pytest.raises(
                CheckpointError, match=r"b cannot be written \(.*\); nothing is left of it"
            ):
                convert(tmp_path / "a", tmp_path / "b", to)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_tensor_with_two_differences_is_named_once(tmp_path: Path) -> None:
    source = open_source(make_hf(tmp_path / "a"))
    name = "model.last.norm.weight"
    specs = source.specs() | {name: TensorSpec((32,), "bfloat16")}
    progress = Progress("convert", 0, "B")
    with pytest.raises(CheckpointError) as caught:
        module._prove_copy(source, tmp_path / "a", specs, {name: "another digest"}, progress)
    assert caught.value.lines == (
        f"the copy differs from the source in {name}; check the disk for errors",
    )


def test_the_proof_finds_tensors_that_were_written_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hf(tmp_path / "a")
    bytes_of = targets.bytes_of

    def wrong(tensor: Tensor) -> memoryview:
        return bytes_of(tensor * 2 if len(tensor) == 67 else tensor)

    monkeypatch.setattr(targets, "bytes_of", wrong)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "a", tmp_path / "b", "hf")
    wrong = "model.first.embed.weight, model.last.head.weight"
    assert caught.value.lines == (
        f"the copy differs from the source in {wrong}; check the disk for errors",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_the_proof_counts_reads_and_writes(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hf(tmp_path / "a")
    read = module.Source.read
    monkeypatch.setattr(
        module.Source, "read", lambda self, name: (read(self, name), read(self, name))[0]
    )
    with pytest.raises(CheckpointError, match="is not complete"):
        convert(tmp_path / "a", tmp_path / "b", to)
    monkeypatch.setattr(module.Source, "read", read)
    stream, skipped = module._read_tensors, "model.last.norm.weight"
    monkeypatch.setattr(
        module,
        "_read_tensors",
        lambda *arguments: (pair for pair in stream(*arguments) if pair[0] != skipped),
    )
    with pytest.raises(
        CheckpointError, match=r"is not complete: \['model.last.norm.weight'\] not written"
    ):
        convert(tmp_path / "a", tmp_path / "b", to)
    monkeypatch.setattr(
        module,
        "_read_tensors",
        lambda *arguments: (pair for pair in stream(*arguments) for _ in range(2)),
    )
    with pytest.raises(KeyError):
        convert(tmp_path / "a", tmp_path / "b", to)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_logits_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hf(tmp_path / "a")
    logits = iter([torch.ones(3), torch.tensor([1, 1, 1.001])])
    monkeypatch.setattr(module, "_logits", lambda side: next(logits))
    with pytest.raises(
        CheckpointError,
        match=r"the copy's logits differ from the source's: relative error 0\.000577",
    ):
        convert(tmp_path / "a", tmp_path / "b", "torch", logits=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
