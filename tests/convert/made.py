"""Tiny checkpoints of every form, and what is in them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from composer3d.checkpoint.manifest import Manifest, model_of
from composer3d.convert.carried import NAMES
from composer3d.convert.formats import Source, open_source
from composer3d.convert.targets import write
from composer3d.models.llama.huggingface import config_of
from composer3d.models.llama.names import hf_names, shapes
from composer3d.models.llama.shape import ModelShape

SHAPE = ModelShape(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn=48, vocab=67, rope_theta=1e4)
CARRIED = {
    "generation_config.json": b"{}",
    "special_tokens_map.json": b'{"a": 1}',
    "tokenizer.json": b"\xc3\xa4",
    "tokenizer.model": bytes(range(256)),
}
NAMES_IN_ORDER = [name for name in NAMES if name in {"config.json", *CARRIED}]


def weights(shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator).to(dtype)
        for name, size in shapes(shape).items()
    }


def make_hf(folder: Path, shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32) -> Path:
    """Made by safetensors' own writer."""
    folder.mkdir()
    own = hf_names(shape)
    held = {own[name]: tensor for name, tensor in weights(shape, dtype).items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(shape, str(dtype).removeprefix("torch.")) | {
        "eos_token_id": 7,
        "max_position_embeddings": 99,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in CARRIED.items():
        (folder / name).write_bytes(content)
    return folder


def make_dcp(folder: Path, shape: ModelShape = SHAPE, recipe: str = "") -> Path:
    """As training leaves it: with an optimizer's state, a step and a position in the data."""
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
    kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    source = Source(kind="dcp", path=folder)
    source.shape, source.manifest = shape, manifest
    folder.mkdir()
    assert write("dcp", folder, source, kinds, iter(state.items()), 0) == []
    return folder


def tensors(path: Path) -> dict[str, Tensor]:
    """All of a checkpoint by our names, as ``convert`` would read it."""
    source = open_source(path)
    return {name: source.read(name).clone() for name in source.names}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
