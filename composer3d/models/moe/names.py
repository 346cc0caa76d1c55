"""Find the parameters of a Llama with experts in the files of Hugging Face.

Our tensors hold all experts of a block: ``blocks.7.moe.experts.w1`` (gate), ``w3`` (up) and ``w2``
(down). Files have two forms. The published form has one tensor for each expert and projection, and
is the one that is written. The packed form has two tensors for each block, as transformers has them
in memory: ``gate_up_proj``, in which the rows of each gate come before those of its up projection,
and ``down_proj``. All other parameters are those of ``models.llama.names``.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from composer3d.models.llama.model import Llama
from composer3d.models.llama.names import hf_name, repeat_blocks, sizes_of
from composer3d.models.locations import Location
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.shape import MoeShape
from composer3d.spec.errors import CheckpointError


class _Names(NamedTuple):
    """The published names of one family, below ``model.layers.N.``."""

    block: str
    w1: str
    w2: str
    w3: str


_MIXTRAL = _Names("block_sparse_moe", w1="w1", w2="w2", w3="w3")
_QWEN_3 = _Names("mlp", w1="gate_proj", w2="down_proj", w3="up_proj")

_PACKED_BLOCK = "mlp"  # of both families
_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"

_PROJECTIONS = ("w1", "w2", "w3")
_EXPERTS_IN_FILES = ".experts."
_EXPERTS = ".moe.experts."
_ROUTER = ".moe.router.weight"


@cache
def parameter_shapes(shape: MoeShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by our name, in the model's order.

    As ``models.llama.names.parameter_shapes``: one block with experts and one without are built.
    """
    with_experts = sizes_of(MoeLlama(replace(shape, n_layers=1, dense_layers=0, moe_every=1)))
    dense = sizes_of(Llama(replace(shape, n_layers=1)))
    blocks = (
        with_experts if shape.has_experts(layer) else dense for layer in range(shape.n_layers)
    )
    return repeat_blocks(dense, blocks)


def is_trained(name: str) -> bool:
    """Return whether the parameter of this name has a gradient, and so a state of the optimizer."""
    return not name.endswith(".moe.router.bias")


def hf_locations(shape: MoeShape, in_files: Collection[str] = ()) -> dict[str, Location]:
    """Return the place of each parameter in the files of Hugging Face, by our name.

    Args:
        shape: the shape of a model that ``huggingface.make_config`` accepts.
        in_files: the names of tensors in the files. A block is packed if they have one of its
            packed names.

    Raises:
        CheckpointError: most tensors of experts are missing. Each is listed in the result, so an
            untrusted config.json could ask for more names than there is memory.
    """
    if in_files:
        _require_experts(shape, in_files)
    names = _QWEN_3 if shape.qk_norm else _MIXTRAL
    locations = {}
    for name, size in parameter_shapes(shape).items():
        if _EXPERTS not in name and not name.endswith(_ROUTER):
            locations[name] = Location((hf_name(name),), size)
            continue
        layer = f"model.layers.{name.split('.')[1]}"
        is_packed = _is_packed(layer, in_files)
        block = f"{layer}.{_PACKED_BLOCK if is_packed else names.block}"
        projection = name.rpartition(".")[2]
        if name.endswith(_ROUTER):
            locations[name] = Location((f"{block}.gate.weight",), size)
        elif is_packed:
            locations[name] = _packed_location(block, projection, size)
        else:
            locations[name] = _published_location(block, getattr(names, projection), size)
    return locations


def _require_experts(shape: MoeShape, in_files: Collection[str]) -> None:
    """Refuse a shape with far more tensors of experts than the files have."""
    found = sum(_EXPERTS_IN_FILES in name for name in in_files)
    wanted = sum(
        len(_PROJECTIONS) * shape.experts
        for layer in range(shape.n_layers)
        if shape.has_experts(layer) and not _is_packed(f"model.layers.{layer}", in_files)
    )
    if wanted > 2 * found:
        raise CheckpointError(
            f"there are {found:,} tensors of experts, but the model of config.json has {wanted:,}; "
            "copy the missing files"
        )


def _is_packed(layer: str, in_files: Collection[str]) -> bool:
    return any(f"{layer}.{_PACKED_BLOCK}.{name}" in in_files for name in (_GATE_UP, _DOWN))


def _packed_location(block: str, projection: str, size: tuple[int, ...]) -> Location:
    """Return the place of w1, w2 or w3 in the packed form."""
    if projection == "w2":
        return Location((f"{block}.{_DOWN}",), size)
    experts, rows, columns = size
    begin = 0 if projection == "w1" else rows
    return Location(
        (f"{block}.{_GATE_UP}",), (experts, 2 * rows, columns), rows=(begin, begin + rows)
    )


def _published_location(block: str, projection: str, size: tuple[int, ...]) -> Location:
    """Return the places of a projection of all experts in the published form."""
    in_order = tuple(f"{block}.experts.{expert}.{projection}.weight" for expert in range(size[0]))
    return Location(in_order, size[1:], is_stack=True)
