"""Make tiny checkpoints of each format, and read them back."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from composer3d.checkpoint.manifest import Manifest, TensorSpec, model_of
from composer3d.convert.carried import CARRIED_NAMES
from composer3d.convert.formats import Source, dtype_name, open_source
from composer3d.convert.targets import write
from composer3d.models.llama.huggingface import make_config
from composer3d.models.llama.names import hf_names, parameter_shapes
from composer3d.models.llama.shape import ModelShape

SHAPE = ModelShape(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn=48, vocab=67, rope_theta=1e4)
CARRIED = {
    "generation_config.json": b"{}",
    "special_tokens_map.json": b'{"a": 1}',
    "tokenizer.json": b"\xc3\xa4",
    "tokenizer.model": bytes(range(256)),
}
NAMES_IN_ORDER = [name for name in CARRIED_NAMES if name in {"config.json", *CARRIED}]


def weights(shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return random parameters by our names. They are the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator).to(dtype)
        for name, size in parameter_shapes(shape).items()
    }


def make_hf(folder: Path, shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32) -> Path:
    """Make a Hugging Face folder with the writer of safetensors."""
    folder.mkdir()
    names = hf_names(shape)
    tensors_in_file = {names[name]: tensor for name, tensor in weights(shape, dtype).items()}
    save_file(tensors_in_file, folder / "model.safetensors", metadata={"format": "pt"})
    config = make_config(shape, str(dtype).removeprefix("torch.")) | {
        "eos_token_id": 7,
        "max_position_embeddings": 99,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in CARRIED.items():
        (folder / name).write_bytes(content)
    return folder


def make_dcp(folder: Path, shape: ModelShape = SHAPE, recipe: str = "") -> Path:
    """Make a checkpoint as training does: with optimizer state, step and position in the data."""
    state = {f"model.{name}": tensor for name, tensor in weights(shape).items()}
    for name, tensor in weights(shape).items():
        state |= {f"optim.{name}.exp_avg": tensor * 2, f"optim.{name}.exp_avg_sq": tensor**2}
        state[f"optim.{name}.step"] = torch.tensor(5.0)
    manifest = Manifest(
        step=5,
        world_size=8,
        layout={"pp": 2, "tp": 4},
        model=model_of(shape, "float32"),
        recipe=recipe,
        data={"at": 40, "digest": "abc"},
        lr=0.125,
    )
    specs = {
        name: TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))
        for name, tensor in state.items()
    }
    source = Source(format="dcp", path=folder)
    source.shape, source.manifest = shape, manifest
    folder.mkdir()
    assert write("dcp", folder, source, specs, iter(state.items()), 0) == []
    return folder


def tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint by our names, as ``convert`` does."""
    source = open_source(path)
    return {name: source.read(name).clone() for name in source.locations}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two sets of tensors have equal names, dtypes and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
