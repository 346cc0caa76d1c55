"""Find the parameters of a GLM-4.5 in the files of Hugging Face, as those of a DeepSeek-V3."""

from collections.abc import Collection

from composer3d.models.deepseek.names import copies, left_out
from composer3d.models.glm.shape import GlmShape
from composer3d.models.glm.table import table
from composer3d.models.locations import Location
from composer3d.models.moe.names import locations_of

__all__ = ["copies", "hf_locations", "left_out"]


def hf_locations(shape: GlmShape, in_files: Collection[str] = ()) -> dict[str, Location]:
    """Return the place of each parameter in the files of Hugging Face, by our name.

    The arguments and the error are those of ``models.moe.names.locations_of``.
    """
    return locations_of(table(shape), shape, in_files)
