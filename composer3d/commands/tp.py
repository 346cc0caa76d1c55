"""Run a checkpoint's model over the ranks of tp: what ``generate`` and ``eval --tasks`` share."""

import json
from collections.abc import Callable, Mapping
from math import gcd
from pathlib import Path
from typing import Any

from composer3d.commands import job
from composer3d.facts.errors import UserError
from composer3d.recipe.draft import ParsedRecipe
from composer3d.recipe.resolve import Resolved
from composer3d.recipe.schema import Recipe
from composer3d.recipe.tables import load_document
from composer3d.runtime import environment, launch


def run_ranks(
    name: str,
    function: Callable[..., int],
    arguments: Mapping[str, Any],
    *,
    src: str,
    own: Recipe | None,
    tp: int,
    device: str,
) -> int:
    """Start the ranks of tp on this machine, or run as one of them.

    Args:
        name: of the job, for messages.
        function: what a rank does: a function of a module, which takes ``arguments`` and
            ``document``, the recipe of the job, and returns the exit status.
        arguments: the arguments of ``function``.
        src, own: the checkpoint and the recipe for ``open_checkpoint``.
        tp: the number of ranks.
        device: as in [run] of a recipe.

    Returns:
        The exit status.

    Raises:
        UserError: the checkpoint or the layout cannot be used.
    """
    # Imported here because these modules import torch.
    from composer3d.generate.load import open_checkpoint
    from composer3d.generate.recipe import document_of
    from composer3d.runtime.process_group import count_gpus

    checkpoint = open_checkpoint(Path(src), own)
    tables: dict[str, dict[str, Any]] = {
        "run": {"device": device},
        # Each rank of ep holds equally many experts.
        "mesh": {"dp_shard": 1, "tp": tp, "ep": gcd(tp, checkpoint.shape.experts or 1)},
        "parallel": {"zero": 0},
        # No data is read, and no sequence is cut: any length that tp divides passes the rules.
        "data": {"source": "tokens", "path": ".", "global_batch": 1, "seq_len": tp},
    }
    document = document_of(name, checkpoint, tables)
    whole = {**arguments, "document": document}
    world_size = environment.world_size() if environment.is_rank() else tp
    resolved = load_document(document, world_size=world_size)
    if environment.is_rank():
        return function(**whole)
    if device == "cpu" or not count_gpus():
        job.require_cores(resolved)
    result = launch.run_ranks(function, whole, processes=tp)
    job.print_lost_ranks(result, resolved.recipe.mesh)
    return result.status


def run_rank(
    document: ParsedRecipe, function: Callable[[Resolved, int], int], *, as_json: bool
) -> int:
    """Run ``function`` as one rank of ``run_ranks``, and return its exit status.

    ``job.run_rank`` says the rest. With ``as_json``, an error is also printed as JSON.
    """

    def report(error: UserError) -> None:
        if as_json:
            print(json.dumps({"ok": False, "errors": error.lines}), flush=True)

    def resolve(world_size: int) -> Resolved:
        return load_document(document, world_size=world_size)

    return job.run_rank(function, resolve, report=report)
