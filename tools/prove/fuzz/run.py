"""Change sound inputs at random, and require that each is refused, or read rightly.

recipes       composer3d check: refused with the place, or a recipe whose parts agree
tokens        folders of token files: refused, or the same tokens
checkpoints   of training runs: refused, or bitwise the same values
folders       of Hugging Face: refused, or converted exactly
tokenizers    composer3d prepare: refused, or a whole folder of token files

Each case has a number. ``--case KIND:NUMBER`` runs one again, and prints what it did.

Exit status: 0 if all cases are right, 1 if one is not, 2 if the arguments are wrong.
"""

import importlib
import os
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.prove.proof import add_number, make_parser

KINDS = {
    "recipes": 2000,
    "tokens": 500,
    "checkpoints": 500,
    "folders": 300,
    "tokenizers": 200,
}
SEED = 1
_SHOWN_FINDINGS = 40
# Among so many cases of a kind, some are accepted.
_MANY = 50


class Tally(NamedTuple):
    """What became of the cases of a kind: how many had each outcome, and what went wrong."""

    outcomes: Counter[str]
    findings: list[str]
    seconds: float


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("fuzz", __doc__)
    for kind, count in KINDS.items():
        add_number(parser, f"--{kind}", count, "the number of cases")
    add_number(parser, "--seed", SEED, "of all cases")
    add_number(parser, "--first", 0, "the number of the first case")
    parser.add_argument("--case", metavar="KIND:NUMBER", help="run only this case")
    add_number(parser, "--jobs", os.cpu_count() or 1, "cases at a time", least=1)
    parser.add_argument("--keep", metavar="DIR", help="keep the folder of --case here")
    options = parser.parse_args(arguments)
    first = options.first
    counts = {kind: range(first, first + getattr(options, kind)) for kind in KINDS}
    if options.case:
        kind, _, number = options.case.partition(":")
        if kind not in KINDS or not number.isdecimal():
            parser.error(f"--case {options.case}: write KIND:NUMBER, such as recipes:12")
        counts = {kind: range(int(number), int(number) + 1)}
    if not any(counts.values()):
        parser.error("there is no case to run")

    from tools.prove.hostile.case import proof_folder

    with proof_folder() as place:
        root = Path(place)
        # This imports torch: not before the arguments are right.
        from composer3d.runtime.launch import Pool

        with Pool() as pool:
            base = make_base(root, {kind for kind, numbers in counts.items() if numbers}, pool)
        n_wrong = 0
        for kind, numbers in counts.items():
            if numbers:
                tally = try_all(
                    kind,
                    numbers,
                    options.seed,
                    root,
                    base,
                    jobs=options.jobs,
                    shows=options.case is not None,
                    keep=options.keep if options.case else None,
                )
                if len(numbers) >= _MANY and set(tally.outcomes) == {"refused"}:
                    tally.findings.append(
                        f"WRONG {kind}: every case is refused, so the input that they change may "
                        "not be sound"
                    )
                n_wrong += len(tally.findings)
                for finding in tally.findings[:_SHOWN_FINDINGS]:
                    print(finding)
                print(f"{kind:<12} {len(numbers):>5} in {tally.seconds:4.0f} s:", end=" ")
                print(
                    ", ".join(f"{count} {name}" for name, count in tally.outcomes.most_common())
                    + (f", {len(tally.findings)} WRONG" if tally.findings else ""),
                    flush=True,
                )
    return 1 if n_wrong else 0


def make_base(root: Path, kinds: set[str], pool: Any) -> Path:
    """Make the sound inputs that the cases of ``kinds`` change, in ``root``/base."""
    from tools.prove.hostile import base as hostile_base
    from tools.prove.hostile.case import prepare_outside

    prepare_outside(root)
    base = root / "base"
    if kinds <= {"recipes", "tokens"}:
        base.mkdir()
        (base / "recipe.toml").write_text(hostile_base.RECIPE)
    else:
        hostile_base.make_base(base, pool)
    if "checkpoints" in kinds:
        _module("checkpoints").make_base(base, pool)
    for kind in sorted(kinds & {"tokens", "folders", "tokenizers"}):
        _module(kind).make_base(base)
    return base


def _module(kind: str) -> Any:
    return importlib.import_module(f"tools.prove.fuzz.{kind}")


def try_all(
    kind: str,
    numbers: Sequence[int],
    seed: int,
    root: Path,
    base: Path,
    *,
    jobs: int,
    shows: bool = False,
    keep: str | None = None,
) -> Tally:
    """Run the cases ``numbers`` of a kind.

    Args:
        kind: a name in KINDS.
        numbers: the cases.
        seed: the seed of all cases.
        root: the folder in which each case gets a folder of its own.
        base: the sound inputs, as ``make_base`` has made them.
        jobs: how many cases run at a time.
        shows: whether to print what each case did.
        keep: a folder to which the folders of the cases are copied.
    """
    from tools.prove.fuzz.child import Running, observe, warm_up

    warm_up()
    maker = _module(kind).make
    waiting, running = list(reversed(numbers)), dict[int, Running]()
    outcomes: Counter[str] = Counter()
    findings = []
    begin = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            number = waiting.pop()
            folder = root / f"{kind}-{number}"
            running[number] = observe(maker, base, folder, f"{seed} {kind} {number}")
        for number, each in list(running.items()):
            verdict = each.poll()
            if verdict is None:
                continue
            del running[number]
            name = f"{kind}:{number} (seed {seed})  {verdict.change}"
            if verdict.outcome:
                outcomes[verdict.outcome] += 1
            else:
                findings.append("\n  ".join([f"WRONG {name}", *verdict.problems]))
            if shows:
                print(name, verdict.output, verdict.outcome, sep="\n")
                print(f"{verdict.cpu_s:.2f} s of CPU time, {verdict.peak_mib:.0f} MiB")
            folder = root / f"{kind}-{number}"
            if keep is not None:
                subprocess.run(["cp", "-a", str(folder), keep], check=True)
            # shutil.rmtree cannot remove the deepest folders.
            subprocess.run(["rm", "-rf", str(folder)], check=True)
        time.sleep(0.002)
    return Tally(outcomes, findings, time.monotonic() - begin)
