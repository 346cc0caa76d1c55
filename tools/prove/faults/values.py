"""Faults in what one rank computes.

They are in the batch, loss, attention, checkpointing, gradient norm, clipping, optimizer and
initial weights.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.models.contract import IGNORE_INDEX, SequenceInfo
from composer3d.models.layers import head as head_module
from composer3d.parallel import checkpointing, executor, grad_norm, init, stages
from composer3d.parallel.context import api
from composer3d.parallel.data import fsdp
from composer3d.recipe.rates import Rates
from composer3d.recipe.schema import OptimTable
from composer3d.training import batches, build, optimizers
from composer3d.training import step as train_step
from composer3d.training.optimizers import Optimizer
from composer3d.training.optimizers import contract as optimizers_contract
from tools.prove.faults.clipping import change_clipping, scale_gradients
from tools.prove.faults.places import CLIPPED, NO_MEMORY, PACKED, harms
from tools.prove.faults.plant import fault_by, fault_of, instead_of

# All gradients that train are zero but for rounding.
_NOTHING = 'model.window=1 optim.train=["blocks.*.attn.wq.weight"]'
# A parameter of blocks.0 that is a query's projection is in both.
_TWO_GROUPS = (
    'mesh.tp=2 optim.groups=[{train=["blocks.0.*"],lr_factor=0.5},'
    '{train=["*norm.weight","blocks.*.wq.weight"],lr_factor=2.0,weight_decay=0.5}]'
)


def change_step(**changes: Any) -> None:
    """Change the arguments of ``forward_backward``.

    ``changes`` holds, by name of an argument, a function of the stages and all arguments by name.
    """

    @instead_of(stages.Stages, stages.Stages.forward_backward)
    def wrong(right: Any, self: stages.Stages, *arguments: Any) -> Tensor:
        names = ("tokens", "labels", "positions", "valid", "documents", "ahead")
        # The last two are optional.
        values = dict(zip(names, arguments, strict=False))
        changed = {name: change(self, values) for name, change in changes.items()}
        return right(self, *(values | changed).values())


@harms("mesh.dp_shard=2", message="0.5 times the reference, suspect dp_shard; all")
@harms("mesh.dp_replicate=2 mesh.dp_shard=2", message="suspect dp_replicate x dp_shard")
def double_the_divisor() -> None:
    """The loss is divided by the number of data-parallel ranks once more."""
    change_step(valid=lambda own, arguments: arguments["valid"] * own.mesh.batch_ranks)


@harms("mesh.dp_shard=2", message="0.25 times the reference, suspect micro-batches; all")
def divide_by_micro_batches() -> None:
    """The loss is divided by the number of micro-batches as well."""

    def micro_batches(own: stages.Stages, arguments: Any) -> int:
        return arguments["tokens"].shape[0] // own.executor._micro_batch

    change_step(valid=lambda own, arguments: arguments["valid"] * micro_batches(own, arguments))


@harms("mesh.dp_shard=2")
def divide_by_own_tokens() -> None:
    """The loss is a mean of means: each rank divides by its own number of valid tokens."""
    change_step(
        valid=lambda own, arguments: (arguments["labels"] >= 0).sum()[None] * own.mesh.batch_ranks
    )


@harms("mesh.dp_shard=2", message="times the reference")
def count_ignored_labels() -> None:
    """The loss is divided by the number of all labels, including the ignored ones."""
    batches.IGNORE_INDEX = -1


@harms("mesh.tp=2", message="0.5 times the reference, suspect tp; all")
@fault_of(train_step, train_step.move_to_device)
def count_tokens_on_every_tp_rank(right: Any, own: stages.Stages, batch: Any) -> Any:
    """Valid tokens are summed over tp ranks, which hold the same tokens."""
    inputs = right(own, batch)
    return inputs._replace(valid_tokens=(inputs.labels_BT != IGNORE_INDEX).sum()[None])


@harms("mesh.dp_shard=2")
@harms(f"mesh.tp=2 {_NOTHING}", message="^loss")
def learn_ignored_labels() -> None:
    """Ignored labels count, as token 0."""
    change_step(labels=lambda own, arguments: arguments["labels"].clamp(min=0))


@harms("mesh.cp=2")
def label_before_the_cut_is_lost() -> None:
    """cp: labels are shifted after the sequence is cut, so the last label of a rank is wrong."""
    change_step(
        labels=lambda own, arguments: torch.cat(
            (arguments["labels"][:, :-1], arguments["tokens"][:, :1]), 1
        )
    )


@harms("mesh.dp_shard=2")
@harms(f"mesh.cp=2 {_NOTHING}", message="^loss")
def take_the_labels_of_the_next_row() -> None:
    """Each row has the labels of the next row."""
    change_step(labels=lambda own, arguments: arguments["labels"].roll(-1, 0))


@harms("mesh.cp=2")
def count_positions_from_the_start_of_the_part() -> None:
    """cp: the positions of a rank's tokens are 0, 1, 2, ... and not those in the whole sequence."""
    change_step(
        positions=lambda own, arguments: torch.arange(arguments["tokens"].shape[1]).expand_as(
            arguments["tokens"]
        )
    )


