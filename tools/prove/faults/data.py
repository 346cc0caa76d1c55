"""Faults in the loader, validation, learning rate, clipping, and AdamW's constants.

Faults of the loader are planted in the class, so that training and validation both have them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer3d.data import Batch, Loader, loader, order
from composer3d.data.rows import EvenRows
from composer3d.models.contract import IGNORE_INDEX
from composer3d.recipe.schema import OptimTable
from composer3d.training import batches, optim
from composer3d.training import step as train_step
from composer3d.training import validation as train_validation
from composer3d.verify import worker as verify_worker
from tools.prove.faults.clipping import change_clipping
from tools.prove.faults.places import CLIPPED, NO_MEMORY, PACKED, VALIDATION, found_by, harms
from tools.prove.faults.plant import fault_by, fault_of, instead_of
from tools.prove.faults.values import change_optimizer

_WHOLE_DOCUMENTS = "data.packing=whole_documents"
_RIGHT_LEARNING_RATE = optim.learning_rate
_RIGHT_ORDER = loader.sample_order


def _change_batches(change: Callable[[Loader, Batch], Batch]) -> None:
    """Have every loader return ``change(loader, batch)``."""
    right = Loader.__getitem__
    Loader.__getitem__ = lambda self, step: change(self, right(self, step))


def _change_loaders(change: Callable[[Loader], None]) -> None:
    """Call ``change`` with every loader after it is built."""

    @instead_of(Loader, Loader.__post_init__)
    def wrong(right: Any, self: Loader) -> None:
        right(self)
        change(self)


@harms("mesh.cp=2", "mesh.cp=4 parallel.cp_balance=contiguous", f"mesh.cp=2 {PACKED}")
@fault_by(_change_batches)
def give_positions_from_the_start_of_the_part(_: Loader, batch: Batch) -> Batch:
    """Loader, cp: the positions of each rank's tokens are 0, 1, 2, ... instead of global ones."""
    positions_T = torch.arange(batch.tokens_BT.shape[1])
    return batch._replace(positions_BT=positions_T.expand_as(batch.tokens_BT).clone())


@harms("mesh.cp=2")
@fault_by(_change_batches)
def give_positions_of_a_contiguous_part(self: Loader, batch: Batch) -> Batch:
    """Loader, cp: a rank's second chunk has the positions that follow its first chunk."""
    first = (self.owned_ranges or [(0, 0)])[0][0]
    positions_T = torch.arange(first, first + batch.tokens_BT.shape[1])
    return batch._replace(positions_BT=positions_T.expand_as(batch.tokens_BT).clone())


@harms("mesh.cp=2", "mesh.cp=2 parallel.cp_balance=contiguous")
def load_the_tokens_of_the_other_order() -> None:
    """Loader, cp: it loads zigzag parts if the stages expect contiguous ones, and vice versa."""
    right = batches.owned_ranges
    batches.owned_ranges = lambda *arguments, balanced: right(*arguments, balanced=not balanced)


@harms("mesh.dp_shard=2")
def read_the_rows_of_the_first_rank() -> None:
    """Loader: every rank reads the rows of batch rank 0."""
    _change_loaders(lambda self: setattr(self, "batch_rank", 0))


@harms("mesh.tp=2")
def label_a_token_with_itself() -> None:
    """Loader: labels are not shifted."""
    _change_batches(lambda _, batch: batch._replace(labels_BT=batch.tokens_BT.clone()))


@harms("mesh.dp_shard=2")
def label_a_token_with_the_next_but_one() -> None:
    """Loader: labels are shifted by two."""
    _change_batches(lambda _, batch: batch._replace(labels_BT=batch.labels_BT.roll(-1, 1)))


@harms("mesh.tp=2")
@fault_by(_change_batches)
def label_the_last_token_with_the_first(_: Loader, batch: Batch) -> Batch:
    """Loader: labels are shifted within a row, so the last label is the row's first token."""
    labels = batch.labels_BT.clone()
    labels[:, -1] = batch.tokens_BT[:, 0]
    return batch._replace(labels_BT=labels)


