"""Faults of blocks that differ by their number: windows, and rotary positions.

``verify`` sees those of the cut into stages. ``checks.model`` and ``checks.generation`` see those
of a single process.
"""

from typing import Any

from composer3d.generate import cache
from composer3d.models.layers.attention import Attention
from composer3d.models.layers.rope import Rope
from composer3d.models.llama.shape import ModelShape
from composer3d.models.shape import DecoderShape
from composer3d.parallel.pipeline import stage_cut
from tools.prove.faults.places import found_by, harms
from tools.prove.faults.plant import fault_of

# The second stage begins at another place of both periods than the model.
_CUT = "mesh.pp=2 parallel.stages=[1,3] model.n_layers=4"

_WINDOWED = "tokens of the with windows in two of three blocks model"


def _count_from_the_stage(name: str, right: Any, model: Any, *rest: Any, **options: Any) -> Any:
    """Give each block of a stage what the block of the model has that has its place."""
    of_model = [getattr(block.attn, name) for block in model.blocks.values()]
    stages = right(model, *rest, **options)
    for stage in stages:
        for value, block in zip(of_model, stage.blocks.values(), strict=False):
            setattr(block.attn, name, value)
    return stages


@harms(f"{_CUT} model.window=16 model.full_every=3")
@fault_of(stage_cut, stage_cut.cut_into_stages)
def count_windows_from_the_stage(*arguments: Any, **options: Any) -> Any:
    """Pipeline: the blocks of a stage have the windows of the model's first blocks."""
    return _count_from_the_stage("window", *arguments, **options)


@harms(f"{_CUT} model.nope_every=2")
@fault_of(stage_cut, stage_cut.cut_into_stages)
def count_positions_from_the_stage(*arguments: Any, **options: Any) -> Any:
    """Pipeline: the first blocks of each stage have rotary positions where the model's have."""
    return _count_from_the_stage("is_rotary", *arguments, **options)


@harms("mesh.pp=2 parallel.stages=[1,3] model.architecture=gemma3 model.preset=debug-gemma3")
@fault_of(stage_cut, stage_cut.cut_into_stages)
def count_bases_from_the_stage(*arguments: Any, **options: Any) -> Any:
    """Gemma 3, pipeline: a stage's blocks have the rotary bases of the model's first blocks."""
    return _count_from_the_stage("rope", *arguments, **options)


@harms("mesh.dp_shard=2 model.nope_every=2")
@fault_of(stage_cut, stage_cut.cut_into_stages)
def rotate_every_block(right: Any, *arguments: Any, **options: Any) -> Any:
    """A block that has no rotary positions gets them."""
    stages = right(*arguments, **options)
    for stage in stages:
        for block in stage.blocks.values():
            block.attn.is_rotary = True
    return stages


@found_by("model", "^logits of the with windows in two of three blocks model")
@fault_of(DecoderShape, DecoderShape.window_of)
def count_windows_from_zero(right: Any, self: DecoderShape, block: int) -> int:
    """Windows: blocks 0, N, 2N ... see all tokens instead of N - 1, 2N - 1 ..., counted from 0."""
    return right(self, block - 1)


@found_by("model", "^logits of the with positions in every second block model")
@fault_of(ModelShape, ModelShape.is_rotary)
def count_positions_from_zero(right: Any, self: ModelShape, block: int) -> bool:
    """Positions: blocks 0, N, 2N ... have none instead of N - 1, 2N - 1 ..., counted from 0."""
    return right(self, block - 1)


@found_by("model", "^logits of the with positions in every second block model")
@fault_of(Attention, Attention.forward)
def rotate_where_no_block_does(right: Any, self: Any, x: Any, *, seq: Any) -> Any:
    """Attention: queries and keys are rotated in every block."""
    self.is_rotary = True
    return right(self, x, seq=seq)


@found_by("model", "^logits of the with norms over all heads and windows model")
@fault_of(Rope, Rope.unstretched)
def stretch_blocks_with_windows(_: Any, self: Rope) -> Rope:
    """OLMo 3: the positions of blocks with a window are stretched, too."""
    return self


@found_by("generation", _WINDOWED)
@fault_of(cache.AttendCached, cache.AttendCached.__call__)
def see_windows_alone(right: Any, self: Any, *qkv: Any, seq: Any, window: int) -> Any:
    """Generation: a block that sees all tokens has the window of the others."""
    return right(self, *qkv, seq=seq, window=window or 3)


@found_by("generation", _WINDOWED)
@fault_of(cache.CachedSequence, cache.CachedSequence.view)
def see_what_the_first_block_sees(right: Any, self: Any, window: int, dtype: Any) -> Any:
    """Generation: all blocks share one mask, that of the first one."""
    self.shared.setdefault("window of the first block", window)
    return right(self, self.shared["window of the first block"], dtype)
