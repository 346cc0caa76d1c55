"""The gradients of micro-batches on this rank alone, before other data-parallel ranks add theirs.

Ranks with the same part of a model get the same gradients of the same micro-batch, bit by bit. Each
gradient is handed over as soon as backward has computed it, and dropped at once: so no more than
one whole gradient is in memory, and FSDP finds nothing to reduce.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from composer3d.parallel.data import fsdp
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.parallel.stages import Stages
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


def see_local_gradients(
    stages: Stages,
    tokens_BT: Tensor,
    labels_BT: Tensor,
    positions_BT: Tensor,
    documents_BT: Tensor | None = None,
    ahead_B2KT: Tensor | None = None,
    *,
    see: SeeGradient,
) -> Tensor:
    """Give the gradients of some rows on this rank to ``see``, before any is reduced.

    A gradient is dropped as soon as ``see`` returns, so FSDP finds nothing to reduce. Afterwards
    ``.grad``, what routers have seen, and all that the next step reads are as before. There must be
    FSDP.

    Args:
        stages: this rank's stages.
        tokens_BT, labels_BT, positions_BT, documents_BT, ahead_B2KT: as for
            ``Stages.forward_backward``; without a pipeline, of any number of micro-batches. The
            losses are divided by their tokens.
        see: see ``seen_by``. It is called on the device's stream, in backward.

    Returns:
        This rank's share of the sum of the divided losses, a float64 scalar.

    Collectives: those of a step, without sums of gradients over data-parallel ranks.
    """
    if not stages.has_run:
        # FSDP makes the whole parameters in its first forward.
        stages.evaluate(tokens_BT, labels_BT, positions_BT, documents_BT)
    stages.begin(training=True)
    keywords = stages.keywords(labels_BT, positions_BT, documents_BT, ahead_B2KT)
    tokens = labels_BT.numel() * stages.mesh.sizes.cp
    depths = 0 if ahead_B2KT is None else ahead_B2KT.shape[2]
    divisor = torch.full((1 + depths,), tokens, device=stages.mesh.device)
    modules = {module.number: module for module in stages.modules}
    undisturbed = nullcontext() if stages.balance is None else stages.balance.undisturbed()
    with undisturbed, seen_by(see, modules):
        total = stages.executor.forward_backward(tokens_BT, keywords, divisor).sum()
    return total if stages.counts_loss else torch.zeros_like(total)


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
