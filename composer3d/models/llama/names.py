"""Translate names and layouts of parameters between our format and Meta's.

Our names are used without the ``model.`` of checkpoints: ``blocks.7.attn.wq.weight``. The values
are the same in both formats. But Meta orders the rows of the query and key projections in another
way: its rotary pairs are neighbours, (x[2i], x[2i + 1]). Our pairs and Hugging Face's are
(x[i], x[i + D/2]).
"""

from typing import Any

from torch import Tensor

from composer3d.facts.errors import CheckpointError
from composer3d.facts.text import in_quotes, short_json
from composer3d.models.llama.huggingface import make_shape
from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.models.llama.table import table
from composer3d.models.locations import in_block

# The fields of ModelShape that params.json has under the same name.
_SHARED_PARAMS = ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta")

# The stretched positions of Llama 3.1 and 3.2, the only ones that Meta's code can compute:
# (rope_factor, rope_low_freq, rope_high_freq, rope_context).
_STRETCHES = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))
# The fields of a stretch that params.json may give.
_STRETCH_PARAMS = {"rope_factor": "rope_scaling_factor", "rope_high_freq": "rope_high_freq_factor"}
# Keys of params.json that are not read: the tensors have the first three sizes, and the last two
# are those of Meta's buffers.
_UNREAD_PARAMS = (
    "vocab_size",
    "multiple_of",
    "ffn_dim_multiplier",
    "max_batch_size",
    "max_seq_len",
)
_KNOWN_PARAMS = {*_SHARED_PARAMS, "use_scaled_rope", *_STRETCH_PARAMS.values(), *_UNREAD_PARAMS}
_SHOWN_KEYS = 3


def meta_names(shape: ModelShape) -> dict[str, str]:
    """Map our name of each parameter to Meta's.

    The files of a tied model also hold the embedding as ``output.weight``, which is not in the
    result.

    Raises CheckpointError as ``make_meta_params`` does.
    """
    make_meta_params(shape)
    return {name: in_block(row.meta, name) for name, row in table(shape).parameters()}


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
    rows = table(shape).blocks[0]
    if not any(row.is_rotary and name.endswith(f".{row.name}") for row in rows):
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
    if shape.nope_every:
        unsupported["nope_every"] = shape.nope_every
    if shape.head_width * shape.n_heads != shape.dim:
        unsupported["head_dim"] = shape.head_width
    if shape.rope_factor != 1 and shape.rope_scaling != "llama3":
        unsupported["rope_scaling"] = shape.rope_scaling
    elif shape.rope_factor != 1 and stretch not in _STRETCHES:
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
        CheckpointError: params.json lacks a value, or has one of a wrong type or out of range, or
            has a key that is not one of Meta's for a Llama of text.
    """
    _refuse_unknown(params)
    # The params.json of Llama 2 lacks these keys.
    defaults = {"n_kv_heads": params.get("n_heads"), "norm_eps": 1e-5, "rope_theta": 1e4}
    params = {**defaults, **params}
    missing = [name for name in _SHARED_PARAMS if params.get(name) is None]
    if missing:
        raise CheckpointError(
            f"params.json lacks {', '.join(missing)}; take the one that came with the files"
        )

    values = {name: params[name] for name in _SHARED_PARAMS}
    values |= {"vocab": vocab, "ffn": ffn, "tied": tied, **_stretch(params, ffn)}
    keys = {name: f"params.json: {name}" for name in _SHARED_PARAMS}
    keys |= {name: f"params.json: {key}" for name, key in _STRETCH_PARAMS.items()}
    return make_shape(values, keys)


def _refuse_unknown(params: dict[str, Any]) -> None:
    """Refuse keys that may change what the model computes. A key that is null counts as absent."""
    unknown = [key for key in params.keys() - _KNOWN_PARAMS if params[key] is not None]
    if unknown:
        shown = [f"{in_quotes(key, 40)} = {short_json(params[key])}" for key in sorted(unknown)]
        others = len(shown) - _SHOWN_KEYS
        more = f" and {others:,} others" if others > 0 else ""
        raise CheckpointError(
            f"params.json: {', '.join(shown[:_SHOWN_KEYS])}{more} is not supported, and may change "
            "what the model computes; give the model in the format of Hugging Face"
        )


def _stretch(params: dict[str, Any], ffn: int) -> dict[str, Any]:
    """Return the fields of the stretch of rotary positions that params.json describes, unchecked.

    Meta's own files do not give the factor: it is that of the published model of these sizes.
    """
    is_scaled = params.get("use_scaled_rope", False)
    if type(is_scaled) is not bool:
        raise CheckpointError(
            f"params.json: use_scaled_rope = {short_json(is_scaled)} must be true or false"
        )
    if not is_scaled:
        return {}
    given = {name: params.get(key) for name, key in _STRETCH_PARAMS.items()}
    if given["rope_factor"] is None:
        given["rope_factor"] = _published_factor(params, ffn)
    return {name: value for name, value in given.items() if value is not None}


def _published_factor(params: dict[str, Any], ffn: int) -> float:
    sizes = (params["dim"], params["n_layers"], params["n_heads"], ffn)
    for shape in PRESETS.values():
        is_stretched = shape.rope_factor != 1 and shape.rope_scaling == "llama3"
        if is_stretched and (shape.dim, shape.n_layers, shape.n_heads, shape.ffn) == sizes:
            return shape.rope_factor
    raise CheckpointError(
        "params.json has use_scaled_rope, but no rope_scaling_factor, and not the sizes of a "
        'published model; add "rope_scaling_factor": 8.0 if it was made from Llama 3.1 or 3.3, or '
        "32.0 if from Llama 3.2"
    )
