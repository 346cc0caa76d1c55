"""Tensor parallelism: exact blocks, with no more collectives than the papers have."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

from composer3d.facts.errors import PlanError
from composer3d.models.contract import SequenceInfo
from composer3d.models.deepseek.shape import DeepseekShape
from composer3d.models.layers.head import Head
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape, RotaryShape
from composer3d.models.registry import architecture, resolve
from composer3d.parallel import ShardingPlan, StepShape, compose, init
from composer3d.parallel.tensor import styles
from composer3d.recipe.schema import MeshTable, ParallelTable
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from tests.models.layers.labels import random

SHAPE = ModelShape(dim=16, n_layers=1, n_heads=4, n_kv_heads=2, ffn=24, vocab=32, rope_theta=100.0)
HEAD_NORMS = replace(SHAPE, qk_norm=True, qkv_bias=True, head_dim=6)


# --- one block against one process, and its collectives ---

Counts = dict[str, int]  # calls by the name of the collective's operator


class BlockCounts(NamedTuple):
    """The collectives of a block, by phase."""

    forward: Counts
    backward: Counts
    finish: Counts


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def count_collectives(run: Callable[[], Any]) -> tuple[Any, Counts]:
    """Call ``run``; return its result and the collectives that it ran."""
    with CommDebugMode() as mode:
        result = run()
    counts = {}
    for operator, count in mode.get_comm_counts().items():
        if count:
            counts[str(operator).rpartition(".")[2].strip("_")] = count
    return result, counts


def total(counts: Counts, word: str) -> int:
    """The number of calls of all collectives with ``word`` in their name."""
    return sum(count for name, count in counts.items() if word in name)


def run_block(
    parallel: ParallelTable, shape: RotaryShape = SHAPE, name: str = "llama"
) -> BlockCounts:
    """Run one block forward and backward over all ranks, and compare it with one process.

    ``name`` is that of its architecture.
    """
    with pool_world() as device:
        ours = architecture(name)
        plan: ShardingPlan = resolve(ours.plan)(shape)
        rank, size = dist.get_rank(), dist.get_world_size()
        step = StepShape(micro_batch=2, micro_batches=1, seq_len=8)
        mesh = Mesh.build(MeshTable(dp_shard=1, tp=size), device)
        stages = compose(
            ours.build(shape, dtype=torch.float64), plan, mesh, parallel=parallel, step=step, seed=5
        )
        single = ours.build(shape, dtype=torch.float64, device="cpu")
        init.initialise(single, plan, 5)
        seq = SequenceInfo(torch.arange(8).repeat(2, 1))
        whole_h = random(2, 8, shape.dim, seed=1).requires_grad_()
        cotangent = random(2, 8, shape.dim, seed=2)
        expected = single.blocks["0"](whole_h, seq)
        expected.backward(cotangent)

        own_tokens = slice(None)
        if parallel.sequence_parallel:
            own_tokens = slice(8 // size * rank, 8 // size * (rank + 1))
        h = whole_h.detach()[:, own_tokens].clone().requires_grad_()
        out, forward = count_collectives(lambda: stages.modules[0].blocks["0"](h, seq))
        _, backward = count_collectives(lambda: out.backward(cotangent[:, own_tokens]))
        _, finish = count_collectives(stages.finish_gradients)
        assert whole_h.grad is not None
        assert_close(out, expected[:, own_tokens])
        assert_close(h.grad, whole_h.grad[:, own_tokens])

        expected_grads = {
            f"blocks.0.{name}": parameter.grad
            for name, parameter in single.blocks["0"].named_parameters()
        }
        grads = {
            name: parameter.grad
            for name, parameter in stages.named_parameters()
            if name in expected_grads
        }
        assert len(grads) == len(expected_grads)
        for name, grad in grads.items():
            assert isinstance(grad, DTensor), name
            assert_close(grad.full_tensor(), expected_grads[name])
        return BlockCounts(forward, backward, finish)


def test_a_block_under_sequence_parallelism_gathers_and_scatters_twice(pool: Pool) -> None:
    for counts in pool.run(run_block, {"parallel": ParallelTable()}, world_size=2):
        assert total(counts.forward, "gather") == total(counts.forward, "scatter") == 2
        assert total(counts.backward, "gather") == total(counts.backward, "scatter") == 2
        assert sum(counts.forward.values()) == sum(counts.backward.values()) == 4
        # A rank has the gradients of the two norms for its tokens only. They are summed once a
        # step.
        assert counts.finish == {"allreduce": 1}


def test_a_block_without_sequence_parallelism_reduces_twice(pool: Pool) -> None:
    arguments = {"parallel": ParallelTable(sequence_parallel=False)}
    for counts in pool.run(run_block, arguments, world_size=2):
        assert total(counts.forward, "reduce") == total(counts.backward, "reduce") == 2
        assert sum(counts.forward.values()) == sum(counts.backward.values()) == 2
        assert counts.finish == {}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_head_norms_and_biases_have_exact_gradients(pool: Pool, sequence_parallel: bool) -> None:
    """A rank has the gradients of q_norm and k_norm for its heads only, with a cut sequence or not.

    They are summed like those of the block's norms.
    """
    arguments = {
        "parallel": ParallelTable(sequence_parallel=sequence_parallel),
        "shape": HEAD_NORMS,
    }
    for counts in pool.run(run_block, arguments, world_size=2):
        assert counts.finish == {"allreduce": 1}


@pytest.mark.parametrize(
    ("world_size", "kv_heads", "sequence_parallel"), [(2, 1, True), (4, 2, True), (4, 2, False)]
)
def test_ranks_share_key_value_heads(
    pool: Pool, world_size: int, kv_heads: int, sequence_parallel: bool
) -> None:
    """Every rank has whole key and value weights and biases. Their gradients are summed."""
    shape = replace(HEAD_NORMS, n_heads=2 * world_size, n_kv_heads=kv_heads)
    arguments = {"parallel": ParallelTable(sequence_parallel=sequence_parallel), "shape": shape}
    for counts in pool.run(run_block, arguments, world_size=world_size):
        assert counts.finish == {"allreduce": 1}
    cuts = pool.run(cuts_of_parameters, {"shape": shape}, world_size=world_size)[0]
    whole = {name for name, cut in cuts.items() if cut == "R" and "norm" not in name}
    assert whole == {
        "blocks.0.attn.wk.weight",
        "blocks.0.attn.wk.bias",
        "blocks.0.attn.wv.weight",
        "blocks.0.attn.wv.bias",
    }


LATENTS = DeepseekShape(
    *(16, 1, 4, 4, 24, 32, 100.0),
    **{"head_dim": 8, "query_rank": 6, "kv_rank": 5, "rope_dim": 4, "value_dim": 7},
    dense_layers=1,
)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("query_rank", [6, 0])
def test_latents_have_exact_gradients(pool: Pool, sequence_parallel: bool, query_rank: int) -> None:
    """Queries, keys and the feed-forward layer each gather their input.

    Without sequence parallelism every rank has whole gradients of the down-projections: nothing is
    left to sum. Those of the gathered inputs are summed once.
    """
    arguments = {
        "parallel": ParallelTable(sequence_parallel=sequence_parallel),
        "shape": replace(LATENTS, query_rank=query_rank),
        "name": "deepseek",
    }
    for counts in pool.run(run_block, arguments, world_size=2):
        if sequence_parallel:
            assert total(counts.forward, "gather") == total(counts.backward, "scatter") == 3
            assert total(counts.forward, "scatter") == total(counts.backward, "gather") == 2
            assert counts.finish == {"allreduce": 1}
        else:
            assert (sum(counts.forward.values()), sum(counts.backward.values())) == (2, 3)
            assert counts.finish == {}


# --- how parameters are cut ---


def tp_mesh(device: torch.device) -> DeviceMesh:
    """A mesh with all ranks on its tp axis."""
    mesh = Mesh.build(MeshTable(dp_shard=1, tp=dist.get_world_size()), device)
    assert mesh.tp is not None
    return mesh.tp


def cuts_of_parameters(shape: ModelShape) -> dict[str, str]:
    """By name of a parameter: the dimension that is cut, or "R" if it is replicated."""
    with pool_world() as device:
        model = Llama(shape)
        styles.apply(model, sharding_plan(shape), tp_mesh(device), ParallelTable())
        cuts = {}
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                cuts[name] = "".join(
                    str(placement.dim) if isinstance(placement, Shard) else "R"
                    for placement in parameter.placements
                )
        return cuts


def test_parameters_are_cut_as_the_plan_says(pool: Pool) -> None:
    """Head norms are replicated, and biases are cut."""
    for cuts in pool.run(cuts_of_parameters, {"shape": HEAD_NORMS}, world_size=2):
        assert cuts == {
            "first.embed.weight": "0",
            "blocks.0.attn_norm.weight": "R",
            "blocks.0.attn.wq.weight": "0",
            "blocks.0.attn.wq.bias": "0",
            "blocks.0.attn.wk.weight": "0",
            "blocks.0.attn.wk.bias": "0",
            "blocks.0.attn.wv.weight": "0",
            "blocks.0.attn.wv.bias": "0",
            "blocks.0.attn.q_norm.weight": "R",
            "blocks.0.attn.k_norm.weight": "R",
            "blocks.0.attn.wo.weight": "1",
            "blocks.0.ffn_norm.weight": "R",
            "blocks.0.ffn.w1.weight": "0",
            "blocks.0.ffn.w2.weight": "1",
            "blocks.0.ffn.w3.weight": "0",
            "last.norm.weight": "R",
            "last.head.weight": "0",
        }


# --- models and meshes that do not fit ---


def test_key_value_heads_that_do_not_divide_are_refused(pool: Pool) -> None:
    with pytest.raises(
        WorkerError,
        match=r"mesh\.tp = 3 and 2 key-value heads: one must divide the other; use mesh\.tp = 2",
    ):
        pool.run(cuts_of_parameters, {"shape": SHAPE}, world_size=3)


def cut_head(head: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool = True) -> None:
    """Cut a model that consists of ``head``."""
    plan = ShardingPlan(tensor={"0": "head"}, init={})
    styles.apply(nn.Sequential(head), plan, mesh, ParallelTable(loss_parallel=loss_parallel))


def cut_head_without_a_loss() -> None:
    with pool_world() as device:
        cut_head(nn.Linear(4, 4, bias=False), tp_mesh(device))


def cut_head_with_a_loss_of_its_own() -> None:
    def sum_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.sum()

    with pool_world() as device:
        mesh = tp_mesh(device)
        for loss_parallel in (False, True):  # with False it gets whole logits, and is accepted
            head = Head(4, 4)
            head.cross_entropy = sum_of_logits
            cut_head(head, mesh, loss_parallel=loss_parallel)


def cut_head_of_four_rows() -> None:
    with pool_world() as device:
        cut_head(Head(4, 4), tp_mesh(device))


@pytest.mark.parametrize(
    ("task", "world_size", "message"),
    [
        (
            cut_head_without_a_loss,
            2,
            "cuts a head at its seam `cross_entropy`, which Linear lacks: compute the loss in the "
            "head",
        ),
        (
            cut_head_with_a_loss_of_its_own,
            2,
            r"Head has a loss of its own, which needs whole logits; use parallel.loss_parallel = "
            "false",
        ),
        (
            cut_head_of_four_rows,
            3,
            "a vocabulary of 4 rows leaves no row for the last of 3 tp ranks; "
            r"use a lower mesh\.tp",
        ),
    ],
)
def test_heads_that_cannot_be_cut_are_refused(
    pool: Pool, task: Callable[[], None], world_size: int, message: str
) -> None:
    with pytest.raises(WorkerError, match=message):
        pool.run(task, {}, world_size=world_size)


def leave_norms_uncut() -> None:
    with pool_world() as device:
        plan = sharding_plan(SHAPE)
        tensor = {glob: style for glob, style in plan.tensor.items() if style != "norm"}
        styles.apply(Llama(SHAPE), replace(plan, tensor=tensor), tp_mesh(device), ParallelTable())


def test_a_parameter_without_a_style_is_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(leave_norms_uncut, {}, world_size=2)
    assert isinstance(caught.value.user_error, PlanError)
    names = ("blocks.0.attn_norm.weight", "blocks.0.ffn_norm.weight", "last.norm.weight")
    expected = tuple(f"the plan's tensor table leaves parameter {name!r} uncut" for name in names)
    assert caught.value.user_error.lines == expected
