"""A bit that flips on one replica is named; a healthy run is bitwise one without the check."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from composer3d.parallel.local_gradients import units_of
from composer3d.recipe.schema import MeshTable
from composer3d.reliability.digests import Digest, Disagreement
from composer3d.runtime.launch import Pool
from composer3d.training import loop
from composer3d.training.build import Run
from composer3d.training.observers import replicas as replicas_of_training
from composer3d.training.observers.observer import StepResult
from composer3d.training.observers.replicas import Repeats, ReplicaCheck, what_repeats
from tests.long import some_of
from tests.training.jobs import RECIPE, Listener, built_run

SETS = [
    "run.steps=7",
    "optim.warmup=1",
    "optim.decay=7",
    "checkpoint.every=0",
    "data.micro_batch=1",
]
FLOAT8 = ["precision.compute=bfloat16", "precision.matmul=float8"]
EXPERTS = [
    "model.architecture=moe",
    "model.preset=debug-moe",
    "model.router=sigmoid",
    "model.balance_loss=0.01",
]
EVERY = "reliability.digest_every=2"


def train_and_flip(
    folder: str, sets: list[str], rank: int | None, after: int, name: str, kind: str
) -> dict[str, Any]:
    """A task: train; on ``rank``, flip a bit of ``name`` after step ``after``.

    Args:
        kind: what is off by one bit: "parameter"; "exp_avg"; "forward", the loss that this rank
            computes for the check; "forward alone", the same without a backward to compare;
            "forward, parameter", the loss in one check, and the parameter after two more;
            "backward", from then on one gradient of the unit ``name``, before it is reduced; or
            "activation", from then on the gradient of the output of the unit ``name``.

    Returns:
        The reports of this rank, its loss after each step, its shards and its random state at the
        end.
    """
    losses = []
    with built_run(folder, sets) as run, pytest.MonkeyPatch.context() as monkeypatch:
        if kind == "forward alone":
            replicas = run.observers.find(ReplicaCheck)
            assert replicas is not None
            replicas._repeats = Repeats.FORWARD
        has_fault = int(os.environ["RANK"]) == rank

        class Saboteur(Listener):
            def end_step(self, result: StepResult) -> None:
                losses.append((result.values.loss, result.values.norm))
                if has_fault and result.step == after:
                    plant(run, name, kind, monkeypatch)

        listener = Saboteur()
        run.observers.add(listener)
        loop.train(run)
        shards = {name: local(tensor).clone() for name, tensor in run.stages.named_parameters()}
    return {
        "reports": listener.reports,
        "losses": losses,
        "shards": shards,
        "random": torch.get_rng_state(),
    }


def plant(run: Run, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "forward, parameter":
        honest = replicas_of_training.see_local_gradients
        checks = []

        def lie_once(*arguments: Any, **keywords: Any) -> torch.Tensor:
            loss = honest(*arguments, **keywords)
            checks.append(loss)
            if len(checks) == 1:
                loss.view(torch.int64).bitwise_xor_(1)
            if len(checks) == 3:
                plant(run, name, "parameter", monkeypatch)
            return loss

        monkeypatch.setattr(replicas_of_training, "see_local_gradients", lie_once)
        return
    if kind.startswith("forward"):
        of_run: tuple[Any, str] = (replicas_of_training, "see_local_gradients")
        if kind == "forward alone":
            of_run = (run.stages, "evaluate")
        compute = getattr(*of_run)

        def lie(*arguments: Any, **keywords: Any) -> torch.Tensor:
            loss: torch.Tensor = compute(*arguments, **keywords)
            loss.view(torch.int64).bitwise_xor_(1)
            return loss

        monkeypatch.setattr(*of_run, lie)
        return
    if kind == "backward":
        (module,) = run.stages.modules
        parameters = {unit.name: held for unit, held in units_of(0, module).items()}[name]
        parameters[1].register_hook(off_by_one_bit)
        return
    if kind == "activation":
        (module,) = run.stages.modules
        module.get_submodule(name).register_full_backward_pre_hook(
            lambda _, grads: tuple(map(off_by_one_bit, grads))
        )
        return
    parameter = dict(run.stages.named_parameters())[name]
    if kind == "parameter":
        flip(local(parameter))
    else:
        # The next step multiplies a moment and rounds it, which may take the least bit back.
        flip(local(run.optimizer.state[parameter][kind]), bit=20)


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    """Flip one bit of the middle element of a float32 in place: 0 is the least one."""
    bits = tensor.view(-1).view(torch.int32)
    bits[len(bits) // 2] ^= 1 << bit


def off_by_one_bit(grad: torch.Tensor) -> torch.Tensor:
    wrong = grad.clone()
    flip(local(wrong))
    return wrong


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run_all(pool: Pool, folder: Path, mesh: str, *sets: str, **fault: Any) -> list[dict[str, Any]]:
    """Train on a mesh such as "dp_replicate=3 tp=2"; return the results of all ranks."""
    axes = dict(axis.split("=") for axis in mesh.split())
    (folder / "recipe.toml").write_text(
        RECIPE.format(mesh="\n".join(f"{axis} = {size}" for axis, size in axes.items()))
    )
    world_size = 1
    for axis, size in axes.items():
        world_size *= int(size) if axis != "ep" else 1
    arguments = {"rank": None, "after": 0, "name": "", "kind": "parameter", **fault}
    return pool.run(
        train_and_flip,
        {"folder": str(folder), "sets": [*SETS, *sets], **arguments},
        world_size=world_size,
    )


@pytest.mark.parametrize(
    ("mesh", "sets", "rank", "name", "kind", "suspects", "what"),
    [
        ("dp_replicate=3", [], 0, "blocks.0.attn.wq.weight", "exp_avg", [0], "optimizer state"),
        ("dp_replicate=2", [], 1, "blocks.0.attn.wq.weight", "parameter", [0, 1], "parameters"),
        ("dp_replicate=2 tp=2", [], 3, "last.norm.weight", "parameter", [3], "parameters"),
        (
            "dp_replicate=2 cp=2",
            ["parallel.zero=0"],
            2,
            "last.norm.weight",
            "parameter",
            [2],
            "parameters",
        ),
        ("dp_replicate=3 pp=2", [], 4, "", "forward", [1, 4], "loss"),
        ("dp_shard=3", [], 2, "", "forward alone", [2], "loss"),
        ("dp_replicate=3 pp=2", [], 1, "blocks.1", "backward", [1], "gradient of blocks.1"),
        ("dp_shard=3 tp=2", [], 3, "blocks.1", "activation", [2, 3], "gradient of blocks.1"),
    ],
    ids=[
        "moment",
        "two",
        "norm of tp",
        "zero 0",
        "forward of a pipeline",
        "forward alone",
        "backward of a pipeline",
        "gradient of an activation",
    ],
)
def test_a_flipped_bit_is_named(
    pool: Pool,
    folder: Path,
    mesh: str,
    sets: list[str],
    rank: int,
    name: str,
    kind: str,
    suspects: list[int],
    what: str,
) -> None:
    sets = [*sets, EVERY, "run.steps=4"]
    if "dp_shard=3" in mesh or "replicate=3" in mesh:
        sets.append("data.global_batch=6")
    results = run_all(pool, folder, mesh, *sets, rank=rank, after=3, name=name, kind=kind)
    assert all(not other["reports"] for other in results[1:])
    # The check after step 2 was right. The fault comes after step 3.
    (step, lines, values), *_ = results[0]["reports"]
    assert step == 4
    article = "other" if what == "parameters" else "another"
    (line,) = [line for line in lines if line.startswith(f"corruption: {article} {what}")]
    assert [int(number) for number in re.findall(r"rank (\d+) \(", line)] == suspects
    assert "all agreed after step 2" in line
    if len(suspects) == 1:
        assert values == {"corrupt_rank": suspects[0]}


@some_of(
    2,
    ("mesh", "sets"),
    [
        ("pp=2 dp_replicate=2 tp=2", ["model.tied=true"]),
        ("pp=2 dp_replicate=2", ["parallel.schedule=ZBVZeroBubble", *FLOAT8]),
        ("dp_replicate=2 cp=2", ["precision.compute=bfloat16", "memory.cpu_offload=true"]),
        (
            "dp_replicate=2 dp_shard=2 ep=2",
            [*EXPERTS, "model.router_bias=true", "data.packing=documents"],
        ),
        (
            "tp=2 dp_shard=2",
            [
                "parallel.sequence_parallel=false",
                "parallel.zero=1",
                "memory.activation_checkpoint=full",
                "memory.loss_chunks=2",
            ],
        ),
    ],
)
def test_healthy_ranks_agree_and_train_the_same_bits(
    pool: Pool, folder: Path, mesh: str, sets: list[str]
) -> None:
    # The last check is after the last step: each step sets the random state anew.
    sets = [*sets, "run.steps=4"]
    off = run_all(pool, folder, mesh, *sets, "run.out_dir=off")
    on = run_all(pool, folder, mesh, *sets, "run.out_dir=on", EVERY)
    for one, other in zip(off, on, strict=True):
        assert not other["reports"]
        assert one["losses"] == other["losses"]
        assert len(one["losses"]) == 4
        assert torch.equal(one["random"], other["random"])
        assert one["shards"].keys() == other["shards"].keys()
        for name, tensor in one["shards"].items():
            assert torch.equal(tensor.view(torch.uint8), other["shards"][name].view(torch.uint8))


def check_of(*, repeats: Repeats = Repeats.ALL) -> ReplicaCheck:
    """A check of 3 data-parallel ranks, without their model."""
    check = object.__new__(ReplicaCheck)
    check._sizes = MeshTable(pp=2, dp_shard=3)
    check._repeats = repeats
    return check


def wrong(what: str, rank: int, unit: tuple[int, int] | None = None) -> Disagreement:
    """A disagreement about ``what``, or about the gradient of the unit (stage, place)."""
    place = () if unit is None else (("stage", unit[0]), ("unit", unit[1]))
    return Disagreement(what, (("pp", rank // 3), *place), (rank,), (0, 1, 2))


def test_only_what_can_have_caused_the_rest_is_told() -> None:
    causes = check_of()._causes
    late, middle, early = (wrong(f"gradient {unit}", 1, unit) for unit in ((1, 0), (0, 9), (0, 1)))
    assert causes([early, late, middle]) == [late]
    assert causes([early, middle]) == [middle]
    # Wrong parameters or a wrong loss explain all gradients of their replica: ranks 1 and 4.
    of_rank_4 = wrong("loss", 4)
    assert causes([early, of_rank_4, late]) == [of_rank_4]
    # Another replica has a fault of its own.
    of_rank_2 = wrong("gradient (0, 1)", 2, (0, 1))
    assert causes([of_rank_4, of_rank_2, late]) == [of_rank_4, of_rank_2]
    # One line for the ranks of tp that have met it together.
    (both,) = causes([late, late._replace(suspects=(4,), ranks=(3, 4, 5))])
    assert (both.suspects, both.ranks) == ((1, 4), (0, 1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("digests", "repeats", "lines"),
    [
        ([("parameters", 0), ("loss", 0)], Repeats.ALL, []),
        ([("loss", 0)], Repeats.ALL, ["no two ranks hold the same parameters"]),
        ([("parameters", 0), ("loss", 0)], Repeats.FORWARD, ["backward is not compared"]),
        ([("parameters", 0)], Repeats.NOTHING, ["no arithmetic is compared: with mesh.tp > 2"]),
        (
            [("parameters", 0), ("loss", None)],
            Repeats.ALL,
            ["all data-parallel ranks share experts"],
        ),
    ],
)
def test_the_log_says_what_is_not_compared(
    digests: list[tuple[str, int | None]], repeats: Repeats, lines: list[str]
) -> None:
    of_ranks = [
        [Digest(what, (("ep", rank if part is None else part),), (0,)) for what, part in digests]
        for rank in range(2)
    ]
    said = list(check_of(repeats=repeats)._omissions(of_ranks))
    assert len(said) == len(lines)
    assert all(map(str.startswith, said, lines))


def test_gpus_compute_the_same_bits_less_often_than_cpus() -> None:
    def on_gpu(tp: int, *, is_deterministic: bool = False) -> Repeats:
        return what_repeats("cuda", is_deterministic=is_deterministic, tp=tp)

    assert what_repeats("cpu", is_deterministic=False, tp=4) is Repeats.ALL
    assert on_gpu(4, is_deterministic=True) is Repeats.ALL
    assert [on_gpu(tp) for tp in (1, 2, 4)] == [Repeats.FORWARD, Repeats.FORWARD, Repeats.NOTHING]
    # Nothing is computed then, so nothing of a model is needed.
    assert check_of(repeats=Repeats.NOTHING)._digests_of_micro_batch(1) == []


def test_ranks_that_agree_again_do_not_make_later_checkpoints_good(
    pool: Pool, folder: Path
) -> None:
    """A wrong gradient of step 2 may be in all replicas, and in the checkpoints from then on."""
    results = run_all(
        pool,
        folder,
        "dp_replicate=3",
        "reliability.digest_every=1",
        "data.global_batch=6",
        rank=1,
        after=2,
        kind="forward, parameter",
        name="last.norm.weight",
    )
    found = results[0]["reports"]
    assert [step for step, _, _ in found] == [2, 5, 6, 7]
    for _, lines, _ in found:
        assert all("; all agreed after step 1: resume from a checkpoint that" in x for x in lines)