@harms("mesh.dp_shard=2")
@fault_by(_change_loaders)
def leave_out_a_token_between_samples(self: Loader) -> None:
    """Loader: a sample begins seq_len + 1 tokens after the previous one."""
    stride = self.seq_len + 1
    self._cuts = [EvenRows.of(corpus, stride) for corpus in self._corpora]
    self._n_samples = [len(cut) for cut in self._cuts]


@harms(f"mesh.dp_shard=2 {_WHOLE_DOCUMENTS}")
@fault_by(_change_loaders)
def cut_documents_in_samples_of_whole_ones(self: Loader) -> None:
    """Loader: samples of whole documents are cut every seq_len tokens."""
    self._cuts = [EvenRows.of(corpus, self.seq_len) for corpus in self._corpora]
    self._n_samples = [len(cut) for cut in self._cuts]


@harms(f"mesh.dp_shard=2 {_WHOLE_DOCUMENTS}")
def learn_what_fills_samples_up() -> None:
    """Loader: what fills up a sample of whole documents belongs to its last document."""
    Loader._is_filling = lambda self, picks: torch.zeros(  # type: ignore[method-assign]
        self._rows, self.seq_len, dtype=torch.bool
    )


@harms("mesh.dp_shard=2")
def take_the_sample_after() -> None:
    """Loader: the order of samples begins with its second sample."""
    loader.sample_order = lambda n, seed, first, *others: _RIGHT_ORDER(n, seed, first + 1, *others)


@harms("mesh.dp_shard=2", message=VALIDATION)
def repeat_the_first_order() -> None:
    """Loader: every epoch has the order of the first one."""
    right = order._round_keys
    order._round_keys = lambda seed, epoch: right(seed, 0)  # type: ignore[assignment]


@harms("mesh.dp_shard=2")
def take_samples_in_the_order_of_the_text() -> None:
    """Loader: samples are not shuffled."""
    loader.sample_order = lambda n, seed, first, count, _: np.arange(first, first + count) % n


@harms("mesh.dp_shard=2")
def forget_the_seed_of_the_order() -> None:
    """Loader: every run has the order of seed 0."""
    _change_loaders(lambda self: setattr(self, "seed", 0))


@harms("mesh.dp_shard=2", message=VALIDATION)
@fault_of(Loader, Loader._steps)
def hand_out_a_batch_twice(_: Any, self: Loader) -> Iterator[int]:
    """Loader: each batch is returned for two steps."""
    while True:
        for _ in range(2):
            yield self.next_step
        self.next_step += 1


@harms(f"mesh.dp_shard=2 {PACKED}")
def begin_documents_with_the_end_of_the_last() -> None:
    """Loader: the token that ends a document belongs to the next document."""
    right = loader.number_documents
    loader.number_documents = lambda ends: right(ends.roll(-1, 1))


@harms(f"mesh.tp=2 {PACKED}")
@fault_by(_change_batches)
def learn_what_follows_a_document(_: Loader, batch: Batch) -> Batch:
    """Loader: the last token of a document has token 0 for its label."""
    labels_BT = batch.labels_BT.masked_fill(batch.labels_BT == IGNORE_INDEX, 0)
    return batch._replace(labels_BT=labels_BT)


@harms(f"mesh.dp_shard=2 {PACKED}", message=VALIDATION)
@fault_of(train_validation, train_validation.validate)
def validate_by_a_mean_of_batches(_: Any, recipe: Any, stages: Any, held_out: Any) -> float:
    """Validation: the loss is the mean of the mean losses of its batches."""
    means = []
    for _ in range(recipe.validation.steps):
        local_sums = train_validation.evaluate_batch(stages, next(held_out))
        loss, tokens = stages.mesh.sum_over_world(*local_sums)
        means.append(loss / max(tokens, 1.0))
    return sum(means) / len(means)


@harms(f"mesh.dp_shard=2 {PACKED}", message=VALIDATION)
@fault_of(train_validation, train_validation.validate)
def validate_by_a_mean_of_ranks(_: Any, recipe: Any, stages: Any, held_out: Any) -> float:
    """Validation: the loss is the mean of the mean losses of batch ranks."""
    steps = range(recipe.validation.steps)
    sums = [train_validation.evaluate_batch(stages, next(held_out)) for _ in steps]
    loss, tokens = map(sum, zip(*sums, strict=True))
    (mean,) = stages.mesh.sum_over_world(loss / max(float(tokens), 1.0))
    return mean / stages.mesh.batch_ranks


