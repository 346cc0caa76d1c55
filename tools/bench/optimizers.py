"""How many steps Muon needs for the validation loss of AdamW, on the quickstart recipes.

AdamW trains the recipe's own steps. Muon has fewer, with a learning rate schedule that ends with
them. Both take their rate from the same grid: the one with the lowest validation loss for the
first seed. Then both train with further seeds.
"""

import statistics

from tools.bench.quickstarts import DENSE, EXPERTS, SEEDS, last_loss, train
from tools.bench.tables import print_head, print_row

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
ADAMW_STEPS = 250  # of the recipes
MUON_STEPS = 187  # three quarters
STEPS = {"adamw": ADAMW_STEPS, "muon": MUON_STEPS}
RECIPES = {"quickstart": (DENSE, ()), "quickstart-moe": (EXPERTS, ("mesh.ep=1",))}


def report(python: str) -> None:
    """Print the last validation loss of each recipe, optimizer, rate and seed."""
    print_head("recipe", "optimizer", "steps", "rate", "seeds", "validation loss", "mean")
    for recipe in RECIPES:
        for optimizer in STEPS:
            tried = {}
            for rate in RATES:
                tried[rate] = [_last_loss(python, recipe, optimizer, rate, SEEDS[0])]
                _print_row(recipe, optimizer, rate, tried[rate])
            best = min(tried, key=tried.__getitem__)
            losses = tried[best]
            losses += [_last_loss(python, recipe, optimizer, best, seed) for seed in SEEDS[1:]]
            _print_row(recipe, optimizer, best, losses)


def _last_loss(python: str, recipe: str, optimizer: str, rate: float, seed: int) -> float:
    path, sets = RECIPES[recipe]
    overrides = (
        *sets,
        f"run.seed={seed}",
        f"run.steps={STEPS[optimizer]}",
        f'optim.name="{optimizer}"',
        f"optim.lr={rate}",
        f"optim.min_lr={rate / 10}",
        "validation.every=1000",  # the end of a run always validates
        "validation.steps=16",
    )
    return last_loss(train(python, path, overrides))


def _print_row(recipe: str, optimizer: str, rate: float, losses: list[float]) -> None:
    shown = ", ".join(f"{loss:.4f}" for loss in losses)
    seeds = ", ".join(map(str, SEEDS[: len(losses)]))
    mean = f"{statistics.mean(losses):.4f}"
    print_row(recipe, optimizer, STEPS[optimizer], f"{rate:g}", seeds, shown, mean)
