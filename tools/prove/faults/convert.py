"""Faults of names and forms, which reading and writing share: files are held against a table of their own."""

from collections.abc import Callable

from torch import Tensor

from composer3d.convert import formats, targets
from composer3d.models.llama import names


def _swap(*modules: str) -> None:
    """Two of our modules have each other's names, in Hugging Face's files and in Meta's."""
    a, b = modules
    names._TABLE[a], names._TABLE[b] = names._TABLE[b], names._TABLE[a]


def swap_keys_and_values() -> None:
    """wk is called v_proj, and wv k_proj."""
    _swap("blocks.#.attn.wk", "blocks.#.attn.wv")


def swap_gate_and_up() -> None:
    """w1 is called up_proj, and w3 gate_proj."""
    _swap("blocks.#.ffn.w1", "blocks.#.ffn.w3")


def swap_the_norms_of_a_block() -> None:
    """attn_norm is called post_attention_layernorm, and ffn_norm input_layernorm."""
    _swap("blocks.#.attn_norm", "blocks.#.ffn_norm")


def swap_embedding_and_head() -> None:
    """The embedding is called lm_head, and the head embed_tokens."""
    _swap("first.embed", "last.head")


def count_blocks_from_the_end() -> None:
    """The blocks are numbered the other way."""
    right = names._translate

    def wrong(name: str, column: str) -> str:
        parts = name.split(".")
        if parts[0] == "blocks":
            parts[1] = {"0": "1", "1": "0"}.get(parts[1], parts[1])
        return right(".".join(parts), column)

    names._translate = wrong


def leave_rotary_pairs_apart() -> None:
    """Queries and keys are written for Meta as they lie in ours."""
    names.to_meta = lambda name, whole, shape, inverse=False: whole


def turn_rotary_pairs_back() -> None:
    """Queries and keys are rearranged in the wrong direction, which undoes itself."""
    right = names.to_meta
    names.to_meta = lambda name, whole, shape, inverse=False: right(
        name, whole, shape, inverse=not inverse
    )


def rearrange_only_queries() -> None:
    """Keys are written for Meta as they lie in ours."""
    right = names.to_meta
    names.to_meta = lambda name, whole, shape, inverse=False: (
        whole if name.endswith("wk.weight") else right(name, whole, shape, inverse=inverse)
    )


def write_another_base() -> None:
    """config.json has the rope_theta of Llama 2."""
    _change_config(lambda config: config | {"rope_theta": 10_000.0})


def write_another_epsilon() -> None:
    """config.json has an epsilon of 1e-6."""
    _change_config(lambda config: config | {"rms_norm_eps": 1e-6})


def _change_config(change: Callable[[dict], dict]) -> None:
    right = targets.make_config
    targets.make_config = lambda *given: change(right(*given))


def round_to_half() -> None:
    """Tensors pass through float16 where they are read."""
    right = formats.Source.read

    def wrong(self: formats.Source, ours: str) -> Tensor:
        tensor = right(self, ours)
        return tensor.half().to(tensor.dtype)

    formats.Source.read = wrong
