"""Prove random layouts: ``verify`` must call none of them wrong, and find every planted fault.

A layout is a random row of the covering matrix with random values of all other keys that a proof
reads: sizes that the matrix does not vary, sets of frozen parameters, extreme optimizers, sequences
of one token. The layouts are drawn with a seed, small worlds more often. A layout that ``check``
accepts must not be refused later, when it is composed. A layout whose settings let rounding grow
too far to be judged in float32 is proven in float64 instead.

With ``--faults``, each fault of ``tools/prove/faults`` that ``verify`` looks for is planted in its
own layout with such random settings. A layout that is refused only with its fault is found, too.
Some settings leave a fault without effect: a wrong mask changes nothing in sequences of one token.
So a fault that is not found is only wrong if it has an effect, measured by code that knows nothing
of rounding (``largest_effect``). An effect on a weight counts above the bound that ``verify``
states: tiny learning rates and clipped norms make that of any fault as small as one likes.

Exit status: 0 if all is right, 1 if not.
"""

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from composer3d.facts.errors import UserError
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool
from composer3d.verify import proof
from composer3d.verify.judge import EXACT, RankErrors, ReferenceStats, Verdict
from tools.prove.matrix import cover as matrix
from tools.prove.paths import RECIPE
from tools.prove.proof import add_number, make_parser

STEPS = 3
# Further settings of a layout. Half of the layouts have the first value of a key; "" leaves it out.
SETTINGS: dict[str, tuple[str, ...]] = {
    "run.steps": ("", "1", "7", "1000000"),
    "data.seq_len": ("", "1", "2", "3", "7", "16", "96"),
    "data.packing": ("", "documents", "whole_documents"),
    "data.seed": ("", "12345"),
    "model.window": ("", "1", "2", "5"),
    "model.full_every": ("", "2", "3"),
    "model.nope_every": ("", "1", "2", "3"),
    "model.dim": ("", "128", "320"),
    "model.head_dim": ("", "2", "12"),
    "model.ffn": ("", "96"),
    "model.norm_eps": ("", "1e-20", "1e-6", "1e-2", "1.0"),
    "model.rope_theta": ("", "1.0", "1e12"),
    "model.rope_factor": ("", "8.0"),
    "model.rope_scaling": ("", "linear", "dynamic", "yarn"),
    "model.rope_low_freq": ("", "0.5"),
    "model.rope_high_freq": ("", "8.0"),
    "model.rope_context": ("", "4", "131072"),
    "model.rope_beta_fast": ("", "64.0"),
    "model.rope_beta_slow": ("", "0.5"),
    "model.rope_truncate": ("", "false"),
    "model.rope_attention_factor": ("", "1.5"),
    "model.experts": ("", "16"),
    "model.experts_per_token": ("", "1", "4"),
    "model.expert_groups": ("", "2"),
    "model.group_best": ("", "one"),
    "model.router_scale": ("", "1e-3", "100.0"),
    "model.shared_gate": ("", "true"),
    "model.bias_rate": ("", "0.0", "1.0"),
    "model.balance_loss": ("", "1e-6", "100.0"),
    "model.z_loss": ("", "1e-6", "10.0"),
    "parallel.virtual_stages": ("", "1", "2", "3"),
    "parallel.stages": ("", "[1,3]", "[2,1]", "[1,1,2,1]"),
    "memory.activation_checkpoint": ("", "every 2 blocks", "selective in the first 1 stages"),
    "memory.loss_chunks": ("", "7"),
    "precision.reduce": ("", "bfloat16"),
    "precision.matmul": ("", "float8"),
    "optim.lr": ("", "10.0", "1e-2", "1e-5", "1e-30"),
    "optim.min_lr": ("", "1e-6"),
    "optim.schedule": ("", "linear", "wsd", "constant"),
    "optim.warmup": ("", "1", "1000000"),
    "optim.decay": ("", "1", "1000"),
    "optim.decay_steps": ("", "1", "100"),
    "optim.eps": ("", "1e-30", "1e-15", "1e-4", "0.9"),
    "optim.betas": (
        *("", "[0.9, 0.0]", "[0.0, 0.0]", "[0.0, 0.999]", "[0.999999, 0.95]", "[0.9, 0.999999]"),
        *("[0.999999, 0.999999]", "[0.95, 0.999999999]"),
    ),
    "optim.weight_decay": ("", "0.0", "1.0", "10.0"),
    "optim.clip": ("", "0.0", "1e-12", "1e9"),
    "optim.train": (
        *("", '["blocks.*.attn.wq.weight"]', '["blocks.*.attn.w[qk].weight"]'),
        *('["blocks.*.attn.*"]', '["blocks.0.*"]', '["blocks.1.*"]'),
        *('["blocks.*.ffn.w2.weight","last.head.weight"]', '["*norm.weight"]', '["*.bias"]'),
        *('["first.*"]', '["last.*"]', '["first.*","last.*"]', '["*.router.weight"]'),
        *('["*.experts.*"]', '["*.experts.*","blocks.*.attn.wv.weight"]'),
    ),
    "optim.groups": (
        "",
        '[{train=["blocks.1.*"],lr_factor=0.25},{train=["*"],weight_decay=1.0}]',
        '[{train=["blocks.*.attn.w[qk].weight","*norm.weight"],lr_factor=3.0,weight_decay=0.3}]',
        '[{train=["first.*"],lr_factor=1000.0},{train=["*.experts.*"],lr_factor=0.001}]',
    ),
    "optim.name": ("", "muon"),
    "optim.matrices": ("", '["blocks.*.attn.w[qk].weight"]', '["blocks.*","last.*"]'),
    "optim.matrix_lr": ("", "1e-2", "1e-5"),
    "optim.lr_scale": ("", "original"),
    "optim.momentum": ("", "0.0", "0.9999"),
    "optim.nesterov": ("", "false"),
    "optim.newton_schulz": ("", "[2.0,-1.5,0.5]"),
    "optim.newton_schulz_steps": ("", "1", "3"),
}
# Float8 is proven in float64 alone.
FLOAT64_ONLY = ("precision.matmul",)
# An effect of a fault on a gradient, relative to all gradients, or on a loss or weight, relative to
# itself. Exact layouts differ by less.
EFFECT = 1e-12


