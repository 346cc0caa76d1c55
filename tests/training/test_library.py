"""A training loop of one's own: its model, its batches and its checkpoints."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.checkpoint import manifest
from composer3d.data import Batch
from composer3d.facts.errors import (
    CheckpointError,
    DataError,
    DeviceError,
    MeshError,
    SaveError,
    TrainingError,
    UserError,
)
from composer3d.recipe.schema import (
    CheckpointTable,
    DataTable,
    MeshTable,
    Model,
    OptimTable,
    ParallelTable,
    PrecisionTable,
    Recipe,
    RunTable,
)
from composer3d.recipe.tables import load_recipe, make_recipe, preset
from composer3d.reliability.lock import Claim
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.library import Checkpoints, build_model, open_batches
from composer3d.training.optimizers import build_stages_optimizer
from composer3d.training.step import compute_gradients, update
from tests.generate.jobs import run_command

ALONE, DP, CP = MeshTable(dp_shard=1), MeshTable(dp_shard=2), MeshTable(cp=2, dp_shard=1)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 200)
    monkeypatch.chdir(tmp_path)


def recipe_of(
    mesh: MeshTable, *tables: Any, name: str = "own", model: Model | None = None
) -> Recipe:
    data = DataTable(source="text", path="text.txt", seq_len=32, global_batch=4)
    given = {type(table) for table in tables}
    usual = [table for table in (data, RunTable(name=name)) if type(table) not in given]
    return make_recipe(model or preset("debug-tiny", n_layers=2), mesh, *usual, *tables)


class CountedBatches:
    """Batches of a user: the number of the next one is their state."""

    def __init__(self, recipe: Recipe) -> None:
        self.next, self._shape = 0, (recipe.data.global_batch, recipe.data.seq_len)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class EmptyBatches(CountedBatches):
    """The same with a buffer that is empty, so that the object is false."""

    def __len__(self) -> int:
        return 0


def loop(recipe: Recipe, last: int, counted: bool = False) -> dict[str, Any]:
    """Go on to the step ``last``, and save it; return what a rank has then."""
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_model(recipe, mesh)
        optimizer = build_stages_optimizer(stages, recipe)
        batches = open_batches(recipe, mesh)
        own = CountedBatches(recipe)
        checkpoints = Checkpoints(recipe, stages, optimizer, own if counted else batches)
        done = checkpoints.load()
        losses = []
        for _ in range(done, last):
            sums = compute_gradients(stages, next(batches))
            losses.append(update(stages, optimizer, sums, max_norm=1.0, lr=1e-3).loss)
            own.next += 1
        if last > done:
            checkpoints.save(last)
            checkpoints.wait()
        tensors = {name: whole(p) for name, p in stages.named_parameters()}
        for name, parameter in stages.named_parameters():
            tensors |= {f"{name} {key}": whole(t) for key, t in optimizer.state[parameter].items()}
    return {"done": done, "losses": losses, "tensors": tensors, "next": own.next}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(pool: Pool, recipe: Recipe, last: int, **keywords: Any) -> dict[str, Any]:
    arguments = {"recipe": recipe, "last": last, **keywords}
    result: dict[str, Any] = pool.run(loop, arguments, world_size=recipe.world_size)[0]
    return result


def test_a_loop_goes_on_with_the_same_bits_and_on_any_layout(pool: Pool) -> None:
    straight = run(pool, recipe_of(DP, name="straight"), 4)
    assert (straight["done"], len(straight["losses"])) == (0, 4)
    assert straight["losses"][-1] < straight["losses"][0]

    first = run(pool, recipe_of(DP), 2)
    second = run(pool, recipe_of(DP, CheckpointTable(async_save=True)), 4)
    assert second["done"] == 2
    assert first["losses"] + second["losses"] == straight["losses"]
    for name, tensor in straight["tensors"].items():
        assert torch.equal(second["tensors"][name], tensor), name

    # Another layout sums in another order.
    run(pool, recipe_of(ALONE, name="other"), 2)
    other = run(pool, recipe_of(CP, name="other"), 4)
    assert other["losses"] == pytest.approx(straight["losses"][2:], rel=1e-6)
    for name, tensor in straight["tensors"].items():
        torch.testing.assert_close(other["tensors"][name], tensor, rtol=1e-4, atol=1e-6)


def test_train_goes_on_with_the_checkpoint_of_a_loop_and_the_reverse(pool: Pool) -> None:
    """Both save the same files, and take the same batches in the same order."""
    Path("x.toml").write_text(
        '[run]\nname = "mixed"\nsteps = 4\n[model]\npreset = "debug-tiny"\n'
        '[data]\nsource = "text"\npath = "text.txt"\nseq_len = 32\nglobal_batch = 4\n'
        '[optim]\nlr = 1e-3\nschedule = "constant"\n[metrics]\nevery = 1\n'
    )

    def train(name: str, steps: int) -> list[float]:
        sets = (f"run.name={name}", f"run.steps={steps}", "run.device=cpu")
        words = [word for text in sets for word in ("--set", text)]
        task = {"arguments": ["train", "x.toml", *words]}
        ((status, _, errors),) = pool.run(run_command, task, world_size=1)
        assert status == 0, errors
        assert "warning" not in errors
        rows = Path("runs", name, "metrics.jsonl").read_text().splitlines()
        return [row["loss"] for row in map(json.loads, rows) if "loss" in row]

    by_train = train("alone", 6)
    begun = run(pool, load_recipe("x.toml"), 2)
    assert begun["losses"] == by_train[:2]
    assert train("mixed", 4) == by_train[2:4]
    ended = run(pool, load_recipe("x.toml"), 6)
    assert (ended["done"], ended["losses"]) == (4, by_train[4:])


def test_batches_of_ones_own_go_on_where_they_were(pool: Pool) -> None:
    assert run(pool, recipe_of(ALONE), 3, counted=True)["next"] == 3
    again = run(pool, recipe_of(DP), 5, counted=True)
    assert (again["done"], again["next"]) == (3, 5)
    # The batches of a recipe have another state.
    with pytest.raises(WorkerError, match="the state of its loader lacks 'digest'") as found:
        run(pool, recipe_of(ALONE), 6)
    assert isinstance(found.value.user_error, CheckpointError)


def test_another_job_has_locked_the_folder(pool: Pool) -> None:
    run(pool, recipe_of(DP), 1)
    claim = Claim(Path("runs/own"))
    refusal = r"runs/own is in use by process \d+ .*; wait for its end, or give this run another"
    with pytest.raises(WorkerError, match=refusal) as found:
        run(pool, recipe_of(DP), 2)
    assert isinstance(found.value.user_error, UserError)
    claim.close()
    assert run(pool, recipe_of(DP), 2)["done"] == 1


def save_into_a_folder_that_was_replaced(recipe: Recipe) -> int:
    """Make two objects; then replace the folder and save. Returns the step that the second has."""
    with pool_world() as device:
        stages = build_model(recipe, Mesh.build(recipe.mesh, device))
        optimizer = build_stages_optimizer(stages, recipe)
        first = Checkpoints(recipe, stages, optimizer)
        first.save(1)
        first.wait()
        second = Checkpoints(recipe, stages, optimizer)
        done = second.load()
        recipe.run.folder.rename("elsewhere")
        recipe.run.folder.mkdir()
        with pytest.raises(TrainingError, match="was removed or replaced while this job ran"):
            second.save(2)
        assert list(recipe.run.folder.iterdir()) == []
        return done


def state_of_empty_batches(recipe: Recipe) -> int:
    """Save batches that are false, and return the number of the next one after a load."""
    with pool_world() as device:
        stages = build_model(recipe, Mesh.build(recipe.mesh, device))
        optimizer = build_stages_optimizer(stages, recipe)
        batches = EmptyBatches(recipe)
        checkpoints = Checkpoints(recipe, stages, optimizer, batches)
        batches.next = 7
        checkpoints.save(1)
        batches.next = 0
        checkpoints.load()
        return batches.next


def test_batches_that_are_empty_when_they_are_given_keep_their_state(pool: Pool) -> None:
    assert pool.run(state_of_empty_batches, {"recipe": recipe_of(ALONE)}, world_size=1) == [7]


def save_the_rank(recipe: Recipe) -> None:
    """Save batches of which each rank has a state of its own."""
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_model(recipe, mesh)
        batches = CountedBatches(recipe)
        batches.next = mesh.rank
        optimizer = build_stages_optimizer(stages, recipe)
        Checkpoints(recipe, stages, optimizer, batches).save(1)


def test_a_state_that_differs_over_ranks_is_refused(pool: Pool) -> None:
    """A load would give all ranks that of rank 0."""
    text = (
        "the state of the batches must be the same on every rank: next is 0 on rank 0; 1 on rank 1"
    )
    with pytest.raises(WorkerError, match=text) as found:
        pool.run(save_the_rank, {"recipe": recipe_of(DP)}, world_size=2)
    assert isinstance(found.value.user_error, MeshError)
    assert not recipe_of(DP).checkpoint_folder.exists()


def take_a_whole_row(recipe: Recipe) -> None:
    """Compute a step on rows that ``own_tokens`` has not cut."""
    with pool_world() as device:
        stages = build_model(recipe, Mesh.build(recipe.mesh, device))
        rows_BT = torch.arange(33).repeat(recipe.data.global_batch, 1)
        positions_BT = torch.arange(32).expand(recipe.data.global_batch, 32)
        compute_gradients(stages, Batch(rows_BT[:, :-1], rows_BT[:, 1:], positions_BT))


def test_rows_that_are_not_cut_over_cp_are_refused(pool: Pool) -> None:
    """Each rank would see the whole row twice, and the tokens that it has to predict."""
    pool.run(take_a_whole_row, {"recipe": recipe_of(ALONE)}, world_size=1)
    text = r"has 4 x 32 tokens, but a rank's share of the step is 64 tokens: .* Stages\.own_tokens"
    with pytest.raises(WorkerError, match=text) as found:
        pool.run(take_a_whole_row, {"recipe": recipe_of(CP)}, world_size=2)
    assert isinstance(found.value.user_error, DataError)


class LiveBatches(CountedBatches):
    """Batches that hand out the dict in which they count."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.state = {"next": 0, "files": [0, 0]}

    def state_dict(self) -> dict[str, Any]:
        return self.state


