"""Tensor parallelism: its two collectives are transposes, and a block needs no more of them than the papers say."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

from composer3d.models.contract import SequenceInfo
from composer3d.models.layers.head import Head
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel import ShardingPlan, StepShape, compose, init
from composer3d.parallel.tensor import styles as tp
from composer3d.recipe.schema import MeshTable, ParallelTable
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.spec.errors import PlanError

SHAPE = ModelShape(dim=16, n_layers=1, n_heads=4, n_kv_heads=2, ffn=24, vocab=32, rope_theta=100.0)
HEAD_NORMS = replace(SHAPE, qk_norm=True, qkv_bias=True, head_dim=6)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tensor | None, b: Tensor | None) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def check_collectives() -> tuple[float, float]:
    """Values and gradients of both, against what one process computes; returns <G x, y> and <x, S y> of this rank."""
    with pool_world():
        rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        assert group is not None
        wholes = [random(2, 3 * size, 5, seed=seed) for seed in range(size)]  # one (B, T, C) a rank
        x_whole = random(2, 3 * size, 5, seed=99)
        shard, whole_sum = slice(3 * rank, 3 * rank + 3), torch.stack(wholes).sum(0)

        x = x_whole[:, shard].clone().requires_grad_()
        gathered = tp.gather_sequence(x, group)
        torch.testing.assert_close(gathered, x_whole, rtol=0, atol=0)
        gathered.backward(wholes[rank])
        close(x.grad, whole_sum[:, shard])

        # Laid out the other way round: a transposed input must be sent as what it means, not as it lies in memory.
        y = wholes[rank].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        scattered = tp.scatter_sum(y, group)
        close(scattered, whole_sum[:, shard])
        scattered.backward(x_whole[:, shard])
        torch.testing.assert_close(y.grad, x_whole, rtol=0, atol=0)
        return (gathered * y).sum().item(), (x * scattered).sum().item()


def check_columns_and_rows() -> None:
    """gather > columns > rows > scatter, as a feed-forward does it, against the two products on one process."""
    with pool_world():
        rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        assert group is not None
        x, up, down, cotangent = (
            random(*shape, seed=seed).requires_grad_(seed < 3)
            for seed, shape in enumerate(
                [(2, 2 * size, 6), (4 * size, 6), (6, 4 * size), (2, 2 * size, 6)]
            )
        )
        expected = (x @ up.T).relu() @ down.T
        expected.backward(cotangent)
        mine, part = slice(2 * rank, 2 * rank + 2), slice(4 * rank, 4 * rank + 4)
        x_r, up_r, down_r = (
            t.detach().clone().requires_grad_() for t in (x[:, mine], up[part], down[:, part])
        )
        out = tp.scatter_sum((tp.gather_sequence(x_r, group) @ up_r.T).relu() @ down_r.T, group)
        out.backward(cotangent[:, mine])
        assert x.grad is not None
        assert up.grad is not None
        assert down.grad is not None
        close(out, expected[:, mine])
        close(x_r.grad, x.grad[:, mine])
        close(up_r.grad, up.grad[part])
        close(down_r.grad, down.grad[:, part])


def counted(run: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What ``run`` returns and the collectives that it runs, by the name of their operator."""
    with CommDebugMode() as mode:
        out = run()
    return out, {
        str(op).rpartition(".")[2].strip("_"): count
        for op, count in mode.get_comm_counts().items()
        if count
    }


