"""Faults in names and formats that reading and writing of checkpoints share.

A copy and its source would agree, so ``checks.conversion`` compares files with a table of its own.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from composer3d.convert import formats
from composer3d.models import locations
from composer3d.models.llama import huggingface, names
from composer3d.models.table import ParameterTable, Row
from tools.prove.faults.places import found_by
from tools.prove.faults.plant import fault_of, instead_of


def _swap(*modules: str) -> None:
    """Swap the names of two of our modules, in Hugging Face's files and in Meta's."""
    other = dict(zip(modules, reversed(modules), strict=True))

    @instead_of(ParameterTable, ParameterTable.parameters)
    def wrong(right: Any, self: ParameterTable) -> Iterator[tuple[str, Row]]:
        rows = {re.sub(r"^blocks\.\d+", "blocks.#", name): row for name, row in right(self)}
        for name, row in right(self):
            module, _, last = re.sub(r"^blocks\.\d+", "blocks.#", name).rpartition(".")
            named = rows[f"{other.get(module, module)}.{last}"]
            yield name, row._replace(hf=named.hf, meta=named.meta)


@found_by("conversion", "^torch: blocks")
def swap_keys_and_values() -> None:
    """Conversion: wk is called v_proj, and wv k_proj."""
    _swap("blocks.#.attn.wk", "blocks.#.attn.wv")


@found_by("conversion", "^torch: blocks")
def swap_gate_and_up() -> None:
    """Conversion: w1 is called up_proj, and w3 gate_proj."""
    _swap("blocks.#.ffn.w1", "blocks.#.ffn.w3")


@found_by("conversion", "^torch: blocks.0.attn_norm")
def swap_the_norms_of_a_block() -> None:
    """Conversion: attn_norm is called post_attention_layernorm, and ffn_norm input_layernorm."""
    _swap("blocks.#.attn_norm", "blocks.#.ffn_norm")


@found_by("conversion", "^torch: first.embed")
def swap_embedding_and_head() -> None:
    """Conversion: the embedding is called lm_head, and the head embed_tokens."""
    _swap("first.embed", "last.head")


@found_by("conversion", "^torch: blocks")
def count_blocks_from_the_end() -> None:
    """Conversion: the blocks are numbered in reverse."""
    right = locations.in_block

    def wrong(name_in_files: str, name: str) -> str:
        parts = name.split(".")
        if parts[0] == "blocks":
            parts[1] = {"0": "1", "1": "0"}.get(parts[1], parts[1])
        return right(name_in_files, ".".join(parts))

    locations.in_block = names.in_block = wrong


@found_by("conversion", "^meta: layers.0.attention.wk")
def leave_rotary_pairs_apart() -> None:
    """Conversion: queries and keys keep our order of rows in Meta's files."""
    names.to_meta = lambda name, whole, shape, inverse=False: whole


@found_by("conversion", "^meta: layers.0.attention.wk")
@fault_of(names, names.to_meta)
def turn_rotary_pairs_back(
    right: Any, name: str, whole: Tensor, shape: Any, inverse: bool = False
) -> Tensor:
    """Conversion: queries and keys are permuted in the wrong direction, both ways."""
    return right(name, whole, shape, inverse=not inverse)


@found_by("conversion", "^meta: layers.0.attention.wk")
@fault_of(names, names.to_meta)
def rearrange_only_queries(
    right: Any, name: str, whole: Tensor, *others: Any, **kinds: Any
) -> Tensor:
    """Conversion: keys keep our order of rows in Meta's files."""
    return whole if name.endswith("wk.weight") else right(name, whole, *others, **kinds)


@found_by("conversion", "^convert refuses its own work")
def write_another_base() -> None:
    """Conversion: config.json has the rope_theta of Llama 2."""
    _change_config(lambda config: config | {"rope_theta": 10_000.0})


@found_by("conversion", "^convert refuses its own work")
def write_another_epsilon() -> None:
    """Conversion: config.json has an epsilon of 1e-6."""
    _change_config(lambda config: config | {"rms_norm_eps": 1e-6})


def _change_config(change: Callable[[dict], dict]) -> None:
    """Write ``change(config)`` in place of config.json."""
    right = huggingface.make_config
    huggingface.make_config = lambda *arguments: change(right(*arguments))


@found_by("conversion", "^torch: ")
@fault_of(formats.Source, formats.Source.read)
def round_to_half(right: Any, self: formats.Source, ours: str) -> Tensor:
    """Conversion: tensors are rounded to float16 when they are read."""
    tensor = right(self, ours)
    return tensor.half().to(tensor.dtype)
