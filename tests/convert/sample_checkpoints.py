"""Make tiny checkpoints of each format, and read them back."""

import json
from collections.abc import Collection
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from composer3d.checkpoint.manifest import Manifest, TensorSpec, model_of
from composer3d.convert.formats import Source, dtype_name, open_source
from composer3d.convert.targets import write
from composer3d.models.llama.shape import ModelShape
from composer3d.models.moe.shape import PRESETS, MoeShape

SHAPE = ModelShape(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn=48, vocab=67, rope_theta=1e4)
MIXTRAL = MoeShape(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn=48,
    vocab=67,
    experts=4,
    experts_per_token=2,
)
QWEN_3 = MoeShape(
    dim=32,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    ffn=48,
    vocab=67,
    head_dim=16,
    tied=True,
    qk_norm=True,
    experts=6,
    experts_per_token=3,
    expert_ffn=16,
    renormalise=False,
    dense_layers=1,
    moe_every=2,
)
QWEN_2 = replace(QWEN_3, qk_norm=False, qkv_bias=True, shared_ffn=40, shared_gate=True)
DEEPSEEK = replace(PRESETS["debug-moe-shared"], n_layers=2)
CARRIED = {
    "generation_config.json": b"{}",
    "special_tokens_map.json": b'{"a": 1}',
    "tokenizer.json": b"\xc3\xa4",
    "tokenizer.model": bytes(range(256)),
}


def weights(shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return random parameters by our names. They are the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator).to(dtype)
        for name, size in source_of(shape).model_of.table_of(shape).shapes().items()
    }


def source_of(shape: ModelShape, folder: Path = Path()) -> Source:
    """Make a source of a model of this shape, without tensors."""
    source = Source(format="dcp", path=folder)
    source.shape = shape
    source.architecture = "moe" if isinstance(shape, MoeShape) else "llama"
    return source


def hf_tensors(
    shape: ModelShape, tensors: dict[str, Tensor], packed: Collection[int] = ()
) -> dict[str, Tensor]:
    """Return parameters as the files of Hugging Face have them.

    Args:
        shape: of the model.
        tensors: the parameters, by our names.
        packed: the numbers of layers with two tensors that hold all experts.
    """
    model_of = source_of(shape).model_of
    published = model_of.hf_locations(shape)
    if packed:
        in_files = [
            f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(shape.n_layers)
        ]
        in_memory = model_of.hf_locations(shape, in_files)
        published |= {name: in_memory[name] for name in in_memory if _layer_of(name) in packed}

    result: dict[str, Tensor] = {}
    for name, location in published.items():
        tensor = tensors[name]
        if location.is_stack:
            result |= zip(location.names, tensor.clone().unbind(), strict=True)
        elif location.rows is not None:
            empty = torch.empty(location.shape, dtype=tensor.dtype)
            result.setdefault(location.names[0], empty)[:, slice(*location.rows)] = tensor
        else:
            result[location.names[0]] = tensor
    return {name: tensor.clone() for name, tensor in result.items()}


def _layer_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("blocks.") else None


def make_hf(
    folder: Path,
    shape: ModelShape = SHAPE,
    dtype: torch.dtype = torch.float32,
    packed: Collection[int] = (),
) -> Path:
    """Make a Hugging Face folder with the writer of safetensors. ``packed``: see ``hf_tensors``."""
    folder.mkdir()
    tensors_in_file = hf_tensors(shape, weights(shape, dtype), packed)
    save_file(tensors_in_file, folder / "model.safetensors", metadata={"format": "pt"})
    make_config = source_of(shape).huggingface.make_config
    config = make_config(shape, str(dtype).removeprefix("torch.")) | {
        "eos_token_id": 7,
        "max_position_embeddings": 99,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in CARRIED.items():
        (folder / name).write_bytes(content)
    return folder


def make_dcp(folder: Path, shape: ModelShape = SHAPE, recipe: str = "", trained: str = "*") -> Path:
    """Make a checkpoint as training does: with optimizer state, step and position in the data.

    Only parameters that match the glob ``trained`` have a state of the optimizer.
    """
    source = source_of(shape, folder)
    state = {f"model.{name}": tensor for name, tensor in weights(shape).items()}
    for name, tensor in weights(shape).items():
        if name.endswith(".moe.router.bias") or not fnmatchcase(name, trained):
            continue
        state |= {f"optim.{name}.exp_avg": tensor * 2, f"optim.{name}.exp_avg_sq": tensor**2}
        state[f"optim.{name}.step"] = torch.tensor(5.0)
    manifest = Manifest(
        step=5,
        world_size=8,
        layout={"pp": 2, "tp": 4},
        model=model_of(shape, "float32", source.architecture),
        recipe=recipe,
        data={"at": 40, "digest": "abc"},
        lr=0.125,
    )
    specs = {
        name: TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))
        for name, tensor in state.items()
    }
    source.manifest = manifest
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
