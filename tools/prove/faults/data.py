"""Faults of what training draws and how it steps: loader, validation, learning rate, clipping,
AdamW's constants.

Those of the loader are planted in the class, so that training and validation have them both.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from composer3d.data import Batch, Loader, loader
from composer3d.models.contract import IGNORE_INDEX
from composer3d.parallel import grad_norm
from composer3d.recipe.schema import OptimTable
from composer3d.training import batches, build, loop, optim
from composer3d.training import step as train_step
from composer3d.verify import worker as verify_worker

_RULE = optim.learning_rate
_ORDER = loader.sample_order


def _change_batches(change: Callable[[Loader, Batch], Batch]) -> None:
    """Have every loader hand out ``change(loader, batch)``."""
    right = Loader.__getitem__
    Loader.__getitem__ = lambda self, step: change(self, right(self, step))


def _change_loaders(change: Callable[[Loader], None]) -> None:
    """Call ``change`` with every loader that has been built."""
    right = Loader.__post_init__

    def wrong(self: Loader) -> None:
        right(self)
        change(self)

    Loader.__post_init__ = wrong


def give_positions_from_the_start_of_the_part() -> None:
    """The loader gives each rank of cp positions 0, 1, 2, and not those of its part."""
    _change_batches(
        lambda _, batch: batch._replace(
            positions_BT=torch.arange(batch.tokens_BT.shape[1]).expand_as(batch.tokens_BT).clone()
        )
    )


def give_positions_of_a_contiguous_part() -> None:
    """The loader gives positions as if the part were one chunk, while it is two."""
    _change_batches(
        lambda self, batch: batch._replace(
            positions_BT=torch.arange(batch.tokens_BT.shape[1]).expand_as(batch.tokens_BT)
            + (self.owned_ranges or [(0, 0)])[0][0]
        )
    )


def load_the_tokens_of_the_other_order() -> None:
    """The loader holds zigzag parts where the stages take contiguous ones, and the other way round."""
    right = batches.owned_ranges
    batches.owned_ranges = lambda *given, balanced: right(*given, balanced=not balanced)


def read_the_rows_of_the_first_rank() -> None:
    """Every loader reads the rows of batch rank 0."""
    _change_loaders(lambda self: setattr(self, "batch_rank", 0))


def label_a_token_with_itself() -> None:
    """Labels are not shifted."""
    _change_batches(lambda _, batch: batch._replace(labels_BT=batch.tokens_BT.clone()))


def label_a_token_with_the_next_but_one() -> None:
    """Labels are shifted once too often."""
    _change_batches(lambda _, batch: batch._replace(labels_BT=batch.labels_BT.roll(-1, 1)))


def label_the_last_token_with_the_first() -> None:
    """Labels are shifted within the row: the first token of the next sample is never a label."""

    def change(_: Loader, batch: Batch) -> Batch:
        labels = batch.labels_BT.clone()
        labels[:, -1] = batch.tokens_BT[:, 0]
        return batch._replace(labels_BT=labels)

    _change_batches(change)


def leave_out_a_token_between_samples() -> None:
    """A sample begins seq_len + 1 tokens after the one before."""

    def change(self: Loader) -> None:
        tokens = self.corpus.tokens
        count = (len(tokens) - 1) // (self.seq_len + 1)
        self._samples = tokens[: count * (self.seq_len + 1)].reshape(count, -1)

    _change_loaders(change)


def take_the_sample_after() -> None:
    """The order of samples begins one late."""
    loader.sample_order = lambda n, seed, first, count: _ORDER(n, seed, first + 1, count)


def repeat_the_first_order() -> None:
    """Every epoch has the order of the first one."""
    right = loader._permutation
    loader._permutation = lambda n, seed, epoch: right(n, seed, 0)  # type: ignore[assignment]


def take_samples_in_the_order_of_the_text() -> None:
    """Nothing is shuffled."""
    loader.sample_order = lambda n, seed, first, count: (
        _ORDER(n, seed, first, count) * 0 + [number % n for number in range(first, first + count)]
    )


def forget_the_seed_of_the_order() -> None:
    """Every run has the order of seed 0."""
    _change_loaders(lambda self: setattr(self, "seed", 0))


def hand_out_a_batch_twice() -> None:
    """Each batch is handed out for two steps."""

    def wrong(self: Loader) -> Iterator[int]:
        while True:
            for _ in range(2):
                yield self.next_step
            self.next_step += 1

    Loader._steps = wrong


def begin_documents_with_the_end_of_the_last() -> None:
    """The token that ends a document is taken for the first of the next one."""
    right = loader.number_documents
    loader.number_documents = lambda ends: right(ends.roll(-1, 1))


def learn_what_follows_a_document() -> None:
    """The last token of a document has token 0 for its label."""
    _change_batches(
        lambda _, batch: batch._replace(
            labels_BT=batch.labels_BT.masked_fill(batch.labels_BT == IGNORE_INDEX, 0)
        )
    )


def validate_by_a_mean_of_batches() -> None:
    """The loss of a validation is the mean over its batches of their mean losses."""

    def wrong(recipe: Any, stages: Any, held_out: Any) -> float:
        held_out_batches = batches.make_loader(recipe, stages.mesh, held_out, seed=0)
        means = []
        for _ in range(recipe.validation.steps):
            parts = train_step.evaluate_batch(stages, next(held_out_batches))
            loss, tokens = stages.mesh.sum_over_world(*parts)
            means.append(loss / max(tokens, 1.0))
        return sum(means) / len(means)

    train_step.validate = wrong


def validate_by_a_mean_of_ranks() -> None:
    """The loss of a validation is the mean over batch ranks of their mean losses."""

    def wrong(recipe: Any, stages: Any, held_out: Any) -> float:
        held_out_batches = batches.make_loader(recipe, stages.mesh, held_out, seed=0)
        steps = range(recipe.validation.steps)
        parts = [train_step.evaluate_batch(stages, next(held_out_batches)) for _ in steps]
        loss, tokens = map(sum, zip(*parts, strict=True))
        (mean,) = stages.mesh.sum_over_world(loss / max(float(tokens), 1.0))
        return mean / stages.mesh.batch_ranks

    train_step.validate = wrong


def _change_validation(**options: Callable[[Any], Any]) -> None:
    """Build the loader of a validation with other options, each made of the recipe."""
    right, make_loader = train_step.validate, train_step.make_loader

    def wrong(recipe: Any, stages: Any, held_out: Any) -> float:
        train_step.make_loader = lambda recipe, mesh, corpus, **given: make_loader(
            recipe, mesh, corpus, **given | {key: option(recipe) for key, option in options.items()}
        )
        try:
            return right(recipe, stages, held_out)
        finally:
            train_step.make_loader = make_loader

    train_step.validate = wrong


def validate_on_rows_that_follow_the_seed() -> None:
    """Validation draws its rows with data.seed, so that runs of two seeds cannot be compared."""
    _change_validation(seed=lambda recipe: recipe.data.seed)


def validate_on_a_batch_less() -> None:
    """The last batch of a validation is left out."""
    _change_number_of_batches(lambda count: count - 1)


def validate_on_a_batch_more() -> None:
    """A validation takes one more batch."""
    _change_number_of_batches(lambda count: count + 1)


def _change_number_of_batches(change: Callable[[int], int]) -> None:
    from dataclasses import replace

    right = train_step.validate

    def wrong(recipe: Any, *given: Any) -> float:
        steps = change(recipe.validation.steps)
        return right(replace(recipe, validation=replace(recipe.validation, steps=steps)), *given)

    train_step.validate = wrong


def validate_on_the_training_batch() -> None:
    """Validation reads the rows that were just trained on: those of the training's order, from its first step."""
    right, seen = batches.make_loader, []

    def wrong(recipe: Any, mesh: Any, corpus: Any, *, seed: int) -> Loader:
        seen.append(corpus)
        return right(recipe, mesh, seen[0], seed=seed)

    batches.make_loader = train_step.make_loader = wrong