def layouts(
    count: int, seed: int = 32, *, has_experts: bool | None = None, dtype: str = "float64"
) -> Iterator[list[str]]:
    """Draw layouts, as overrides of ``tools/prove/verify.toml``. By default, some have experts.

    A seed always gives the same sequence, so a smaller ``count`` gives the first ones of it.
    """
    generator = random.Random(seed)
    while count:
        fixed = matrix.NO_EXPERTS if has_experts is False else ()
        if generator.random() < 0.4:
            # Most rows of the matrix have a pipeline.
            fixed = (*fixed, ("schedule", "none"))
        row = matrix.complete(fixed, generator)
        if row is None or has_experts not in (None, matrix.has_experts(row)):
            continue
        # A world of twice the size is a quarter as frequent. A compiled layout takes a minute of
        # all cores.
        chance = 0.01 if row["compile"] == "yes" else 4 / matrix.world(row) ** 2
        if generator.random() > chance:
            continue
        sets = [*matrix.sets(row), f"run.seed={generator.randrange(1 << 30)}"]
        yield add_settings(sets, generator, RECIPE, dtype)
        count -= 1


def add_settings(
    sets: list[str], generator: random.Random, recipe: Path, dtype: str = "float64"
) -> list[str]:
    """Add random settings to the overrides of a recipe, as far as they are legal together."""
    for key, values in SETTINGS.items():
        value = values[0] if generator.random() < 0.5 else generator.choice(values)
        changed = [*(each for each in sets if each.split("=")[0] != key), f"{key}={value}"]
        if dtype == "float32" and key in FLOAT64_ONLY:
            continue
        if value and is_legal(changed, recipe):
            sets = changed
    return sets


