"""The gradients of micro-batches on this rank alone, before other data-parallel ranks add theirs.

Ranks with the same part of a model get the same gradients of the same micro-batch, bit by bit. Each
gradient is handed over as soon as backward has computed it, and dropped at once: so no more than
one whole gradient is in memory, and FSDP finds nothing to reduce.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from composer3d.parallel.data import fsdp
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.runtime.torch_private import gathered_parameters, modules_of_unit

# The unit that is a whole stage holds parameters only if the embedding is also the head.
_OF_STAGE = "first and last"


class GradientUnit(NamedTuple):
    """A part of the model: ``first``, a block or several, or ``last``.

    Backward comes to the largest ``(stage, place)`` first.

    Attributes:
        stage: the number of its pipeline stage.
        place: its number in the stage.
        name: its global name, such as "blocks.3", or "blocks.4 to blocks.7" for several blocks.
    """

    stage: int
    place: int
    name: str


# see(unit, number of the parameter in the unit, gradient). tp may have cut the gradient, and it may
# be a part of a sum over tp.
SeeGradient = Callable[[GradientUnit, int, Tensor], None]


def units_of(stage_number: int, stage: nn.Module) -> dict[GradientUnit, list[nn.Parameter]]:
    """Return the whole parameters of each unit of a stage, in the order of the model.

    A unit has no parameters before its first forward. If an embedding is also the head of its
    stage, both are one unit. It comes first, as the embedding does.
    """
    names = {module: name for name, module in stage.named_modules()}
    found = {}
    for place, unit in enumerate(fsdp.units(stage)):
        modules = modules_of_unit(unit)
        name = names[modules[0]] or _OF_STAGE
        if len(modules) > 1:
            name = f"{name} to {names[modules[-1]]}"
        found[GradientUnit(stage_number, place, name)] = gathered_parameters(unit)
    return found


@contextmanager
def seen_by(see: SeeGradient, stages: Mapping[int, nn.Module]) -> Iterator[None]:
    """Give each gradient of the backwards inside of this context to ``see``, and drop it.

    Args:
        see: is called in backward, with a plain tensor of the shape of this rank's shard over tp.
            A parameter can have several gradients, which add up.
        stages: those of this rank, by number. They have FSDP, and have been called before.
    """
    with ExitStack() as context:
        for number, stage in stages.items():
            for unit, parameters in units_of(number, stage).items():
                for index, parameter in enumerate(parameters):
                    if parameter.requires_grad:
                        hook = partial(_see_and_drop, see, unit, index)
                        handle = parameter.register_post_accumulate_grad_hook(hook)
                        context.callback(handle.remove)
        yield


def _see_and_drop(see: SeeGradient, unit: GradientUnit, index: int, parameter: Tensor) -> None:
    # A layer that defers its weight gradient has none here at first.
    if parameter.grad is not None:
        see(unit, index, local_shard(parameter.grad))
        parameter.grad = None
