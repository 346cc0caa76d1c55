"""Hugging Face folders as wrappers, trainers and people leave them: read, or one cause is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from composer3d import cli
from composer3d.checkpoint.torchfile import load_torch
from composer3d.convert.convert import convert
from composer3d.convert.formats import open_source
from composer3d.convert.inspect import inspect
from composer3d.facts.errors import CheckpointError
from tests.convert.changes import Change, flip, refusal, rewrite_safetensors
from tests.convert.sample_checkpoints import make_dcp, make_hf

NORM = "model.norm.weight"


def rename(folder: Path, new_name: Callable[[str], str]) -> None:
    file = folder / "model.safetensors"
    save_file({new_name(name): tensor for name, tensor in load_file(file).items()}, file)


def change(folder: Path, change_tensors: Change) -> None:
    rewrite_safetensors(folder / "model.safetensors", change_tensors)


def shard(folder: Path, count: int = 3, suffix: str = "safetensors") -> list[Path]:
    """Cut the weights into files, without an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    files = [folder / f"{stem}-{n:05}-of-{count:05}.{suffix}" for n in range(1, count + 1)]
    for number, file in enumerate(files):
        part = {name: tensors[name] for name in names[number::count]}
        save_file(part, file) if suffix == "safetensors" else torch.save(part, file)
    return files


def index(folder: Path, files: dict[str, str]) -> None:
    content = json.dumps({"weight_map": files})
    (folder / "model.safetensors.index.json").write_text(content)


RENAMED: dict[str, Callable[[str], str]] = {
    "two wrappers": lambda name: f"module._orig_mod.{name}",
    "inside": lambda name: name.replace("model.layers.0.", "model.layers.0._orig_mod."),
    "fsdp": lambda name: name.replace("model.", "model._fsdp_wrapped_module.", 1),
    "nested": lambda name: name.replace("model.", "model.language_model.", 1),
    "older nested": lambda name: f"language_model.{name}",
    "no prefix": lambda name: name.removeprefix("model."),
}


@pytest.mark.parametrize("case", RENAMED)
def test_names_of_wrappers_are_read(tmp_path: Path, case: str) -> None:
    usual, odd = make_hf(tmp_path / "usual"), make_hf(tmp_path / "odd")
    rename(odd, RENAMED[case])
    expected, source = open_source(usual), open_source(odd)
    assert source.specs() == expected.specs()
    for name in expected.locations:
        assert torch.equal(source.read(name), expected.read(name))
    (note,) = [line for line in source.notes if "other names than usual" in line]
    assert "is read as 'model." in note or "is read as 'lm_head" in note


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_without_an_index_are_read(tmp_path: Path, suffix: str) -> None:
    expected, folder = open_source(make_hf(tmp_path / "x")), make_hf(tmp_path / "shards")
    files = shard(folder, suffix=suffix)
    source = open_source(folder)
    assert all(torch.equal(source.read(name), expected.read(name)) for name in expected.locations)
    files[1].unlink()
    with pytest.raises(CheckpointError, match="no index, and 1 of the 3 files of its set are miss"):
        open_source(folder)


def both_names(folder: Path) -> None:
    change(folder, lambda t: t.update({f"module.{NORM}": t[NORM].clone()}))


def adapter(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")
    low = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 2)}
    save_file(low, folder / "adapter_model.safetensors")


def adapter_names(folder: Path) -> None:
    rename(folder, lambda name: f"base_model.model.{name}".replace(".weight", ".lora_A.weight"))


def eyes(folder: Path) -> None:
    rename(folder, RENAMED["nested"])
    seeing = {f"model.visual.{number}": torch.ones(1) for number in range(12)}
    change(folder, lambda tensors: tensors.update(seeing))


def quantize(folder: Path) -> None:
    change(folder, lambda t: t.update({name: t[name].to(torch.int8) for name in t}))


