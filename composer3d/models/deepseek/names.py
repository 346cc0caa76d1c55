"""Find the parameters of a DeepSeek-V2 or V3 in the files of Hugging Face.

They have the forms of ``models.moe.names``. Published files of V3 also hold the layers of
multi-token prediction, which are no part of this model.
"""

from collections.abc import Collection

from composer3d.models.deepseek.shape import DeepseekShape
from composer3d.models.deepseek.table import table
from composer3d.models.locations import Location
from composer3d.models.moe.names import locations_of


def hf_locations(shape: DeepseekShape, in_files: Collection[str] = ()) -> dict[str, Location]:
    """Return the place of each parameter in the files of Hugging Face, by our name.

    The arguments and the error are those of ``models.moe.names.locations_of``.
    """
    return locations_of(table(shape), shape, in_files)