def recipe_of(sets: list[str], recipe: Path = RECIPE) -> Recipe:
    return load(recipe, sets).recipe


def is_legal(sets: list[str], recipe: Path = RECIPE) -> bool:
    """Whether ``check`` accepts a layout; it also reads the file of a schedule."""
    try:
        recipe_of(sets, recipe)
    except UserError:
        return False
    return True


class Outcome(NamedTuple):
    """The verdict, and the result of ``largest_effect``; infinite if the ranks did not end."""

    verdict: Verdict
    effect: float


def prove(
    pool: Pool,
    folder: Path,
    sets: list[str],
    dtype: str,
    recipe: Path = RECIPE,
    fault: Callable[[], None] | None = None,
) -> Outcome:
    """Run ``verify`` on a layout, and measure its errors once more."""
    effects: list[float] = []

    def record(verdict: Verdict, ranks: Any, small: Recipe, stats: ReferenceStats) -> Verdict:
        effects.append(
            largest_effect(
                ranks, stats, EXACT[dtype], in_weights=0.0 if fault is None else EXACT[dtype]
            )
        )
        return judge(verdict, ranks, small, stats)

    judge = proof.judge
    with mock.patch.object(proof, "judge", record):
        verdict = proof.verify_layout(
            pool, folder, str(recipe), sets, dtype=dtype, steps=STEPS, fault=fault
        )
    return Outcome(verdict, max(effects, default=math.inf))


def largest_effect(
    ranks: Sequence[RankErrors], stats: ReferenceStats, exact: float, *, in_weights: float
) -> float:
    """The largest error of all ranks, without regard to what rounding explains.

    Errors of gradients and of their norm are relative to the norm of the gradients of all
    parameters, those of losses and weights to themselves. A loss or a norm whose error is at most
    ``exact``, the bound that ``verify`` states, is right; and so is a weight whose error is at most
    ``in_weights``. The result is infinite if something cannot be compared, or breaks a rule.
    """

    def beyond_bound(error: float) -> float:
        return 0.0 if error <= exact else error

    norms = [math.hypot(*of_step.values()) for of_step in stats.norms["gradient"]]
    shares = [_ratio(norm, whole) for norm, whole in zip(norms, stats.norms_of_all, strict=True)]
    largest = 0.0
    for rank in ranks:
        if rank.broken_rule:
            return math.inf
        errors = [beyond_bound(error) for error in rank.loss]
        for step, share in enumerate(shares):
            errors.append(beyond_bound(rank.norm[step]) * share)
            clipped = beyond_bound(rank.clipped[step])
            errors.append(clipped * (1.0 if stats.clips[step] else share))
        for shard in rank.shards:
            if shard.problem:
                return math.inf
            if shard.kind == "gradient":
                error = _ratio(math.sqrt(shard.diff_sq), stats.norms_of_all[shard.step])
            else:
                norm = stats.norms["weight"][shard.step].get(shard.name, 0.0)
                error = _ratio(math.sqrt(shard.diff_sq), norm)
                error = 0.0 if error <= in_weights else error
            errors.append(error)
        largest = max([largest, *(math.inf if math.isnan(error) else error for error in errors)])
    return largest


