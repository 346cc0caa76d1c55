"""Find the parameters of a DeepSeek-V2 or V3 in the files of Hugging Face.

They have the forms of ``models.moe.names``. Published files of V3 also hold layers of multi-token
prediction after the others. Each of them repeats the embedding and the head. transformers does not
read them.
"""

import re
from collections.abc import Collection

from composer3d.models.deepseek.shape import DeepseekShape, PredictingShape
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


def left_out(shape: PredictingShape, in_files: Collection[str]) -> frozenset[str]:
    """Return the tensors of layers of multi-token prediction that the model does not have."""
    layer_of = {name: found[1] for name in in_files if (found := _LAYER.match(name))}
    layers = {
        layer
        for layer in layer_of.values()
        if int(layer) >= shape.all_layers and f"model.layers.{layer}.{_OF_PREDICTION}" in in_files
    }
    return frozenset(name for name, layer in layer_of.items() if layer in layers)


def copies(shape: PredictingShape) -> dict[str, str]:
    """Return the tensors in files that repeat another one, each with our name of that parameter."""
    head = "first.embed.weight" if shape.tied else "last.head.weight"
    found = {}
    for layer in range(shape.n_layers, shape.all_layers):
        found[f"model.layers.{layer}.embed_tokens.weight"] = "first.embed.weight"
        found[f"model.layers.{layer}.shared_head.head.weight"] = head
    return found
