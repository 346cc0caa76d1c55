"""The optimizer's state as a flat dict of tensors, which is the form that checkpoints store."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def optimizer_state(
    optimizer: torch.optim.AdamW, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """Return the state of AdamW as live tensors, to save or to load into in place.

    ``optim.NAME.exp_avg`` and ``optim.NAME.exp_avg_sq`` have the shape and the placements of the
    parameter NAME. ``optim.NAME.step`` is a float32 scalar. A parameter that has not been updated
    yet gets a state of zeros, as AdamW itself makes it in the first update. A parameter that does
    not require a gradient has no state. There is no collective.

    Args:
        optimizer: AdamW. Missing states are added to it.
        named_parameters: the global names of this rank's parameters, with the parameters that the
            optimizer was built with.
    """
    flat: dict[str, Tensor] = {}
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            flat[f"optim.{name}.{key}"] = state[key]
    return flat