def _change_rate(change: Callable[[int, OptimTable, int], float]) -> None:
    loop.learning_rate = verify_worker.learning_rate = change


def take_the_learning_rate_of_the_next_step() -> None:
    """Steps of the schedule are counted from 1."""
    _change_rate(lambda step, table, total: _RULE(step + 1, table, total))


def take_the_learning_rate_of_the_last_step() -> None:
    """The learning rate of a step is set after it."""
    _change_rate(lambda step, table, total: _RULE(max(step - 1, 0), table, total))


def forget_the_warmup() -> None:
    """The first steps have the full learning rate."""
    _change_rate(
        lambda step, table, total: max(_RULE(step, table, total), table.lr * (step < table.warmup))
    )


def warm_up_from_nothing() -> None:
    """The first step of the warmup has a learning rate of 0."""
    _change_rate(
        lambda step, table, total: (
            table.lr * step / table.warmup if step < table.warmup else _RULE(step, table, total)
        )
    )


def decay_to_nothing() -> None:
    """The decay ends at 0, and not at min_lr."""
    _change_rate(lambda step, table, total: max(0.0, _RULE(step, table, total) - table.min_lr))


def decay_to_the_end_of_the_run() -> None:
    """The decay ends with the run, whatever optim.decay says."""
    from dataclasses import replace

    _change_rate(lambda step, table, total: _RULE(step, replace(table, decay=None), total))


