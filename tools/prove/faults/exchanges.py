"""Faults of what ranks send each other: over tp, over the axes of FSDP, and around the ring of cp."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Partial, Replicate

from composer3d.parallel import stages
from composer3d.parallel.context import api, kernels, ring
from composer3d.parallel.data import fsdp
from composer3d.parallel.tensor import collectives, styles, vocab
from composer3d.runtime.mesh import Mesh


def repeat_own_shard_of_the_sequence() -> None:
    """tp: the all-gather of the sequence brings this rank's shard as often as there are ranks."""
    collectives._all_gather = lambda x, group: torch.cat(
        [x] * group.size(), collectives.SEQUENCE_DIM
    )


def gather_the_sequence_backwards() -> None:
    """tp: shards of the sequence are put together in the wrong order."""
    right = collectives._all_gather
    collectives._all_gather = lambda x, group: torch.cat(
        right(x, group).chunk(group.size(), collectives.SEQUENCE_DIM)[::-1],
        collectives.SEQUENCE_DIM,
    )


def keep_own_part_of_the_sum() -> None:
    """tp: the reduce-scatter does not sum."""
    collectives._reduce_scatter = lambda x, group: x.chunk(group.size(), collectives.SEQUENCE_DIM)[
        group.rank()
    ].contiguous()


def reduce_scatter_twice() -> None:
    """tp: what was summed already is summed once more."""
    right = collectives._reduce_scatter
    collectives._reduce_scatter = lambda x, group: right(x, group) * group.size()


def drop_sum_of_gradients() -> None:
    """tp without sequence parallelism: backward does not sum what each rank made of the same input."""
    styles.sum_gradients = lambda x, group: x


def sum_gradients_twice() -> None:
    """tp without sequence parallelism: that sum is taken of sums."""
    right = collectives._all_reduce
    styles.sum_gradients = lambda x, group: collectives._WithTranspose.apply(
        x, group, collectives._identity, lambda grad, group: right(right(grad, group), group)
    )


def drop_sum_of_outputs() -> None:
    """tp without sequence parallelism: each rank goes on with its own part of the product."""
    styles.sum_outputs = lambda x, group: x


def reduce_over_the_wrong_group() -> None:
    """tp without sequence parallelism sums over the ranks of FSDP, which hold other samples."""
    groups, build, right = [], Mesh.build.__func__, collectives._all_reduce

    def noted(cls: type[Mesh], *arguments: Any) -> Mesh:
        mesh = build(cls, *arguments)
        groups.append(mesh.device_mesh.get_group("fsdp"))
        return mesh

    Mesh.build = classmethod(noted)
    collectives._all_reduce = lambda x, group: right(x, groups[0])


def drop_reduction_of_norms() -> None:
    """tp: gradients that are parts of a sum (of norms, and of shared key-value heads) are taken for whole."""

    def pretend(self: stages.Stages) -> None:
        for parameter in self.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and any(
                placement.is_partial() for placement in grad.placements
            ):
                parameter.grad = DTensor.from_local(
                    grad.to_local(), grad.device_mesh, [Replicate()], run_check=False
                )

    stages.Stages.finish_gradients = pretend


def leave_gradients_partial() -> None:
    """tp: nothing reduces the gradients of norms."""
    stages.Stages.finish_gradients = lambda self: None


def read_the_wrong_kv_head() -> None:
    """tp above the number of key-value heads: heads are dealt out in turn, where queries are in order."""

    def wrong(kv_heads: int, mesh: Any) -> styles.Local:
        rank = mesh.get_local_rank()
        return styles.Local(
            Replicate(),
            grad_placement=Partial(),
            select=lambda p: p.chunk(kv_heads)[rank % kv_heads],
        )

    styles._kv_column = wrong


def keep_own_share_of_kv_gradients() -> None:
    """tp above the number of key-value heads: what other ranks' queries owe a shared head is not added."""
    right = styles._kv_column

    def wrong(kv_heads: int, mesh: Any) -> styles.Local:
        style = right(kv_heads, mesh)
        style.grad_placement = style.placement
        return style

    styles._kv_column = wrong


def count_kv_gradients_on_every_rank() -> None:
    """tp above the number of key-value heads: the gradient of a shared head is summed twice."""
    right = stages.Stages.finish_gradients

    def wrong(self: stages.Stages) -> None:
        right(self)
        for name, parameter in self.named_parameters():
            if ".wk." in name or ".wv." in name:
                parameter.grad = parameter.grad * self.mesh.sizes.tp

    stages.Stages.finish_gradients = wrong


