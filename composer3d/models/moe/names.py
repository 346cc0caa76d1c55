"""Find the parameters of a Llama with experts in the files of Hugging Face.

Our tensors hold all experts of a block: ``blocks.7.moe.experts.w1`` (gate), ``w3`` (up) and ``w2``
(down). Files have two forms. The published form has one tensor for each expert and projection, and
is the one that is written. The packed form has two tensors for each block, as transformers has them
in memory: ``gate_up_proj``, in which the rows of each gate come before those of its up projection,
and ``down_proj``. The table has the published names.
"""

from collections.abc import Collection

from composer3d.facts.errors import CheckpointError
from composer3d.models.locations import Location
from composer3d.models.locations import hf_locations as published_locations
from composer3d.models.moe.shape import ExpertsShape, MoeShape
from composer3d.models.moe.table import table
from composer3d.models.table import ParameterTable

_PACKED_BLOCK = "mlp"  # of both families
_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"

_PROJECTIONS = ("experts.w1", "experts.w2", "experts.w3")
_EXPERTS_IN_FILES = ".experts."
_ROUTER = "router.weight"


def hf_locations(shape: MoeShape, in_files: Collection[str] = ()) -> dict[str, Location]:
    """Return the place of each parameter in the files of Hugging Face, by our name.

    The arguments and the error are those of ``locations_of``.
    """
    return locations_of(table(shape), shape, in_files)


def locations_of(
    rows: ParameterTable, shape: ExpertsShape, in_files: Collection[str]
) -> dict[str, Location]:
    """Return the place of each parameter in the files of Hugging Face, by our name.

    Args:
        rows: the parameters of the model.
        shape: the shape of a model that ``huggingface.make_config`` accepts.
        in_files: the names of tensors in the files. A block is packed if they have one of its
            packed names.

    Raises:
        CheckpointError: most tensors of experts are missing. Each is listed in the result, so an
            untrusted config.json could ask for more names than there is memory.
    """
    if in_files:
        _require_experts(shape, in_files)
    locations = published_locations(rows)
    for layer in range(shape.all_layers):
        files = f"model.layers.{layer}"
        if not (shape.has_experts(layer) and _is_packed(files, in_files)):
            continue
        in_table = {row.name: row for row in rows.blocks[layer]}
        for leaf in (*_PROJECTIONS, _ROUTER):
            row = in_table[f"moe.{leaf}"]
            locations[f"blocks.{layer}.moe.{leaf}"] = _packed_location(files, leaf, row.shape)
    return locations


def _require_experts(shape: ExpertsShape, in_files: Collection[str]) -> None:
    """Refuse a shape with far more tensors of experts than the files have."""
    found = sum(_EXPERTS_IN_FILES in name for name in in_files)
    wanted = sum(
        len(_PROJECTIONS) * shape.experts
        for layer in range(shape.all_layers)
        if shape.has_experts(layer) and not _is_packed(f"model.layers.{layer}", in_files)
    )
    if wanted > 2 * found:
        raise CheckpointError(
            f"there are {found:,} tensors of experts, but the model of config.json has {wanted:,}; "
            "copy the missing files"
        )


def _is_packed(layer: str, in_files: Collection[str]) -> bool:
    return any(f"{layer}.{_PACKED_BLOCK}.{name}" in in_files for name in (_GATE_UP, _DOWN))


def _packed_location(layer: str, leaf: str, size: tuple[int, ...]) -> Location:
    """Return the place of the router, or of w1, w2 or w3 of the experts, in the packed form."""
    block = f"{layer}.{_PACKED_BLOCK}"
    if leaf == _ROUTER:
        return Location((f"{block}.gate.weight",), size)
    if leaf == "experts.w2":
        return Location((f"{block}.{_DOWN}",), size)
    experts, rows, columns = size
    begin = 0 if leaf == "experts.w1" else rows
    return Location(
        (f"{block}.{_GATE_UP}",), (experts, 2 * rows, columns), rows=(begin, begin + rows)
    )
