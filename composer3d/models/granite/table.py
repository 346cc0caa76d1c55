"""The parameters of a Granite 3: those of a Llama of the same sizes. No torch here."""

from composer3d.models.granite.shape import GraniteShape
from composer3d.models.llama.table import ffn_rows, norm_row, projection_rows, table_of_blocks
from composer3d.models.table import ParameterTable


def table(shape: GraniteShape) -> ParameterTable:
    """Return the parameters of a Granite 3 with this shape.

    Its norms have no name in Meta's format, which has no place for the multipliers.
    """
    hf = "model.layers.#"
    block = (
        norm_row("attn_norm", shape.dim, hf=f"{hf}.input_layernorm"),
        *projection_rows(shape),
        norm_row("ffn_norm", shape.dim, hf=f"{hf}.post_attention_layernorm"),
        *ffn_rows(shape),
    )
    return table_of_blocks(shape, block)
