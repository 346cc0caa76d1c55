"""The vocabulary cut over tp: embedding and loss of uneven shards, and the loss in parts."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composer3d.checkpoint import Store
from composer3d.checkpoint.manifest import Manifest
from composer3d.facts.errors import PlanError
from composer3d.models.contract import IGNORE_INDEX, SequenceInfo, ShardingPlan
from composer3d.models.layers.head import Head
from composer3d.models.llama.model import Last, Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel import Stages, StepShape, checkpointing, compose, init
from composer3d.parallel.tensor import styles, vocab
from composer3d.parallel.tensor.collectives import gather_columns
from composer3d.recipe.schema import MeshTable, OptimTable, ParallelTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.optimizers import Optimizer, build_optimizer
from tests.models.layers.labels import random, random_labels, summed_loss

SHAPE = ModelShape(dim=24, n_layers=1, n_heads=4, n_kv_heads=2, ffn=24, vocab=259, rope_theta=100.0)


# --- the loss of cut logits ---


class LossCounts(NamedTuple):
    """The collectives of a loss, by operator."""

    forward: dict[str, int]
    backward: dict[str, int]


def check_losses(columns: int) -> LossCounts:
    """Compare loss and gradient of cut logits, and of cut and gathered ones, with plain ones.

    Returns the collectives for cut logits.
    """
    with pool_world():
        group = dist.group.WORLD
        assert group is not None
        first, size = vocab.own_rows(columns, group)
        own = slice(first, first + size)
        cut_loss = partial(vocab.cross_entropy, first=first, group=group)

        def gathered_loss(logits: Tensor, labels: Tensor) -> Tensor:
            return summed_loss(gather_columns(logits, columns, group), labels)

        labels = random_labels(14, columns)
        all_ignored = torch.full_like(labels, IGNORE_INDEX)
        # Exponentials of these logits overflow, in the columns of one rank only.
        large_logits = random(14, columns, seed=1)
        large_logits[:, -1] += 2000
        for logits, target in (
            (random(14, columns, seed=1), labels),
            (large_logits, labels),
            (large_logits, all_ignored),
        ):
            plain = logits.clone().requires_grad_()
            expected = summed_loss(plain, target)
            (3 * expected).backward()
            assert plain.grad is not None
            for loss_of in (cut_loss, gathered_loss):
                own_logits = logits[:, own].clone().requires_grad_()
                loss = loss_of(own_logits, target)
                (3 * loss).backward()
                torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(
                    own_logits.grad, plain.grad[:, own], rtol=1e-12, atol=1e-12
                )

        own_logits = random(14, columns, seed=1)[:, own].requires_grad_()
        with CommDebugMode() as forward:
            loss = cut_loss(own_logits, labels)
        with CommDebugMode() as backward:
            loss.backward()
        return LossCounts(by_operator(forward), by_operator(backward))


def by_operator(mode: CommDebugMode) -> dict[str, int]:
    return {str(operator): count for operator, count in mode.get_comm_counts().items()}


@pytest.mark.parametrize(("world_size", "columns"), [(2, 11), (3, 11), (4, 10)])
def test_loss_of_cut_logits_is_the_plain_loss(pool: Pool, world_size: int, columns: int) -> None:
    for counts in pool.run(check_losses, {"columns": columns}, world_size=world_size):
        assert list(counts.forward.values()) == [2]
        assert "allreduce" in next(iter(counts.forward))
        assert counts.backward == {}


class NarrowLoss(NamedTuple):
    """The loss of bfloat16 logits; ``relative_error`` is against the same logits in float64."""

    loss_dtype: torch.dtype
    grad_dtype: torch.dtype
    relative_error: float


def bfloat16_loss() -> NarrowLoss:
    with pool_world():
        group = dist.group.WORLD
        assert group is not None
        first, size = vocab.own_rows(257, group)
        logits, labels = random(4000, 257, seed=1, dtype=torch.bfloat16), random_labels(4000, 257)
        own_logits = logits[:, first : first + size].clone().requires_grad_()
        loss = vocab.cross_entropy(own_logits, labels, first=first, group=group)
        loss.backward()
        assert own_logits.grad is not None
        expected = summed_loss(logits.double(), labels).item()
        error = abs(loss.item() - expected) / expected
        return NarrowLoss(loss.dtype, own_logits.grad.dtype, error)


def test_bfloat16_logits_are_summed_in_float32(pool: Pool) -> None:
    for result in pool.run(bfloat16_loss, {}, world_size=2):
        assert result.loss_dtype == torch.float32
        assert result.grad_dtype == torch.bfloat16
        assert result.relative_error < 1e-6


# --- embedding and head of a vocabulary that does not divide ---


def check_ends(parallel: ParallelTable) -> None:
    """Compare embedding and head, forward and backward, with one process."""
    with pool_world() as device:
        rank, size = dist.get_rank(), dist.get_world_size()
        plan, step = sharding_plan(SHAPE), StepShape(micro_batch=2, micro_batches=1, seq_len=12)
        mesh = Mesh.build(MeshTable(dp_shard=1, tp=size), device)
        stages = compose(
            Llama(SHAPE, dtype=torch.float64), plan, mesh, parallel=parallel, step=step, seed=5
        )
        single = Llama(SHAPE, dtype=torch.float64, device="cpu")
        init.initialise(single, plan, 5)
        tokens = torch.randint(SHAPE.vocab, (2, 12), generator=torch.Generator().manual_seed(1))
        tokens[0, :4] = torch.tensor([0, 129, 130, 258])
        labels = random_labels(24, SHAPE.vocab).view(2, 12)
        seq = SequenceInfo(torch.arange(12).repeat(2, 1))
        expected_h = single.first(tokens, seq)
        expected_loss = single.last(expected_h, seq, labels)
        expected_loss.backward()

        module = stages.modules[0]
        assert module.first is not None
        assert module.last is not None
        own_tokens = slice(None)
        if parallel.sequence_parallel:
            own_tokens = slice(12 // size * rank, 12 // size * (rank + 1))
        h = module.first(tokens, seq)
        torch.testing.assert_close(h, expected_h[:, own_tokens], rtol=1e-12, atol=1e-12)
        loss = module.last(h, seq, labels)
        loss.backward()
        stages.finish_gradients()
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
        for name in ("first.embed.weight", "last.head.weight", "last.norm.weight"):
            grad = module.get_parameter(name).grad
            assert isinstance(grad, DTensor)
            torch.testing.assert_close(
                grad.full_tensor(), single.get_parameter(name).grad, rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize(
    ("world_size", "sequence_parallel", "loss_parallel"),
    [(4, True, True), (4, False, False), (2, True, False), (2, False, True)],
)
def test_embedding_and_head_of_an_uneven_vocabulary_are_exact(
    pool: Pool, world_size: int, sequence_parallel: bool, loss_parallel: bool
) -> None:
    parallel = ParallelTable(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    pool.run(check_ends, {"parallel": parallel}, world_size=world_size)


# --- checkpoints of a vocabulary that does not divide ---


def compose_and_update(mesh: MeshTable, seed: int) -> tuple[Stages, Optimizer]:
    """Compose a model and make one optimizer step; the weights serve as their own gradients."""
    step = StepShape(micro_batch=1, micro_batches=1, seq_len=24)
    built = Mesh.build(mesh, torch.device("cpu"))
    stages = compose(
        Llama(SHAPE), sharding_plan(SHAPE), built, parallel=ParallelTable(), step=step, seed=seed
    )
    optimizer = build_optimizer(stages.named_parameters(), OptimTable())
    for parameter in stages.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return stages, optimizer


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor; collective for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state_of(stages: Stages, optimizer: Optimizer) -> dict[str, list[float]]:
    """All weights and optimizer states as numbers, the same on every rank."""
    state = {}
    for name, parameter in stages.named_parameters():
        state[name] = gather(parameter.detach()).tolist()
        for key, value in optimizer.state[parameter].items():
            state[name + key] = gather(value).tolist()
    return state


def save(folder: Path, mesh: MeshTable) -> dict[str, list[float]]:
    with pool_world():
        stages, optimizer = compose_and_update(mesh, seed=0)
        Store(folder, keep=1).save(Manifest(step=1, model={}), stages, optimizer)
        return state_of(stages, optimizer)


def load(folder: Path, mesh: MeshTable) -> dict[str, list[float]]:
    with pool_world():
        stages, optimizer = compose_and_update(mesh, seed=1)
        Store(folder, keep=1).load(folder / "step-00000001", stages, optimizer)
        return state_of(stages, optimizer)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        (MeshTable(dp_shard=2, tp=2), MeshTable(dp_shard=1, tp=4)),
        # If FSDP and tp both cut the rows, torch misplaces them on this mesh.
        (MeshTable(dp_shard=3, tp=2), MeshTable(dp_shard=1)),
    ],
    ids=str,
)
def test_uneven_shards_are_saved_and_loaded_bit_for_bit(
    pool: Pool, tmp_path: Path, saving: MeshTable, loading: MeshTable
) -> None:
    """All layouts have the same initial weights, and the same ones after loading a checkpoint."""
    arguments = {"folder": tmp_path / "alone", "mesh": MeshTable(dp_shard=1)}
    (alone,) = pool.run(save, arguments, world_size=1)
    arguments = {"folder": tmp_path / "cut", "mesh": saving}
    saved = pool.run(save, arguments, world_size=saving.world_size)
    arguments = {"folder": tmp_path / "cut", "mesh": loading}
    loaded = pool.run(load, arguments, world_size=loading.world_size)
    assert len(alone["first.embed.weight"]) == 259
    for state in (*saved, *loaded):
        assert state == alone


# --- the loss in parts ---


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


class ModelWithHead(nn.Module):
    """A head of 40 words and width 4, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head(40, 4)
        self.head.weight = nn.Parameter(random(40, 4, seed=2))