def saves_behind(recipe: Recipe, fails: bool) -> list[Any]:
    """Save in the background, which is late, and leave the world without ``wait``.

    Returns:
        The step that a second object has loaded meanwhile, and the state of the batches in the
        checkpoint that was under way at the end.
    """
    with pool_world() as device:
        stages = build_model(recipe, Mesh.build(recipe.mesh, device))
        optimizer = build_stages_optimizer(stages, recipe)
        batches = LiveBatches(recipe)
        first = Checkpoints(recipe, stages, optimizer, batches)
        store = first._store
        go_on, begin = threading.Event(), store._begin

        def begin_late(name: str) -> None:
            go_on.wait(60)
            if fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            begin(name)

        store._begin = begin_late  # type: ignore[method-assign]
        first.save(1)
        assert not (recipe.checkpoint_folder / "step-00000001").exists()
        batches.state["next"] = 1
        batches.state["files"][0] = 5
        threading.Timer(0.3, go_on.set).start()
        loaded = None
        if not fails:
            loaded = Checkpoints(recipe, stages, optimizer, CountedBatches(recipe)).load()
            go_on.clear()
            first.save(2)
            batches.state["next"] = 2
            threading.Timer(0.3, go_on.set).start()
    return [
        loaded,
        *(manifest.read(recipe.checkpoint_folder / f"step-0000000{step}").data for step in (1, 2)),
    ]