def run_block(parallel: ParallelTable, shape: ModelShape = SHAPE) -> dict[str, dict[str, int]]:
    """One block forward and backward on two ranks, held against one process; its collectives by phase."""
    with pool_world() as device:
        plan, rank = sharding_plan(shape), dist.get_rank()
        step = StepShape(micro_batch=2, micro_batches=1, seq_len=8)
        size = dist.get_world_size()
        mesh = Mesh.build(MeshTable(dp_shard=1, tp=size), device)
        stages = compose(
            Llama(shape, dtype=torch.float64), plan, mesh, parallel=parallel, step=step, seed=5
        )
        single = Llama(shape, dtype=torch.float64, device="cpu")
        init.initialise(single, plan, 5)
        seq = SequenceInfo(torch.arange(8).repeat(2, 1))
        whole = random(2, 8, shape.dim, seed=1).requires_grad_()
        cotangent = random(2, 8, shape.dim, seed=2)
        expected = single.blocks["0"](whole, seq)
        expected.backward(cotangent)

        mine = (
            slice(8 // size * rank, 8 // size * (rank + 1))
            if parallel.sequence_parallel
            else slice(None)
        )
        h = whole.detach()[:, mine].clone().requires_grad_()
        out, forward = counted(lambda: stages.modules[0].blocks["0"](h, seq))
        _, backward = counted(lambda: out.backward(cotangent[:, mine]))
        _, finish = counted(stages.finish_gradients)
        assert whole.grad is not None
        close(out, expected[:, mine])
        close(h.grad, whole.grad[:, mine])
        wanted = {
            f"blocks.0.{name}": parameter.grad
            for name, parameter in single.blocks["0"].named_parameters()
        }
        found = {
            name: parameter.grad for name, parameter in stages.named_parameters() if name in wanted
        }
        assert len(found) == len(wanted)
        for name, grad in found.items():
            assert isinstance(grad, DTensor), name
            close(grad.full_tensor(), wanted[name])
        return {"forward": forward, "backward": backward, "finish": finish}


def placements(shape: ModelShape) -> dict[str, str]:
    with pool_world() as device:
        model = Llama(shape)
        mesh = Mesh.build(MeshTable(dp_shard=1, tp=dist.get_world_size()), device)
        assert mesh.tp is not None
        tp.apply(model, sharding_plan(shape), mesh.tp, ParallelTable())
        return {
            name: "".join(str(p.dim) if isinstance(p, Shard) else "R" for p in parameter.placements)
            for name, parameter in model.named_parameters()
            if isinstance(parameter, DTensor)
        }


def leave_norms_uncut() -> None:
    with pool_world() as device:
        plan = sharding_plan(SHAPE)
        tensor = {glob: style for glob, style in plan.tensor.items() if style != "norm"}
        mesh = Mesh.build(MeshTable(dp_shard=1, tp=2), device)
        assert mesh.tp is not None
        tp.apply(Llama(SHAPE), replace(plan, tensor=tensor), mesh.tp, ParallelTable())


@pytest.mark.parametrize("world_size", [2, 3])
def test_gather_and_scatter_are_transposes(pool: Pool, world_size: int) -> None:
    products = pool.run(check_collectives, {}, world_size=world_size)
    one, other = (sum(each) for each in zip(*products, strict=True))
    assert abs(one) > 1
    assert one == pytest.approx(other, rel=1e-12)


def test_columns_and_rows_are_one_product(pool: Pool) -> None:
    pool.run(check_columns_and_rows, {}, world_size=2)


def test_block_under_sequence_parallelism_gathers_and_scatters_twice(pool: Pool) -> None:
    for rank in pool.run(run_block, {"parallel": ParallelTable()}, world_size=2):
        assert total(rank["forward"], "gather") == total(rank["forward"], "scatter") == 2
        assert total(rank["backward"], "gather") == total(rank["backward"], "scatter") == 2
        assert sum(rank["forward"].values()) == sum(rank["backward"].values()) == 4
        # Each rank has the gradients of its tokens only for the two norms: they are summed once a step.
        assert rank["finish"] == {"all_reduce": 2}


def test_block_without_it_reduces_twice(pool: Pool) -> None:
    for rank in pool.run(
        run_block, {"parallel": ParallelTable(sequence_parallel=False)}, world_size=2
    ):
        assert total(rank["forward"], "reduce") == total(rank["backward"], "reduce") == 2
        assert sum(rank["forward"].values()) == sum(rank["backward"].values()) == 2
        assert rank["finish"] == {}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_norms_and_biases_of_heads_have_exact_gradients(
    pool: Pool, sequence_parallel: bool
) -> None:
    """Each rank has the gradients of its heads only for q_norm and k_norm, whether the sequence is cut or not."""
    arguments = {
        "parallel": ParallelTable(sequence_parallel=sequence_parallel),
        "shape": HEAD_NORMS,
    }
    for rank in pool.run(run_block, arguments, world_size=2):
        assert rank["finish"] == {"all_reduce": 4 if sequence_parallel else 2}


@pytest.mark.parametrize(("world_size", "kv_heads"), [(2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_ranks_share_key_value_heads(
    pool: Pool, world_size: int, kv_heads: int, sequence_parallel: bool
) -> None:
    """Weights and biases of keys and values are whole on every rank, and their gradients are summed once a step."""
    shape = replace(HEAD_NORMS, n_heads=2 * world_size, n_kv_heads=kv_heads)
    arguments = {"parallel": ParallelTable(sequence_parallel=sequence_parallel), "shape": shape}
    for rank in pool.run(run_block, arguments, world_size=world_size):
        assert rank["finish"] == {"all_reduce": 4 + (4 if sequence_parallel else 2)}
    cut = pool.run(placements, {"shape": shape}, world_size=world_size)[0]
    whole = {name for name, placement in cut.items() if placement == "R" and "norm" not in name}
    assert whole == {
        f"blocks.0.attn.w{each}.{kind}" for each in "kv" for kind in ("weight", "bias")
    }


def test_key_value_heads_that_fit_no_way_are_refused(pool: Pool) -> None:
    with pytest.raises(
        WorkerError,
        match=r"mesh\.tp = 3 and 2 key-value heads: one must divide the other; use mesh\.tp = 2",
    ):
        pool.run(placements, {"shape": SHAPE}, world_size=3)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "plain",
            "cuts a head at its seam `cross_entropy`, which Linear lacks: compute the loss in the head",
        ),
        (
            "own loss",
            r"Head has a loss of its own, which needs whole logits; use parallel.loss_parallel = false",
        ),
        (
            "short",
            r"a vocabulary of 4 rows leaves no row for the last of 3 tp ranks; use a lower mesh\.tp",
        ),
    ],
)
def test_heads_that_cannot_be_cut_are_refused(pool: Pool, kind: str, words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        pool.run(cut_a_head, {"kind": kind}, world_size=3 if kind == "short" else 2)


def cut_a_head(kind: str) -> None:
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(dp_shard=1, tp=3 if kind == "short" else 2), device)
        assert mesh.tp is not None
        head: nn.Module = nn.Linear(4, 4, bias=False) if kind == "plain" else Head(4, 4)
        if kind == "own loss":
            head.cross_entropy = lambda logits, labels: logits.sum()
            # Whole logits go through it.
            plan = ShardingPlan(tensor={"0": "head"}, init={})
            tp.apply(nn.Sequential(Head(4, 4)), plan, mesh.tp, ParallelTable(loss_parallel=False))
        tp.apply(
            nn.Sequential(head),
            ShardingPlan(tensor={"0": "head"}, init={}),
            mesh.tp,
            ParallelTable(),
        )


def total(collectives: dict[str, int], word: str) -> int:
    return sum(count for name, count in collectives.items() if word in name)


def test_parameters_are_cut_as_the_plan_says(pool: Pool) -> None:
    for rank in pool.run(placements, {"shape": SHAPE}, world_size=2):
        assert rank == {
            "first.embed.weight": "0",
            "blocks.0.attn_norm.weight": "R",
            "blocks.0.attn.wq.weight": "0",
            "blocks.0.attn.wk.weight": "0",
            "blocks.0.attn.wv.weight": "0",
            "blocks.0.attn.wo.weight": "1",
            "blocks.0.ffn_norm.weight": "R",
            "blocks.0.ffn.w1.weight": "0",
            "blocks.0.ffn.w2.weight": "1",
            "blocks.0.ffn.w3.weight": "0",
            "last.norm.weight": "R",
            "last.head.weight": "0",
        }


def test_norms_of_heads_are_replicated_and_biases_cut(pool: Pool) -> None:
    plain = set(pool.run(placements, {"shape": SHAPE}, world_size=2)[0])
    for rank in pool.run(placements, {"shape": HEAD_NORMS}, world_size=2):
        assert {
            name.removeprefix("blocks.0.attn."): cut
            for name, cut in rank.items()
            if name not in plain
        } == {
            "wq.bias": "0",
            "wk.bias": "0",
            "wv.bias": "0",
            "q_norm.weight": "R",
            "k_norm.weight": "R",
        }


def test_parameter_that_no_style_cuts_is_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(leave_norms_uncut, {}, world_size=2)
    assert isinstance(caught.value.user_error, PlanError)
    names = ("blocks.0.attn_norm.weight", "blocks.0.ffn_norm.weight", "last.norm.weight")
    expected = tuple(f"the plan's tensor table leaves parameter {name!r} uncut" for name in names)
    assert caught.value.user_error.lines == expected
