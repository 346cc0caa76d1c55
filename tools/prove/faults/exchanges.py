"""Faults in what ranks send each other: over tp, over FSDP's axes, and around the ring of cp."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Replicate

from composer3d.parallel import stages
from composer3d.parallel.context import api, kernels, ring
from composer3d.parallel.data import fsdp, reduce_scatter
from composer3d.parallel.tensor import collectives, forwards, styles, vocab
from composer3d.runtime.mesh import Mesh
from tools.prove.faults.places import NO_MEMORY, PACKED, computes_narrow, harms
from tools.prove.faults.plant import fault_of, instead_of

# tp with a residual stream that is whole on all ranks.
_NO_SP = "mesh.tp=2 parallel.sequence_parallel=false"
_SHARED = "mesh.tp=2 model.n_kv_heads=1"
_OLMO_2 = "model.architecture=olmo2 model.preset=debug-olmo2"
_GATED = "model.architecture=moe model.preset=debug-moe model.shared_ffn=48 model.shared_gate=true"
_UNITS = "parallel.fsdp_blocks=2 model.n_layers=5"
_NARROW = "precision.reduce=bfloat16"


@harms("mesh.tp=2")
def repeat_own_shard_of_the_sequence() -> None:
    """tp: the all-gather of the sequence repeats this rank's shard instead of adding the others."""
    collectives._all_gather = lambda x, group: torch.cat([x] * group.size(), collectives.CUT_DIM)