def two_sets(folder: Path) -> None:
    for count in (2, 3):
        for number in range(1, count + 1):
            save_file({"a": torch.ones(1)}, folder / f"model-{number:05}-of-{count:05}.safetensors")
    (folder / "model.safetensors").unlink()


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "adapter": (adapter, "is a LoRA adapter, which changes the weights of another model; merge it"),
    "names of an adapter": (adapter_names, "is a LoRA adapter, which changes"),
    "weights and an adapter": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "holds weights and a LoRA adapter (adapter_config.json), which is not applied; merge both",
    ),
    "an index of others": (
        lambda folder: index(folder, {"a": "model-00001-of-00002.safetensors"}),
        "holds model.safetensors, and model.safetensors.index.json that names other files",
    ),
    "two names": (
        both_names,
        "holds 'model.norm.weight' twice, once as 'module.model.norm.weight'",
    ),
    "two sets": (two_sets, "has no index, and not one set of files such as"),
    "a model with eyes": (
        eyes,
        "which its model does not have; remove or rename it (so it is with 11 more tensors)",
    ),
    "quantized": (quantize, "and not quantized (so it is with"),
    "another model": (
        lambda folder: rename(folder, lambda name: f"transformer.h.{name}"),
        "has the tensors of another model than its shape says: it holds",
    ),
}


COMMANDS = {
    "inspect": [],
    "convert": ["to", "--to", "torch"],
    "generate": ["--prompt", "a"],
}


@pytest.mark.parametrize(
    ("case", "command"),
    [*((case, "inspect") for case in REFUSED), ("two names", "convert"), ("adapter", "generate")],
)
def test_what_cannot_be_read_has_one_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, command: str
) -> None:
    spoil, message = REFUSED[case]
    folder = make_hf(tmp_path / "x")
    spoil(folder)
    (line,) = refusal(folder, function=open_source)
    assert message in line
    assert cli.main([command, str(folder), *COMMANDS[command]]) in (1, 2)
    printed = capsys.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if str(folder) in line]
    assert len(lines) == 1
    assert message in lines[0]


def test_an_index_of_the_one_file_is_no_other_model(tmp_path: Path) -> None:
    folder = make_hf(tmp_path / "x")
    names = load_file(folder / "model.safetensors")
    index(folder, dict.fromkeys(names, "model.safetensors"))
    assert open_source(folder).locations


def test_weights_that_are_not_finite_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_hf(tmp_path / "x")
    assert not any("warning" in line for line in inspect(folder)["notes"])
    change(folder, lambda t: t[NORM][:3].copy_(torch.tensor([torch.nan, torch.inf, -torch.inf])))
    assert cli.main(["inspect", str(folder)]) == 0
    assert re.search(
        r"^warning: 'model.norm.weight' holds 1 NaN and 2 infinite of [\d,]+ numbers$",
        capsys.readouterr().out,
        re.M,
    )
    for to in ("torch", "dcp"):
        assert cli.main(["convert", str(folder), str(tmp_path / to), "--to", to]) == 0
        assert "holds 1 NaN and 2 infinite of" in capsys.readouterr().out
        assert cli.main(["inspect", str(tmp_path / to)]) == 0
        assert "holds 1 NaN and 2 infinite of" in capsys.readouterr().out
    assert not any("warning" in line for line in inspect(make_dcp(tmp_path / "d"))["notes"])


@pytest.mark.parametrize("damaged", ["model.embed_tokens.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_named_beside_others_that_cannot_be_read(
    tmp_path: Path, damaged: str
) -> None:
    folder = make_hf(tmp_path / "x")
    file = folder / "pytorch_model.bin"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors[NORM][0] = torch.nan
    torch.save(tensors, file)
    flip(file, load_torch(file)[damaged].begin + 1)
    report = inspect(folder)
    (problem,) = report["problems"]
    assert f"'{damaged}'" in problem
    assert any(line.startswith(f"warning: '{NORM}' holds 1 NaN") for line in report["notes"])


def test_logits_of_weights_that_are_not_finite_are_compared_too(tmp_path: Path) -> None:
    folder = make_hf(tmp_path / "x")
    change(folder, lambda tensors: tensors["lm_head.weight"][:1].fill_(torch.nan))
    report = convert(folder, tmp_path / "copy", "dcp", logits=True)
    assert report["logits"] == {"bitwise": True, "relative_error": 0.0}
    with pytest.raises(CheckpointError, match="the source's own logits are not finite"):
        convert(folder, tmp_path / "other", "dcp", dtype="float16", logits=True)


def test_a_file_of_torch_gets_no_name_by_which_it_is_not_read(tmp_path: Path) -> None:
    folder = make_hf(tmp_path / "x")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        convert(folder, tmp_path / "x.safetensors", "torch")
