"""Faults of what one rank computes: batch, loss, attention, checkpointing, norm, clipping, optimizer, first weights."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.models.contract import IGNORE_INDEX, SequenceInfo
from composer3d.models.layers import head as head_module
from composer3d.parallel import checkpointing, grad_norm, init, stages
from composer3d.parallel.context import api
from composer3d.training import batches
from composer3d.training import step as train_step
from composer3d.verify import worker as verify_worker


def _change_step(**changes: Any) -> None:
    """Give ``forward_backward`` other arguments: each of ``changes`` maps (stages, value) to the value it gets."""
    right = stages.Stages.forward_backward

    def wrong(self: stages.Stages, *given: Any) -> Tensor:
        names = ("tokens", "labels", "positions", "valid", "documents")
        values = dict(zip(names, given, strict=False))
        values |= {name: change(self, values) for name, change in changes.items()}
        return right(self, *values.values())

    stages.Stages.forward_backward = wrong


def double_the_divisor() -> None:
    """The loss is divided by the number of data-parallel ranks once more."""
    _change_step(valid=lambda own, given: given["valid"] * own.mesh.batch_ranks)


def divide_by_micro_batches() -> None:
    """The loss is divided by the number of micro-batches as well."""
    _change_step(valid=lambda own, given: given["valid"] * own._step.micro_batches)


def divide_by_own_tokens() -> None:
    """A mean of means: each rank divides by the tokens that count on it."""
    _change_step(
        valid=lambda own, given: float((given["labels"] >= 0).sum()) * own.mesh.batch_ranks
    )


def count_ignored_labels() -> None:
    """The loss is divided by all labels, those that do not count among them."""
    batches.IGNORE_INDEX = -1


def count_tokens_on_every_tp_rank() -> None:
    """Valid tokens are summed over ranks that hold the same ones."""
    right = train_step.move_to_device

    def wrong(own: stages.Stages, batch: Any) -> tuple[Any, ...]:
        *rows, _ = right(own, batch)
        return *rows, (rows[1] != IGNORE_INDEX).sum()

    train_step.move_to_device = wrong


def learn_ignored_labels() -> None:
    """Labels that do not count are taken for token 0."""
    _change_step(labels=lambda own, given: given["labels"].clamp(min=0))


def label_before_the_cut_is_lost() -> None:
    """Labels are shifted after the sequence is cut: the last token of a rank's part has the wrong one."""
    _change_step(
        labels=lambda own, given: torch.cat((given["labels"][:, :-1], given["tokens"][:, :1]), 1)
    )


def take_the_labels_of_the_next_row() -> None:
    """Labels are those of the next row."""
    _change_step(labels=lambda own, given: given["labels"].roll(-1, 0))


def count_positions_from_the_start_of_the_part() -> None:
    """A rank's part of the sequence has positions 0, 1, 2, and not those of the whole."""
    _change_step(
        positions=lambda own, given: torch.arange(given["tokens"].shape[1]).expand_as(
            given["tokens"]
        )
    )


def restart_positions_one_late() -> None:
    """Positions start anew at the second token of a document. (Were they never to, no number would change: rotary ones
    are relative, and other documents are hidden.)
    """
    _change_step(positions=lambda own, given: given["positions"].roll(1, 1))


def take_the_documents_of_the_next_row() -> None:
    """Attention is masked by the documents of the next row."""
    _change_step(documents=lambda own, given: given["documents"].roll(-1, 0))


def shift_positions() -> None:
    """Positions of the second half are one too high. (All of them would change nothing: rotary ones are relative.)"""
    right = stages.Stage.forward

    def wrong(self: stages.Stage, h: Tensor, *, positions_BT: Tensor, **more: Any) -> Tensor:
        late = positions_BT >= positions_BT.shape[1] // 2
        return right(self, h, positions_BT=positions_BT + late, **more)

    stages.Stage.forward = wrong