def test_a_save_behind_has_the_state_of_its_step_and_ends_with_the_world(pool: Pool) -> None:
    recipe = recipe_of(ALONE, CheckpointTable(async_save=True))
    task = {"recipe": recipe, "fails": False}
    states = {"next": 0, "files": [0, 0]}, {"next": 1, "files": [5, 0]}
    assert pool.run(saves_behind, task, world_size=1) == [[1, *states]]


def test_a_save_behind_that_fails_ends_the_world_with_its_error(pool: Pool) -> None:
    recipe = recipe_of(ALONE, CheckpointTable(async_save=True))
    with pytest.raises(
        WorkerError, match=r"could not be saved: .*No space left on device"
    ) as found:
        pool.run(saves_behind, {"recipe": recipe, "fails": True}, world_size=1)
    assert isinstance(found.value.user_error, SaveError)


def save_anew(recipe: Recipe, steps: list[int]) -> None:
    """Save without a load."""
    with pool_world() as device:
        stages = build_model(recipe, Mesh.build(recipe.mesh, device))
        checkpoints = Checkpoints(recipe, stages, build_stages_optimizer(stages, recipe))
        for step in steps:
            checkpoints.save(step)


def test_a_training_that_forgot_to_load_saves_nothing_that_no_load_would_take(pool: Pool) -> None:
    recipe = recipe_of(DP)
    pool.run(save_anew, {"recipe": recipe, "steps": [3]}, world_size=2)
    refusal = r"checkpoints has step-00000003 of an earlier training.* call load\(\) first"
    for step in (1, 3):
        with pytest.raises(WorkerError, match=refusal) as found:
            pool.run(save_anew, {"recipe": recipe, "steps": [step]}, world_size=2)
        assert isinstance(found.value.user_error, CheckpointError)
    assert [path.name for path in recipe.checkpoint_folder.iterdir()] == ["step-00000003"]
    # It may save later steps, and then also replace its own.
    pool.run(save_anew, {"recipe": recipe, "steps": [4, 4]}, world_size=2)


def test_the_lock_is_of_the_process_and_of_the_folder_that_it_was(pool: Pool) -> None:
    task = {"recipe": recipe_of(ALONE)}
    assert pool.run(save_into_a_folder_that_was_replaced, task, world_size=1) == [1]