@harms("mesh.tp=2")
@fault_of(collectives, collectives._all_gather)
def gather_the_sequence_backwards(right: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """tp: the all-gather joins the shards of the sequence in reverse order."""
    shards = right(x, group).chunk(group.size(), collectives.CUT_DIM)
    return torch.cat(shards[::-1], collectives.CUT_DIM)


@harms("mesh.tp=2")
def keep_own_part_of_the_sum() -> None:
    """tp: the reduce-scatter cuts but does not sum."""
    collectives._reduce_scatter = lambda x, group: x.chunk(group.size(), collectives.CUT_DIM)[
        group.rank()
    ].contiguous()


@harms("mesh.tp=2")
def reduce_scatter_twice() -> None:
    """tp: the reduce-scatter multiplies its sums by the number of ranks."""
    right = collectives._reduce_scatter
    collectives._reduce_scatter = lambda x, group: right(x, group) * group.size()


@harms(_NO_SP)
def drop_sum_of_gradients() -> None:
    """tp without sequence parallelism: backward does not sum the gradients of a shared input."""
    styles.sum_gradients = lambda x, group: x


@harms(_NO_SP)
def sum_gradients_twice() -> None:
    """tp without sequence parallelism: backward sums the gradients of a shared input twice."""
    right = collectives._all_reduce
    styles.sum_gradients = lambda x, group: collectives._WithTranspose.apply(
        x, group, collectives._identity, lambda grad, group: right(right(grad, group), group)
    )


@harms(_NO_SP)
def drop_sum_of_outputs() -> None:
    """tp without sequence parallelism: each rank continues with its own part of the product."""
    styles.sum_outputs = lambda x, group: x


@harms(f"{_NO_SP} mesh.dp_shard=2")
def reduce_over_the_wrong_group() -> None:
    """tp without sequence parallelism: sums go over the FSDP ranks, which hold other samples."""
    right_build, right = Mesh.build.__func__, collectives._all_reduce
    fsdp_groups = []

    def build_and_keep_group(cls: type[Mesh], *arguments: Any) -> Mesh:
        mesh = right_build(cls, *arguments)
        fsdp_groups.append(mesh.device_mesh.get_group("fsdp"))
        return mesh

    Mesh.build = classmethod(build_and_keep_group)
    collectives._all_reduce = lambda x, group: right(x, fsdp_groups[0])


@harms(f"mesh.tp=2 {_OLMO_2}")
def take_own_mean_in_wide_norms() -> None:
    """tp: a norm over all heads takes the mean square of this rank's heads alone."""
    forwards.mean_over_ranks = lambda x, group: x


@harms(f"mesh.tp=2 {_OLMO_2}")
def keep_own_gradient_of_means() -> None:
    """tp: the gradient of a mean over all heads stays this rank's own; the ranks do not sum it."""
    forwards.mean_over_ranks = lambda x, group: (
        collectives._WithTranspose.apply(x, group, collectives._all_reduce, collectives._identity)
        / group.size()
    )


@harms("mesh.tp=2", message=r"gradient of .*norm.* are off: .*norm\.weight$")
@harms(f"{_NO_SP} model.qk_norm=true", message=r"are off: blocks\.\*\.attn\.k_norm")
def drop_reduction_of_norms() -> None:
    """tp: partial gradients, of norms and shared key-value heads, are taken for complete ones."""
    _change_finish(lambda names: [[]])


@harms(f"mesh.tp=2 {_GATED}", message=r"gradient of .*shared_gate")
def drop_reduction_of_gates() -> None:
    """tp: the partial gradient of the shared expert's gate is taken for the whole one."""
    _change_finish(lambda names: [[name for name in names if "shared_gate" not in name]])


@harms("mesh.tp=2", message=r"gradient of .*norm.* are off|is off")
@harms("mesh.tp=2 mesh.dp_shard=2 parallel.zero=3")
def leave_out_a_norm() -> None:
    """tp: the partial gradient of one norm is left out of the sum."""
    _change_finish(lambda names: [names[1:]])


@harms("mesh.tp=2")
def sum_a_norm_twice() -> None:
    """tp: a gradient that is whole already is summed again."""
    _change_finish(lambda names: [names, names[:1]])


def _change_finish(rounds: Callable[[list[str]], list[list[str]]]) -> None:
    """Sum the partial gradients of other parameters, once or several times."""

    @instead_of(stages.Stages, stages.Stages.finish_gradients)
    def wrong(right: Any, self: stages.Stages) -> None:
        whole = [module.partial_gradients for module in self.modules]
        for picked in zip(*(rounds(sorted(names)) for names in whole), strict=True):
            for module, names in zip(self.modules, picked, strict=True):
                module.partial_gradients = frozenset(names)
            right(self)
        for module, names in zip(self.modules, whole, strict=True):
            module.partial_gradients = names


@harms("mesh.tp=4 model.n_kv_heads=2")
@fault_of(styles, styles._kv_column)
def read_the_wrong_kv_head(_: Any, kv_heads: int, mesh: Any) -> styles.Local:
    """tp above the number of key-value heads: ranks read the heads in turn, not in order."""
    rank = mesh.get_local_rank()
    return styles.Local(
        Replicate(),
        sums_gradients=True,
        select=lambda p: p.chunk(kv_heads)[rank % kv_heads],
    )


@harms(_SHARED, message=r"attn\.wk\.weight, blocks\.\*\.attn\.wv\.weight")
@fault_of(styles, styles._kv_column)
def keep_own_share_of_kv_gradients(right: Any, kv_heads: int, mesh: Any) -> styles.Local:
    """tp above the number of key-value heads: a shared head gets one rank's gradient alone."""
    style = right(kv_heads, mesh)
    style.sums_gradients = False
    return style


@harms(_SHARED, message=r"2 times the reference, suspect tp; .*attn\.wk\.weight")
@fault_of(stages.Stages, stages.Stages.finish_gradients)
def count_kv_gradients_on_every_rank(right: Any, self: stages.Stages) -> None:
    """tp above the number of key-value heads: the gradient of a shared head is summed twice."""
    right(self)
    for name, parameter in self.named_parameters():
        if ".wk." in name or ".wv." in name:
            parameter.grad = parameter.grad * self.mesh.sizes.tp


@harms("mesh.tp=2")
def mask_the_vocabulary_one_off() -> None:
    """Vocabulary-parallel loss: a rank takes its first label for another rank's."""
    vocab._is_own = lambda labels, first, logits: (
        (labels > first) & (labels < first + logits.shape[1])
    )


@harms("mesh.tp=2", message="only 126 of|is off by")
@fault_of(vocab, vocab.own_rows)
def begin_rows_one_late(right: Any, size: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Vocabulary: every rank but the first starts its rows one row too late."""
    first, count = right(size, group)
    return first + (group.rank() > 0), count


@harms("mesh.tp=2")
def keep_own_maximum_of_logits() -> None:
    """Vocabulary-parallel loss: each rank subtracts the largest of its own logits."""
    right = dist.all_reduce
    dist.all_reduce = lambda tensor, op=dist.ReduceOp.SUM, group=None, **options: (
        None if op == dist.ReduceOp.MAX else right(tensor, op, group, **options)
    )


@harms("mesh.tp=2")
def keep_own_sum_of_exponentials() -> None:
    """Vocabulary-parallel loss: each rank's softmax covers its own logits alone."""
    right = dist.all_reduce
    dist.all_reduce = lambda tensor, op=dist.ReduceOp.SUM, group=None, **options: (
        None if tensor.dim() == 2 and group is not None else right(tensor, op, group, **options)
    )


@harms("mesh.dp_shard=2", "mesh.cp=2", "mesh.pp=2 mesh.dp_shard=2 mesh.tp=2")
@harms(f"mesh.cp=2 {NO_MEMORY}", message="^gradient")
def drop_reduce_scatter() -> None:
    """FSDP: gradients are not summed over dp_shard; each rank keeps its own part."""

    def wrong(
        output: Tensor, input: Tensor, op: object = None, group: Any = None, **_: object
    ) -> None:
        output.copy_(input.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    dist.reduce_scatter_tensor = dist.reduce_scatter_single = wrong


@harms("mesh.dp_shard=2", message="it is 2 times the reference, suspect dp_shard; all")
@harms(
    "mesh.dp_shard=2 mesh.cp=2", message="it is 4 times the reference, suspect dp_shard x cp or mi"
)
def reduce_shards_twice() -> None:
    """FSDP: summed gradients are multiplied by the number of shards (dp_shard and cp)."""
    right = dist.reduce_scatter_single

    def wrong(output: Tensor, input: Tensor, *arguments: Any, group: Any, **options: Any) -> None:
        right(output, input * dist.get_world_size(group), *arguments, group=group, **options)

    dist.reduce_scatter_tensor = dist.reduce_scatter_single = wrong


@harms("mesh.dp_shard=2")
@fault_of(fsdp, fsdp.apply)
def send_gradients_in_bfloat16(
    right: Any, stage: Any, plan: Any, meshes: Any, parallel: Any, precision: Any, memory: Any
) -> None:
    """FSDP: gradients travel in bfloat16 although the recipe asks for float32."""
    narrow = replace(precision, reduce="bfloat16")
    right(stage, plan, meshes, parallel, narrow, memory)


@harms(f"mesh.dp_shard=2 {_NARROW}", message="sent in a wider dtype than bfloat16")
@fault_of(reduce_scatter.SendNarrow, reduce_scatter.SendNarrow.__init__)
def send_gradients_wide(right: Any, self: Any, dtype: torch.dtype) -> None:
    """FSDP: gradients travel in float32 although the recipe asks for bfloat16."""
    right(self, torch.float32 if dtype == torch.bfloat16 else dtype)


@harms(f"mesh.dp_shard=2 parallel.zero=1 {_NARROW}")
@computes_narrow(
    r"AccumulateGrad: aten::add_\.Tensor of bfloat16", f"mesh.dp_shard=2 parallel.zero=1 {_NARROW}"
)
@fault_of(fsdp, fsdp.fully_shard)
def sum_micro_batches_in_bfloat16(right: Any, module: Any, **options: Any) -> None:
    """FSDP: gradients that are sent in bfloat16 are also summed over micro-batches in it."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    right(module, **options | {"mp_policy": policy})


@harms(
    f"mesh.dp_shard=4 {_NARROW}",
    message=r"in bfloat16 differs from the exact one by [1-9]\S* times what",
)
@computes_narrow(
    r"SendNarrow\.__call__: aten::sum\.dim_IntList of bfloat16", f"mesh.dp_shard=4 {_NARROW}"
)
def sum_shards_in_bfloat16() -> None:
    """FSDP: gradients that are sent in bfloat16 are also summed over shards in it."""
    right = reduce_scatter.torch.sum

    def wrong(x: Tensor, *, dim: int, dtype: torch.dtype, out: Tensor) -> None:
        out.copy_(right(x, dim=dim))

    reduce_scatter.torch = SimpleNamespace(
        **{name: getattr(torch, name) for name in ("Tensor", "empty", "empty_like")}, sum=wrong
    )


@harms("mesh.dp_shard=2", message="at step 2")
def gather_the_first_parameters_for_ever() -> None:
    """FSDP: the all-gather sends the shards of the first step in every step."""
    right = FSDPParam.all_gather_inputs.fget
    first_inputs: dict[int, list[Tensor]] = {}

    def wrong(self: FSDPParam) -> list[Tensor]:
        return first_inputs.setdefault(id(self), [shard.clone() for shard in right(self)])

    FSDPParam.all_gather_inputs = property(wrong)


@harms(
    "mesh.tp=2 mesh.dp_shard=3 model.vocab=259 model.dim=96 data.global_batch=12",
    message=r"embed.*holds \[43, \d+\] at \[217, 0\] of \[259, \d+\] on rank 5",
)
def cut_rows_twice() -> None:
    """FSDP cuts the rows of a vocabulary that tp cuts unevenly; torch misplaces these shards."""
    fsdp._columns_if_rows_are_uneven = lambda parameter: None


@harms("mesh.dp_replicate=2 mesh.dp_shard=2", "mesh.dp_replicate=2 parallel.zero=0")
@fault_of(dist, dist.all_reduce)
def drop_all_reduce_of_replicas(
    right: Any, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any
) -> object:
    """Gradients are not summed over dp_replicate."""
    return right(tensor, op, group, **options) if group is None else None


@harms("mesh.dp_replicate=2", message="2 times the reference, suspect dp_replicate; all")
@fault_of(dist, dist.all_reduce)
def all_reduce_replicas_twice(
    right: Any, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any
) -> object:
    """Gradients are summed over dp_replicate twice."""
    if group is not None:
        right(tensor, op, group)
    return right(tensor, op, group, **options)


@harms("mesh.dp_shard=2 parallel.zero=2")
@fault_of(fsdp, fsdp.begin_micro_batch)
def reduce_only_the_last_micro_batch(
    right: Any, units: Sequence[Any], parallel: Any, *, last: bool
) -> None:
    """zero 2: the reduced gradients of all micro-batches but the last are lost."""
    right(units, parallel, last=last)
    for parameter in _fsdp_parameters(units):
        # The parameters are gathered now, and the shards hold the reduced gradients.
        parameter.sharded_param.grad = None


@harms("mesh.dp_shard=2 parallel.zero=1")
@fault_of(fsdp, fsdp.begin_micro_batch)
def reduce_what_was_reduced(right: Any, units: Sequence[Any], parallel: Any, *, last: bool) -> None:
    """zero 1: the last micro-batch reduces the gradients of earlier ones a second time."""
    right(units, parallel, last=last)
    if last:
        for parameter in _fsdp_parameters(units):
            parameter._unsharded_param.grad *= 2


@harms(
    f"mesh.dp_shard=2 {_UNITS}",
    message=r"gradient of blocks\.0\..*0\.5 times the reference, suspect dp_shard",
)
@fault_of(fsdp, fsdp.units)
def lose_units_of_several_blocks(right: Any, stage: Any) -> list[Any]:
    """FSDP: a unit of several blocks is none of those that are set up, and averages gradients."""
    return [unit for unit in right(stage) if len(fsdp.modules_of_unit(unit)) == 1]


@harms(f"mesh.dp_shard=2 {_UNITS}", message=r"gradient of blocks\.1\..* is missing on rank")
@fault_of(FSDPParamGroup, FSDPParamGroup.post_backward)
def reduce_only_the_first_block_of_a_unit(
    right: Any, self: FSDPParamGroup, *arguments: Any
) -> None:
    """FSDP: the gradients of the other blocks of a unit are left out of its sum."""
    of_first = set(self.modules[0].modules())
    for parameter in self.fsdp_params:
        if parameter._module_info.module not in of_first:
            parameter._unsharded_param.grad = None
    right(self, *arguments)


def _fsdp_parameters(units: Sequence[Any]) -> list[FSDPParam]:
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


@harms("mesh.tp=2 model.tied=true", message="embed|head")
def untie_the_head() -> None:
    """Tied embeddings: embedding and head become separate parameters when memory is allocated."""
    # The package holds the function compose under the same name as its module.
    sys.modules["composer3d.parallel.compose"].tie = lambda stage, ties: None


@harms("mesh.cp=2")
def attend_to_own_tokens() -> None:
    """Context parallelism without the ring: a rank sees the keys of its own tokens alone."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, seq: object, window: int) -> Tensor:
        return kernels.attend_block(q, k, v, causal=True)[0]

    api.make_attend = lambda group, method, *, balanced: attend


@harms("mesh.cp=2")
def cut_the_sequence_contiguously() -> None:
    """cp: tokens are cut contiguously, but the ring expects a zigzag cut."""
    stages.shard_sequence = lambda x, dim, group, **_: x.chunk(group.size(), dim)[
        group.rank()
    ].contiguous()


@harms("mesh.cp=4", "mesh.cp=2 parallel.cp_method=allgather parallel.cp_balance=contiguous")
@fault_of(kernels, kernels.attend_block_backward)
def lose_what_other_ranks_owe_the_keys(
    right: Any, *tensors: Tensor, causal: bool, **options: Any
) -> tuple[Tensor, ...]:
    """cp: keys and values get no gradient from the queries of other ranks."""
    dq, dk, dv = right(*tensors, causal=causal, **options)
    return (dq, dk, dv) if causal else (dq, dk * 0, dv * 0)


def _spoil_hops(*callers: str) -> None:
    """Make a hop called by ``callers``, the innermost first, return the message that it sent."""
    right = ring._send_to_next

    def wrong(message: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        wait, frame, names = right(message, group), sys._getframe(1), []
        while frame is not None and len(names) < len(callers):
            names.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        if tuple(names) != callers:
            return wait
        sent = message.clone()

        def wait_and_return_sent() -> Tensor:
            wait()
            return sent

        return wait_and_return_sent

    ring._send_to_next = wrong


@harms("mesh.cp=2")
def lose_the_hop_of_keys() -> None:
    """Ring, forward: a rank keeps its own keys and values instead of the ones that arrive."""
    _spoil_hops("_kv_rounds", "attend_in_rounds")


@harms("mesh.cp=2")
def lose_the_hop_of_keys_in_backward() -> None:
    """Ring, backward: a rank differentiates with its own keys and values, not arriving ones."""
    _spoil_hops("_kv_rounds", "_attend_in_rounds_backward")


@harms("mesh.cp=2")
def lose_the_hop_of_key_gradients() -> None:
    """Ring, backward: gradients of keys and values do not travel back to their rank."""
    _spoil_hops("_attend_in_rounds_backward")


@harms("mesh.cp=3 data.seq_len=252", "mesh.dp_shard=8 mesh.cp=4 data.global_batch=16")
def use_one_buffer_for_the_ring() -> None:
    """Ring: arriving keys and values overwrite ones that are still being read."""
    buffers: dict[Any, Tensor] = {}
    right = ring._send_to_next

    def wrong(message: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        incoming = right(message, group)()
        buffer = buffers.setdefault((sys._getframe(1).f_code.co_name, incoming.shape), incoming)
        buffer.copy_(incoming)
        return lambda: buffer

    ring._send_to_next = wrong


@harms("mesh.cp=2")
@fault_of(ring, ring.tiles)
def hide_half_of_the_later_keys(right: Any, *arguments: Any) -> tuple[Any, ...]:
    """Ring: queries of the second chunk do not see the second chunk of a later rank's keys."""
    return tuple(
        tile._replace(keys=slice(tile.keys.stop // 2))
        if tile.queries.start and not tile.causal
        else tile
        for tile in right(*arguments)
    )


@harms(f"mesh.cp=2 {PACKED}")
def forget_documents_in_the_ring() -> None:
    """Ring: queries see keys of other documents."""
    ring.starts_of = lambda documents: None


@harms(f"mesh.cp=2 {PACKED}")
@fault_of(ring, ring.starts_of)
def let_documents_start_one_token_late(right: Any, documents: Any) -> tuple[tuple[int, ...], ...]:
    """Ring: the first token of a document belongs to the document before."""
    return tuple(tuple(start + 1 for start in row) for row in right(documents) or ())


@harms("mesh.cp=2 parallel.cp_method=allgather")
def join_the_parts_as_if_cut_in_order() -> None:
    """cp: gathered or exchanged parts are joined as a contiguous cut, but the cut is zigzag."""
    right = ring.join_parts
    ring.join_parts = api.join_parts = lambda parts, dim, balanced: right(parts, dim, False)


# The proofs of these have fewer ranks, but more than two of cp.
_MANY_RANKS = "mesh.dp_shard=8 mesh.cp=4 data.global_batch=16"
_GATHERING = f"{_MANY_RANKS} parallel.cp_method=allgather"
_ULYSSES = f"{_MANY_RANKS} parallel.cp_method=ulysses"


@harms(_GATHERING, _ULYSSES)
def join_late_chunks_in_an_order_for_two_ranks() -> None:
    """cp: late chunks are joined with the last rank's first, as they should, but then in order."""
    right = ring.join_parts

    def join(parts: Tensor, dim: int, balanced: bool) -> Tensor:
        if not balanced or len(parts) == 1:
            return right(parts, dim, balanced)
        early, late = parts.chunk(2, dim if dim < 0 else dim + 1)
        return torch.cat((*early.unbind(), *late.roll(1, 0).unbind()), dim)

    ring.join_parts = api.join_parts = join


@harms(_GATHERING, _ULYSSES)
def cut_late_chunks_in_an_order_for_two_ranks() -> None:
    """cp: the whole is cut for all ranks, but late chunks of all but the first change places."""
    right = ring.parts_of_all_ranks

    def cut(x: Tensor, dim: int, size: int, balanced: bool) -> Tensor:
        parts = right(x, dim, size, balanced)
        if not balanced or size == 1:
            return parts
        early, late = parts.chunk(2, dim % x.dim() + 1)
        return torch.cat((early, torch.cat((late[:1], late[1:].flip(0)))), dim % x.dim() + 1)

    ring.parts_of_all_ranks = api.parts_of_all_ranks = cut


@harms("mesh.cp=2 parallel.cp_method=ulysses")
def exchange_the_wrong_heads() -> None:
    """Ulysses: ranks receive the heads of the rank on the opposite side."""
    right = api._exchange
    api._exchange = lambda x, name: right(x.flip(0), name)


@harms("mesh.cp=2 model.window=16")
@fault_of(ring, ring._merge)
def forget_that_a_query_sees_nothing(right: Any, *blocks: Tensor) -> None:
    """Ring: a query that sees no key in a block counts it as one key with a score of 0."""
    out, lse, block, block_lse = blocks
    right(out, lse, block, block_lse.nan_to_num(neginf=0.0))
