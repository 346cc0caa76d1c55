"""``composer3d verify``: prove that layouts compute what one process computes."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from composer3d.commands import job
from composer3d.commands.arguments import (
    argument,
    json_option,
    positive,
    recipe_argument,
    set_option,
)
from composer3d.facts.errors import UserError
from composer3d.facts.files import MIB, read_plain
from composer3d.facts.text import one_line
from composer3d.full.verdict import verify_full
from composer3d.recipe.draft import key_of_override, split_overrides
from composer3d.recipe.resolve import Resolved, load
from composer3d.runtime import environment
from composer3d.runtime.launch import Pool, temporary_folder
from composer3d.runtime.progress import Progress
from composer3d.verify.proof import verify_layout

# Keys with which a stranger's layout could run code, or load files from the Hub.
_STRANGE = frozenset(("model.architecture", "model.hf"))

EXAMPLES = (
    "composer3d verify debug-2-dp",
    "composer3d verify llama3-405b-16384-4d --full",
    "torchrun --nproc-per-node 2 -m composer3d verify debug-2-dp --here",
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    recipe: str = recipe_argument()
    sets: Sequence[str] = set_option()
    as_json: bool = json_option()
    dtype: Literal["float32", "float64"] | None = argument(
        "--dtype",
        choices=("float32", "float64"),
        help="prove in this dtype alone; default: float64, and then one small model in float32; "
        "with --here: float64",
    )
    steps: int = argument(
        "--steps",
        metavar="N",
        type=positive,
        default=3,
        help="optimizer steps; default: %(default)s",
    )
    layouts: str | None = argument(
        "--layouts",
        metavar="FILE",
        help="prove many layouts: each line of FILE has key=value overrides",
    )
    full: bool = argument(
        "--full",
        action="store_true",
        help="also check the structure of the full-size job on tensors without data: groups, "
        "collectives, messages, sums of gradients, and that the small model decides as it does",
    )
    here: bool = argument(
        "--here",
        action="store_true",
        help="under torchrun: prove the recipe's own mesh on the devices and the network of this "
        "job, each process one rank, with a shrunk model",
    )


def run(options: Options) -> int:
    """Prove the recipe's layout, or each layout of the file ``layouts``, and print the verdicts.

    Returns:
        The exit status: 0 if all layouts are exact, 1 if a layout is wrong or not proven, or a
        layout of the file is refused, 2 if the recipe's own layout is refused.

    Raises:
        UserError: the file ``layouts`` cannot be read, or has no layout; or ``here`` is true, but
            this process is no rank of a job.
    """
    if options.here:
        return _run_here(options)
    if options.full:
        return _run_full(options)
    begin = time.monotonic()
    lines = [""] if options.layouts is None else _read_layouts(options.layouts)
    verdicts = []
    with (
        Pool() as pool,
        temporary_folder("composer3d-verify-") as folder,
        Progress("verify", len(lines), "layouts") as progress,
    ):
        for line in lines:
            overrides = split_overrides(line)
            verdict = verify_layout(
                pool,
                folder,
                options.recipe,
                [*options.sets, *overrides],
                dtype=options.dtype,
                steps=options.steps,
                # The user named the recipe and wrote ``sets``. The layouts may be a stranger's.
                may_import=_STRANGE.isdisjoint(map(key_of_override, overrides)),
            )
            verdicts.append(verdict)
            with progress.paused():
                print(verdict.in_words(line), flush=True)
            progress.advance()

    passed = all(verdict.passed for verdict in verdicts)
    if len(verdicts) > 1:
        exact = sum(verdict.passed for verdict in verdicts)
        seconds = time.monotonic() - begin
        print(f"{exact} of {len(verdicts)} layouts are exact, in {seconds:.0f} s")
    if options.as_json:
        results = [asdict(verdict) for verdict in verdicts]
        answer = results[0] if options.layouts is None else {"passed": passed, "results": results}
        print(json.dumps(answer))
    if passed:
        return 0
    return 2 if options.layouts is None and verdicts[0].refused else 1


def _run_full(options: Options) -> int:
    """Prove the recipe's layout, and check the structure of its full-size job."""
    if options.layouts is not None:
        raise UserError("verify --full is about the recipe's own layout: leave out --layouts")
    full = load(options.recipe, options.sets, check_files=False, may_import=True).recipe
    with Pool() as pool, temporary_folder("composer3d-verify-") as folder:
        verdict = verify_full(pool, folder, full, dtype=options.dtype, steps=options.steps)
    print(verdict, flush=True)
    if options.as_json:
        print(json.dumps(verdict.as_json()))
    if verdict.passed:
        return 0
    return 2 if verdict.proof.refused else 1


def _run_here(options: Options) -> int:
    """Prove the recipe's mesh as one rank of this job. Rank 0 prints the verdict."""
    if options.layouts is not None or options.full:
        raise UserError(
            "verify --here proves the recipe's own layout: leave out --layouts and --full"
        )
    if not environment.is_rank():
        raise UserError(
            "verify --here is one rank of a job: start it as the training, with torchrun "
            f"--nproc-per-node N -m composer3d verify {one_line(options.recipe)} --here"
        )

    def prove(resolved: Resolved, rank: int) -> int:
        # Imported here because these modules import torch.
        from composer3d.runtime.process_group import broadcast_object
        from composer3d.verify.here import prove_here

        def advice() -> str:
            return "composer3d doctor checks that machine and its network"

        timeout_s = 60 * resolved.recipe.run.timeout_minutes
        with job.join(resolved, rank, timeout_s=timeout_s, advice=advice) as world:
            verdict = prove_here(
                resolved.recipe, world.device, options.dtype or "float64", options.steps
            )
            if verdict is not None:
                print(verdict, flush=True)
                if options.as_json:
                    print(json.dumps(asdict(verdict)), flush=True)
            passed = broadcast_object(verdict.passed if verdict is not None else None)
        return 0 if passed else 1

    def report(error: UserError) -> None:
        if options.as_json:
            answer = {"passed": False, "refused": error.status == 2, "error": str(error)}
            print(json.dumps(answer), flush=True)

    def resolve(world_size: int) -> Resolved:
        return load(
            options.recipe, options.sets, world_size=world_size, check_files=False, may_import=True
        )

    return job.run_rank(prove, resolve, report=report)


def _read_layouts(path: str) -> list[str]:
    """Return the lines of a file of layouts, without comments and empty lines.

    Raises UserError if the file cannot be read or has no layout.
    """
    shown = f"--layouts {one_line(path)}"
    try:
        text = read_plain(path, limit=MIB).decode()
    except OSError as error:
        raise UserError(f"{shown}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise UserError(f"{shown}: cannot be read ({error})") from None
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    layouts = [line for line in lines if line]
    if not layouts:
        raise UserError(f"{shown}: has no layout; write one a line, such as: mesh.tp=2 mesh.pp=2")
    return layouts
