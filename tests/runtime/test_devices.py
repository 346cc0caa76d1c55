"""Settings of processes on GPUs, on a machine without one, and ranks that would share a GPU."""

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from composer3d.facts.errors import DeviceError, RecipeError
from composer3d.recipe.resolve import load
from composer3d.runtime import devices
from composer3d.runtime.devices import (
    Gpu,
    configure_allocator,
    make_deterministic,
    offload_threads,
    prepare_gpu,
    refuse_shared_gpus,
)
from composer3d.runtime.environment import ALLOCATOR, ALLOCATOR_VARIABLES, RECORDER_VARIABLES
from composer3d.runtime.launch import Pool
from tools.prove.paths import ROOT

VARIABLES = (
    *ALLOCATOR_VARIABLES,
    *devices._DETERMINISTIC,
    *RECORDER_VARIABLES,
)


def lines_of_ranks(store: dist.Store, gpus: list[Gpu]) -> list[tuple[str, ...] | None]:
    """Let ranks on these GPUs check them; return the lines of their errors. None: no error."""
    lines: list[tuple[str, ...] | None] = [("did not return",)] * len(gpus)

    def check(rank: int) -> None:
        try:
            refuse_shared_gpus(store, gpus[rank], rank=rank, size=len(gpus))
            lines[rank] = None
        except DeviceError as error:
            lines[rank] = error.lines

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return lines


def test_each_rank_has_a_gpu_of_its_own() -> None:
    gpus = [Gpu(host, uuid) for host in ("a", "b") for uuid in ("GPU-1", "GPU-2")]
    assert lines_of_ranks(dist.HashStore(), gpus) == [None] * 4


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_ranks_that_share_a_gpu_are_named_on_rank_0_and_no_rank_goes_on(
    kind: str, tmp_path: Path
) -> None:
    gpus = [Gpu("a", "GPU-1"), Gpu("b", "GPU-1"), Gpu("a", "GPU-2"), Gpu("b", "GPU-1")]
    store = dist.HashStore() if kind == "memory" else dist.FileStore(str(tmp_path / "store"), 4)
    first, *others = lines_of_ranks(store, gpus)
    assert others == [()] * 3
    assert first is not None
    (line,) = first
    assert line.startswith(
        "ranks 1 and 3 would share the GPU GPU-1 of b: each process needs a GPU of its own; show"
    )


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 32),
        ({"LOCAL_WORLD_SIZE": "8"}, 4),
        ({"LOCAL_WORLD_SIZE": "64"}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "1"}, 4),  # torchrun sets it
        ({"LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "6"}, 6),
        ({"WORLD_SIZE": "16"}, 2),
    ],
)
def test_the_optimizer_on_the_host_has_this_ranks_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], threads: int
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert offload_threads(32) == threads


def allocator(variables: dict[str, str]) -> tuple[str, str]:
    """A task: what is said, and what torch's allocator was told before or now."""
    os.environ |= variables
    return configure_allocator(), torch._C._accelerator_getAllocatorSettings()


def test_the_allocator_grows_its_segments_unless_the_user_has_configured_it(pool: Pool) -> None:
    assert pool.run(allocator, {"variables": {}}, world_size=1) == [(ALLOCATOR, ALLOCATOR)]
    for name in ALLOCATOR_VARIABLES:
        variables = {name: "max_split_size_mb:64"}
        ((said, told),) = pool.run(allocator, {"variables": variables}, world_size=1)
        assert said == f"max_split_size_mb:64 ({name})"
        assert ALLOCATOR not in told


def deterministic(variables: dict[str, str]) -> tuple[dict[str, str], list[bool]]:
    """A task: the variables of libraries, and the settings of torch."""
    os.environ |= variables
    make_deterministic()
    return (
        {name: os.environ[name] for name in devices._DETERMINISTIC},
        [
            torch.are_deterministic_algorithms_enabled(),
            # With a warning only, attention's backward would stay as it is.
            not torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            not torch.backends.cudnn.benchmark,
            not torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch._inductor.config.deterministic,
        ],
    )


def test_torch_cublas_and_nccl_are_told_to_be_deterministic(pool: Pool) -> None:
    for variables in ({}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"}):
        ((environment, settings),) = pool.run(deterministic, {"variables": variables}, world_size=1)
        expected = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"} | variables
        assert environment == expected
        assert all(settings), settings


def test_an_environment_that_is_not_deterministic_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("NCCL_ALGO", "Tree,Ring")
    with pytest.raises(RecipeError) as caught:
        make_deterministic()
    assert caught.value.lines == (
        "run.deterministic = true, but CUBLAS_WORKSPACE_CONFIG = ':0:0' in the environment; unset "
        "it, or use :4096:8 or :16:8",
        "run.deterministic = true, but NCCL_ALGO = 'Tree,Ring' in the environment; unset it, or "
        "use Ring",
    )
    assert not torch.are_deterministic_algorithms_enabled()


def prepare(sets: list[str]) -> tuple[str, bool, int]:
    """A task: the line that is said, whether torch is deterministic, and the number of threads.

    The flight recorder must be on.
    """
    for name in (*VARIABLES, "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    line = prepare_gpu(load(str(ROOT / "recipes/debug-1-single.toml"), sets).recipe, cores=3)
    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    return line, torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()


def test_a_process_on_a_gpu_is_set_as_its_recipe_says(pool: Pool) -> None:
    (seen,) = pool.run(prepare, {"sets": []}, world_size=1)
    assert seen == ("GPU: allocator expandable_segments:True", False, 1)
    sets = ["run.deterministic=true", "memory.cpu_offload=true"]
    (seen,) = pool.run(prepare, {"sets": sets}, world_size=1)
    line = "GPU: allocator expandable_segments:True, deterministic, 3 threads for the optimizer on "
    assert seen == (f"{line}the host", True, 3)


@pytest.mark.parametrize("chosen", [None, *RECORDER_VARIABLES])
def test_the_flight_recorder_is_on_unless_the_user_has_set_it(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    for name in RECORDER_VARIABLES:
        # To 0 first, so that the test ends with the variable as it was.
        monkeypatch.setenv(name, "0")
        if name != chosen:
            monkeypatch.delenv(name)
    devices.record_collectives()
    found = {name: os.environ[name] for name in RECORDER_VARIABLES if name in os.environ}
    assert found == ({chosen: "0"} if chosen else {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"})
