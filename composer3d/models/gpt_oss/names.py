"""Find the parameters of a gpt-oss in the files of Hugging Face.

The matrices of experts are transposed there: (experts, in, out). ``convert.mxfp4`` reads those of
the published files, which are in MXFP4, as if they were.
"""

from collections.abc import Collection

from composer3d.models import locations
from composer3d.models.gpt_oss.shape import GptOssShape
from composer3d.models.gpt_oss.table import table
from composer3d.models.locations import Location

_MATRICES = (".experts.w1", ".experts.w2")


def hf_locations(shape: GptOssShape, in_files: Collection[str] = ()) -> dict[str, Location]:
    """Return the place of each parameter in the files of Hugging Face, by our name.

    Args:
        shape: the shape of a model that ``huggingface.make_config`` accepts.
        in_files: is not read: there is one form.
    """
    found = locations.hf_locations(table(shape))
    for name, location in found.items():
        if name.endswith(_MATRICES):
            experts, rows, columns = location.shape
            found[name] = Location(location.names, (experts, columns, rows), is_transposed=True)
    return found