@harms(f"mesh.tp=2 {PACKED}")
def restart_positions_one_late() -> None:
    """Positions restart at the second token of a document.

    Positions that never restart would change no number: rotary positions are relative, and other
    documents are hidden.
    """
    change_step(positions=lambda own, arguments: arguments["positions"].roll(1, 1))


@harms(f"mesh.pp=2 {PACKED}")
def take_the_documents_of_the_next_row() -> None:
    """Attention is masked by the documents of the next row."""
    change_step(documents=lambda own, arguments: arguments["documents"].roll(-1, 0))


@harms(f"mesh.cp=2 {PACKED}", message="step 2")
def keep_the_documents_of_the_first_step() -> None:
    """Attention is masked by the documents of an earlier step."""
    first: list[Tensor] = []

    def stale(own: stages.Stages, arguments: Any) -> Tensor:
        first.append(arguments["documents"])
        return first[0]

    change_step(documents=stale)


@harms("mesh.pp=2", message="blocks|first")
@fault_of(stages.Stage, stages.Stage.forward)
def shift_positions(
    right: Any, self: stages.Stage, h: Tensor, *, positions_BT: Tensor, **options: Any
) -> Tensor:
    """Positions of the second half of a sequence are one too high.

    Shifting all positions would change nothing: rotary positions are relative.
    """
    is_second_half = positions_BT >= positions_BT.shape[1] // 2
    return right(self, h, positions_BT=positions_BT + is_second_half, **options)


@harms("mesh.dp_shard=2")
@fault_of(train_step, train_step.compute_gradients)
def train_on_the_same_rows(right: Any, own: stages.Stages, batch: Any) -> object:
    """Every data-parallel rank reads the rows of the first one."""
    tokens = batch.tokens_BT.clone()
    if own.mesh.batch_ranks > 1:
        dist.broadcast(tokens, 0)
    return right(own, type(batch)(tokens, *batch[1:]))


@harms("mesh.tp=2")
def forget_a_micro_batch() -> None:
    """The second micro-batch clears the gradients of the first."""
    begin = fsdp.begin_micro_batch

    @instead_of(executor.OneStage, executor.OneStage.forward_backward)
    def wrong(right: Any, self: executor.OneStage, *arguments: Any) -> Tensor:
        begun = 0

        def clear_before_the_second(*inputs: Any, **keywords: Any) -> None:
            nonlocal begun
            begun += 1
            if begun == 2:
                for parameter in self._module.parameters():
                    parameter.grad = None
            begin(*inputs, **keywords)

        fsdp.begin_micro_batch = clear_before_the_second
        return right(self, *arguments)


@harms("mesh.dp_shard=2", message="at step 2")
@fault_of(stages.Stages, stages.Stages.forward_backward)
def keep_the_gradients_of_the_last_step(right: Any, self: stages.Stages, *arguments: Any) -> Tensor:
    """Gradients are added to those of the previous step."""
    old_gradients = [parameter.grad for parameter in self.parameters()]
    loss = right(self, *arguments)
    for parameter, old_gradient in zip(self.parameters(), old_gradients, strict=True):
        if old_gradient is not None:
            parameter.grad = parameter.grad + old_gradient
    return loss


