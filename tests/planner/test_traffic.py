"""The formulas of traffic, compared with the collectives that real steps call."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer3d.planner.links import group_of
from composer3d.planner.traffic import flows
from composer3d.recipe.draft import split_overrides
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.training.build import build_stages
from composer3d.training.optimizers import build_stages_optimizer
from composer3d.training.step import compute_gradients
from composer3d.verify.data import random_batch
from composer3d.verify.worker import local_batch
from tests.long import some_of
from tools.prove.paths import ROOT

RECIPES = ROOT / "recipes"


class Key(NamedTuple):
    """The ranks of a group, by their number and distance, and what they do."""

    size: int
    stride: int
    operation: str


OF_PIPELINE = Key(0, 0, "send")


class Sum(NamedTuple):
    """Calls, and bytes of whole tensors."""

    count: int
    payload_bytes: int


class Recorder:
    """Sums the collectives that this rank calls.

    Messages of a pipeline have the key ``OF_PIPELINE``: each two neighbours have a group.
    """

    def __init__(self, stage_ranks: int) -> None:
        self.stage_ranks = stage_ranks
        self.counts: Counter[Key] = Counter()
        self.payload_bytes: Counter[Key] = Counter()

    def add(self, group: Any, operation: str, payload_bytes: int) -> None:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return
        key = Key(len(ranks), ranks[1] - ranks[0], operation)
        if operation == "send" and key.stride >= self.stage_ranks:
            key = OF_PIPELINE
        self.counts[key] += 1
        self.payload_bytes[key] += payload_bytes

    def sums(self) -> dict[Key, Sum]:
        return {key: Sum(self.counts[key], self.payload_bytes[key]) for key in self.counts}

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Record what process groups are asked to do. A rank's own input or output is measured."""

        def wrap(name: str, operation: str, nbytes: Callable[..., int]) -> None:
            method = getattr(dist.ProcessGroup, name)

            def call(group: Any, *arguments: Any) -> Any:
                self.add(group, operation, nbytes(*arguments))
                return method(group, *arguments)

            monkeypatch.setattr(dist.ProcessGroup, name, call)

        wrap("all_gather_single", "all_gather", lambda out, *_: out.nbytes)
        wrap("reduce_scatter_single", "reduce_scatter", lambda out, x, *_: x.nbytes)
        wrap("all_to_all_single", "all_to_all", lambda out, x, *_: x.nbytes)
        wrap("allreduce", "all_reduce", lambda tensors, *_: tensors[0].nbytes)
        wrap("send", "send", lambda tensors, *_: tensors[0].nbytes)

        # DTensor reduces through functional collectives, which do not call these methods.
        functional = funcol.all_reduce

        def all_reduce(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
            mesh, dim = keywords["group"] if "group" in keywords else arguments[1]
            self.add(mesh.get_group(dim), "all_reduce", tensor.nbytes)
            return functional(tensor, *arguments, **keywords)

        monkeypatch.setattr(funcol, "all_reduce", all_reduce)


class Done:
    """A request that is done."""

    def wait(self) -> None:
        """Do not wait."""


def copy_input(group: Any, out: Any, x: Any, *_: Any) -> Any:
    """Do what an all-to-all does if all ranks send the same; else only fill the output."""
    if out.shape == x.shape:
        out.copy_(x)
    else:
        out.zero_()
    return Done()


class Case(NamedTuple):
    """A recipe and its overrides."""

    recipe: str
    sets: str

    def load(self) -> Recipe:
        return load(RECIPES / f"{self.recipe}.toml", split_overrides(self.sets)).recipe


class Step(NamedTuple):
    """A step of the first rank of a pipeline rank."""

    case: Case
    pp_rank: int


def record_steps(steps: list[Step]) -> list[dict[Key, Sum]]:
    """Return the collectives of each step, one after the other in this process."""
    found = []
    for step in steps:
        chosen = step.case.load()
        rank = step.pp_rank * (chosen.world_size // chosen.mesh.pp)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=chosen.world_size)
        found.append(record_a_step(chosen))
        dist.destroy_process_group()
    return found


def record_a_step(chosen: Recipe) -> dict[Key, Sum]:
    """Take two steps as one rank of a fake world.

    The model, FSDP and the schedule are the real ones; only the bytes of other ranks are missing.

    Returns:
        The collectives of the second step. The first one may do more, to begin with.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist.ProcessGroup, "all_to_all_single", copy_input)
        # Stages vote for static shapes before the first step: the others have voted for them.
        monkeypatch.setattr(dist, "recv", lambda vote, **_: vote.fill_(1))
        mesh = Mesh.build(chosen.mesh, torch.device("cpu"))
        stages = build_stages(chosen, mesh)
        batch = local_batch(random_batch(chosen, 0), stages)
        optimizer = build_stages_optimizer(stages, chosen)
        scalars = {"divisor": torch.ones((), dtype=torch.float64), "is_good": torch.tensor(True)}
        compute_gradients(stages, batch)
        optimizer.apply_gradients(**scalars)
        recorder = Recorder(mesh.stage_ranks)
        recorder.patch(monkeypatch)
        compute_gradients(stages, batch)
        optimizer.apply_gradients(**scalars)
    return recorder.sums()


def expected(recipe: Recipe, pp_rank: int) -> dict[Key, Sum]:
    sums: dict[Key, Sum] = {}
    for flow in flows(recipe, pp_rank):
        group = group_of(flow.axis, recipe.mesh, pp_rank)
        key = Key(group.size, group.stride, flow.operation)
        if flow.axis == "pp" and flow.operation == "send":
            key = OF_PIPELINE
        before = sums.get(key, Sum(0, 0))
        sums[key] = Sum(before.count + flow.count, before.payload_bytes + flow.payload_bytes)
    return sums


DENSE, MOE = "debug-8-dp-tp-pp", "quickstart-moe"
NO_DP = "mesh.dp_shard=1"
BF16 = "precision.compute=bfloat16"
FULL = "memory.activation_checkpoint=full"
SELECTIVE = "memory.activation_checkpoint=selective"
EVERY_2 = "memory.activation_checkpoint=every 2 blocks"
IN_3_STAGES = "memory.activation_checkpoint=full in the first 3 stages"
NARROW = "precision.reduce=bfloat16"
BY_2 = "parallel.fsdp_blocks=2"
MUON = "optim.name=muon"
PREDICTION = (
    "model.architecture=deepseek model.preset=debug-deepseek model.n_kv_heads=4 model.mtp_layers"
)
WITHOUT_PP = "mesh.pp=1 mesh.dp_replicate=2"
CASES = [
    Case(DENSE, f"{MUON} parallel.zero=3"),
    Case(DENSE, f"parallel.schedule=Interleaved1F1B model.n_layers=6 {IN_3_STAGES}"),
    Case(DENSE, f"parallel.zero=3 parallel.schedule=GPipe model.tied=true {BF16} {FULL}"),
    Case(
        DENSE,
        "parallel.zero=3 parallel.schedule=LoopedBFS parallel.virtual_stages=4 model.n_layers=8",
    ),
    Case(
        DENSE,
        "parallel.zero=1 parallel.schedule=LoopedBFS parallel.virtual_stages=4 model.n_layers=8 "
        f"{BF16} {SELECTIVE}",
    ),
    Case(
        DENSE,
        f"parallel.zero=3 mesh.pp=4 mesh.tp=1 mesh.dp_shard=2 model.tied=true "
        f"parallel.schedule=ZBVZeroBubble model.n_layers=8 {FULL}",
    ),
    Case(DENSE, f"mesh.tp=4 {NO_DP} model.tied=true model.vocab=259 {MUON} model.n_kv_heads=2"),
    Case(
        DENSE,
        f"mesh.dp_replicate=2 mesh.tp=1 parallel.zero=3 {NARROW} {MUON} "
        "optim.newton_schulz_dtype=float32",
    ),
    Case(DENSE, f"{WITHOUT_PP} parallel.zero=3 {BF16} model.tied=true {MUON}"),
    Case(
        DENSE,
        f"mesh.pp=1 mesh.dp_replicate=4 {NO_DP} parallel.zero=0 model.n_layers=3 {BY_2} "
        "parallel.sequence_parallel=false parallel.loss_parallel=false memory.loss_chunks=2 "
        f"model.vocab=257 {BF16}",
    ),
    Case(DENSE, f"mesh.pp=1 mesh.cp=2 {FULL} {BF16} model.qk_norm=true model.qkv_bias=true"),
    Case(
        DENSE,
        f"mesh.pp=1 mesh.cp=4 mesh.tp=1 parallel.cp_method=allgather {BF16} {FULL} "
        "model.window=20 model.full_every=2 model.nope_every=3",
    ),
    Case(
        DENSE,
        f"mesh.pp=1 mesh.cp=2 mesh.tp=2 mesh.dp_shard=2 parallel.cp_method=ulysses "
        f"model.n_kv_heads=4 parallel.zero=2 {BF16} {FULL}",
    ),
    Case(
        DENSE,
        f"mesh.pp=1 mesh.cp=2 mesh.tp=4 {NO_DP} parallel.zero=1 {NARROW} memory.loss_chunks=3 "
        f"{SELECTIVE}",
    ),
    Case(
        DENSE,
        f"{NO_DP} parallel.schedule=GPipe parallel.sequence_parallel=false memory.loss_chunks=3",
    ),
    Case(
        DENSE,
        f"mesh.pp=4 mesh.tp=2 {NO_DP} parallel.schedule=DualPipeV model.n_layers=8 "
        f"parallel.sequence_parallel=false {FULL}",
    ),
    Case(
        DENSE,
        f"mesh.cp=2 mesh.tp=2 {NO_DP} parallel.cp_method=allgather model.n_layers=5 {EVERY_2}",
    ),
    Case(DENSE, f"mesh.pp=1 mesh.cp=2 mesh.tp=2 mesh.dp_shard=2 model.n_layers=3 {EVERY_2}"),
    Case(DENSE, f"mesh.pp=1 mesh.dp_shard=4 model.n_layers=5 {BY_2} parallel.zero=3 {BF16}"),
    Case(
        DENSE, f"{WITHOUT_PP} model.n_layers=5 {BY_2} parallel.zero=2 {BF16} {NARROW} {SELECTIVE}"
    ),
    Case(DENSE, f"parallel.zero=3 model.n_layers=6 {BY_2} {FULL}"),
    Case(
        DENSE, f"parallel.zero=3 parallel.schedule=ZBVZeroBubble model.n_layers=12 {BY_2} {NARROW}"
    ),
    Case(
        DENSE,
        "parallel.zero=1 parallel.schedule=Interleaved1F1B precision.params=float64 "
        f"model.n_layers=12 {BY_2}",
    ),
    Case(
        DENSE,
        f'{MUON} parallel.zero=3 model.vocab=257 optim.matrices=["*"] '
        'optim.train=["first.*","last.*","blocks.0.*norm*","*.w[qo]*"]',
    ),
    Case(MOE, f"model.balance_loss=0.01 {FULL}"),
    Case(MOE, f"model.n_layers=6 model.moe_every=2 {BY_2} {EVERY_2}"),
    Case(
        MOE,
        f"{WITHOUT_PP} mesh.ep=2 parallel.zero=2 {BF16} {SELECTIVE} {MUON} model.n_layers=3 {BY_2}",
    ),
    Case(MOE, "mesh.pp=1 mesh.ep=1 mesh.tp=1 mesh.dp_shard=8 parallel.zero=3 data.micro_batch=4"),
    Case(MOE, f"model.preset=debug-moe-shared mesh.ep=8 mesh.pp=1 mesh.cp=2 {FULL}"),
    Case(MOE, f"model.shared_ffn=48 model.shared_gate=true {FULL}"),
    Case(MOE, f"model.shared_ffn=48 model.shared_gate=true mesh.pp=1 {SELECTIVE}"),
    Case(MOE, MUON),
    Case(MOE, "mesh.tp=1 mesh.ep=1"),
    Case(MOE, "mesh.pp=1 mesh.ep=1 mesh.dp_shard=8 data.micro_batch=4 model.balance_loss=0"),
    Case(MOE, f"{NO_DP} mesh.tp=4 mesh.ep=2"),
    Case(MOE, f"mesh.tp=1 mesh.ep=1 {WITHOUT_PP} parallel.zero=1 {BF16}"),
    Case(MOE, f"{MUON} mesh.pp=1 mesh.ep=2 mesh.tp=4 mesh.dp_replicate=2 {NO_DP} parallel.zero=0"),
    Case(DENSE, "model.architecture=gemma3 model.preset=debug-gemma3 model.tied=true"),
    Case(DENSE, f"{PREDICTION}=2 model.tied=true parallel.zero=3"),
    Case(DENSE, f"{PREDICTION}=1 parallel.zero=3 parallel.schedule=GPipe {BY_2} {FULL}"),
    Case(DENSE, f"{PREDICTION}=2 parallel.schedule=ZBVZeroBubble {MUON} mesh.ep=2"),
    Case(
        DENSE,
        f"{PREDICTION}=1 mesh.pp=1 mesh.cp=2 parallel.zero=2 memory.loss_chunks=2 mesh.ep=2",
    ),
]


# So many at a time that a test ends in seconds.
@some_of(2, "cases", [CASES[begin::4] for begin in range(4)])
def test_steps_send_what_the_formulas_say(pool: Pool, cases: list[Case]) -> None:
    steps = [Step(case, pp_rank) for case in cases for pp_rank in {0, case.load().mesh.pp - 1}]
    found = pool.run(record_steps, {"steps": steps}, world_size=1, limit_s=200.0)[0]
    for step, sums in zip(steps, found, strict=True):
        assert sums == expected(step.case.load(), step.pp_rank), step
