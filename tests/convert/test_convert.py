"""Conversion between all formats keeps every bit of the tensors, and the files of the model."""

import errno
import json
import runpy
import shutil
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.manifest import Manifest, model_of
from composer3d.checkpoint.torchfile import load_torch
from composer3d.cli import main
from composer3d.convert import formats
from composer3d.convert.convert import convert
from composer3d.convert.formats import open_source
from composer3d.convert.inspect import inspect
from composer3d.facts.errors import CheckpointError, UserError
from composer3d.models.llama.names import meta_names, to_meta
from composer3d.models.llama.shape import ModelShape
from composer3d.models.moe.shape import MoeShape
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from tests.checkpoint.test_manifest import fail_to_open
from tests.convert.changes import flip, peaks_of_converts, refusal, rewrite_torch
from tests.convert.sample_checkpoints import (
    CARRIED,
    DEEPSEEK,
    MIXTRAL,
    QWEN_2,
    QWEN_3,
    SHAPE,
    hf_tensors,
    make_dcp,
    make_hf,
    same,
    tensors,
    weights,
)
from tests.models.names_in_files import hf_names

FORMATS = ("hf", "meta", "torch", "dcp")
TIED = replace(SHAPE, tied=True, rope_factor=32.0, head_dim=8)
QWEN3 = replace(SHAPE, qk_norm=True, head_dim=16, tied=True)


# Shapes, and the layers that have all experts in two tensors.
MODELS: dict[str, tuple[ModelShape, Collection[int]]] = {
    "llama": (SHAPE, ()),
    "mixtral": (MIXTRAL, ()),
    "mixtral, packed": (MIXTRAL, range(MIXTRAL.n_layers)),
    "qwen 2": (QWEN_2, ()),
    "qwen 2, packed": (QWEN_2, range(QWEN_2.n_layers)),
    "qwen 3": (QWEN_3, ()),
    "qwen 3, packed": (QWEN_3, range(QWEN_3.n_layers)),
}