def train_on_the_same_rows() -> None:
    """Every data-parallel rank reads the rows of the first one."""
    right = train_step.compute_gradients

    def wrong(own: stages.Stages, batch: Any) -> object:
        tokens = batch.tokens_BT.clone()
        if own.mesh.batch_ranks > 1:
            dist.broadcast(tokens, 0)
        return right(own, type(batch)(tokens, *batch[1:]))

    train_step.compute_gradients = wrong


def forget_a_micro_batch() -> None:
    """Accumulation starts anew with the second micro-batch."""
    right = stages.Stages._micro_batches

    def wrong(self: stages.Stages, *rows: Any) -> Any:
        for index, (tokens, keywords) in enumerate(right(self, *rows)):
            if index == 1:
                for parameter in self.parameters():
                    parameter.grad = None
            yield tokens, keywords

    stages.Stages._micro_batches = wrong


def keep_the_gradients_of_the_last_step() -> None:
    """Gradients are added to those of the step before."""
    right = stages.Stages.forward_backward

    def wrong(self: stages.Stages, *given: Any) -> Tensor:
        old = [parameter.grad for parameter in self.parameters()]
        total = right(self, *given)
        for parameter, grad in zip(self.parameters(), old, strict=True):
            parameter.grad = parameter.grad if grad is None else parameter.grad + grad
        return total

    stages.Stages.forward_backward = wrong


