"""``composer3d train``: from a command to ranks. Outside torchrun it starts them; inside it is one of them.

Nothing here imports torch before the starter has begun to.
"""

import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from composer3d.recipe.changes import changes
from composer3d.recipe.resolve import Resolved, load
from composer3d.recipe.schema import Recipe
from composer3d.runtime import launch, log
from composer3d.runtime.ranks import identity, place
from composer3d.runtime.starter import STORE, end_with
from composer3d.spec.errors import DeviceError, LostPeersError, RecipeError, UserError

PROCESSES_PER_CORE = 16  # of a job on CPUs; the slowest that is still of use to try a layout


def main_train(path: str, sets: Sequence[str]) -> int:
    """Train a recipe, on as many processes of this machine as its mesh has, or as one rank of torchrun's.

    Returns the exit status: 0 done, 1 a rank failed, 2 the user's input is wrong, 128 + N stopped by signal N.
    """
    if "RANK" in os.environ:
        return train_rank(path, sets)
    resolved = load(path, sets)
    if (done := steps_done(resolved.recipe)) is not None:
        log.setup("", main=True)
        log.get().info(nothing_to_do(done, resolved.recipe.run.steps))
        return 0
    processes = resolved.recipe.world_size
    if resolved.recipe.run.device == "cpu":
        require_cores(resolved)
    if processes > 1:
        launch.warm_up()
    if resolved.recipe.run.device != "cpu":
        from composer3d.runtime.process_group import count_gpus

        found = count_gpus()
        if found and resolved.takes_what_is_left:
            resolved = load(path, sets, world_size=found)
            processes = found
        elif found < processes and (found or resolved.recipe.run.device == "cuda"):
            raise DeviceError(
                f"{resolved.place('mesh.dp_shard')}: the mesh needs {processes} GPUs, this machine shows {found}; "
                'change [mesh], start several nodes with torchrun, or set run.device = "cpu"'
            )
        if not found:
            require_cores(resolved)
    if processes == 1:
        return train_rank(path, sets)
    ended = launch.run_ranks(_rank, {"path": path, "sets": tuple(sets)}, processes=processes)
    for line in lines_about(ended, resolved.recipe):
        print(line, file=sys.stderr)
    return ended.status


def steps_done(recipe: Recipe) -> int | None:
    """The steps of a run that is done, by its newest checkpoint; None where training has to look, or something to do.

    It reads the manifest and the sizes of the files. Where anything is not as it should be, or the recipe changes what
    a checkpoint depends on, training finds it, and says what is wrong.
    """
    folder = Path(recipe.run.out_dir, recipe.run.name, "checkpoints")
    names = [
        path.name for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8}", path.name)
    ]
    if recipe.checkpoint.resume != "auto" or not names or int(max(names)[5:]) < recipe.run.steps:
        return None
    # Imported here, as it imports torch: there is hardly anything else to do.
    from composer3d.checkpoint import manifest as manifests

    newest = folder / max(names)
    try:
        manifest = manifests.read(newest)
        changed = {change.key for change in changes(manifest.recipe, recipe)}
        is_whole = all(
            (newest / name).stat().st_size == size for name, (size, _) in manifest.files.items()
        )
    except (UserError, OSError, ValueError):
        return None
    model = manifests.model_of(recipe.model, recipe.precision.params)
    same_model = all(manifest.model.get(key) == value for key, value in model.items())
    refused = {key for key in changed if key == "run.seed" or key.startswith(("data.", "model."))}
    if manifest.step < recipe.run.steps or not (is_whole and same_model) or refused:
        return None
    return manifest.step


def nothing_to_do(done: int, total: int) -> str:
    """What is said of a run that is done."""
    return f"nothing to do: {done} of {total} steps are done; raise run.steps to train on"


def require_cores(resolved: Resolved) -> None:
    """Refuse a job whose processes would keep the machine busy with changing between them.

    Raises RecipeError.
    """
    recipe = resolved.recipe
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    most = PROCESSES_PER_CORE * cores
    if recipe.world_size > most and not recipe.run.oversubscribe:
        raise RecipeError(
            f"{resolved.place('mesh.dp_shard')}: the mesh needs {recipe.world_size} processes, but this machine has "
            f"{cores} cores: at most {most} processes, {PROCESSES_PER_CORE} a core, are started on them; change "
            "[mesh], or set run.oversubscribe = true"
        )


