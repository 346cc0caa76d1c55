"""The learning rate of a step."""

import math

from composer3d.recipe.schema import OptimTable


def learning_rate(step: int, table: OptimTable, total_steps: int) -> float:
    """Compute the learning rate of a step.

    It is a pure function of the step, so a resumed run needs no scheduler state.

    The rate rises linearly during the warmup and reaches ``lr`` in its last step. After that:

    - "constant" stays at ``lr``.
    - "cosine" and "linear" decay from the step after the warmup.
    - "wsd" (warmup, stable, decay: Hu et al. 2024, "MiniCPM") stays at ``lr``, and decays linearly
      over ``decay_steps`` steps, of which step ``decay`` is the last. By default they are a tenth
      of ``decay``. The decay never starts before the warmup has ended.

    A decay reaches ``min_lr`` in step ``decay``, counted from 1 (default: ``total_steps``), and
    stays there.

    Args:
        step: the number of the step, counted from 0.
        table: the recipe's ``[optim]``.
        total_steps: ``run.steps``.
    """
    if step < table.warmup:
        return table.lr * (step + 1) / table.warmup

    start = table.warmup
    end = total_steps if table.decay is None else table.decay
    if table.schedule == "wsd":
        decay_steps = table.decay_steps or max(1, end // 10)
        start = max(start, end - decay_steps)
    if table.schedule == "constant" or step < start:
        return table.lr

    progress = min(1.0, (step + 1 - start) / max(1, end - start))
    if table.schedule == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        remaining = 1.0 - progress
    return table.min_lr + (table.lr - table.min_lr) * remaining
