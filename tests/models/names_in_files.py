"""Names of parameters in the files of Hugging Face."""

from composer3d.models.llama.shape import ModelShape
from composer3d.models.llama.table import table
from composer3d.models.locations import hf_locations


def hf_names(shape: ModelShape) -> dict[str, str]:
    """Map our name of each parameter of a Llama to Hugging Face's."""
    return {name: place.names[0] for name, place in hf_locations(table(shape)).items()}