def mask_the_vocabulary_one_off() -> None:
    """The loss of a cut vocabulary takes a rank's first label for another rank's."""
    vocab._is_own = lambda labels, first, logits: (
        (labels > first) & (labels < first + logits.shape[1])
    )


def begin_rows_one_late() -> None:
    """Every rank but the first believes that its rows of the vocabulary begin one later."""
    right = vocab.own_rows

    def wrong(size: int, group: dist.ProcessGroup) -> tuple[int, int]:
        first, count = right(size, group)
        return first + (group.rank() > 0), count

    vocab.own_rows = wrong


def keep_own_maximum_of_logits() -> None:
    """The loss of a cut vocabulary: each rank subtracts the largest of its own logits."""
    right = dist.all_reduce
    dist.all_reduce = lambda tensor, op=dist.ReduceOp.SUM, group=None, **more: (
        None if op == dist.ReduceOp.MAX else right(tensor, op, group, **more)
    )


def keep_own_sum_of_exponentials() -> None:
    """The loss of a cut vocabulary: a softmax over this rank's logits alone."""
    right = dist.all_reduce
    dist.all_reduce = lambda tensor, op=dist.ReduceOp.SUM, group=None, **more: (
        None if tensor.dim() == 2 and group is not None else right(tensor, op, group, **more)
    )


def drop_reduce_scatter() -> None:
    """Gradients are not summed over dp_shard: each rank keeps its own part."""

    def keep(
        output: Tensor, input: Tensor, op: object = None, group: Any = None, **_: object
    ) -> None:
        output.copy_(input.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    dist.reduce_scatter_tensor = dist.reduce_scatter_single = keep


def reduce_shards_twice() -> None:
    """Gradients are summed over dp_shard (and cp), and multiplied by the number of ranks as well."""
    right = dist.reduce_scatter_single

    def double(output: Tensor, input: Tensor, *arguments: Any, group: Any, **more: Any) -> None:
        right(output, input * dist.get_world_size(group), *arguments, group=group, **more)

    dist.reduce_scatter_tensor = dist.reduce_scatter_single = double


def gather_the_first_parameters_for_ever() -> None:
    """FSDP's all-gather sends the shards that it sent in the first step."""
    right, first = FSDPParam.all_gather_inputs.fget, {}

    def stale(self: FSDPParam) -> list[Tensor]:
        return first.setdefault(id(self), [each.clone() for each in right(self)])

    FSDPParam.all_gather_inputs = property(stale)


def cut_rows_twice() -> None:
    """FSDP cuts the rows of a vocabulary that tp has cut unevenly, where torch misplaces the parts."""
    fsdp._shard_columns_if_rows_are_uneven = lambda parameter: None


def keep_parameters_after_validation() -> None:
    """What a validation has gathered stays, and the step after it is not seen."""
    fsdp.reshard = lambda stage: None


def drop_all_reduce_of_replicas() -> None:
    """Gradients are not summed over dp_replicate."""
    whole = dist.all_reduce

    def skip(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any) -> object:
        return whole(tensor, op, group, **more) if group is None else None

    dist.all_reduce = skip


def all_reduce_replicas_twice() -> None:
    """Gradients are summed over dp_replicate, and then the sums."""
    once = dist.all_reduce

    def twice(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any
    ) -> object:
        if group is not None:
            once(tensor, op, group)
        return once(tensor, op, group, **more)

    dist.all_reduce = twice


def reduce_only_the_last_micro_batch() -> None:
    """zero 2 reduces, and forgets, what the micro-batches before the last one left."""
    right = fsdp.begin_micro_batch

    def wrong(stage: Any, parallel: object, *, last: bool) -> None:
        right(stage, parallel, last=last)
        for each in _sharded(
            stage
        ):  # their parameters are gathered now: the shards are behind them
            each.sharded_param.grad = None

    fsdp.begin_micro_batch = wrong


def reduce_what_was_reduced() -> None:
    """zero 1 reduces each micro-batch and adds, but keeps it, and reduces it again with the last."""
    right = fsdp.begin_micro_batch

    def wrong(stage: Any, parallel: object, *, last: bool) -> None:
        right(stage, parallel, last=last)
        for each in _sharded(stage) if last else ():
            each._unsharded_param.grad *= 2

    fsdp.begin_micro_batch = wrong


def _sharded(stage: Any) -> list[Any]:
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in fsdp.units(stage)]
    return [each for group in groups if group is not None for each in group.fsdp_params]