OTHERS = {
    "another model": (
        {"model": preset("debug-tiny", n_layers=2, rope_theta=5e5)},
        CheckpointError,
        r"made with model\.rope_theta = 10000\.0",
    ),
    "another seed": ({"tables": [RunTable(name="own", seed=1)]}, CheckpointError, r"run\.seed = 0"),
    "another optimizer": (
        {"tables": [OptimTable(name="muon")]},
        CheckpointError,
        r"made with optim\.name = \"adamw\"",
    ),
    "other samples": (
        {"tables": [DataTable(source="text", path="text.txt", seq_len=64, global_batch=4)]},
        DataError,
        r"data\.seq_len = 64, but the checkpoint was made with 32",
    ),
}


def test_a_checkpoint_of_something_else_is_refused(pool: Pool) -> None:
    run(pool, recipe_of(ALONE), 1)
    for name, (changes, error, text) in OTHERS.items():
        tables = changes.get("tables", [])
        with pytest.raises(WorkerError, match=text) as found:
            run(pool, recipe_of(ALONE, *tables, model=changes.get("model")), 2)
        assert isinstance(found.value.user_error, error), name


def test_its_manifest_says_what_was_trained(pool: Pool) -> None:
    recipe = recipe_of(DP)
    run(pool, recipe, 1)
    read = manifest.read(Path("runs/own/checkpoints/step-00000001"))
    assert (read.step, read.world_size, read.layout["dp_shard"]) == (1, 2, 2)
    assert read.data is not None
    assert read.data["next_step"] == 1
    assert read.lr is None
    assert {"assets/tokenizer.json", "assets/config.json"} <= read.files.keys()
    Path("again.toml").write_text(read.recipe)
    assert load_recipe("again.toml") == recipe


def fail(recipe: Recipe) -> None:
    with pool_world() as device:
        build_model(recipe, Mesh.build(recipe.mesh, device))


@pytest.mark.parametrize(
    ("tables", "error", "text"),
    [
        (
            (ParallelTable(attention_kernel="flash3"), PrecisionTable(compute="bfloat16")),
            DeviceError,
            'parallel.attention_kernel = "flash3" needs a GPU',
        ),
        ((MeshTable(tp=2, dp_shard=1),), UserError, "= 2 processes, but the world has 1"),
    ],
)
def test_what_this_machine_cannot_run_is_refused(
    pool: Pool, tables: tuple[Any, ...], error: type[UserError], text: str
) -> None:
    mesh = next((table for table in tables if isinstance(table, MeshTable)), ALONE)
    others = [table for table in tables if table is not mesh]
    with pytest.raises(WorkerError, match=text) as found:
        pool.run(fail, {"recipe": recipe_of(mesh, *others)}, world_size=1)
    assert isinstance(found.value.user_error, error)


def compose_on_another_mesh(recipe: Recipe) -> None:
    with pool_world() as device:
        build_model(recipe, Mesh.build(MeshTable(dp_shard=1, cp=2), device))


def test_a_mesh_of_other_sizes_than_the_recipe_is_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"the mesh is MeshTable\(.*cp=2.* but the recipe has"):
        pool.run(compose_on_another_mesh, {"recipe": recipe_of(DP)}, world_size=2)


def first_weights(recipe: Recipe) -> dict[str, Tensor]:
    with pool_world() as device:
        stages = build_model(recipe, Mesh.build(recipe.mesh, device))
        return {name: whole(parameter) for name, parameter in stages.named_parameters()}


def test_a_model_in_a_folder_of_hugging_face_gives_the_first_weights(pool: Pool) -> None:
    trained = run(pool, recipe_of(ALONE), 1)["tensors"]
    task = {"arguments": ["convert", "runs/own", "hf", "--to", "hf"]}
    ((status, _, errors),) = pool.run(run_command, task, world_size=1)
    assert status == 0, errors
    Path("hf.toml").write_text(
        '[model]\nhf = "hf"\n[data]\nsource = "text"\npath = "text.txt"\nseq_len = 32\n'
    )
    (weights,) = pool.run(first_weights, {"recipe": load_recipe("hf.toml")}, world_size=1)
    for name, tensor in weights.items():
        assert torch.equal(tensor, trained[name]), name


def test_batches_of_ones_own_keep_the_files_of_the_model(pool: Pool) -> None:
    run(pool, recipe_of(ALONE), 1)
    task = {"arguments": ["convert", "runs/own", "hf", "--to", "hf"]}
    ((status, _, errors),) = pool.run(run_command, task, world_size=1)
    assert status == 0, errors
    Path("hf.toml").write_text(
        '[run]\nname = "own-batches"\n[model]\nhf = "hf"\n'
        '[data]\nsource = "text"\npath = "text.txt"\nseq_len = 32\n'
    )
    run(pool, load_recipe("hf.toml"), 1, counted=True)
    (assets,) = Path("runs/own-batches").glob("checkpoints/*/assets")
    for name in ("config.json", "tokenizer.json"):
        assert (assets / name).read_bytes() == Path("hf", name).read_bytes(), name