def _change_validation(**options: Callable[[Any], Any]) -> None:
    """Build the loader of a validation with other options; each is a function of the recipe."""
    right = train_validation.make_loader

    def wrong(recipe: Any, *arguments: Any, **keywords: Any) -> Loader:
        changed = {key: option(recipe) for key, option in options.items()}
        return right(recipe, *arguments, **keywords | changed)

    train_validation.make_loader = wrong


@found_by("training", r"^validation_loss of step \d is")
def validate_in_the_order_of_new_runs() -> None:
    """Validation: the order of samples is that of new runs, whatever the run began with."""
    right = train_validation.make_held_out_loader
    train_validation.make_held_out_loader = lambda *arguments: right(*arguments[:3])


@harms("mesh.dp_shard=2", message=VALIDATION)
def validate_on_rows_that_follow_the_seed() -> None:
    """Validation: the rows depend on data.seed, so that runs of two seeds cannot be compared."""
    _change_validation(seed=lambda recipe: recipe.data.seed)


@harms("mesh.tp=2", message=VALIDATION)
def validate_on_a_batch_less() -> None:
    """Validation: the last batch is left out."""
    _change_number_of_batches(lambda count: count - 1)


@harms("mesh.tp=2", message=VALIDATION)
def validate_on_a_batch_more() -> None:
    """Validation: there is one batch too many."""
    _change_number_of_batches(lambda count: count + 1)


def _change_number_of_batches(change: Callable[[int], int]) -> None:
    """Change the number of batches of a validation."""

    @instead_of(train_validation, train_validation.validate)
    def wrong(right: Any, recipe: Any, *arguments: Any) -> float:
        table = replace(recipe.validation, steps=change(recipe.validation.steps))
        return right(replace(recipe, validation=table), *arguments)


@harms("mesh.tp=2", message=VALIDATION)
def validate_on_the_training_batch() -> None:
    """Validation: it reads training rows, in the order of training, from its first step on."""
    right, corpora = batches.make_loader, []

    def wrong(recipe: Any, mesh: Any, corpus: Any, **options: Any) -> Loader:
        # The first loader is that of training.
        corpora.append(corpus)
        return right(recipe, mesh, corpora[0], **options)

    batches.make_loader = train_validation.make_loader = wrong


def _change_learning_rate(change: Callable[[int, OptimTable, int], float]) -> None:
    """Have training and the proof call ``change(step, table, total_steps)``."""
    train_step.learning_rate = verify_worker.learning_rate = change


@harms(f"mesh.tp=2 {NO_MEMORY}", "mesh.tp=2", message="^weight")
@found_by("training", "lr of step 1 is")
def take_the_learning_rate_of_the_next_step() -> None:
    """Learning rate: steps of the schedule are counted from 1."""
    _change_learning_rate(lambda step, table, total: _RIGHT_LEARNING_RATE(step + 1, table, total))


@harms("mesh.dp_shard=2 optim.warmup=10", message="^weight .*step 2")
def take_the_learning_rate_of_the_last_step() -> None:
    """Learning rate: a step has the learning rate of the previous step."""
    _change_learning_rate(
        lambda step, table, total: _RIGHT_LEARNING_RATE(max(step - 1, 0), table, total)
    )


@harms("mesh.tp=2 optim.warmup=10", message="^weight")
@fault_by(_change_learning_rate)
def forget_the_warmup(step: int, table: OptimTable, total: int) -> float:
    """Learning rate: there is no warmup."""
    return max(_RIGHT_LEARNING_RATE(step, table, total), table.lr * (step < table.warmup))


@harms("mesh.tp=2 optim.warmup=10", message="^weight")
@fault_by(_change_learning_rate)
def warm_up_from_nothing(step: int, table: OptimTable, total: int) -> float:
    """Learning rate: the first step of the warmup has a learning rate of 0."""
    if step < table.warmup:
        return table.lr * step / table.warmup
    return _RIGHT_LEARNING_RATE(step, table, total)


