"""The parameters of a GLM-4.5, one row each. No torch here."""

from composer3d.models.deepseek.table import EXPERTS_IN_FILES, with_prediction
from composer3d.models.glm.shape import GlmShape
from composer3d.models.llama.table import attention_rows
from composer3d.models.llama.table import table as llama_table
from composer3d.models.moe.table import expert_rows
from composer3d.models.table import ParameterTable


def table(shape: GlmShape) -> ParameterTable:
    """Return the parameters of a GLM-4.5 with this shape."""
    of_experts = (*attention_rows(shape), *expert_rows(shape, EXPERTS_IN_FILES))
    return with_prediction(llama_table(shape), shape, of_experts)
