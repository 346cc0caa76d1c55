"""Take configurations of other programs through import, check, plan, dryrun and verify.

    bash tools/prove/run imports                                # all of them, at full size
    bash tools/prove/run imports moe-64e-1024                   # one of them
    bash tools/prove/run imports moe-64e-1024 --steps verify    # one step, after the import
    bash tools/prove/run imports --record done.txt              # leaves out what done.txt has

The configurations stand beside this file. Each step is a process of its own with a limit of time,
as a user would start it. A step holds if its exit status is 0, the recipe has the GPUs of the text,
the dry run is one of all of them, and verify calls the layout exact. ``--record FILE`` adds a line
for each step that holds, so that a proof that was interrupted goes on.

Exit status: 0 if every step holds, 1 if one does not.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tools.prove.proof import make_parser

FOLDER = Path(__file__).resolve().parent
CONFIGURATIONS = {
    path.stem: path for path in sorted(FOLDER.iterdir()) if path.suffix in (".sh", ".txt")
}
# The open points of each text, all of them defaults of Megatron-LM or what the text says twice.
_MODEL = ("disable_bias_linear", "attention_dropout", "hidden_dropout")
_GPT = ("swiglu", "normalization", "position_embedding_type", *_MODEL)
ACCEPTED = {
    "megatron-175b-512": _GPT,
    "megatron-deepspeed-16": (*_GPT, "vocab_size", "gradient_accumulation_steps"),
    "moe-64e-1024": _MODEL,
}
STEPS = ("import", "check", "plan", "dryrun", "verify")
LIMIT_S = 3600.0


class Outcome(NamedTuple):
    """What a step has given: why it does not hold, or nothing; and the figures of its line."""

    problem: str
    shown: str


def arguments_of(step: str, configuration: Path, recipe: Path) -> list[str]:
    """Return the command line of one of STEPS; ``recipe`` is what the import makes."""
    match step:
        case "import":
            accepts = [f"--accept={key}" for key in ACCEPTED[configuration.stem]]
            return ["import", str(configuration), "-o", str(recipe), *accepts]
        case "plan":
            return ["plan", str(recipe), "--top", "1"]
        case _:
            return [step, str(recipe)]


def judge(step: str, answer: dict[str, Any], gpus: int) -> Outcome:
    """Say whether the answer of a step, its JSON, is right; ``gpus`` are those of the text."""
    match step:
        case "import" | "check" | "dryrun":
            world = answer["world_size"]
            problem = "" if world == gpus else f"it has {world} ranks, and the text {gpus}"
            shown = f"{world} ranks"
            if step == "dryrun":
                shown += f", peak {max(stage['peak_gib'] for stage in answer['stages']):.1f} GiB"
            return Outcome(problem, shown)
        case "plan":
            legal = answer["legal"]
            return Outcome("" if answer["layouts"] else "no layout", f"{legal:,} legal layouts")
        case _:
            errors = [answer[key] for key in answer if key.endswith("_rel_err")]
            shown = f"{answer['layout']}, worst relative error {max(errors):.0e}"
            return Outcome("" if answer["passed"] is True else "not exact", shown)


def gpus_of(name: str) -> int:
    """Return the GPUs of a configuration, with which its name ends."""
    return int(name.rpartition("-")[2])


def main(arguments: list[str]) -> int:
    """Run the chosen steps of the chosen configurations; returns the exit status."""
    parser = make_parser("imports", __doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CONFIGURATIONS))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, metavar="STEP")
    parser.add_argument("--record", type=Path, help="a file of the steps that hold already")
    options = parser.parse_args(arguments)
    if CONFIGURATIONS.keys() != ACCEPTED.keys():
        parser.error(f"{FOLDER} has not the configurations {', '.join(ACCEPTED)}")
    names = options.names or list(CONFIGURATIONS)
    unknown = [name for name in names if name not in CONFIGURATIONS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; use {', '.join(CONFIGURATIONS)}")
    done: set[str] = set()
    if options.record is not None and options.record.exists():
        done = {" ".join(line.split()[:2]) for line in options.record.read_text().splitlines()}

    failed = 0
    with tempfile.TemporaryDirectory(prefix="composer3d-imports-") as folder:
        for name in names:
            recipe = Path(folder, f"{name}.toml")
            for step in STEPS:
                # The other steps read the recipe of the import, which takes no second.
                if step != "import" and (step not in options.steps or f"{name} {step}" in done):
                    continue
                line, holds = _run(name, step, arguments_of(step, CONFIGURATIONS[name], recipe))
                print(line, flush=True)
                failed += not holds
                if holds and options.record is not None and f"{name} {step}" not in done:
                    with options.record.open("a") as file:
                        file.write(f"{line}\n")
                if step == "import" and not holds:
                    break
    return 1 if failed else 0


def _run(name: str, step: str, command: list[str]) -> tuple[str, bool]:
    """Run a step; return its line and whether it holds."""
    start = time.monotonic()
    output = ""
    try:
        result = subprocess.run(
            [sys.executable, "-m", "composer3d", *command, "--json"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        output = result.stdout + result.stderr
        outcome = Outcome(f"exit status {result.returncode}", "")
        if result.returncode == 0:
            answer = json.loads(result.stdout.splitlines()[-1])
            outcome = judge(step, answer, gpus_of(name))
    except subprocess.TimeoutExpired:
        outcome = Outcome(f"not done after {LIMIT_S:.0f} s", "")
    word = f"FAILED: {outcome.problem}" if outcome.problem else "ok"
    line = f"{name:<24} {step:<8} {time.monotonic() - start:6.0f} s  {word}  {outcome.shown}"
    if outcome.problem:
        line += "\n" + output[-2000:]
    return line.rstrip(), not outcome.problem