def lines_about(ended: launch.Ended, recipe: Recipe) -> list[str]:
    """What to say of ranks that could not say it themselves: who died, or was killed since it did not end."""
    lines = []
    by_signal: dict[int, list[int]] = defaultdict(list)
    for rank, number in sorted(ended.died.items()):
        by_signal[number].append(rank)
    for number, ranks in by_signal.items():
        was = "was" if len(ranks) == 1 else "were"
        how = (
            f"{was} ended by {_signal_words(number)}"
            if number > 0
            else f"ended with status {-number}"
        )
        lines.append(f"{_names(ranks, recipe)} {how}; {way_out(recipe)}")
    if ended.stuck and ended.status > 128:
        text = f"had not ended {launch.SHUTDOWN_S:.0f} s after the signal, or a second one came: killed"
        lines.append(f"{_names(ended.stuck, recipe)} {text}; {way_out(recipe)}")
    elif ended.stuck and signal.SIGABRT in by_signal:  # NCCL aborts the ranks that waited in vain
        lines.append(f"{_names(ended.stuck, recipe)} still ran: look there first")
    return lines


def _signal_words(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else "a real-time signal"
    why = (
        "; often the kernel's answer to memory running out: see dmesg"
        if number == signal.SIGKILL
        else ""
    )
    return f"signal {number} ({name}{why})"


def _names(ranks: Sequence[int], recipe: Recipe) -> str:
    shown = ", ".join(place(rank, recipe.mesh) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def way_out(recipe: Recipe) -> str:
    """What to do after a failure: the newest checkpoint, if there is one, and that the same command resumes."""
    folder = Path(recipe.run.out_dir) / recipe.run.name / "checkpoints"
    whole = [path.parent for path in folder.glob("step-*/manifest.json")]
    steps = [path for path in whole if re.fullmatch(r"step-\d{8}", path.name)]
    if not steps:
        return f"there is no checkpoint in {folder}: the same command starts anew"
    return f"the newest checkpoint is {max(steps)}: the same command goes on from it"


def _rank(path: str, sets: Sequence[str]) -> int:
    return train_rank(path, sets)


def train_rank(path: str, sets: Sequence[str]) -> int:
    """Train as the rank that RANK, LOCAL_RANK and WORLD_SIZE say, and return its exit status."""
    if "TORCHELASTIC_RUN_ID" in os.environ and STORE not in os.environ:
        end_with(os.getppid())  # the agent: nobody else would end this rank when it is killed
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with suppress(OSError):  # for top and ps; Linux
        Path("/proc/self/comm").write_text(f"c3d rank {rank}")
    try:
        return _train(load(path, sets, world_size=size), rank)
    except UserError as error:
        torch = sys.modules.get("torch")
        # Once there is a group, all ranks raise it (``dist.on_all``): one prints. Before, a node or rank can be alone.
        formed = torch is not None and torch.distributed.is_initialized()
        alone = isinstance(error, DeviceError) or os.environ.get("LOCAL_RANK", "0") == "0"
        if error.lines and (
            rank == 0 or (alone and not formed) or isinstance(error, LostPeersError)
        ):
            prefix = f"rank {rank}: " if rank and not isinstance(error, LostPeersError) else ""
            print(*(prefix + line for line in error.lines), sep="\n", file=sys.stderr, flush=True)
        return error.status


def _train(resolved: Resolved, rank: int) -> int:
    import torch

    from composer3d.runtime import peers
    from composer3d.runtime import process_group as dist
    from composer3d.training.build import build
    from composer3d.training.loop import train

    recipe = resolved.recipe
    if recipe.world_size > 1 or "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = dist.pick_device(recipe.run.device)
    if device.type == "cpu":
        dist.keep_freed_memory()
    who = identity(rank, recipe.mesh, device.type)
    log.setup(who, main=rank == 0)
    if (
        count := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ) != "0" and STORE not in os.environ:
        log.get().info(
            f"restarted by torchrun, {count} of at most {os.environ.get('TORCHELASTIC_MAX_RESTARTS')}"
        )
    timeout_s = 60 * recipe.run.timeout_minutes
    try:
        store = dist.open_store(timeout_s=timeout_s)
        watch = peers.watched(
            cast(Any, store).clone(),  # for a thread; torch's stubs lack it
            rank=rank,
            size=int(os.environ.get("WORLD_SIZE", "1")),
            name=lambda peer: place(peer, recipe.mesh),
            way_out=lambda: way_out(recipe),
        )
        with watch, dist.world(device, timeout_s=timeout_s, store=store):
            stopped = train(build(recipe, device, resolved.to_toml()))
    except UserError:
        raise
    except Exception as error:
        error.add_note(f"[{who}]")
        raise
    return 128 + stopped if stopped else 0
