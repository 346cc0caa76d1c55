"""Faults that are planted in the composition, one function each: ``verify`` must see every one of them.

Each is called in a worker before anything is built, and changes what this process runs from then on.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import stage as pipelining_stage
from torch.distributed.tensor import DTensor, Replicate

from composer3d import train
from composer3d.models import Seq
from composer3d.parallel import ac, clip, cp, fsdp, init, kernels, pp, stages


def drop_reduce_scatter() -> None:
    """Gradients are not summed over dp_shard: each rank keeps its own part."""

    def keep(output: torch.Tensor, input: torch.Tensor, op: object = None, group: object = None, **_: object) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        output.copy_(input.chunk(size)[rank])

    dist.reduce_scatter_tensor = dist.reduce_scatter_single = keep


def drop_all_reduce_of_replicas() -> None:
    """Gradients are not summed over dp_replicate."""
    whole = dist.all_reduce

    def skip(tensor: torch.Tensor, op: object = dist.ReduceOp.SUM, group: object = None, **more: object) -> object:
        return whole(tensor, op, group, **more) if group is None else None

    dist.all_reduce = skip


def drop_reduction_of_norms() -> None:
    """Gradients of norms under sequence parallelism are taken for whole: each tp rank has those of its tokens."""

    def pretend(self: stages.Stages) -> None:
        for parameter in self.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
                parameter.grad = DTensor.from_local(grad.to_local(), grad.device_mesh, [Replicate()], run_check=False)

    stages.Stages.finish_gradients = pretend


def lose_a_gradient_between_stages() -> None:
    """The gradient of one micro-batch does not reach the stage before."""
    receive = pipelining_stage._PipelineStageBase._retrieve_recv_grads

    def lose(self: object, chunk: int) -> object:
        grads = receive(self, chunk)
        return tuple(grad * 0 for grad in grads) if chunk == 1 else grads

    pipelining_stage._PipelineStageBase._retrieve_recv_grads = lose


def double_the_divisor() -> None:
    """The loss is divided by the number of data-parallel ranks once more."""
    right = stages.Stages.forward_backward

    def wrong(self: stages.Stages, tokens: object, labels: object, positions: object, valid: float) -> object:
        return right(self, tokens, labels, positions, valid * 2)

    stages.Stages.forward_backward = wrong


def divide_by_own_tokens() -> None:
    """A mean of means: each rank divides by the tokens that count on it."""
    right = stages.Stages.forward_backward

    def wrong(
        self: stages.Stages, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, valid: float
    ) -> object:
        own = float((labels >= 0).sum()) * self.mesh.batch_ranks
        return right(self, tokens, labels, positions, own)

    stages.Stages.forward_backward = wrong


def shift_positions() -> None:
    """Positions of the second half are one too high. (All of them would change nothing: rotary ones are relative.)"""
    right = stages.Stage.forward

    def wrong(self: stages.Stage, h: torch.Tensor, *, positions_BT: torch.Tensor, **more: object) -> torch.Tensor:
        late = positions_BT >= positions_BT.shape[1] // 2
        return right(self, h, positions_BT=positions_BT + late, **more)

    stages.Stage.forward = wrong


def clip_by_own_norm() -> None:
    """Each rank clips by the norm of the gradients it holds."""
    right = clip.scale_gradients

    def wrong(parameters: object, *, norm: float, max_norm: float) -> None:
        held = list(parameters)
        own = sum(
            float(torch.linalg.vector_norm(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad)) ** 2
            for p in held
        )
        right(held, norm=own**0.5, max_norm=max_norm)

    clip.scale_gradients = wrong


def count_replicas_in_the_norm() -> None:
    """The norm counts a replicated gradient on every rank that holds it."""
    right = clip.square_share

    def wrong(parameters: object, mesh: object) -> torch.Tensor:
        return right(parameters, mesh) * mesh.table.tp

    clip.square_share = wrong


def forget_a_micro_batch() -> None:
    """Accumulation starts anew with the second micro-batch."""
    right = stages.Stages._split

    def wrong(self: stages.Stages, *rows: torch.Tensor) -> object:
        for index, (tokens, keywords) in enumerate(right(self, *rows)):
            if index == 1:
                for parameter in self.parameters():
                    parameter.grad = None
            yield tokens, keywords

    stages.Stages._split = wrong


def same_weights_on_every_shard() -> None:
    """Each shard starts from the values of the first one, as random init through DTensor does on CPU."""
    right = init.fill_normal

    def wrong(local: torch.Tensor, shape: object, offset: tuple[int, ...], **more: object) -> None:
        right(local, shape, (0,) * len(offset), **more)

    init.fill_normal = wrong


def train_on_the_same_rows() -> None:
    """Every data-parallel rank reads the rows of the first one."""
    right = train.compute_gradients

    def wrong(own: stages.Stages, batch: object) -> object:
        tokens = batch.tokens_BT.clone()
        if own.mesh.batch_ranks > 1:
            dist.broadcast(tokens, 0)
        return right(own, type(batch)(tokens, batch.labels_BT, batch.positions_BT))

    from composer3d import verify_worker

    verify_worker.compute_gradients = wrong


def evaluate_one_micro_batch_less() -> None:
    """Validation under pp forgets its last micro-batch."""
    right = pp.forward_only
    pp.forward_only = lambda module, mesh, stream, batches: right(module, mesh, stream, batches[:-1])


def attend_to_own_tokens() -> None:
    """Context parallelism without the ring: a rank sees the keys of its own tokens only."""
    cp.ring_attend = lambda group: lambda q, k, v, *, seq, window: kernels.attend_block(q, k, v, causal=True)[0]


def cut_the_sequence_contiguously() -> None:
    """Tokens are cut in order, while the ring believes that they lie in zigzag."""
    cp.shard_sequence = lambda x, dim, group: x.chunk(group.size(), dim)[group.rank()].contiguous()


def label_before_the_cut_is_lost() -> None:
    """Labels are shifted after the sequence is cut: the last token of a rank's part has the wrong one."""
    right = stages.Stages.forward_backward

    def wrong(
        self: stages.Stages, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, valid: float
    ) -> object:
        labels = labels.clone()
        labels[:, -1] = tokens[:, 0]
        return right(self, tokens, labels, positions, valid)

    stages.Stages.forward_backward = wrong