def leave_out_a_chunk_of_the_loss() -> None:
    """The last of the parts that the loss is made in does not enter it."""
    right = head_module.Head.forward

    def wrong(self: head_module.Head, h_BTC: Tensor, labels_BT: Tensor) -> Tensor:
        labels = labels_BT.flatten().clone()
        labels[-(len(labels) // self.chunks) :] = IGNORE_INDEX
        return right(self, h_BTC, labels.view_as(labels_BT))

    head_module.Head.forward = wrong


def forget_documents() -> None:
    """Tokens of other documents of the row are seen."""
    stages.SequenceInfo = lambda positions, documents=None: SequenceInfo(positions)


def hide_the_token_itself() -> None:
    """Attention: the causal mask is one off, so that a query does not see its own key."""
    right = api.sdpa

    def wrong(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-1)
        seen[0, 0] = True  # the first query sees something
        return right(q, k, v, seen, is_causal=False)

    api.sdpa = wrong


def look_behind_the_window() -> None:
    """Attention sees all tokens before, not those in the window."""
    right = api.ring_attention
    api.ring_attention = lambda *tensors, window, **how: right(*tensors, window=0, **how)


def deal_out_kv_heads_in_turn() -> None:
    """Attention: head h reads key-value head h modulo their number."""
    right = api.sdpa

    def wrong(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        return right(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), **how)

    api.sdpa = wrong


def _change_recomputation(change: Any) -> None:
    right = checkpointing.checkpoint

    def wrong(function: Any, h: Tensor, seq: SequenceInfo, **more: Any) -> Tensor:
        calls = []

        def run(h: Tensor, seq: SequenceInfo) -> Tensor:
            calls.append(h)
            return function(*((h, seq) if len(calls) == 1 else change(h, seq)))

        return right(run, h, seq, **more)

    checkpointing.checkpoint = wrong


def recompute_with_other_positions() -> None:
    """Checkpointing computes a block again with positions that are not those of the first time."""
    _change_recomputation(lambda h, seq: (h, SequenceInfo(seq.positions_BT.flip(1))))


def recompute_with_another_input() -> None:
    """Checkpointing computes a block again from an input that has changed meanwhile."""
    _change_recomputation(lambda h, seq: (h * 1.001, seq))


def count_replicas_in_the_norm() -> None:
    """The norm counts a replicated gradient on every rank that holds it."""
    right = grad_norm.local_grad_norm_sq
    grad_norm.local_grad_norm_sq = lambda parameters, mesh: right(parameters, mesh) * mesh.sizes.tp


def norm_of_the_first_rank() -> None:
    """The norm is that of the shards of one rank."""
    right = grad_norm.local_grad_norm_sq
    grad_norm.local_grad_norm_sq = lambda parameters, mesh: (
        right(parameters, mesh) * (mesh.rank == 0)
    )


def clip_by_own_norm() -> None:
    """Each rank clips by the norm of the gradients it holds."""
    right = grad_norm.scale_gradients

    def wrong(parameters: Any, *, norm: float, max_norm: float) -> None:
        held = list(parameters)
        own = sum(
            float(
                torch.linalg.vector_norm(
                    p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                )
            )
            ** 2
            for p in held
        )
        right(held, norm=own**0.5, max_norm=max_norm)

    grad_norm.scale_gradients = wrong


def clip_twice() -> None:
    """Gradients that have been clipped are scaled again."""
    right = grad_norm.scale_gradients

    def wrong(parameters: Any, **norms: float) -> None:
        held = list(parameters)
        right(held, **norms)
        right(held, **norms)

    grad_norm.scale_gradients = wrong


def do_not_clip() -> None:
    """Gradients are not clipped."""
    grad_norm.scale_gradients = lambda parameters, **norms: None


def decay_norms() -> None:
    """The weights of norms are decayed as matrices are."""
    _change_optimizer(
        lambda optimizer: [group.update(weight_decay=0.1) for group in optimizer.param_groups]
    )


def step_all_but_one_parameter() -> None:
    """The optimizer has not been given the last of the parameters."""
    right = verify_worker.build_optimizer
    verify_worker.build_optimizer = lambda named, table: right(list(named)[:-1], table)


def step_on_one_rank_only() -> None:
    """The optimizer steps on the first rank alone."""
    _change_optimizer(
        lambda optimizer: dist.get_rank() == 0 or setattr(optimizer, "step", lambda: None)
    )


def forget_the_first_moment() -> None:
    """Adam's mean of gradients starts anew with each step."""
    _before_the_step(lambda states: [state["exp_avg"].zero_() for state in states])


def swap_the_first_moments() -> None:
    """Adam's mean of gradients is that of another parameter of the same shape."""

    def swap(states: list[dict[str, Any]]) -> None:
        like: dict[Any, list[dict[str, Any]]] = {}
        for state in states:
            like.setdefault(state["exp_avg"].shape, []).append(state)
        for each in like.values():
            turned = [state["exp_avg"] for state in each]
            for state, moment in zip(each, turned[1:] + turned[:1], strict=True):
                state["exp_avg"] = moment

    _before_the_step(swap)


def _before_the_step(change: Any) -> None:
    right = train_step.set_lr

    def wrong(optimizer: torch.optim.Optimizer, lr: float) -> None:
        change(list(optimizer.state.values()))
        right(optimizer, lr)

    train_step.set_lr = wrong


def _change_optimizer(change: Any) -> None:
    right = verify_worker.build_optimizer

    def wrong(*arguments: Any) -> torch.optim.Optimizer:
        optimizer = right(*arguments)
        change(optimizer)
        return optimizer

    verify_worker.build_optimizer = wrong


def keep_the_first_learning_rate() -> None:
    """The learning rate stays what the optimizer was built with."""
    train_step.set_lr = lambda optimizer, lr: None


def set_the_learning_rate_of_one_group() -> None:
    """The learning rate is set for matrices, and not for norms."""
    train_step.set_lr = lambda optimizer, lr: optimizer.param_groups[0].update(lr=lr)


def same_weights_on_every_shard() -> None:
    """Each shard starts from the values of the first one, as random init through DTensor does on CPU."""
    right = init.fill_normal

    def wrong(local: Tensor, shape: object, offset: tuple[int, ...], **more: Any) -> None:
        right(local, shape, (0,) * len(offset), **more)

    init.fill_normal = wrong


def start_from_other_weights_on_every_rank() -> None:
    """First weights depend on the rank."""
    right = init._key
    init._key = lambda seed, name: right(seed + dist.get_rank(), name)


def round_gradients() -> None:
    """Gradients pass through a narrower dtype on their way."""
    right = stages.Stages.finish_gradients

    def wrong(self: stages.Stages) -> None:
        right(self)
        for parameter in self.parameters():
            wide = parameter.grad.dtype
            narrow = torch.float32 if wide == torch.float64 else torch.bfloat16
            parameter.grad = parameter.grad.to(narrow).to(wide)

    stages.Stages.finish_gradients = wrong