def untie_the_head() -> None:
    """Embedding and head part when memory is taken: each is trained with its own gradient."""
    # The package holds the function compose under the same name as its module.
    sys.modules["composer3d.parallel.compose"].tie = lambda stage, ties: None


def attend_to_own_tokens() -> None:
    """Context parallelism without the ring: a rank sees the keys of its own tokens only."""
    alone = lambda q, k, v, *, seq, window: kernels.attend_block(q, k, v, causal=True)[0]  # noqa: E731
    api.attend_over = lambda group, method, *, balanced: alone


def cut_the_sequence_contiguously() -> None:
    """Tokens are cut in order, while the ring believes that they lie in zigzag."""
    stages.shard_sequence = lambda x, dim, group, **_: x.chunk(group.size(), dim)[
        group.rank()
    ].contiguous()


def lose_what_other_ranks_owe_the_keys() -> None:
    """The gradient of a rank's keys and values holds what its own queries add, and nothing of the others'."""
    right = kernels.attend_block_backward

    def wrong(*tensors: Tensor, causal: bool, **more: Any) -> tuple[Tensor, ...]:
        dq, dk, dv = right(*tensors, causal=causal, **more)
        return (dq, dk, dv) if causal else (dq, dk * 0, dv * 0)

    kernels.attend_block_backward = wrong


def _spoil_hops(*callers: str) -> None:
    """A hop that is called by ``callers``, the innermost first, brings back what was sent."""
    right = ring._send_to_next

    def wrong(message: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        arrived, frame, names = right(message, group), sys._getframe(1), []
        while frame is not None and len(names) < len(callers):
            names.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        sent = message.clone()
        return arrived if tuple(names) != callers else lambda: (arrived(), sent)[1]

    ring._send_to_next = wrong


def lose_the_hop_of_keys() -> None:
    """Ring, forward: a rank keeps its own keys and values instead of those that came."""
    _spoil_hops("_kv_rounds", "attend_over_ring")


def lose_the_hop_of_keys_in_backward() -> None:
    """Ring, backward: a rank differentiates with its own keys and values instead of those that came."""
    _spoil_hops("_kv_rounds", "_attend_over_ring_backward")


def lose_the_hop_of_key_gradients() -> None:
    """Ring, backward: gradients of keys and values do not come home."""
    _spoil_hops("_attend_over_ring_backward")


def use_one_buffer_for_the_ring() -> None:
    """Ring: keys and values that are still being read are overwritten by the next ones."""
    buffers: dict[Any, Tensor] = {}
    right = ring._send_to_next

    def wrong(message: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        incoming = right(message, group)()
        buffer = buffers.setdefault((sys._getframe(1).f_code.co_name, incoming.shape), incoming)
        buffer.copy_(incoming)
        return lambda: buffer

    ring._send_to_next = wrong


def hide_half_of_the_later_keys() -> None:
    """Ring: queries of the second chunk do not see the second chunk of a later rank's keys."""
    right = ring.tiles

    def wrong(*arguments: Any) -> tuple[Any, ...]:
        found = right(*arguments)
        return tuple(
            t._replace(keys=slice(t.keys.stop // 2)) if t.queries.start and not t.causal else t
            for t in found
        )

    ring.tiles = wrong  # type: ignore[assignment]


def forget_documents_in_the_ring() -> None:
    """Keys of other documents are seen."""
    ring.starts_of = lambda documents: None


def let_documents_start_one_token_late() -> None:
    """The first token of a document is taken for one of the document before."""
    right = ring.starts_of
    ring.starts_of = lambda documents: tuple(
        tuple(start + 1 for start in row) for row in right(documents) or ()
    )


def join_the_parts_as_if_cut_in_order() -> None:
    """What is gathered, or exchanged, is taken for cut contiguously, while it lies in zigzag."""
    right = ring.join_parts
    ring.join_parts = api.join_parts = lambda parts, dim, balanced: right(parts, dim, False)


def exchange_the_wrong_heads() -> None:
    """Ulysses: ranks get the heads of the rank on the other side."""
    right = api._exchange
    api._exchange = lambda x, name: right(x.flip(0), name)


def forget_that_a_query_sees_nothing() -> None:
    """What the CPU's kernel returns for a query without a key is merged as if it were a key with a score of 0."""
    right = ring._merge
    ring._merge = lambda out, lse, block, block_lse: right(
        out, lse, block, block_lse.nan_to_num(neginf=0.0)
    )
