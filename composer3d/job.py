"""``composer3d train``: from a command to ranks. Outside torchrun it starts them; inside it is one of them.

Nothing here imports torch before the forkserver has begun to.
"""

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from composer3d import launch, log
from composer3d.errors import DeviceError, UserError
from composer3d.recipe.changes import changes
from composer3d.recipe.load import Resolved, load
from composer3d.recipe.schema import Recipe


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
    if processes > 1:
        launch.warm_up()
    if resolved.recipe.run.device != "cpu":
        from composer3d.dist import count_gpus

        found = count_gpus()
        if found and resolved.takes_what_is_left:
            resolved = load(path, sets, world_size=found)
            processes = found
        elif found < processes and (found or resolved.recipe.run.device == "cuda"):
            raise DeviceError(
                f"{resolved.place('mesh.dp_shard')}: the mesh needs {processes} GPUs, this machine shows {found}; "
                'change [mesh], start several nodes with torchrun, or set run.device = "cpu"'
            )
    if processes == 1:
        return train_rank(path, sets)
    return launch.run_elastic(_rank, (path, tuple(sets)), processes=processes)


def steps_done(recipe: Recipe) -> int | None:
    """The steps of a run that is done, by its newest checkpoint; None where training has to look, or something to do.

    It reads the manifest and the sizes of the files. Where anything is not as it should be, or the recipe changes what
    a checkpoint depends on, training finds it, and says what is wrong.
    """
    folder = Path(recipe.run.out_dir, recipe.run.name, "checkpoints")
    names = [path.name for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8}", path.name)]
    if recipe.checkpoint.resume != "auto" or not names or int(max(names)[5:]) < recipe.run.steps:
        return None
    # Imported here, as it imports torch: there is hardly anything else to do.
    from composer3d.checkpoint import manifest as manifests

    newest = folder / max(names)
    try:
        manifest = manifests.read(newest)
        changed = {change.key for change in changes(manifest.recipe, recipe)}
        is_whole = all((newest / name).stat().st_size == size for name, (size, _) in manifest.files.items())
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


def _rank(path: str, sets: Sequence[str]) -> None:
    """A rank under the elastic agent, which knows only success, an exception and an exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the forkserver ignores it
    if status := train_rank(path, sets):
        raise SystemExit(status)


def train_rank(path: str, sets: Sequence[str]) -> int:
    """Train as the rank that RANK, LOCAL_RANK and WORLD_SIZE say, and return its exit status."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        return _train(load(path, sets, world_size=size), rank)
    except UserError as error:
        torch = sys.modules.get("torch")
        # Once there is a group, all ranks raise it (``dist.on_all``): one prints. Before, a node or rank can be alone.
        formed = torch is not None and torch.distributed.is_initialized()
        alone = isinstance(error, DeviceError) or os.environ.get("LOCAL_RANK", "0") == "0"
        if rank == 0 or (alone and not formed):
            prefix = f"rank {rank}: " if rank else ""
            print(*(prefix + line for line in error.lines), sep="\n", file=sys.stderr, flush=True)
        return error.status


def _train(resolved: Resolved, rank: int) -> int:
    import torch

    from composer3d import dist
    from composer3d.mesh import identity
    from composer3d.train import build, run

    recipe = resolved.recipe
    if recipe.world_size > 1 or "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = dist.pick_device(recipe.run.device)
    if device.type == "cpu":
        dist.keep_freed_memory()
    who = identity(rank, recipe.mesh, device.type)
    log.setup(who, main=rank == 0)
    try:
        with dist.world(device):
            stopped = run(build(recipe, device, resolved.to_toml()))
    except Exception as error:
        error.add_note(f"[{who}]")
        raise
    return 128 + stopped if stopped else 0
