"""Prove random layouts in float32: ``verify`` must call none of them wrong.

A layout is a random row of the covering matrix, with random settings of the optimizer, a random
seed, and sizes that the matrix does not vary. The layouts are drawn with a fixed seed, small
worlds more often. With ``--experts`` all of them have experts. Where two experts score almost the
same, rounding chooses: ``verify`` must find weights without such a tie.

Exit status: 0 if all are exact, 1 if one is not.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.spec.errors import UserError
from composer3d.verify.proof import verify_layout
from tools.prove.matrix import cover as matrix
from tools.prove.paths import RECIPE

STEPS = 3
# Further settings of a layout; the first value of each is the most frequent one.
SETTINGS: dict[str, tuple[str, ...]] = {
    "data.seq_len": ("48", "1", "7", "16", "96"),
    "model.window": ("", "1", "5"),
    "model.dim": ("", "128", "320"),
    "model.head_dim": ("", "12"),
    "model.norm_eps": ("1e-5", "1e-6", "1e-2"),
    "optim.lr": ("3e-4", "1e-2", "1e-5"),
    "optim.eps": ("1e-8", "1e-15", "1e-4"),
    "optim.betas": ("[0.9, 0.95]", "[0.0, 0.999]", "[0.95, 0.0]"),
    "optim.weight_decay": ("0.1", "0.0", "1.0"),
    "optim.clip": ("1.0", "0.0"),
}


def layouts(count: int, seed: int = 32, *, has_experts: bool = False) -> Iterator[list[str]]:
    """Draw layouts, as overrides of ``tools/prove/verify.toml``.

    A seed always gives the same sequence, so a smaller ``count`` gives the first ones of it.
    """
    generator = random.Random(seed)
    while count:
        row = matrix.complete(() if has_experts else matrix.NO_EXPERTS, generator)
        if row is None or matrix.has_experts(row) != has_experts:
            continue
        # A world of twice the size is a quarter as frequent. A compiled layout takes a minute of
        # all cores.
        chance = 0.01 if row["compile"] == "yes" else 4 / matrix.world(row) ** 2
        if generator.random() > chance:
            continue
        sets = [*matrix.sets(row), f"run.seed={generator.randrange(1 << 30)}"]
        for key, values in SETTINGS.items():
            value = values[0] if generator.random() < 0.5 else generator.choice(values)
            if value and is_legal([*sets, f"{key}={value}"]):
                sets.append(f"{key}={value}")
        yield sets
        count -= 1


def world(sets: list[str]) -> int:
    """The number of processes of a layout."""
    return load(RECIPE, sets, check_files=False).recipe.world_size


def is_legal(sets: list[str]) -> bool:
    try:
        load(RECIPE, sets, check_files=False)
    except UserError:
        return False
    return True


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/prove/run float32",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--count",
        type=int,
        default=200,
        metavar="N",
        help="the number of layouts; default: %(default)s",
    )
    parser.add_argument(
        "--part",
        default="1/1",
        metavar="I/N",
        help="prove every Nth layout, from the Ith on; default: all",
    )
    parser.add_argument("--experts", action="store_true", help="layouts with experts")
    options = parser.parse_args(arguments)
    first, step = map(int, options.part.split("/"))
    drawn = layouts(options.count, has_experts=options.experts)
    chosen = list(drawn)[first - 1 :: step]
    begin, n_exact = time.monotonic(), 0
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-float32-") as folder:
        for number, sets in enumerate(chosen, 1):
            verdict = verify_layout(
                pool, Path(folder), str(RECIPE), sets, dtype="float32", steps=STEPS
            )
            n_exact += verdict.passed
            word = "exact" if verdict.passed else "WRONG"
            error = verdict.max_grad_rel_err
            shown = "-" if error is None else f"{error:.0e}"
            print(f"{number:>3} {word}  gradients {shown}  {verdict.layout}", flush=True)
            if not verdict.passed:
                print(f"    {verdict.error}\n    {' '.join(sets)}", flush=True)
    minutes = (time.monotonic() - begin) / 60
    print(f"{n_exact} of {len(chosen)} layouts are exact in float32, in {minutes:.1f} minutes")
    return 0 if n_exact == len(chosen) else 1