def decay_in_a_line() -> None:
    """The decay is linear where it is to be a cosine."""
    from dataclasses import replace

    _change_rate(lambda step, table, total: _RULE(step, replace(table, schedule="linear"), total))


def rise_again_after_the_decay() -> None:
    """Past the end of the decay the learning rate is the full one again."""
    _change_rate(
        lambda step, table, total: (
            table.lr if table.decay and step > table.decay + 9 else _RULE(step, table, total)
        )
    )


def clip_with_a_small_constant() -> None:
    """Gradients are divided by the norm plus 1e-6, as ``torch.nn.utils.clip_grad_norm_`` does."""

    def wrong(parameters: Any, *, norm: float, max_norm: float) -> None:
        for parameter in parameters if norm > max_norm > 0 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(max_norm / (norm + 1e-6))

    grad_norm.scale_gradients = wrong


def scale_small_gradients_up() -> None:
    """Gradients whose norm is below the bound are scaled up to it."""

    def wrong(parameters: Any, *, norm: float, max_norm: float) -> None:
        for parameter in parameters if max_norm > 0 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(max_norm / norm)

    grad_norm.scale_gradients = wrong


def clip_each_tensor_by_its_own_norm() -> None:
    """Each gradient is clipped to the bound, by its own norm."""

    def wrong(parameters: Any, *, norm: float, max_norm: float) -> None:
        for parameter in parameters if max_norm > 0 else ():
            own = math.sqrt(float(_square(parameter.grad)))
            parameter.grad.mul_(min(1.0, max_norm / own))

    grad_norm.scale_gradients = wrong


def _square(gradient: Tensor) -> Tensor:
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.square().sum()


def _change_groups(**options: Any) -> None:
    right = verify_worker.build_optimizer

    def wrong(*given: Any) -> torch.optim.Optimizer:
        optimizer = right(*given)
        for group in optimizer.param_groups:
            group.update({key: option(group[key]) for key, option in options.items()})
        return optimizer

    verify_worker.build_optimizer = build.build_optimizer = wrong


def swap_the_betas() -> None:
    """AdamW: the decay of the first moment is that of the second."""
    _change_groups(betas=lambda betas: betas[::-1])


def take_another_epsilon() -> None:
    """AdamW: epsilon is 1e-6 and not what the recipe says."""
    _change_groups(eps=lambda _: 1e-6)


def decay_through_the_gradient() -> None:
    """Adam with a penalty in the gradient (L2) instead of AdamW's decay."""
    _change_groups(decoupled_weight_decay=lambda _: False)
