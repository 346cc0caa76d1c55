"""``composer3d eval``: the loss of a checkpoint on token files, in one process or on any layout."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from composer3d.commands import job
from composer3d.commands.arguments import (
    argument,
    device_option,
    json_option,
    model_dtype_option,
    own_recipe_option,
    positive,
    set_option,
)
from composer3d.commands.sources import local_source
from composer3d.facts.errors import UserError
from composer3d.facts.text import printable
from composer3d.recipe.draft import Draft, ParsedRecipe
from composer3d.recipe.resolve import Resolved
from composer3d.recipe.schema import AXES, Recipe
from composer3d.recipe.tables import load_document
from composer3d.runtime import environment, launch

_TIMEOUT_S = 600.0

# With pp: enough micro-batches that few ranks wait.
_MICRO_BATCHES_PER_STAGE = 4

EXAMPLES = ("composer3d eval runs/quickstart data/held-out",)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    as_json: bool = json_option()
    src: str = argument(metavar="SRC", help="a checkpoint, as SRC of convert")
    data: str = argument(metavar="DATA", help="a folder that prepare made, or its URL")
    batch: int = argument(
        "--batch",
        metavar="N",
        type=positive,
        default=8,
        help="sequences that a process computes at once; default: %(default)s",
    )
    seq_len: int | None = argument(
        "--seq-len",
        metavar="N",
        type=positive,
        help="tokens of a sequence; default: that of the run, or at most 2048",
    )
    packing: str | None = argument(
        "--packing",
        choices=("none", "documents"),
        help="as data.packing of a recipe; default: that of the run, or none",
    )
    dtype: str | None = model_dtype_option()
    device: str = device_option()
    recipe: str | None = own_recipe_option()
    sets: Sequence[str] = set_option(
        help="a value of the job's recipe, such as mesh.tp=2; may be repeated"
    )


def run(options: Options) -> int:
    """Evaluate: as one rank under torchrun, else with all ranks of the mesh on this machine.

    Returns:
        The exit status: 0 done, 1 a rank failed.

    Raises:
        UserError: the checkpoint, the data or the layout cannot be used.
    """
    with local_source(options.src) as src:
        return _evaluate_from(options, src)


def _evaluate_from(options: Options, src: Path) -> int:
    """Evaluate a checkpoint on a disk: see ``run``."""
    # Imported here because these modules import torch.
    from composer3d.generate.evaluate import Windows, check_data, default_windows
    from composer3d.generate.load import open_checkpoint
    from composer3d.generate.recipe import document_of

    own = job.own_recipe(options.recipe)
    checkpoint = open_checkpoint(src, own)
    usual = default_windows(checkpoint)
    chosen: Any = options.packing or usual.packing
    windows = Windows(seq_len=options.seq_len or usual.seq_len, packing=chosen)
    notes = check_data(checkpoint, options.data, windows)
    for note in (*checkpoint.source.notes, *notes):
        if environment.rank() == 0:
            print(printable(note), file=sys.stderr)
    dtype = options.dtype or checkpoint.dtype
    tables: dict[str, dict[str, Any]] = {
        "run": {"device": options.device},
        # All processes of torchrun, unless --set says otherwise.
        "mesh": {"dp_shard": -1 if environment.is_rank() else 1},
        "parallel": {"schedule": "GPipe"},
        "precision": {
            "params": "float64" if dtype == "float64" else "float32",
            "compute": "bfloat16" if dtype == "bfloat16" else None,
        },
        "data": {
            "source": "tokens",
            "path": options.data,
            "seq_len": windows.seq_len,
            "packing": windows.packing,
            "micro_batch": options.batch,
        },
    }
    document = document_of("eval", checkpoint, tables)
    global_batch = _global_batch(document, options.sets, options.batch)
    sets = [f"data.global_batch={global_batch}", *options.sets]
    arguments: dict[str, Any] = {"document": document, "sets": tuple(sets), "src": str(src)}
    arguments |= {"own": own, "as_json": options.as_json}

    def resolve(world_size: int | None = None) -> Resolved:
        return load_document(document, sets, world_size=world_size)

    if environment.is_rank():
        resolve(environment.world_size())
        return evaluate_rank(**arguments)
    resolved, processes = job.count_processes(resolve(), resolve)
    if processes == 1:
        return evaluate_rank(**arguments)
    result = launch.run_ranks(evaluate_rank, arguments, processes=processes)
    job.print_lost_ranks(result, resolved.recipe.mesh)
    return result.status


def _global_batch(document: ParsedRecipe, sets: Sequence[str], batch: int) -> int:
    """Return the sequences of a call of all ranks, for the mesh that ``sets`` name.

    A mesh that is wrong is reported later, when the recipe is resolved.
    """
    draft = Draft(document)
    draft.read(sets)
    sizes = {axis: draft.values["mesh"].get(axis, 1) for axis in AXES}
    if sizes["dp_shard"] == -1:
        world_size = environment.world_size()
        others = prod(size for axis, size in sizes.items() if axis != "dp_shard")
        sizes["dp_shard"] = world_size // others if others > 0 else 1
    micro_batches = _MICRO_BATCHES_PER_STAGE * sizes["pp"] if sizes["pp"] > 1 else 1
    return max(1, batch * sizes["dp_replicate"] * sizes["dp_shard"] * micro_batches)


def evaluate_rank(
    document: ParsedRecipe, sets: Sequence[str], src: str, own: Recipe | None, as_json: bool
) -> int:
    """Evaluate as one rank of a job, and return its exit status. Rank 0 prints."""
    function = partial(_evaluate, src=src, own=own, as_json=as_json)

    def report(error: UserError) -> None:
        if as_json:
            print(json.dumps({"ok": False, "errors": error.lines}), flush=True)

    def resolve(world_size: int) -> Resolved:
        return load_document(document, sets, world_size=world_size)

    return job.run_rank(function, resolve, report=report)


def _evaluate(resolved: Resolved, rank: int, *, src: str, own: Recipe | None, as_json: bool) -> int:
    from composer3d.generate.evaluate import evaluate

    recipe = resolved.recipe
    joined = job.join(
        resolved, rank, timeout_s=_TIMEOUT_S, advice=lambda: "start the command again"
    )
    with joined as world:
        found = evaluate(recipe, world.device, src, own)
    if rank > 0:
        return 0
    if as_json:
        values = {"seq_len": recipe.data.seq_len, "packing": recipe.data.packing}
        print(json.dumps({"ok": True, **found.as_values(), **values}), flush=True)
        return 0
    perplexity = "beyond a float" if found.perplexity is None else f"{found.perplexity:.4f}"
    print(
        f"loss {found.loss:.6f} nats a token, perplexity {perplexity}\n"
        f"{found.tokens:,} tokens in {found.windows:,} sequences of {recipe.data.seq_len}, "
        f"packing {recipe.data.packing}, {found.tokens_per_s:,.0f} tokens/s",
        flush=True,
    )
    return 0
