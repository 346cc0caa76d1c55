"""``composer3d eval``: the loss of a checkpoint on token files, or its figures on tasks.

The loss is computed in one process or on any layout; tasks are in ``eval_tasks``.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from composer3d.commands import eval_tasks, job
from composer3d.commands.arguments import (
    argument,
    device_option,
    json_option,
    model_dtype_option,
    own_recipe_option,
    positive,
    set_option,
    whole,
)
from composer3d.commands.sources import local_source
from composer3d.facts.errors import UserError
from composer3d.facts.text import one_line, printable
from composer3d.models import hub
from composer3d.recipe.draft import Draft, ParsedRecipe
from composer3d.recipe.resolve import Resolved
from composer3d.recipe.schema import AXES, Recipe
from composer3d.recipe.tables import load_document
from composer3d.runtime import environment, launch

_TIMEOUT_S = 600.0

# The tables whose keys say how the model is computed, and not what it is.
_TABLES = ("run", "mesh", "parallel", "memory", "precision", "compile")

# With pp: enough micro-batches that few ranks wait.
_MICRO_BATCHES_PER_STAGE = 4

EXAMPLES = (
    "composer3d eval runs/quickstart data/held-out",
    "composer3d eval llama-hf --tasks hellaswag,arc_easy --shots 5",
)

DETAILS = (
    "SRC is evaluated on DATA, token files of prepare, or with --tasks on questions of lm-eval, "
    "which needs composer3d[eval]"
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    as_json: bool = json_option()
    src: str = argument(metavar="SRC", help="a checkpoint, as SRC of convert")
    data: str | None = argument(
        one_of="what", metavar="DATA", nargs="?", help="a folder that prepare made, or its URL"
    )
    tasks: str | None = argument(
        "--tasks",
        one_of="what",
        metavar="TASK,...",
        help="tasks or groups of lm-eval by name, or files with tasks (.yaml), which may run code",
    )
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
        help="tokens of a sequence; default: that of the run, or at most 2048; with --tasks the "
        "most tokens of one, by default those of the model",
    )
    packing: str | None = argument(
        "--packing",
        needs=("DATA",),
        choices=("none", "documents"),
        help="as data.packing of a recipe; default: that of the run, or none",
    )
    dtype: str | None = model_dtype_option()
    device: str = device_option()
    recipe: str | None = own_recipe_option()
    sets: Sequence[str] = set_option(
        needs=("DATA",),
        help="with DATA: a value of the job's recipe, such as mesh.tp=2; may be repeated",
    )
    limit: int | None = argument(
        "--limit",
        needs=("--tasks",),
        metavar="N",
        type=positive,
        help="with --tasks: only the first N documents of each task",
    )
    shots: int | None = argument(
        "--shots",
        needs=("--tasks",),
        metavar="N",
        type=whole,
        help="with --tasks: examples before each question; default: as each task says",
    )
    tokenizer: str | None = argument(
        "--tokenizer",
        needs=("--tasks",),
        metavar="FILE|bytes",
        help="with --tasks: as for generate; default: that of SRC",
    )
    no_special_tokens: bool = argument(
        "--no-special-tokens",
        needs=("--tasks",),
        action="store_true",
        help="with --tasks: take texts without the tokens that the tokenizer adds, such as <s>",
    )
    chat: bool = argument(
        "--chat",
        needs=("--tasks",),
        action="store_true",
        help="with --tasks: the tokenizer's chat template renders examples and questions",
    )
    tp: int | None = argument(
        "--tp",
        needs=("--tasks",),
        metavar="N",
        type=positive,
        help="with --tasks: processes that share each layer; default: 1, or all under torchrun",
    )
    out: str | None = argument(
        "--out",
        needs=("--tasks",),
        metavar="FILE.jsonl",
        help="with --tasks: make FILE.jsonl, with a line for each document",
    )


def run(options: Options) -> int:
    """Evaluate: as one rank under torchrun, else with all ranks of the mesh on this machine.

    Returns:
        The exit status: 0 done, 1 a rank failed.

    Raises:
        UserError: the checkpoint, the data, a task or the layout cannot be used.
    """
    if options.tasks is not None:
        with local_source(options.src) as src:
            return _run_tasks(options, options.tasks, src)
    assert options.data is not None  # the parser has required DATA or --tasks
    with local_source(options.src) as src:
        return _run_data(options, options.data, src)


def _run_tasks(options: Options, tasks: str, src: Path) -> int:
    names = tuple(name.strip() for name in tasks.split(","))
    if not all(names):
        raise UserError("--tasks has an empty name; write --tasks NAME,NAME without gaps")
    # Imported here because this module imports torch.
    from composer3d.generate.tasks import TasksRequest

    request = TasksRequest(
        src=str(src),
        recipe=job.own_recipe(options.recipe),
        tasks=names,
        limit=options.limit,
        shots=options.shots,
        batch=options.batch,
        longest=options.seq_len,
        dtype=options.dtype,
        tokenizer=options.tokenizer and str(hub.tokenizer_file(options.tokenizer)),
        adds_special_tokens=not options.no_special_tokens,
        is_chat=options.chat,
        keeps_samples=options.out is not None,
    )
    return eval_tasks.run(
        request,
        processes=options.tp,
        device=options.device,
        out=options.out,
        as_json=options.as_json,
    )


def _run_data(options: Options, data: str, src: Path) -> int:
    """Evaluate a checkpoint on a disk: see ``run``."""
    # Imported here because these modules import torch.
    from composer3d.generate.evaluate import Windows, check_data, default_windows
    from composer3d.generate.load import open_checkpoint
    from composer3d.generate.recipe import document_of

    for text in options.sets:
        if text.partition(".")[0] not in _TABLES:
            raise UserError(
                f"--set {one_line(text)}: eval computes the checkpoint as it is, on any layout; "
                f"set keys of {', '.join(_TABLES)}, and choose the data by DATA, --seq-len and "
                "--packing"
            )
    own = job.own_recipe(options.recipe)
    checkpoint = open_checkpoint(src, own)
    usual = default_windows(checkpoint)
    chosen: Any = options.packing or usual.packing
    windows = Windows(seq_len=options.seq_len or usual.seq_len, packing=chosen)
    notes = check_data(checkpoint, data, windows)
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
            "path": data,
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
        f"{found.tokens:,} predicted tokens in {found.windows:,} sequences of "
        f"{recipe.data.seq_len}, packing {recipe.data.packing}, {found.tokens_per_s:,.0f} tokens/s",
        flush=True,
    )
    return 0
