"""In a whole run, objects never travel in the groups of the devices, which are NCCL's on a GPU."""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from composer3d.runtime import process_group
from composer3d.runtime.launch import Pool
from tests.training.jobs import RECIPE, build_and_train

NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)
ProcessGroup = dist.ProcessGroup


def form_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> object:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def place_of_caller() -> str:
    """Return the file of composer3d that asked for a collective, or "FSDP"."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/_fully_shard/" in name:
            return "FSDP"
        if "/composer3d/" in name:
            return name.rpartition("/composer3d/")[2]
        frame = frame.f_back
    return "unknown"


def train_and_watch(folder: str, sets: list[str]) -> dict[str, set[str]]:
    """A task: train; return the places of all collectives, by the backend of their groups."""
    # Gloo under another name, so that groups of the devices can be told from those of objects.
    dist.Backend.register_backend("devices", form_gloo, devices=["cpu"])
    process_group._BACKENDS["cpu"] = "devices"
    places: dict[str, set[str]] = {"devices": set(), "gloo": set()}

    def watched(right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            values = (*arguments, *keywords.values())
            group = next((value for value in values if isinstance(value, ProcessGroup)), None)
            places[dist.get_backend(group)].add(place_of_caller())
            return right(*arguments, **keywords)

        return call

    for name in NAMES:
        for module in (dist, dist.distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, watched(getattr(module, name)))
    build_and_train(folder, sets)
    return places


def test_objects_of_a_run_travel_in_groups_of_their_own(pool: Pool, folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh="dp_shard = 2"))
    sets = ["checkpoint.every=2", "checkpoint.async_save=true", "validation.every=2"]
    sets += ["validation.path=corpus.txt"]
    for steps in (4, 5):  # the second run resumes
        arguments = {"folder": str(folder), "sets": [*sets, f"run.steps={steps}"]}
        for places in pool.run(train_and_watch, arguments, world_size=2):
            # The check of a start sends tensors over the axes.
            assert places["devices"] == {"FSDP", "runtime/exchanges.py", "runtime/mesh.py"}
            assert places["gloo"] == {"runtime/process_group.py", "checkpoint/store.py"}
