"""Activation checkpointing in a recipe: which blocks of a stage, and how. No torch here."""

import re
from typing import Literal, NamedTuple

from composer3d.facts.ranges import MOST_LAYERS, Range

Mode = Literal["none", "selective", "full"]

_MODES: tuple[Mode, ...] = ("none", "selective", "full")
_EVERY = re.compile("every ([1-9][0-9]{0,9}) blocks")


class Checkpointing(NamedTuple):
    """A value of ``memory.activation_checkpoint``.

    Attributes:
        mode: how a block is checkpointed. "none" keeps all that backward needs. "selective" keeps
            what the model's save list names. "full" keeps the block's input.
        every: the first of every so many blocks of a stage is checkpointed; 1: all blocks.
    """

    mode: Mode
    every: int = 1

    def mode_of(self, place: int) -> Mode:
        """Return the mode of the block at ``place`` in its stage, counted from 0.

        Backward begins with the last block of a stage, while all others are in memory. So that is
        no time to compute one again, and the blocks that do come first.
        """
        return self.mode if place % self.every == 0 else "none"


def parse_checkpointing(text: str) -> Checkpointing | None:
    """Return the meaning of a value of the key, or None if it has none."""
    for mode in _MODES:
        if text == mode:
            return Checkpointing(mode)
    found = _EVERY.fullmatch(text)
    if found is None or int(found[1]) > MOST_LAYERS:
        return None
    return Checkpointing("full", int(found[1]))


CHECKPOINTING = Range(
    lambda value: parse_checkpointing(value) is not None,
    'must be "none", "selective", "full", or "every N blocks" with a number N from 1 to '
    f'{MOST_LAYERS:_}, such as "every 2 blocks"',
)