def lose_what_other_ranks_owe_the_keys() -> None:
    """The gradient of a rank's keys and values holds what its own queries add, and nothing of the others'."""
    right = kernels.attend_block_backward

    def wrong(*tensors: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = right(*tensors, causal=causal)
        return (dq, dk, dv) if causal else (dq, dk * 0, dv * 0)

    kernels.attend_block_backward = wrong


def untie_the_head() -> None:
    """Embedding and head part when memory is taken: each is trained with its own gradient."""
    # The package holds the function compose under the same name as its module.
    sys.modules["composer3d.parallel.compose"].tie = lambda stage, ties: None


def swap_the_middle_stages() -> None:
    """Of four stages of one layer each, the second and the third run in the other order."""
    right = stages.Stage.__init__

    def wrong(self: stages.Stage, model: object, blocks: range, **more: object) -> None:
        start = {1: 2, 2: 1}.get(blocks.start, blocks.start)
        right(self, model, range(start, start + 1), **more)

    stages.Stage.__init__ = wrong


def recompute_with_other_positions() -> None:
    """Checkpointing computes a block again with positions that are not those of the first time."""
    right = ac.checkpoint

    def wrong(function: object, h: torch.Tensor, seq: Seq, **more: object) -> torch.Tensor:
        calls = []

        def run(h: torch.Tensor, seq: Seq) -> torch.Tensor:
            calls.append(h)
            return function(h, seq if len(calls) == 1 else Seq(seq.positions_BT.flip(1)))

        return right(run, h, seq, **more)

    ac.checkpoint = wrong


def reduce_only_the_last_micro_batch() -> None:
    """zero 2 reduces, and forgets, what the micro-batches before the last one left."""
    right = fsdp.begin_micro_batch

    def wrong(stage: object, parallel: object, *, last: bool) -> None:
        right(stage, parallel, last=last)
        for unit in fsdp.units(stage):  # their parameters are gathered now: the shards are behind them
            group = unit._get_fsdp_state()._fsdp_param_group
            for each in group.fsdp_params if group is not None else ():
                each.sharded_param.grad = None

    fsdp.begin_micro_batch = wrong
