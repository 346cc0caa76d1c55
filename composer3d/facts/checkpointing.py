"""Activation checkpointing in a recipe: which blocks of a stage, and how. No torch here."""

import re
from typing import Literal, NamedTuple

from composer3d.facts.ranges import MOST_LAYERS, Range

Mode = Literal["none", "selective", "full"]

_MODES: tuple[Mode, ...] = ("none", "selective", "full")
_NUMBER = "([1-9][0-9]{0,9})"
_VALUE = re.compile(
    rf"(?:({'|'.join(_MODES)})|every {_NUMBER} blocks)(?: in the first {_NUMBER} stages)?"
)


class CheckpointedBlocks(NamedTuple):
    """Which blocks of a pipeline are checkpointed.

    Of every N blocks, it is the first one: backward begins with the last block of a stage, while
    all others are in memory, and that is no time to compute one again. Of the stages, it is the
    first ones: they keep the activations of the most micro-batches.

    Attributes:
        every: the N of "every N blocks" of a stage; 1: all blocks.
        stages: how many stages of the pipeline have checkpointed blocks; None: all.
    """

    every: int = 1
    stages: int | None = None

    def has(self, place: int, stage: int) -> bool:
        """Return whether the block at ``place`` in a stage is one. Both are counted from 0."""
        return place % self.every == 0 and (self.stages is None or stage < self.stages)


EVERY_BLOCK = CheckpointedBlocks()


class Checkpointing(NamedTuple):
    """A value of ``memory.activation_checkpoint``.

    Attributes:
        mode: how a block is checkpointed. "none" keeps all that backward needs. "selective" keeps
            what the model's save list names. "full" keeps the block's input.
        blocks: which blocks are checkpointed.
    """

    mode: Mode
    blocks: CheckpointedBlocks = EVERY_BLOCK

    def __str__(self) -> str:
        """Return it as it stands in a recipe."""
        every, stages = self.blocks
        blocks = self.mode if every == 1 else f"every {every} blocks"
        return blocks if stages is None else f"{blocks} in the first {stages} stages"

    def in_first(self, stages: int | None) -> "Checkpointing":
        """Return the same in so many stages, the first ones; None: in all."""
        return self._replace(blocks=self.blocks._replace(stages=stages))

    def mode_of(self, place: int, stage: int) -> Mode:
        """Return the mode of the block at ``place`` in a stage."""
        return self.mode if self.blocks.has(place, stage) else "none"


def parse_checkpointing(text: str) -> Checkpointing | None:
    """Return the meaning of a value of the key, or None if it has none."""
    found = _VALUE.fullmatch(text)
    if found is None:
        return None
    word, every, stages = found.groups()
    mode: Mode = next((mode for mode in _MODES if mode == word), "full")
    numbers = [int(number) for number in (every, stages) if number is not None]
    if max(numbers, default=1) > MOST_LAYERS or (mode == "none" and stages is not None):
        return None
    blocks = CheckpointedBlocks(int(every or 1), None if stages is None else int(stages))
    return Checkpointing(mode, blocks)


CHECKPOINTING = Range(
    lambda value: parse_checkpointing(value) is not None,
    'must be "none", "selective", "full", or "every N blocks", such as "every 2 blocks"; all but '
    f'"none" may end with "in the first M stages"; N and M are from 1 to {MOST_LAYERS:_}',
)