@harms("mesh.tp=2", message="^weight")
def decay_to_nothing() -> None:
    """Learning rate: the decay ends at 0, and not at min_lr."""
    _change_learning_rate(
        lambda step, table, total: max(0.0, _RIGHT_LEARNING_RATE(step, table, total) - table.min_lr)
    )


@harms("mesh.tp=2 optim.decay=50", message="^weight")
def decay_to_the_end_of_the_run() -> None:
    """Learning rate: the decay ends with the run, whatever optim.decay sets."""
    _change_learning_rate(
        lambda step, table, total: _RIGHT_LEARNING_RATE(step, replace(table, decay=None), total)
    )


@harms("mesh.tp=2", message="^weight")
@harms("mesh.tp=2 optim.warmup=20", message="^learning rate of step .* of the whole run")
@fault_by(_change_learning_rate)
def decay_in_a_line(step: int, table: OptimTable, total: int) -> float:
    """Learning rate: a cosine decay is linear."""
    return _RIGHT_LEARNING_RATE(step, replace(table, schedule="linear"), total)


@harms("mesh.tp=2 optim.decay=50", message="^learning rate of step")
@fault_by(_change_learning_rate)
def rise_again_after_the_decay(step: int, table: OptimTable, total: int) -> float:
    """Learning rate: it returns to the full one ten steps after the end of the decay."""
    is_over = table.decay and step > table.decay + 9
    return table.lr if is_over else _RIGHT_LEARNING_RATE(step, table, total)


@harms("mesh.dp_shard=2", message=CLIPPED)
@fault_of(train_step, train_step.update_rule)
def forget_to_give_the_bound(right: Any, *arguments: Any) -> train_step.UpdateRule:
    """Clipping: training calls a step without ``optim.clip``."""
    return right(*arguments)._replace(max_norm=0.0)


@harms("mesh.dp_shard=2", message=CLIPPED)
@fault_by(change_clipping)
def clip_with_a_small_constant(parameters: Any, *, norm: float, max_norm: float) -> None:
    """Clipping: the bound is divided by the norm plus 1e-6, as torch's own clipping does."""
    if not norm > max_norm > 0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(max_norm / (norm + 1e-6))


@harms("mesh.dp_shard=2", message="^gradient norm after clipping at step 2")
@fault_by(change_clipping)
def scale_small_gradients_up(parameters: Any, *, norm: float, max_norm: float) -> None:
    """Clipping: gradients whose norm is below the bound are scaled up to it."""
    if max_norm <= 0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(max_norm / norm)


@harms("mesh.dp_shard=2", message=CLIPPED)
@fault_by(change_clipping)
def clip_each_tensor_by_its_own_norm(parameters: Any, *, norm: float, max_norm: float) -> None:
    """Clipping: each gradient is clipped by its own norm."""
    if max_norm <= 0:
        return
    for parameter in parameters:
        own_norm = math.sqrt(float(_norm_sq(parameter.grad)))
        parameter.grad.mul_(min(1.0, max_norm / own_norm))


def _norm_sq(gradient: Tensor) -> Tensor:
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.square().sum()


def _change_groups(**options: Any) -> None:
    """Change options of all of AdamW's parameter groups; each is a function of the right value."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update({key: option(group[key]) for key, option in options.items()})

    change_optimizer(change)


@harms("mesh.dp_shard=2", message="^weight")
def swap_the_betas() -> None:
    """AdamW: the two betas are swapped."""
    _change_groups(betas=lambda betas: betas[::-1])


@harms(f"mesh.dp_shard=2 {NO_MEMORY}", "mesh.dp_shard=2", message="^weight")
def take_another_epsilon() -> None:
    """AdamW: epsilon is 1e-6, whatever the recipe sets."""
    _change_groups(eps=lambda _: 1e-6)


@harms("mesh.dp_shard=2", message="^weight")
def decay_through_the_gradient() -> None:
    """AdamW: weight decay is a penalty in the gradient (L2), as in Adam."""
    _change_groups(decoupled_weight_decay=lambda _: False)
