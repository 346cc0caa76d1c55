"""What each parameter is called, and how it lies, in Hugging Face's files and in Meta's: one table.

Names are ours without the checkpoint's ``model.``: ``blocks.7.attn.wq.weight``. Values are the same in all three, but
that Meta's rotary pairs are neighbours, (x[2i], x[2i + 1]), where ours and Hugging Face's are (x[i], x[i + D/2]).
"""

from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from composer3d.models.llama.huggingface import shape_from, shown
from composer3d.models.llama.model import Llama
from composer3d.models.llama.shape import ModelShape
from composer3d.spec.errors import CheckpointError

# Modules; # is the number of a block.
_TABLE = {
    # ours: (Hugging Face's, Meta's)
    "first.embed": ("model.embed_tokens", "tok_embeddings"),
    "blocks.#.attn_norm": ("model.layers.#.input_layernorm", "layers.#.attention_norm"),
    "blocks.#.attn.wq": ("model.layers.#.self_attn.q_proj", "layers.#.attention.wq"),
    "blocks.#.attn.wk": ("model.layers.#.self_attn.k_proj", "layers.#.attention.wk"),
    "blocks.#.attn.wv": ("model.layers.#.self_attn.v_proj", "layers.#.attention.wv"),
    "blocks.#.attn.wo": ("model.layers.#.self_attn.o_proj", "layers.#.attention.wo"),
    "blocks.#.attn.q_norm": ("model.layers.#.self_attn.q_norm", ""),
    "blocks.#.attn.k_norm": ("model.layers.#.self_attn.k_norm", ""),
    "blocks.#.ffn_norm": ("model.layers.#.post_attention_layernorm", "layers.#.ffn_norm"),
    "blocks.#.ffn.w1": ("model.layers.#.mlp.gate_proj", "layers.#.feed_forward.w1"),
    "blocks.#.ffn.w2": ("model.layers.#.mlp.down_proj", "layers.#.feed_forward.w2"),
    "blocks.#.ffn.w3": ("model.layers.#.mlp.up_proj", "layers.#.feed_forward.w3"),
    "last.norm": ("model.norm", "norm"),
    "last.head": ("lm_head", "output"),
}

_BLOCK = "blocks.0."
_PARAMS = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "norm_eps",
    "rope_theta",
)  # one name in Meta's words and ours
_STRETCHED = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))  # Llama 3.1 and 3.2


@cache
def shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """All parameters by our names, in the model's order; a tied head is none of its own. Not to be changed.

    Blocks are alike, so that one of them is built: a config.json may ask for thousands.
    """
    one = Llama(replace(shape, n_layers=1)).named_parameters()
    sizes = {name: tuple(parameter.shape) for name, parameter in one}
    block = {name: size for name, size in sizes.items() if name.startswith(_BLOCK)}
    all_blocks = {
        f"blocks.{number}.{name.removeprefix(_BLOCK)}": size
        for number in range(shape.n_layers)
        for name, size in block.items()
    }
    first = {name: size for name, size in sizes.items() if name.startswith("first.")}
    last = {name: size for name, size in sizes.items() if name.startswith("last.")}
    return {**first, **all_blocks, **last}


def hf_names(shape: ModelShape) -> dict[str, str]:
    """Hugging Face's name of each of ``shapes``."""
    return {name: _translate(name, 0) for name in shapes(shape)}


def meta_names(shape: ModelShape) -> dict[str, str]:
    """Meta's name of each of ``shapes``, or a CheckpointError as of ``meta_params_of``.

    Files of a tied model hold the embedding once more, as ``output.weight``.
    """
    meta_params_of(shape)
    return {name: _translate(name, 1) for name in shapes(shape)}


def _translate(name: str, column: int) -> str:
    number = name.split(".")[1]
    module, _, kind = name.replace(f"blocks.{number}.", "blocks.#.").rpartition(".")
    return f"{_TABLE[module][column].replace('#', number)}.{kind}"


def to_meta(name: str, whole: Tensor, shape: ModelShape, *, back: bool = False) -> Tensor:
    """A parameter of ours, or whole heads of it, as Meta has it; ``back``: the inverse. ``name`` is ours."""
    if not name.endswith(("attn.wq.weight", "attn.wk.weight")):
        return whole
    half = shape.head_width // 2
    return (
        whole.unflatten(0, (-1, half, 2) if back else (-1, 2, half)).transpose(1, 2).flatten(0, 2)
    )


def meta_params_of(shape: ModelShape) -> dict[str, Any]:
    """Meta's params.json of ``shape``; a CheckpointError where Meta's code would compute something else."""
    stretch = (shape.rope_factor, shape.rope_low_freq, shape.rope_high_freq, shape.rope_context)
    refused = {
        "qkv_bias": shape.qkv_bias,
        "qk_norm": shape.qk_norm,
        "window": shape.window,
        "head_dim": shape.head_width if shape.head_width * shape.n_heads != shape.dim else None,
        "rope_*": None if shape.rope_factor == 1 or stretch in _STRETCHED else stretch,
    }
    lines = [
        f"Meta's form of Llama has no {name} = {value}; convert to hf"
        for name, value in refused.items()
        if value
    ]
    if lines:
        raise CheckpointError(lines)
    params = {name: getattr(shape, name) for name in _PARAMS} | {"vocab_size": shape.vocab}
    # The width of its feed-forward is int(multiplier * int(8/3 dim)), rounded up to a multiple.
    params |= {"multiple_of": shape.ffn, "ffn_dim_multiplier": shape.ffn / int(8 * shape.dim / 3)}
    scaled = {"use_scaled_rope": True, "rope_scaling_factor": shape.rope_factor}
    return params | scaled if shape.rope_factor != 1 else params


def shape_of_meta(params: dict[str, Any], *, vocab: int, ffn: int, tied: bool) -> ModelShape:
    """The shape of a params.json; its tensors say ``vocab`` and ``ffn`` (rows of output and w1) and ``tied``.

    Raises CheckpointError where params.json lacks a size, or has one of a wrong type or out of range.
    """
    # Llama 2 leaves these out. use_scaled_rope alone is a factor of 8, and of 32 in Llama 3.2, whose heads are tied.
    params = {"n_kv_heads": params.get("n_heads"), "norm_eps": 1e-5, "rope_theta": 1e4, **params}
    if missing := [name for name in _PARAMS if params.get(name) is None]:
        raise CheckpointError(
            f"params.json lacks {', '.join(missing)}; take the one that came with the files"
        )
    scaled = params.get("use_scaled_rope", False)
    if type(scaled) is not bool:
        raise CheckpointError(
            f"params.json: use_scaled_rope = {shown(scaled)} must be true or false"
        )
    factor = params.get("rope_scaling_factor", 32.0 if tied else 8.0) if scaled else 1.0
    sizes = {name: params[name] for name in _PARAMS}
    keys = {name: f"params.json: {name}" for name in _PARAMS} | {
        "rope_factor": "params.json: rope_scaling_factor"
    }
    return shape_from(
        {**sizes, "vocab": vocab, "ffn": ffn, "tied": tied, "rope_factor": factor}, keys
    )
