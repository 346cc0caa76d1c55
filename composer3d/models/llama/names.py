"""Translate names and layouts of parameters between our format, Hugging Face's and Meta's.

Our names are used without the ``model.`` of checkpoints: ``blocks.7.attn.wq.weight``. The values
are the same in all three formats. But Meta orders the rows of the query and key projections in
another way: its rotary pairs are neighbours, (x[2i], x[2i + 1]). Our pairs and Hugging Face's are
(x[i], x[i + D/2]).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from composer3d.models.llama.huggingface import make_shape
from composer3d.models.llama.model import Llama
from composer3d.models.llama.shape import ModelShape
from composer3d.models.locations import Location
from composer3d.models.untrusted import short_json
from composer3d.spec.errors import CheckpointError


class _Names(NamedTuple):
    """The names of one module. ``#`` is the number of a block; "" means that there is none."""

    hf: str
    meta: str


_TABLE = {
    "first.embed": _Names("model.embed_tokens", "tok_embeddings"),
    "blocks.#.attn_norm": _Names("model.layers.#.input_layernorm", "layers.#.attention_norm"),
    "blocks.#.attn.wq": _Names("model.layers.#.self_attn.q_proj", "layers.#.attention.wq"),
    "blocks.#.attn.wk": _Names("model.layers.#.self_attn.k_proj", "layers.#.attention.wk"),
    "blocks.#.attn.wv": _Names("model.layers.#.self_attn.v_proj", "layers.#.attention.wv"),
    "blocks.#.attn.wo": _Names("model.layers.#.self_attn.o_proj", "layers.#.attention.wo"),
    "blocks.#.attn.q_norm": _Names("model.layers.#.self_attn.q_norm", ""),
    "blocks.#.attn.k_norm": _Names("model.layers.#.self_attn.k_norm", ""),
    "blocks.#.ffn_norm": _Names("model.layers.#.post_attention_layernorm", "layers.#.ffn_norm"),
    "blocks.#.ffn.w1": _Names("model.layers.#.mlp.gate_proj", "layers.#.feed_forward.w1"),
    "blocks.#.ffn.w2": _Names("model.layers.#.mlp.down_proj", "layers.#.feed_forward.w2"),
    "blocks.#.ffn.w3": _Names("model.layers.#.mlp.up_proj", "layers.#.feed_forward.w3"),
    "last.norm": _Names("model.norm", "norm"),
    "last.head": _Names("lm_head", "output"),
}

_FIRST_BLOCK = "blocks.0."

# The fields of ModelShape that params.json has under the same name.
_SHARED_PARAMS = ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta")

# The stretched positions of Llama 3.1 and 3.2, the only ones that Meta's code can compute:
# (rope_factor, rope_low_freq, rope_high_freq, rope_context).
_STRETCHES = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


# Shapes of parameters by their names.
Sizes = Mapping[str, tuple[int, ...]]


@cache
def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by our name, in the model's order.

    A tied head is not a parameter of its own. Only one block is built, because all blocks are the
    same, and a config.json may ask for thousands. The caller must not change the result, which is
    cached.
    """
    sizes = sizes_of(Llama(replace(shape, n_layers=1)))
    return repeat_blocks(sizes, [sizes] * shape.n_layers)


def sizes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a model, by its name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def repeat_blocks(sizes: Sizes, blocks: Iterable[Sizes]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters of a model of many blocks.

    Args:
        sizes: of a model of one block. Those of ``first`` and ``last`` are taken.
        blocks: for each block of the whole model, the sizes of a model of one such block.
    """
    result = {name: size for name, size in sizes.items() if name.startswith("first.")}
    for number, block in enumerate(blocks):
        result |= {
            f"blocks.{number}.{name.removeprefix(_FIRST_BLOCK)}": size
            for name, size in block.items()
            if name.startswith(_FIRST_BLOCK)
        }
    return result | {name: size for name, size in sizes.items() if name.startswith("last.")}


def is_trained(name: str) -> bool:
    """Return whether the parameter of this name has a gradient, and so a state of the optimizer."""
    return True


def hf_names(shape: ModelShape) -> dict[str, str]:
    """Map our name of each parameter to Hugging Face's."""
    return {name: hf_name(name) for name in parameter_shapes(shape)}


def hf_name(name: str) -> str:
    """Return Hugging Face's name of a parameter."""
    return _translate(name, "hf")


def hf_locations(shape: ModelShape, in_files: Collection[str] = ()) -> dict[str, Location]:
    """Return the place of each parameter in the files of Hugging Face, by our name.

    Args:
        shape: the shape of the model.
        in_files: the names of tensors in the files. They make no difference here: there is one form
            only.
    """
    sizes = parameter_shapes(shape)
    return {name: Location((hf_name(name),), size) for name, size in sizes.items()}