def _ratio(error: float, scale: float) -> float:
    if error == 0:
        return 0.0
    return error / scale if scale else math.inf


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("random", __doc__)
    add_number(parser, "--count", 400, "the number of layouts", least=1)
    parser.add_argument(
        "--part",
        default="1/1",
        metavar="I/N",
        help="prove every Nth layout, from the Ith on; default: all",
    )
    add_number(parser, "--seed", 32, "of the random numbers")
    parser.add_argument(
        "--dtype", choices=("float32", "float64"), default="float64", help="default: %(default)s"
    )
    parser.add_argument("--experts", action="store_true", help="layouts with experts alone")
    parser.add_argument("--faults", action="store_true", help="plant faults in random settings")
    options = parser.parse_args(arguments)
    first, step = map(int, options.part.split("/"))
    if not 1 <= first <= step:
        parser.error(f"--part {options.part}: write I/N, with I from 1 to N")
    part = slice(first - 1, None, step)

    begin = time.monotonic()
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-random-") as folder:
        if options.faults:
            n_right, count = prove_faults(pool, Path(folder), options.seed, options.dtype, part)
            what = "faults are found or have no effect"
        else:
            drawn = layouts(
                options.count,
                options.seed,
                has_experts=options.experts or None,
                dtype=options.dtype,
            )
            chosen = list(enumerate(drawn, 1))[part]
            n_right, count = prove_layouts(pool, Path(folder), chosen, options.dtype), len(chosen)
            what = "layouts are exact"
    minutes = (time.monotonic() - begin) / 60
    print(f"{n_right} of {count} {what} in {options.dtype}, in {minutes:.1f} minutes")
    return 0 if n_right == count > 0 else 1


def prove_layouts(
    pool: Pool, folder: Path, chosen: Sequence[tuple[int, list[str]]], dtype: str
) -> int:
    """Prove layouts, print a line for each, and return the number of exact ones."""
    n_exact = 0
    for number, sets in chosen:
        verdict, _ = prove(pool, folder, sets, dtype)
        if verdict.undecided and dtype == "float32":
            # Its settings let rounding grow too far for float32. That must not hide an error.
            verdict, _ = prove(pool, folder, sets, "float64")
            verdict.layout += ", in float64"
        n_exact += verdict.passed
        word = "exact" if verdict.passed else "LATE " if verdict.refused else "WRONG"
        errors = (verdict.max_grad_rel_err, verdict.max_weight_rel_err)
        shown = ["-" if error is None else f"{error:.0e}" for error in errors]
        print(
            f"{number:>3} {word}  gradients {shown[0]}  weights {shown[1]}  {verdict.layout}",
            flush=True,
        )
        if not verdict.passed:
            print(f"    {verdict.error}\n    {' '.join(sets)}", flush=True)
    return n_exact


def faulty_layouts(seed: int, dtype: str) -> list[tuple[Any, list[str]]]:
    """Draw settings for each fault that ``verify`` looks for: faults with overrides."""
    # It imports torch: not before the arguments are right.
    from tools.prove.faults.table import FAULTS

    generator = random.Random(seed)
    out = []
    for fault in FAULTS:
        if fault.check == "verify":
            # What a fault harms must stay.
            fixed = fault.layout.split()
            drawn = add_settings(fixed, generator, fault.recipe, dtype)
            keys = {each.split("=")[0] for each in fixed}
            added = [each for each in drawn if each.split("=")[0] not in keys]
            sets = [*fixed, *added]
            out.append((fault, sets if is_legal(sets, fault.recipe) else fixed))
    return out


def prove_faults(pool: Pool, folder: Path, seed: int, dtype: str, part: slice) -> tuple[int, int]:
    """Plant faults in random settings; return how many are found or have no effect, of how many."""
    n_right, chosen = 0, faulty_layouts(seed, dtype)[part]
    for fault, sets in chosen:
        verdict, effect = prove(pool, folder, sets, dtype, fault.recipe, fault.plant)
        word = "caught   "
        if verdict.passed or verdict.refused or verdict.undecided:
            word = "SURVIVED "
            healthy, usual_effect = prove(pool, folder, sets, dtype, fault.recipe)
            if verdict.refused:
                word = "LATE     " if healthy.refused else "caught   "
            elif (healthy.passed or healthy.undecided) and effect <= max(EFFECT, 10 * usual_effect):
                word = "no effect"
        n_right += word in ("caught   ", "no effect")
        print(f"{word} {fault.plant.__name__}: {verdict.layout}", flush=True)
        if word != "caught   ":
            print(f"    {effect:.0e} {verdict.error}\n    {' '.join(sets)}", flush=True)
    return n_right, len(chosen)
