"""Cut a model into pipeline stages: which blocks each stage has, and what passes between them."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from composer3d.facts.errors import PlanError
from composer3d.facts.schedules import balanced_cut
from composer3d.models.contract import Decoder, SequenceInfo
from composer3d.parallel.executor import StepShape
from composer3d.parallel.stages import Stage
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.mesh import Mesh


def cut_into_stages(
    model: Decoder,
    stages: Sequence[Sequence[int]],
    rank: int,
    parallel: ParallelTable,
    *,
    step_tokens: int | None = None,
) -> list[Stage]:
    """Build the stages of pipeline rank ``rank``, with the blocks of ``_blocks_of_stages``.

    Args:
        model: the whole model.
        stages: the stage numbers of each pipeline rank.
        rank: a pipeline rank.
        parallel: the recipe's ``[parallel]``.

    Raises:
        PlanError: as ``_blocks_of_stages``.
    """
    n_stages = sum(len(held) for held in stages)
    ranges = _blocks_of_stages(model, n_stages, parallel)
    return [
        Stage(
            model,
            ranges[index],
            is_first=index == 0,
            is_last=index == n_stages - 1,
            number=index,
            step_tokens=step_tokens,
        )
        for index in stages[rank]
    ]


def _blocks_of_stages(model: Decoder, n_stages: int, parallel: ParallelTable) -> list[range]:
    """Return the blocks of each stage.

    ``parallel.stages`` gives the number of blocks of each stage. If it is absent, all stages get
    about the same number of parameters. The embedding counts half: forward only looks its
    parameters up, but the optimizer updates all of them. The head counts in full: forward
    multiplies by all of its parameters, as in blocks. The blocks of multi-token prediction stand
    and count with the head.

    Raises:
        PlanError: ``parallel.stages`` does not fit the number of stages or of blocks, or there are
            fewer blocks than stages.
    """
    costs = [_n_parameters(block) for block in model.blocks.values()]
    n_main = len(costs) - model.mtp_layers
    if parallel.stages is not None and n_stages > 1:
        ends = list(accumulate(parallel.stages))
        if len(ends) != n_stages or ends[-1] != n_main or min(parallel.stages) < 1:
            raise PlanError(
                f"parallel.stages = {list(parallel.stages)} must be {n_stages} numbers of at "
                f"least 1, with the sum {n_main}, the number of blocks"
            )
        cut = [range(begin, end) for begin, end in pairwise((0, *ends))]
    else:
        last = _n_parameters(model.last) + sum(costs[n_main:])
        cut = balanced_cut(_n_parameters(model.first) / 2, costs[:n_main], last, n_stages)
    return [*cut[:-1], range(cut[-1].start, len(costs))]


def check_every_stage_trains(model: Decoder, n_stages: int, parallel: ParallelTable) -> None:
    """Raise PlanError if a stage has no parameter that requires a gradient.

    The runtime of torch's pipelines asks each stage for gradients. A tied head counts as the
    embedding's own.
    """
    owned = {id(parameter) for parameter in model.first.parameters()}
    for stage, blocks in enumerate(_blocks_of_stages(model, n_stages, parallel)):
        held = [*list(model.blocks.values())[blocks.start : blocks.stop]]
        parameters = [parameter for block in held for parameter in block.parameters()]
        if stage == 0:
            parameters += model.first.parameters()
        if stage == n_stages - 1:
            parameters += [p for p in model.last.parameters() if id(p) not in owned]
        if not any(parameter.requires_grad for parameter in parameters):
            raise PlanError(
                f"stage {stage} of {n_stages}, with blocks {blocks.start} to {blocks.stop - 1}, "
                "would train nothing: optim.train must match a parameter of every pipeline stage; "
                "use mesh.pp = 1, or another cut (parallel.stages)"
            )


def stage_activation(
    model: Decoder, mesh: Mesh, parallel: ParallelTable, step: StepShape
) -> Tensor:
    """Return a meta tensor with the shape of one micro-batch's residual stream on one rank.

    It is the output of the model's own ``first``, (micro_batch, T, C) in the dtype of the
    parameters, with T divided by cp, and by tp under sequence parallelism.
    """
    tokens_BT = torch.empty((step.micro_batch, step.seq_len), dtype=torch.int64, device="meta")
    with torch.no_grad():
        h_BTC = model.first(tokens_BT, SequenceInfo(tokens_BT))
    cuts = mesh.sizes.cp * (mesh.sizes.tp if parallel.sequence_parallel else 1)
    return h_BTC.new_empty((h_BTC.shape[0], h_BTC.shape[1] // cuts, *h_BTC.shape[2:]))


def _n_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
