"""``composer3d dryrun``: run one step of a job of any size on tensors without data."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from composer3d.commands.arguments import (
    argument,
    gpus_option,
    json_option,
    number,
    recipe_argument,
    set_option,
)
from composer3d.dryrun.report import StageReport, memory_table, traffic_table
from composer3d.dryrun.run import dry_run
from composer3d.facts import hardware
from composer3d.models.registry import architecture
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe

# The GPU and the part of its peak that the column "to hide it" assumes.
_GPU = "H100-80GB SXM"
_EFFICIENCY = 0.4

EXAMPLES = (
    "composer3d dryrun quickstart",
    "composer3d dryrun llama3-405b-16384-3d --json",
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    recipe: str = recipe_argument()
    sets: Sequence[str] = set_option()
    as_json: bool = json_option()
    gpus: int | None = gpus_option()
    routing_skew: float = argument(
        "--routing-skew",
        metavar="X",
        type=number,
        default=1.0,
        help="rows of the busiest rank of ep, divided by the mean; default: %(default)g, even",
    )


def run(options: Options) -> int:
    """Print what each pipeline rank allocates and sends in a step.

    Raises:
        UserError: the recipe cannot be used.
    """
    resolved = load(
        options.recipe, options.sets, world_size=options.gpus, check_files=False, may_import=True
    ).recipe
    result = dry_run(resolved, skew=options.routing_skew)
    if options.as_json:
        print(json.dumps(result.as_json()))
        return 0

    ranks = "1 rank" if result.world_size == 1 else f"{result.world_size:,} ranks"
    print(f"{resolved.run.name}: a step of {ranks}, on tensors without data")
    print("\nGiB of a rank: the most of each kind at one time, and of all together (peak)")
    print(*memory_table(result.stages), sep="\n")
    if resolved.memory.cpu_offload:
        print("# parameters, gradients and optimizer are in host memory; the peak is the device's")
    compute_s = _compute_s(resolved)
    for index, (first, last) in enumerate(_groups(result.stages)):
        report = result.stages[first]
        name = f"stage {first}" if first == last else f"stages {first} to {last}"
        of_all = f" ({name})" if len(result.stages) > 1 else ""
        print(f"\nWhat a rank sends in a step{of_all}" if index == 0 else f"\n{name}")
        print(*traffic_table(report, compute_s), sep="\n")
    print(
        f"\n# to hide it: the bandwidth that sends it in the {compute_s:.2g} s in which an "
        f"{_GPU} computes the step at {_EFFICIENCY:.0%} of its peak in {_dtype_of_peak(resolved)}"
    )
    print(f"# {result.seconds:.0f} s for this dry run")
    return 0


def _groups(stages: Sequence[StageReport]) -> list[tuple[int, int]]:
    """Return the first and the last of neighbouring pipeline ranks that send the same."""
    groups: list[tuple[int, int]] = []
    for report in stages:
        if groups and stages[groups[-1][0]].comm == report.comm:
            groups[-1] = (groups[-1][0], report.stage)
        else:
            groups.append((report.stage, report.stage))
    return groups


def _compute_s(recipe: Recipe) -> float:
    """Return the seconds in which one GPU computes its share of a step."""
    model_of = architecture(recipe.model.architecture)
    tokens = recipe.data.global_batch * recipe.data.seq_len
    flops = model_of.count_flops(recipe.model, recipe.data.seq_len) * tokens / recipe.world_size
    row = hardware.find(_GPU)
    assert row is not None
    peak = hardware.peak_flops(row, _dtype_of_peak(recipe))
    assert peak is not None
    return float(flops / (peak * _EFFICIENCY))


def _dtype_of_peak(recipe: Recipe) -> str:
    """Return the dtype of the recipe's products; float32 for float64, of which no peak is known.

    Products in float32 never run in TF32.
    """
    return "bfloat16" if recipe.precision.computes_in == "bfloat16" else "float32"