def largest_tensor(chunks: int, *, keeps_gradients: bool) -> int:
    """Run 2 x 15 tokens through a head of 40 words; return the elements of the largest tensor.

    Loss and gradients must be the plain ones.
    """
    with pool_world() as device:
        model, plan = ModelWithHead(), ShardingPlan(tensor={"head": "head"}, init={})
        weight = model.head.weight.detach().clone().requires_grad_()
        if dist.get_world_size() > 1:
            mesh = Mesh.build(MeshTable(dp_shard=1, tp=dist.get_world_size()), device)
            assert mesh.tp is not None
            styles.apply(model, plan, mesh.tp, ParallelTable(sequence_parallel=False))
        checkpointing.set_loss_chunks(model, plan, chunks, keeps_gradients=keeps_gradients)
        h, labels = random(2, 15, 4, seed=1).requires_grad_(), random_labels(30, 40)
        expected = summed_loss(F.linear(h, weight).flatten(0, 1), labels)
        expected_grads = torch.autograd.grad(expected, (h, weight))
        with LargestTensor() as largest:
            loss = model.head(h, labels.view(2, 15))
            (3 * loss).backward()
        expected_grads = [3 * grad for grad in expected_grads]
        assert model.head.weight.grad is not None
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        grads = (h.grad, gather(model.head.weight.grad))
        torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)
        return largest.numel