@harms("memory.loss_chunks=2")
@fault_of(head_module.Head, head_module.Head.forward)
def leave_out_a_chunk_of_the_loss(
    right: Any, self: head_module.Head, h_BTC: Tensor, labels_BT: Tensor
) -> Tensor:
    """The last chunk of tokens is left out of a loss that is computed in chunks."""
    labels = labels_BT.flatten().clone()
    labels[-(len(labels) // self.chunks) :] = IGNORE_INDEX
    return right(self, h_BTC, labels.view_as(labels_BT))


def _scale_a_loss_in_chunks(change: Callable[[Tensor], Tensor]) -> None:
    """Change the gradient of a loss that is computed in chunks."""
    right = head_module._LossInParts.backward

    def wrong(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return right(ctx, change(grads[0]))

    head_module._LossInParts.backward = staticmethod(wrong)


@harms("memory.loss_chunks=2")
def forget_the_divisor_of_a_loss_in_chunks() -> None:
    """The gradients that forward computes with a loss in chunks are not divided by the tokens."""
    _scale_a_loss_in_chunks(torch.ones_like)


@harms("mesh.tp=2 memory.loss_chunks=2")
def divide_a_loss_in_chunks_twice() -> None:
    """The gradients that forward computes with a loss in chunks are divided by the tokens twice."""
    _scale_a_loss_in_chunks(torch.square)


@harms(f"mesh.tp=2 {PACKED}")
def forget_documents() -> None:
    """Attention: tokens see other documents of their row."""
    stages.SequenceInfo = lambda positions, documents=None, tokens=None: SequenceInfo(positions)


@harms("mesh.tp=2")
@fault_of(api, api.sdpa)
def hide_the_token_itself(right: Any, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """Attention: the causal mask is shifted by one, so a query does not see its own key."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-1)
    # Without a key, the first query would have no softmax.
    mask[0, 0] = True
    return right(q, k, v, mask, is_causal=False)


@harms("mesh.dp_shard=2 model.window=100")
@harms(f"mesh.dp_shard=2 {_NOTHING}", message=r"^gradient of .*wq")
def look_behind_the_window() -> None:
    """Attention: a query sees all earlier tokens and not just those in the window."""
    right = api.ring_attention
    api.ring_attention = lambda *tensors, window, **options: right(*tensors, window=0, **options)


@harms("mesh.dp_shard=2")
@fault_of(api, api.sdpa)
def deal_out_kv_heads_in_turn(
    right: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Tensor:
    """Attention: head h reads key-value head h modulo their number."""
    groups = q.shape[1] // k.shape[1]
    return right(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), **options)


def _change_recomputation(change: Any) -> None:
    """Run a block on ``change(h, seq)`` when checkpointing computes it again."""

    @instead_of(checkpointing, checkpointing.checkpoint)
    def wrong(right: Any, function: Any, h: Tensor, seq: SequenceInfo, **options: Any) -> Tensor:
        is_again = False

        def run(h: Tensor, seq: SequenceInfo) -> Tensor:
            nonlocal is_again
            if is_again:
                return function(*change(h, seq))
            is_again = True
            return function(h, seq)

        return right(run, h, seq, **options)


@harms("memory.activation_checkpoint=full", message="blocks|first")
def recompute_with_other_positions() -> None:
    """Checkpointing computes a block again with other positions than the first time."""
    _change_recomputation(lambda h, seq: (h, SequenceInfo(seq.positions_BT.flip(1))))


@harms("memory.activation_checkpoint=full", message="blocks|first")
def recompute_with_another_input() -> None:
    """Checkpointing computes a block again from an input that has changed since."""
    _change_recomputation(lambda h, seq: (h * 1.001, seq))


@harms("mesh.tp=2", message="^gradient norm at step 1 is off")
@fault_of(grad_norm, grad_norm.local_grad_norm_sq)
def count_replicas_in_the_norm(right: Any, parameters: Any, mesh: Any) -> Tensor:
    """The gradient norm counts a replicated gradient once for every rank that holds it."""
    return right(parameters, mesh) * mesh.sizes.tp


@harms("mesh.dp_shard=2", message="^gradient norm|^weight")
@harms(f"mesh.dp_shard=2 {NO_MEMORY}", message="^gradient norm")
@fault_of(grad_norm, grad_norm.local_grad_norm_sq)
def norm_of_the_first_rank(right: Any, parameters: Any, mesh: Any) -> Tensor:
    """The gradient norm covers the shards of the first rank alone."""
    return right(parameters, mesh) * (mesh.rank == 0)


@harms("mesh.dp_shard=2", "mesh.pp=2", message=CLIPPED)
@fault_by(change_clipping)
def clip_by_own_norm(parameters: Any, *, norm: float, max_norm: float) -> None:
    """Each rank clips by the norm of its own shards."""
    parameters = list(parameters)
    own_norm_sq = 0.0
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        own_norm_sq += float(torch.linalg.vector_norm(gradient)) ** 2
    scale_gradients(parameters, norm=own_norm_sq**0.5, max_norm=max_norm)


@harms("mesh.dp_shard=2", message=CLIPPED)
@fault_by(change_clipping)
def clip_twice(parameters: Any, **norms: float) -> None:
    """Clipped gradients are scaled once more."""
    parameters = list(parameters)
    scale_gradients(parameters, **norms)
    scale_gradients(parameters, **norms)


@harms("mesh.dp_shard=2", message=CLIPPED)
def do_not_clip() -> None:
    """Gradients are not clipped."""
    change_clipping(lambda parameters, **norms: None)


@harms("mesh.dp_shard=2", f"mesh.tp=2 {NO_MEMORY}", message="^weight of .*norm")
def decay_norms() -> None:
    """AdamW decays the weights of norms as it decays matrices."""
    change_optimizer(
        lambda optimizer: [group.update(weight_decay=0.1) for group in optimizer.param_groups]
    )


@harms(_TWO_GROUPS, f"{_TWO_GROUPS} optim.name=muon", message="^weight")
def forget_the_factor_of_a_group() -> None:
    """The learning rate of a group is that of all others."""
    _change_rates(lambda rates, name, table: rates._replace(lr_factor=1.0))


@harms(_TWO_GROUPS, f"{_TWO_GROUPS} optim.name=muon", message="^weight")
@fault_of(optimizers_contract, optimizers_contract.rates_of)
def take_the_last_group_that_matches(
    right: Any, name: str, n_dims: int, table: OptimTable
) -> Rates:
    """A parameter that two groups match is in the later one."""
    return right(name, n_dims, replace(table, groups=tuple(reversed(table.groups or ()))))


@harms(_TWO_GROUPS, f"{_TWO_GROUPS} optim.name=muon", message="^weight")
def forget_the_decay_of_a_group() -> None:
    """The weight decay of a group is the usual one."""
    right = optimizers_contract.rates_of
    _change_rates(
        lambda rates, name, table: rates._replace(
            weight_decay=right(name, 2 if rates.weight_decay else 1, replace(table, groups=None))[1]
        )
    )


def _change_rates(change: Callable[[Rates, str, OptimTable], Rates]) -> None:
    """Call ``change`` with the rates of each parameter, its name and ``[optim]``."""

    @instead_of(optimizers_contract, optimizers_contract.rates_of)
    def wrong(right: Any, name: str, n_dims: int, table: OptimTable) -> Rates:
        return change(right(name, n_dims, table), name, table)


# The clipped norm comes first: the optimizer also clips.
@harms("mesh.tp=2", message=CLIPPED)
def step_all_but_one_parameter() -> None:
    """The optimizer does not have the last parameter."""
    right = optimizers.build_optimizer
    optimizers.build_optimizer = lambda named, *rest: right(list(named)[:-1], *rest)


def change_optimizer(change: Any) -> None:
    """Call ``change`` with the optimizer after it is built."""

    @instead_of(optimizers, optimizers.build_optimizer)
    def wrong(right: Any, *arguments: Any) -> torch.optim.Optimizer:
        optimizer = right(*arguments)
        change(optimizer)
        return optimizer


@harms("mesh.dp_shard=2", message="^weight.*only on rank 1 with dp_shard1")
@fault_by(change_optimizer)
def step_on_one_rank_only(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer steps on the first rank alone."""
    if dist.get_rank() != 0:
        optimizer.step = lambda: None  # type: ignore[assignment]


@harms("mesh.dp_shard=2", f"mesh.dp_shard=2 {NO_MEMORY}", message="^weight .*step 2")
def forget_the_first_moment() -> None:
    """AdamW's first moment is cleared before each step."""
    _before_the_step(lambda states: [state["exp_avg"].zero_() for state in states])


def _before_the_step(change: Any) -> None:
    """Call ``change`` with the optimizer's states of all parameters before each step."""

    @instead_of(Optimizer, Optimizer.set_lr)
    def wrong(right: Any, optimizer: torch.optim.Optimizer, lr: float) -> None:
        change(list(optimizer.state.values()))
        right(optimizer, lr)


@harms("mesh.dp_shard=2", f"mesh.tp=2 {NO_MEMORY}", message="^weight .*step 2")
@fault_by(_before_the_step)
def swap_the_first_moments(states: list[dict[str, Any]]) -> None:
    """AdamW uses the first moment of another parameter of the same shape."""
    states_of_shape: dict[Any, list[dict[str, Any]]] = {}
    for state in states:
        states_of_shape.setdefault(state["exp_avg"].shape, []).append(state)
    for same_shape in states_of_shape.values():
        moments = [state["exp_avg"] for state in same_shape]
        for state, moment in zip(same_shape, moments[1:] + moments[:1], strict=True):
            state["exp_avg"] = moment


@harms("mesh.dp_shard=2", message="^weight")
def keep_the_first_learning_rate() -> None:
    """The learning rate stays at the value that the optimizer was built with."""
    Optimizer.set_lr = lambda optimizer, lr: None


@harms("mesh.dp_shard=2", message="^weight of .*norm")
def set_the_learning_rate_of_one_group() -> None:
    """The learning rate is set for matrices, but not for norms."""
    Optimizer.set_lr = lambda optimizer, lr: optimizer.param_groups[0].update(lr=lr)


@harms("mesh.dp_shard=2")
@fault_of(init, init.fill_normal)
def same_weights_on_every_shard(
    right: Any, local: Tensor, shape: object, offset: tuple[int, ...], **options: Any
) -> None:
    """Initial weights: each shard has the values of the first one, as DTensor's own init does."""
    right(local, shape, (0,) * len(offset), **options)


@harms("mesh.tp=2")
def start_from_other_weights_on_every_rank() -> None:
    """Initial weights depend on the rank."""
    right = init._key
    init._key = lambda seed, name: right(seed + dist.get_rank(), name)


@harms("mesh.dp_shard=2", f"mesh.dp_shard=2 {NO_MEMORY}", message="^gradient")
@fault_of(stages.Stages, stages.Stages.finish_gradients)
def round_gradients(right: Any, self: stages.Stages) -> None:
    """Gradients are rounded to a narrower dtype."""
    right(self)
    for parameter in self.parameters():
        wide = parameter.grad.dtype
        narrow = torch.float32 if wide == torch.float64 else torch.bfloat16
        parameter.grad = parameter.grad.to(narrow).to(wide)


@harms(
    'mesh.dp_shard=2 optim.train=["blocks.1.*"]',
    message=r"first\.embed\.weight at step 1 is not in the reference",
)
def train_frozen_parameters() -> None:
    """``optim.train``: all parameters train."""
    build.freeze_others = lambda *_: None


@harms(
    'mesh.tp=2 optim.train=["blocks.1.*"]',
    message=r"attn_norm\.weight at step 1: ranks hold only 0 of",
)
@fault_of(build, build.freeze_others)
def freeze_the_norms_too(right: Any, model: Any, train: Any) -> None:
    """``optim.train``: parameters with one dim do not train, although a glob matches them."""
    right(model, train)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter.ndim > 1)