def hf_files(shape: ModelShape, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return what the files of Hugging Face must hold, as they are published."""
    if isinstance(shape, MoeShape):
        return hf_tensors(shape, weights(shape, dtype))
    own = hf_names(shape)
    return {own[name]: tensor for name, tensor in weights(shape, dtype).items()}


# Each format is read and written once. Meta's format has no experts.
DIRECTIONS = [
    ("llama", "hf", "meta"),
    ("llama", "meta", "dcp"),
    ("llama", "dcp", "torch"),
    ("llama", "torch", "hf"),
    ("mixtral", "torch", "dcp"),
    ("mixtral, packed", "dcp", "hf"),
    ("qwen 3", "dcp", "torch"),
    ("qwen 3, packed", "torch", "hf"),
]


@pytest.mark.parametrize(("model", "first", "last"), DIRECTIONS)
def test_every_direction_keeps_every_bit(tmp_path: Path, model: str, first: str, last: str) -> None:
    """Convert hf to ``first`` to ``last``, and read the result with an independent reader."""
    shape, packed = MODELS[model]
    convert(make_hf(tmp_path / "hf", shape, packed=packed), tmp_path / "a", first)
    report = convert(tmp_path / "a", tmp_path / "b", last, logits=True)
    assert report["logits"]["bitwise"]
    assert report["tensors"] == len(weights(shape))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "hf"]
    expected = {f"model.{name}": tensor for name, tensor in weights(shape).items()}
    assert same(tensors(tmp_path / "b"), expected)
    if last == "hf":
        assert same(load_file(tmp_path / "b/model.safetensors"), hf_files(shape))
        before, after = (
            json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "b")
        )
        assert before == after
    elif last == "meta":
        own = meta_names(SHAPE)
        held = torch.load(tmp_path / "b/consolidated.00.pth", weights_only=True)
        assert same(held, {own[n]: to_meta(n, t, SHAPE) for n, t in weights().items()})
        assert not same(held, {own[n]: t for n, t in weights().items()})
    elif last == "torch":
        assert same(torch.load(tmp_path / "b", weights_only=True)["model"], weights(shape))
    else:
        saved = manifests.read(tmp_path / "b").model
        assert saved.get("model.architecture") == ("moe" if model != "llama" else None)
        live = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(live, checkpoint_id=tmp_path / "b")
        assert same(live, expected)


@pytest.mark.parametrize(
    "shape", [TIED, QWEN3, replace(SHAPE, window=9)], ids=["tied", "qwen3", "window"]
)
def test_other_shapes_come_back(tmp_path: Path, shape: ModelShape) -> None:
    make_hf(tmp_path / "hf", shape)
    formats = ("dcp", "meta", "torch", "hf") if shape is TIED else ("dcp", "hf")
    for before, format in zip(("hf", *formats), formats, strict=False):
        convert(tmp_path / before, tmp_path / (format if format != "hf" else "end"), format)
    assert same(
        load_file(tmp_path / "end/model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    )
    if shape is TIED:
        held = torch.load(tmp_path / "meta/consolidated.00.pth", weights_only=True)
        assert torch.equal(held["output.weight"], held["tok_embeddings.weight"])


@pytest.mark.parametrize("format", FORMATS)
def test_files_of_a_model_are_carried(tmp_path: Path, format: str) -> None:
    convert(make_hf(tmp_path / "hf"), tmp_path / "a", format)
    if format == "dcp":
        assert manifests.find_damage(tmp_path / "a", manifests.read(tmp_path / "a")) == []
        assert "assets/tokenizer.model" in manifests.read(tmp_path / "a").files
    convert(tmp_path / "a", tmp_path / "b", "hf")
    assert {name: (tmp_path / "b" / name).read_bytes() for name in CARRIED} == CARRIED
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (7, 99)


def test_a_length_that_the_source_does_not_say_is_a_guess_with_a_note(tmp_path: Path) -> None:
    """Meta's params.json says nothing of it, and servers take no longer text."""
    convert(make_hf(tmp_path / "hf"), tmp_path / "meta", "meta")
    (tmp_path / "meta/config.json").unlink()
    notes = convert(tmp_path / "meta", tmp_path / "b", "hf")["notes"]
    (note,) = [note for note in notes if "is a guess" in note]
    assert note.startswith("config.json: max_position_embeddings = 8,192 is a guess")


def test_what_a_manifest_does_not_list_is_named_and_not_read(tmp_path: Path) -> None:
    convert(make_hf(tmp_path / "hf"), tmp_path / "a", "dcp")
    added = [tmp_path / "a" / name for name in (".DS_Store", "__9_0.distcp", "assets/vocab.txt")]
    for path in added:
        path.write_text("of nobody")
    notes = [f"{path} is not in the manifest: it is not read" for path in added]
    report = inspect(tmp_path / "a")
    assert (report["whole"], report["notes"]) == (True, notes)
    assert convert(tmp_path / "a", tmp_path / "b", "hf")["notes"] == notes
    assert same(
        load_file(tmp_path / "b/model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    )
    assert not (tmp_path / "b/vocab.txt").exists()


@pytest.mark.parametrize("shape", [SHAPE, DEEPSEEK], ids=["llama", "deepseek"])
def test_optimizer_state_survives_a_round_trip(tmp_path: Path, shape: ModelShape) -> None:
    """The bias of a router is not trained, so it has no state."""
    make_dcp(tmp_path / "a", shape)
    note = f"{tmp_path / 'a'} has no assets: no tokenizer is copied"
    report = convert(tmp_path / "a", tmp_path / "b.pt", "torch", logits=shape is not SHAPE)
    assert report["notes"] == [note]
    convert(tmp_path / "b.pt", tmp_path / "c", "dcp")
    before, after = (manifests.read(tmp_path / name) for name in "ac")
    assert replace(before, files={}) == replace(after, files={})
    assert (after.step, after.lr, after.data) == (5, 0.125, {"at": 40, "digest": "abc"})
    found = tensors(tmp_path / "c")
    assert same(found, tensors(tmp_path / "a"))
    assert "optim.last.norm.weight.step" in found
    assert ("optim.blocks.1.moe.experts.w2.exp_avg" in found) == (shape is not SHAPE)
    assert ("model.blocks.1.moe.router.bias" in found) == getattr(shape, "router_bias", False)
    assert "optim.blocks.1.moe.router.bias.exp_avg" not in found


@pytest.mark.parametrize(("to", "only"), [("meta", False), ("dcp", True)])
def test_optimizer_state_is_left_out_with_a_note(tmp_path: Path, to: str, only: bool) -> None:
    make_dcp(tmp_path / "a")
    _, note = convert(tmp_path / "a", tmp_path / "b", to, weights_only=only)["notes"]
    assert note.startswith(
        "left out: the optimizer's state, the step and the position in the data ("
    )
    source = open_source(tmp_path / "b")
    assert all(name.startswith("model.") for name in source.locations)
    assert (source.manifest.step, source.manifest.data, source.manifest.lr) == (0, None, None)


@pytest.mark.parametrize(
    ("model", "to", "most"),
    [("llama", "hf", 0.2), ("llama", "dcp", 0.2), ("qwen 3", "hf", 0.5)],
)
def test_dtype(tmp_path: Path, model: str, to: str, most: float) -> None:
    shape, _ = MODELS[model]
    report = convert(
        make_hf(tmp_path / "hf", shape), tmp_path / "b", to, dtype="bfloat16", logits=True
    )
    assert not report["logits"]["bitwise"]
    assert 0 < report["logits"]["relative_error"] < most
    expected = {f"model.{name}": tensor.bfloat16() for name, tensor in weights(shape).items()}
    assert same(tensors(tmp_path / "b"), expected)
    if to == "hf":
        found = load_file(tmp_path / "b/model.safetensors")
        assert same(found, hf_files(shape, torch.bfloat16))
        assert json.loads((tmp_path / "b/config.json").read_text())["torch_dtype"] == "bfloat16"
    if to == "dcp":
        assert manifests.read(tmp_path / "b").model == model_of(SHAPE, "bfloat16")


def test_dtype_leaves_the_optimizer_as_it_is(tmp_path: Path) -> None:
    make_dcp(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "torch", dtype="float64")
    found = tensors(tmp_path / "b")
    assert found["model.last.norm.weight"].dtype == torch.float64
    assert found["optim.last.norm.weight.exp_avg"].dtype == torch.float32


def test_pytorch_bin_is_read(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    held = load_file(tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/model.safetensors").unlink()
    names = sorted(held)
    parts = {"pytorch_model-1.bin": names[:9], "pytorch_model-2.bin": names[9:]}
    for file, part in parts.items():
        torch.save({name: held[name] for name in part}, tmp_path / "hf" / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "hf/pytorch_model.bin.index.json").write_text(json.dumps(index))
    convert(tmp_path / "hf", tmp_path / "b", "hf")
    assert same(load_file(tmp_path / "b/model.safetensors"), held)


def test_a_name_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entry = json.loads(content[8 : 8 + size])["model.norm.weight"]
    header = f'{{"model.norm.weight": {json.dumps(entry)}, '.encode() + content[9 : 8 + size]
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    assert same(load_file(path), load_file(path))  # the library reads it
    (line,) = inspect(tmp_path / "hf")["problems"]
    assert "it has the key 'model.norm.weight' twice" in line


def test_damage_of_pytorch_bin_is_found(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    held = load_file(tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/model.safetensors").unlink()
    path = tmp_path / "hf/pytorch_model.bin"
    torch.save(held, path)
    assert inspect(tmp_path / "hf")["whole"]
    flip(path, load_torch(path)["model.norm.weight"].begin + 1)
    line = (
        f"{tmp_path}/hf: 'model.norm.weight' cannot be read: ValueError: the bytes of a tensor "
        "do not have their checksum; copy the file again"
    )
    assert inspect(tmp_path / "hf")["problems"] == [line]
    assert refusal(tmp_path / "hf", tmp_path / "b", "hf") == [line]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("embedding", [0, 1], ids=["llama 3", "llama 2"])
def test_meta_files_of_model_parallel_ranks_are_joined(tmp_path: Path, embedding: int) -> None:
    """Meta shards wo and w2 by columns, norms not at all, and the embedding by rows (Llama 3) or
    columns (Llama 2).
    """
    shape = replace(SHAPE, vocab=68)
    convert(make_hf(tmp_path / "hf", shape), tmp_path / "meta", "meta")
    file = tmp_path / "meta/consolidated.00.pth"
    held = torch.load(file, weights_only=True) | {"rope.freqs": torch.ones(4)}
    dims = {
        "attention.wo.weight": 1,
        "feed_forward.w2.weight": 1,
        "norm.weight": None,
        "rope.freqs": None,
    }
    dims["tok_embeddings.weight"] = embedding
    for rank in range(2):
        part = {}
        for name, tensor in held.items():
            dim = next((dim for end, dim in dims.items() if name.endswith(end)), 0)
            part[name] = tensor if dim is None else tensor.chunk(2, dim)[rank].clone()
        torch.save(part, tmp_path / f"meta/consolidated.{rank:02d}.pth")
    convert(tmp_path / "meta", tmp_path / "b", "hf")
    assert same(
        load_file(tmp_path / "b/model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    )
    part["norm.weight"] = part["norm.weight"] + 1
    torch.save(part, tmp_path / "meta/consolidated.01.pth")
    line = "the files of the model-parallel ranks hold different values of it"
    assert line in refusal(tmp_path / "meta", tmp_path / "c", "hf")[0]


def save_sharded(folder: Path) -> None:
    """Save a checkpoint from two ranks, with tensors sharded by rows and by columns in turn."""
    with pool_world():
        mesh = init_device_mesh("cpu", (2,))
        state = {
            f"model.{name}": distribute_tensor(tensor, mesh, [Shard(i % tensor.dim())])
            for i, (name, tensor) in enumerate(weights().items())
        }
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))


def test_shards_of_ranks_are_joined(pool: Pool, tmp_path: Path) -> None:
    pool.run(save_sharded, {"folder": tmp_path / "a"}, world_size=2)
    files = {file.name: manifests.file_entry(file) for file in (tmp_path / "a").iterdir()}
    manifests.write(tmp_path / "a", Manifest(step=3, model=model_of(SHAPE, "float32"), files=files))
    assert len(files) == 3
    convert(tmp_path / "a", tmp_path / "b", "torch")
    assert same(torch.load(tmp_path / "b", weights_only=True)["model"], weights())


def test_a_folder_may_hold_a_manifest_of_its_own(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    (tmp_path / "hf/manifest.json").write_text("{}")
    assert "manifest.json" not in convert(tmp_path / "hf", tmp_path / "b", "hf")["carried"]
    assert open_source(tmp_path / "b").format == "hf"


def test_a_tied_head_that_is_the_embedding_is_dropped(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf", TIED)
    held = load_file(tmp_path / "hf/model.safetensors")
    again = held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}
    save_file(again, tmp_path / "hf/model.safetensors")
    convert(tmp_path / "hf", tmp_path / "b", "hf")
    assert same(load_file(tmp_path / "b/model.safetensors"), held)


def test_command(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
) -> None:
    make_dcp(tmp_path / "a")
    assert (
        main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "hf", "--logits"]) == 0
    )
    out = capsys.readouterr().out
    assert f"{tmp_path / 'b'}: 21 tensors, " in out
    assert "logits: bitwise equal" in out
    assert "left out: the optimizer's state" in out
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "hf", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "ok": False,
        "errors": [f"{tmp_path / 'b'} exists; give a DST that does not exist, or remove it"],
    }
    script = root / "tools/convert_checkpoint.py"
    arguments = [str(tmp_path / "b"), str(tmp_path / "c"), "--to", "torch", "--json"]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tensors"] == 21


def test_inspect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dcp(tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a")]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["format"] == "dcp"
    assert lines["step"] == "5"
    assert lines["layout"] == "pp=2 tp=4"
    assert lines["model"].startswith("dim=32 n_layers=2 ")
    assert lines["tensors"] == f"84 (84 float32), {3 * 19808 * 4 + 21 * 4:,} bytes"
    assert (lines["parameters"], lines["whole"]) == ("19,808", "yes")
    assert main(["inspect", str(tmp_path / "a"), "--json", "--tensors"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"]["optim.last.norm.weight.step"] == [[], "float32"]
    assert found["optimizer"] is True
    with monkeypatch.context() as patch:
        patch.setattr(formats, "_open_as", None)  # refused before anything is read
        assert main(["inspect", str(tmp_path / "a"), "--samples", "1", "--full"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"composer3d inspect: {option} has no effect on a checkpoint; leave it out"
        for option in ("--samples", "--full")
    ]
    assert main(["inspect", str(tmp_path / "b"), "--full"]) == 2
    assert "b does not exist; give another path" in capsys.readouterr().err
    file = tmp_path / "a/__0_0.distcp"
    flip(file, 1000)
    assert main(["inspect", str(tmp_path / "a")]) == 1
    out = capsys.readouterr().out
    assert "step         5\n" in out
    assert f"whole        no\n{file} has another digest than the manifest says\n" in out


def test_files_that_no_run_has_saved_have_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dcp(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "dcp", "dcp", weights_only=True)
    for to in ("hf", "meta", "torch"):
        convert(tmp_path / "run", tmp_path / to, to)
    convert(tmp_path / "hf", tmp_path / "from_hf", "dcp")
    steps = {path.name: inspect(path)["step"] for path in tmp_path.iterdir()}
    others = dict.fromkeys(("dcp", "hf", "meta", "from_hf"))
    assert steps == {"run": 5, "torch": 5, **others}
    assert main(["inspect", str(tmp_path / "hf")]) == 0
    assert "step" not in capsys.readouterr().out


def make_run(folder: Path) -> list[Path]:
    """Make a run's folder with three checkpoints, as training does."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    steps = [folder / f"checkpoints/step-{number:08d}" for number in (5, 90, 100)]
    for step in steps:
        make_dcp(step)
    (folder / "checkpoints/step-00000110.tmp").mkdir()  # a save that was interrupted
    (folder / "checkpoints/step-9999999999").mkdir()  # not a name that composer3d gives
    return steps


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
def test_a_checkpoint_that_may_not_be_read_is_not_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    steps = make_run(tmp_path / "run")
    fail_to_open(monkeypatch, steps[2] / name, errno.EACCES)
    assert main(["inspect", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    problem = f"a checkpoint cannot be read: [Errno 13] Permission denied: '{steps[2]}/{name}'"
    assert problem in said.err


def test_a_run_stands_for_its_newest_whole_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    steps = make_run(run)
    for source in (run, run / "checkpoints"):
        report = convert(source, tmp_path / f"{source.name}-export", "hf")
        assert report["source"] == str(steps[2])
        assert report["notes"][0] == f"{steps[2]} is the newest whole checkpoint of {source}"
    assert same(
        tensors(tmp_path / "run-export"),
        {f"model.{name}": tensor for name, tensor in weights().items()},
    )
    convert(run, run / "export", "hf")  # beside its checkpoints
    (steps[2] / "__0_0.distcp").write_bytes(b"x")
    (steps[1] / "manifest.json").unlink()
    assert main(["inspect", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{steps[0]} is the newest whole checkpoint of {run}\n" in out
    assert (
        f"{steps[2]} is skipped, because it is not whole: {steps[2]}/__0_0.distcp has 1 bytes, "
        in out
    )
    assert f"{steps[1]} is skipped, because it is not whole: " in out
    assert main(["convert", str(run), str(tmp_path / "c"), "--to", "hf"]) == 0
    assert f"{steps[0]} is the newest whole checkpoint of {run}\n" in capsys.readouterr().out
    monkeypatch.chdir(run)
    assert convert(Path("."), tmp_path / "d", "hf")["source"] == str(
        Path("checkpoints") / steps[0].name
    )


def test_a_checkpoint_of_a_later_format_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not damaged, so an older checkpoint of the run must not take its place."""
    run = tmp_path / "run"
    steps = make_run(run)
    monkeypatch.setattr(manifests, "FORMAT", 2)
    (steps[2] / "manifest.json").unlink()
    manifests.write(steps[2], Manifest(step=100, model={}))
    monkeypatch.undo()
    for function, *arguments in (
        (convert, run, tmp_path / "b", "hf"),
        (inspect, run),
        (inspect, steps[2]),
    ):
        with pytest.raises(UserError) as caught:
            function(*arguments)
        assert caught.value.lines == (
            f"{steps[2]}/manifest.json is not of format 1, the only one that this composer3d "
            "reads; use a newer composer3d",
        )
    assert not (tmp_path / "b").exists()


def test_a_model_of_a_later_version_is_not_skipped_or_guessed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    newest = make_run(run)[2]
    torch_file = tmp_path / "a.pt"
    convert(newest, torch_file, "torch")
    later = {"model.logit_softcap": 30.0, "model.x": None}
    saved = manifests.read(newest)
    manifests.write(newest, replace(saved, model=saved.model | later))
    rewrite_torch(torch_file, lambda held: held["composer3d"]["model"].update(later))
    for source, place in ((run, newest), (torch_file, torch_file)):
        with pytest.raises(UserError) as caught:
            convert(source, tmp_path / "b", "hf")
        assert caught.value.lines[0] == (
            f"{place} has 'model.logit_softcap' = 30.0 (and 1 more), which this version does not "
            "know: it would compute another model; use a newer composer3d"
        )


def test_a_run_of_another_architecture_is_not_called_damaged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = make_run(run)
    for step in steps:
        manifest = manifests.read(step)
        model = manifest.model | {"model.architecture": "my_models.gpt:ARCHITECTURE"}
        manifests.write(step, replace(manifest, model=model))
    for lines in (refusal(run, tmp_path / "b", "hf"), refusal(run, function=inspect)):
        assert lines == [
            f'{steps[2]} has a model of the architecture "my_models.gpt:ARCHITECTURE": composer3d '
            "converts and inspects its own architectures only; generate and eval need its recipe, "
            "--recipe FILE"
        ]


def test_a_run_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = make_run(run)
    for step in steps:
        (step / "__0_0.distcp").unlink()
    lines = refusal(run, tmp_path / "b", "hf")
    assert len(lines) == 4
    assert lines[0].startswith(f"{steps[2]} is skipped, because it is not whole: ")
    assert lines[-1] == f"{run} has no whole checkpoint; give another run"
    for step in steps:
        shutil.rmtree(step)
    for lines in (refusal(run, tmp_path / "b", "hf"), refusal(run, function=inspect)):
        assert lines == [f"{run} has no checkpoint (step-* or checkpoints/step-*); train it first"]


def test_memory_is_a_few_times_the_largest_tensor(tmp_path: Path) -> None:
    """The largest tensor, or one projection of all experts of a layer, has 2 or 4 MB."""
    shapes = {
        "llama": replace(SHAPE, dim=512, n_layers=8, ffn=2048),
        "mixtral": replace(MIXTRAL, dim=512, n_layers=5, ffn=512, experts=8),
    }
    for name, shape in shapes.items():
        make_hf(tmp_path / name, shape, torch.bfloat16)
        assert (tmp_path / name / "model.safetensors").stat().st_size > 60e6
    jobs = [("llama", "meta", "float32"), ("mixtral", "dcp", ""), ("mixtral", "hf", "")]
    peaks = peaks_of_converts(tmp_path, jobs)
    assert len(peaks) == 3
    assert max(peaks) < 40e6


def test_a_run_that_trained_a_part_keeps_the_optimizer_of_that_part(tmp_path: Path) -> None:
    recipe = '[optim]\ntrain = ["last.*"]\n'
    source = make_dcp(tmp_path / "source", recipe=recipe, trained="last.*")
    convert(source, tmp_path / "file.pt", to="torch")
    convert(tmp_path / "file.pt", tmp_path / "again", to="dcp")
    found = tensors(tmp_path / "again")
    assert same(found, tensors(source))
    states = {name for name in found if name.startswith("optim.")}
    assert {name.split(".")[1] for name in states} == {"last"}


@pytest.mark.parametrize("recipe", ["", '[optim]\ntrain = ["last.*", "first.*"]\n'])
def test_a_state_that_the_recipe_does_not_explain_is_missed(tmp_path: Path, recipe: str) -> None:
    source = make_dcp(tmp_path / "source", recipe=recipe, trained="last.*")
    with pytest.raises(CheckpointError, match=r"has no 'optim\.first\.embed\.weight\.exp_avg'"):
        open_source(source)