@pytest.mark.parametrize("keeps_gradients", [False, True])
@pytest.mark.parametrize(
    ("world_size", "chunks", "tokens_at_once"),
    [
        (1, 1, 30),
        (1, 4, 8),
        (1, 29, 2),
        (2, 4, 8),
        (2, 100, 1),
    ],
)
def test_loss_in_parts_never_has_all_logits_in_memory(
    pool: Pool, world_size: int, chunks: int, tokens_at_once: int, *, keeps_gradients: bool
) -> None:
    logits, head_weight = tokens_at_once * 40 // world_size, 40 * 4
    arguments = {"chunks": chunks, "keeps_gradients": keeps_gradients}
    for numel in pool.run(largest_tensor, arguments, world_size=world_size):
        assert numel == max(logits, head_weight)


def test_loss_in_parts_needs_a_head_with_chunks() -> None:
    model = Llama(SHAPE)
    checkpointing.set_loss_chunks(model, sharding_plan(SHAPE), 5, keeps_gradients=True)
    assert isinstance(model.last, Last)
    assert model.last.head.chunks == 5
    model.last.head = nn.Linear(3, 3)  # type: ignore[assignment]
    checkpointing.set_loss_chunks(model, sharding_plan(SHAPE), 1, keeps_gradients=True)
    with pytest.raises(
        PlanError,
        match=r"memory\.loss_chunks = 2: Llama has no head with the attribute `chunks`; "
        r"use memory\.loss_chunks = 1",
    ):
        checkpointing.set_loss_chunks(model, sharding_plan(SHAPE), 2, keeps_gradients=True)
