"""Find the parameters of a DeepSeek-V2 or V3 in the files of Hugging Face.

They have the forms of ``models.moe.names``. Published files of V3 also hold a layer of multi-token
prediction after the others, which is no part of this model, nor of that of transformers.
"""

import re
from collections.abc import Collection

from composer3d.models.deepseek.shape import DeepseekShape
from composer3d.models.deepseek.table import table
from composer3d.models.locations import Location
from composer3d.models.moe.names import locations_of

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
# The projection of an embedding and a hidden state to one input, which other layers do not have.
_OF_PREDICTION = "eh_proj.weight"


def hf_locations(shape: DeepseekShape, in_files: Collection[str] = ()) -> dict[str, Location]:
    """Return the place of each parameter in the files of Hugging Face, by our name.

    The arguments and the error are those of ``models.moe.names.locations_of``.
    """
    return locations_of(table(shape), shape, in_files)


def left_out(shape: DeepseekShape, in_files: Collection[str]) -> frozenset[str]:
    """Return the tensors of layers of multi-token prediction, which come after the model's own."""
    layer_of = {name: found[1] for name in in_files if (found := _LAYER.match(name))}
    layers = {
        layer
        for layer in layer_of.values()
        if int(layer) >= shape.n_layers and f"model.layers.{layer}.{_OF_PREDICTION}" in in_files
    }
    return frozenset(name for name, layer in layer_of.items() if layer in layers)
