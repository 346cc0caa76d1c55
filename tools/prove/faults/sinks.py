"""Faults of attention's sinks (gpt-oss) where ranks share a sequence."""

from typing import Any

import torch
from torch import Tensor

from composer3d.parallel.context import api, kernels
from tools.prove.faults.places import OFF, Place, harms
from tools.prove.faults.plant import fault_of, instead_of

_GPT_OSS = "model.architecture=gpt_oss model.preset=debug-gpt-oss model.n_kv_heads=4"


def _harms(*layouts: str, message: str = OFF) -> Place:
    """Plant the decorated fault in layouts of a model with sinks."""
    return harms(*(f"{_GPT_OSS} {layout}" for layout in layouts), message=message)


@_harms("mesh.cp=2", "mesh.cp=2 parallel.cp_method=allgather data.packing=documents")
def add_sinks_to_each_block_of_keys() -> None:
    """cp: a sink enters with each block of keys, not once after all of them."""
    of_this_call: list[Tensor] = []
    add_sinks = kernels.add_sinks

    @instead_of(api, api.attend_in_rounds)
    def remember(right: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *others: Any) -> Any:
        of_this_call[:] = [] if sinks is None else [sinks.detach()]
        return right(q, k, v, sinks, *others)

    @instead_of(kernels, kernels.attend_block)
    def add_to_block(right: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = right(*arguments, **options)
        return add_sinks(out, lse, *of_this_call) if of_this_call else (out, lse)

    @instead_of(kernels, kernels.add_sinks)
    def add_to_whole_rows(_: Any, out: Tensor, lse: Tensor, *sinks: Tensor) -> Any:
        return out, lse


@_harms("mesh.cp=2", "mesh.dp_shard=2", message=r"attn\.sinks")
@fault_of(kernels, kernels.sinks_gradient)
def forget_the_gradient_of_sinks(
    right: Any, grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor
) -> Tensor:
    """A sink keeps its initial value: its gradient is 0."""
    return torch.zeros_like(sinks)


@_harms("mesh.cp=2 parallel.cp_method=ulysses", message=r"attn\.sinks")
@fault_of(api, api._ulysses)
def give_heads_the_sinks_of_others(
    right: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, group: Any, *others: Any
) -> Any:
    """Ulysses: the heads that a rank computes have the sinks of the heads of another rank."""
    return right(q, k, v, sinks.roll(len(sinks) // group.size()), group, *others)