def meta_names(shape: ModelShape) -> dict[str, str]:
    """Map our name of each parameter to Meta's.

    The files of a tied model also hold the embedding as ``output.weight``, which is not in the
    result.

    Raises CheckpointError as ``make_meta_params`` does.
    """
    make_meta_params(shape)
    return {name: _translate(name, "meta") for name in parameter_shapes(shape)}


def _translate(name: str, column: Literal["hf", "meta"]) -> str:
    """Return the name of one parameter in a column of the table."""
    number = name.split(".")[1]  # the number of the block, if the parameter is in a block
    module, _, leaf = name.replace(f"blocks.{number}.", "blocks.#.").rpartition(".")
    translated = getattr(_TABLE[module], column)
    return f"{translated.replace('#', number)}.{leaf}"


def to_meta(name: str, whole: Tensor, shape: ModelShape, *, inverse: bool = False) -> Tensor:
    """Convert a parameter from our layout to Meta's, or from Meta's to ours if ``inverse``.

    Only the rows of the query and key projections are reordered. Other parameters are returned
    unchanged.

    Args:
        name: our name of the parameter.
        whole: the whole parameter, or all rows of some of its heads.
        shape: the shape of the model.
        inverse: convert from Meta's layout to ours.

    Returns:
        A tensor with the shape of ``whole``.
    """
    if not name.endswith(("attn.wq.weight", "attn.wk.weight")):
        return whole
    half = shape.head_width // 2
    # A head has 2 halves of D/2 rows in our layout, and D/2 pairs of 2 rows in Meta's.
    sizes = (-1, half, 2) if inverse else (-1, 2, half)
    return whole.unflatten(0, sizes).transpose(1, 2).flatten(0, 2)


def make_meta_params(shape: ModelShape) -> dict[str, Any]:
    """Return the content of Meta's params.json for ``shape``.

    Raises CheckpointError if Meta's code cannot compute this shape. The error has a line for each
    field that it does not support.
    """
    stretch = (shape.rope_factor, shape.rope_low_freq, shape.rope_high_freq, shape.rope_context)
    unsupported: dict[str, Any] = {}
    if shape.qkv_bias:
        unsupported["qkv_bias"] = shape.qkv_bias
    if shape.qk_norm:
        unsupported["qk_norm"] = shape.qk_norm
    if shape.window:
        unsupported["window"] = shape.window
    if shape.head_width * shape.n_heads != shape.dim:
        unsupported["head_dim"] = shape.head_width
    if shape.rope_factor != 1 and stretch not in _STRETCHES:
        unsupported["rope_*"] = stretch
    if unsupported:
        raise CheckpointError(
            [
                f"Meta's format of Llama has no {name} = {value}; convert to hf"
                for name, value in unsupported.items()
            ]
        )

    params = {name: getattr(shape, name) for name in _SHARED_PARAMS}
    params["vocab_size"] = shape.vocab
    # Meta computes the width of the feed-forward: int(ffn_dim_multiplier * int(8/3 dim)), rounded
    # up to a multiple of multiple_of.
    params["multiple_of"] = shape.ffn
    params["ffn_dim_multiplier"] = shape.ffn / int(8 * shape.dim / 3)
    if shape.rope_factor != 1:
        params["use_scaled_rope"] = True
        params["rope_scaling_factor"] = shape.rope_factor
    return params


def parse_meta_params(params: dict[str, Any], *, vocab: int, ffn: int, tied: bool) -> ModelShape:
    """Return the shape that a params.json and the sizes of some tensors describe.

    Args:
        params: the content of params.json.
        vocab: the number of rows of the whole tensor ``output``.
        ffn: the number of rows of each whole tensor ``w1``.
        tied: whether ``output`` equals the embedding.

    Raises:
        CheckpointError: params.json lacks a value, or has one of a wrong type or out of range.
    """
    # The params.json of Llama 2 lacks these keys.
    defaults = {"n_kv_heads": params.get("n_heads"), "norm_eps": 1e-5, "rope_theta": 1e4}
    params = {**defaults, **params}
    missing = [name for name in _SHARED_PARAMS if params.get(name) is None]
    if missing:
        raise CheckpointError(
            f"params.json lacks {', '.join(missing)}; take the one that came with the files"
        )

    is_scaled = params.get("use_scaled_rope", False)
    if type(is_scaled) is not bool:
        raise CheckpointError(
            f"params.json: use_scaled_rope = {short_json(is_scaled)} must be true or false"
        )
    factor = 1.0
    if is_scaled:
        # Meta's own files do not give the factor. It is 32 in Llama 3.2, which has a tied head, and
        # 8 in Llama 3.1.
        factor = params.get("rope_scaling_factor", 32.0 if tied else 8.0)

    values = {name: params[name] for name in _SHARED_PARAMS}
    values |= {"vocab": vocab, "ffn": ffn, "tied": tied, "rope_factor": factor}
    keys = {name: f"params.json: {name}" for name in _SHARED_PARAMS}
    keys["rope_factor"] = "params.json: rope_scaling_factor"
    return make_shape(values, keys)
