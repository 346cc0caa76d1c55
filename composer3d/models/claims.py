"""What a sharding plan claims about a model, compared with what autograd keeps for backward.

A step with an untrue claim is slower, needs more memory, or fails. So the claim is an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composer3d.facts.errors import PlanError
from composer3d.models.contract import Decoder, SequenceInfo, ShardingPlan

_TOKENS = 4


def check(model: Decoder, plan: ShardingPlan) -> None:
    """Check the plan's ``unread`` and ``first_only_looks_up`` with forwards of the model's parts.

    One block of each kind runs. On the meta device, nothing is computed. There a block whose
    forward depends on values cannot run, and its claims are not checked.

    Raises:
        PlanError: a claim is untrue. The error has a line for each such claim.
    """
    lines = []
    if plan.first_only_looks_up and _first_reads_parameters(model):
        lines.append(
            "the plan says first_only_looks_up, but backward reads a parameter of `first`; leave "
            "first_only_looks_up out"
        )
    for number in sorted(set(first_of_kind(model).values())) if plan.unread else ():
        block = model.blocks[number]
        unread = unread_modules(model, block)
        lines += [
            f"the plan's unread names 'blocks.{number}.{name}', but backward reads what it "
            "returns, or something that is computed after it; leave it out of unread"
            for name, _ in block.named_modules()
            if plan.is_unread(f"blocks.{number}.{name}")
            and unread is not None
            and name not in unread
        ]
    if lines:
        raise PlanError(lines)


def unread_modules(model: Decoder, block: nn.Module) -> frozenset[str] | None:
    """Return the modules of a block whose outputs backward does not read.

    They are the last to compute: autograd keeps nothing that the block makes after them.

    Returns:
        The names of modules within the block; None: its forward cannot run on the meta device.
    """
    main_blocks = list(model.blocks.values())[: len(model.blocks) - model.mtp_layers]
    reads_embedding = block not in main_blocks
    block = deepcopy(block)  # a router counts its tokens
    is_meta = next(block.parameters()).is_meta
    if is_meta:
        block.to(torch.bfloat16)  # the only dtype of grouped products on the meta device
    kept: list[Tensor] = []
    # For each module, its last output, and the number of tensors that were kept until then.
    outputs: dict[str, tuple[Tensor, int]] = {}

    def remember(module: nn.Module, inputs: Any, output: Any, *, name: str) -> None:
        if isinstance(output, Tensor):
            outputs[name] = output, len(kept)

    for name, module in block.named_modules():
        module.register_forward_hook(partial(remember, name=name))
    seq = _sequence(model)
    h_BTC = model.first(_tokens(model), seq).detach().to(next(block.parameters()).dtype)
    embeddings = (h_BTC.clone(),) if reads_embedding else ()
    try:
        with _keeping(kept.append):
            block(h_BTC.requires_grad_(), seq, *embeddings)
    except Exception:  # whatever a user's block raises; if it is wrong, its first step says so
        if is_meta:
            return None
        raise
    storages = set(map(_storage_of, kept))
    return frozenset(
        name
        for name, (output, count) in outputs.items()
        if count == len(kept) and _storage_of(output) not in storages
    )


def first_of_kind(model: Decoder) -> dict[str, str]:
    """Return the first block of each block's kind, by number. A kind has equal parameters."""
    found: dict[Any, str] = {}
    kinds = {}
    for number, block in model.blocks.items():
        parameters = tuple((name, weight.shape) for name, weight in block.named_parameters())
        kinds[number] = found.setdefault((type(block), parameters), number)
    return kinds


def _first_reads_parameters(model: Decoder) -> bool:
    kept: list[Tensor] = []
    with _keeping(kept.append):
        model.first(_tokens(model), _sequence(model))
    storages = set(map(_storage_of, kept))
    return any(_storage_of(weight) in storages for weight in model.first.parameters())


@contextmanager
def _keeping(keep: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``keep`` with each tensor that autograd keeps for backward."""

    def pack(tensor: Tensor) -> Tensor:
        keep(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        yield


def _tokens(model: Decoder) -> Tensor:
    device = next(model.parameters()).device
    return torch.zeros(1, _TOKENS, dtype=torch.long, device=device)


def _sequence(model: Decoder) -> SequenceInfo:
    device = next(model.parameters()).device
    return SequenceInfo(torch.arange(_TOKENS, device=device)[None])


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
