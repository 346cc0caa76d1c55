"""The optimizer's state as a flat dict of tensors, which is the form that checkpoints store."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from composer3d.recipe.optimizers import OptimizerFacts


class SavedOptimizer(Protocol):
    """What a checkpoint needs of an optimizer: any of ``training.optimizers`` has it.

    Attributes:
        facts: what it keeps for each parameter.
        matrix_names: the parameters whose state is that of a matrix.
        state: its tensors by name, for each parameter. Each has the shape of the parameter, or is
            a scalar.
    """

    facts: ClassVar[OptimizerFacts]
    matrix_names: frozenset[str]
    state: defaultdict[Tensor, Any]


def optimizer_state(
    optimizer: SavedOptimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """Return the state of the optimizer as live tensors, to save or to load into in place.

    A tensor is called ``optim.NAME.STATE``, with the global name of its parameter. It has the shape
    and the placements of the parameter, or it is a float32 scalar (``StateTensor``). A parameter
    that has not been updated yet gets a state of zeros, as the first update itself makes it. A
    parameter that does not require a gradient has no state. There is no collective.

    Args:
        optimizer: the optimizer. Missing states are added to it.
        named_parameters: the global names of this rank's parameters, with the parameters that the
            optimizer was built with.
    """
    flat: dict[str, Tensor] = {}
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        tensors = optimizer.facts.state_of(is_matrix=name in optimizer.matrix_names)
        state = optimizer.state[parameter]
        if not state:
            # Scalars come first, as in a state that torch makes: digests go by the order.
            for tensor in sorted(tensors, key=lambda tensor: not tensor.is_scalar):
                state[tensor.name] = (
                    torch.zeros((), dtype=torch.float32, device=parameter.device)
                    if tensor.is_scalar
                    else torch.zeros_like(parameter)
                )
        for tensor in tensors:
            flat[f"optim.{name}.{tensor.name}"] = state[tensor.name]
    return flat
