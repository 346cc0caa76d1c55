"""The parameters of a Phi-3 or Phi-4: those of a Llama, with other names in files. No torch here.

The files join matrices that read the same input: the rows of queries, keys and values in one
tensor, and those of the gate and of the up projection in another. Our parameters stay apart, so
that tp cuts the rows of each.
"""

from dataclasses import replace

from composer3d.models.llama.table import table as llama_table
from composer3d.models.phi3.shape import Phi3Shape
from composer3d.models.table import ParameterTable

_QKV = "model.layers.#.self_attn.qkv_proj.weight"
_GATE_UP = "model.layers.#.mlp.gate_up_proj.weight"
# The matrices of a tensor have its name, and its rows in the order of the table.
_JOINED = {
    "attn.wq.weight": _QKV,
    "attn.wk.weight": _QKV,
    "attn.wv.weight": _QKV,
    "ffn.w1.weight": _GATE_UP,
    "ffn.w3.weight": _GATE_UP,
}


def table(shape: Phi3Shape) -> ParameterTable:
    """Return the parameters of a Phi-3 or Phi-4 with this shape."""
    rows = llama_table(shape)
    block = tuple(row._replace(hf=_JOINED.get(row.name, row.hf)) for row in rows.blocks[0])
    return replace(rows, blocks=(block,) * shape.n_layers)
