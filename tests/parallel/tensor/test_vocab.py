"""The vocabulary over tp: embedding and loss of uneven shards against plain ones, and a loss that is made in parts."""

from functools import partial
from pathlib import Path
from typing import Any

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
from composer3d.models.contract import IGNORE_INDEX, SequenceInfo, ShardingPlan
from composer3d.models.layers.head import Head
from composer3d.models.llama.model import Last, Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel import StepShape, compose, init
from composer3d.parallel.tensor import styles as tp
from composer3d.parallel.tensor import vocab
from composer3d.recipe.schema import MeshTable, OptimTable, ParallelTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.spec.errors import PlanError
from composer3d.training.optim import build_optimizer

SHAPE = ModelShape(dim=24, n_layers=1, n_heads=4, n_kv_heads=2, ffn=24, vocab=259, rope_theta=100.0)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def labels_of(count: int, columns: int) -> Tensor:
    """Labels of every part of the vocabulary, its ends among them, every third of which does not count."""
    labels = torch.randint(columns, (count,), generator=torch.Generator().manual_seed(3))
    labels[1], labels[2] = 0, columns - 1
    labels[::3] = IGNORE_INDEX
    return labels


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)


def check_losses(columns: int) -> list[dict[str, int]]:
    """Loss and gradient of cut logits against the plain ones, cut and gathered; the collectives of the first."""
    with pool_world():
        group = dist.group.WORLD
        assert group is not None
        first, size = vocab.own_rows(columns, group)
        cut = partial(vocab.cross_entropy, first=first, group=group)

        def gathered(logits: Tensor, labels: Tensor) -> Tensor:
            return summed(tp.gather_columns(logits, columns, group), labels)

        labels = labels_of(14, columns)
        # Numbers whose exponentials overflow, in the columns of one rank only; and labels none of which counts.
        far = random(14, columns, seed=1)
        far[:, -1] += 2000
        for logits, target in (
            (random(14, columns, seed=1), labels),
            (far, labels),
            (far, torch.full_like(labels, IGNORE_INDEX)),
        ):
            plain = logits.clone().requires_grad_()
            expected = summed(plain, target)
            (3 * expected).backward()
            assert plain.grad is not None
            for loss_of in (cut, gathered):
                mine = logits[:, first : first + size].clone().requires_grad_()
                loss = loss_of(mine, target)
                (3 * loss).backward()
                torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(
                    mine.grad, plain.grad[:, first : first + size], rtol=1e-12, atol=1e-12
                )
        counts: list[dict[str, int]] = []
        mine = random(14, columns, seed=1)[:, first : first + size].requires_grad_()
        with CommDebugMode() as mode:
            loss = cut(mine, labels)
        counts.append({str(op): count for op, count in mode.get_comm_counts().items()})
        with CommDebugMode() as mode:
            loss.backward()
        counts.append({str(op): count for op, count in mode.get_comm_counts().items()})
        return counts


def bfloat16_loss() -> tuple[torch.dtype, torch.dtype, float]:
    """What bfloat16 logits give: the dtypes of loss and gradient, and the error against the same logits widened."""
    with pool_world():
        group = dist.group.WORLD
        assert group is not None
        first, size = vocab.own_rows(257, group)
        logits, labels = random(4000, 257, seed=1, dtype=torch.bfloat16), labels_of(4000, 257)
        mine = logits[:, first : first + size].clone().requires_grad_()
        loss = vocab.cross_entropy(mine, labels, first=first, group=group)
        loss.backward()
        assert mine.grad is not None
        expected = summed(logits.double(), labels).item()
        return loss.dtype, mine.grad.dtype, abs(loss.item() - expected) / expected


@pytest.mark.parametrize(("world_size", "columns"), [(2, 12), (2, 11), (3, 11), (4, 10)])
def test_cut_loss_is_the_plain_loss(pool: Pool, world_size: int, columns: int) -> None:
    for forward, backward in pool.run(check_losses, {"columns": columns}, world_size=world_size):
        assert list(forward.values()) == [2]
        assert "allreduce" in next(iter(forward))
        assert backward == {}


def test_bfloat16_logits_are_summed_wide(pool: Pool) -> None:
    for loss, grad, error in pool.run(bfloat16_loss, {}, world_size=2):
        assert (loss, grad) == (torch.float32, torch.bfloat16)
        assert error < 1e-6


def check_ends(parallel: ParallelTable) -> None:
    """Embedding and head of a vocabulary of uneven shards, forward and backward, against one process."""
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
        labels, seq = (
            labels_of(24, SHAPE.vocab).view(2, 12),
            SequenceInfo(torch.arange(12).repeat(2, 1)),
        )
        expected = single.first(tokens, seq)
        loss = single.last(expected, seq, labels)
        loss.backward()

        module = stages.modules[0]
        assert module.first is not None
        assert module.last is not None
        part = (
            slice(12 // size * rank, 12 // size * (rank + 1))
            if parallel.sequence_parallel
            else slice(None)
        )
        h = module.first(tokens, seq)
        torch.testing.assert_close(h, expected[:, part], rtol=1e-12, atol=1e-12)
        mine = module.last(h, seq, labels)
        mine.backward()
        stages.finish_gradients()
        torch.testing.assert_close(mine, loss, rtol=1e-12, atol=1e-12)
        for name in ("first.embed.weight", "last.head.weight", "last.norm.weight"):
            grad = module.get_parameter(name).grad
            assert isinstance(grad, DTensor)
            torch.testing.assert_close(
                grad.full_tensor(), single.get_parameter(name).grad, rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("loss_parallel", [True, False])
def test_ends_of_an_uneven_vocabulary(
    pool: Pool, world_size: int, sequence_parallel: bool, loss_parallel: bool
) -> None:
    parallel = ParallelTable(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    pool.run(check_ends, {"parallel": parallel}, world_size=world_size)


def job(mesh: MeshTable, seed: int) -> tuple[Any, torch.optim.AdamW]:
    """A composed model of an uneven vocabulary and an optimizer that has made a step of made-up gradients."""
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


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state_of(stages: Any, optimizer: torch.optim.AdamW) -> dict[str, list[float]]:
    """The state as numbers, the same on every rank."""
    out = {}
    for name, parameter in stages.named_parameters():
        for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items():
            out[name + key] = whole(value).tolist()
    return out


def save(folder: Path, mesh: MeshTable) -> dict[str, list[float]]:
    with pool_world():
        state = job(mesh, seed=0)
        Store(folder, keep=1).save(Manifest(step=1, model={}), *state)
        return state_of(*state)


def load(folder: Path, mesh: MeshTable) -> dict[str, list[float]]:
    with pool_world():
        state = job(mesh, seed=1)
        Store(folder, keep=1).load(folder / "step-00000001", *state)
        return state_of(*state)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        (MeshTable(dp_shard=2, tp=2), MeshTable(dp_shard=1, tp=4)),
        (
            MeshTable(dp_shard=3, tp=2),
            MeshTable(dp_shard=1),
        ),  # where torch misplaces two cuts of the rows
        (MeshTable(dp_shard=2, tp=4), MeshTable(dp_shard=2, tp=2)),
    ],
    ids=str,
)
def test_uneven_shards_are_saved_and_loaded_bit_for_bit(
    pool: Pool, tmp_path: Path, saving: MeshTable, loading: MeshTable
) -> None:
    """On every layout the same initial weights, and the same ones after a checkpoint of another layout."""
    (alone,) = pool.run(
        save, {"folder": tmp_path / "alone", "mesh": MeshTable(dp_shard=1)}, world_size=1
    )
    saved = pool.run(
        save, {"folder": tmp_path / "cut", "mesh": saving}, world_size=saving.world_size
    )
    loaded = pool.run(
        load, {"folder": tmp_path / "cut", "mesh": loading}, world_size=loading.world_size
    )
    assert len(alone["first.embed.weight"]) == 259
    for rank in (*saved, *loaded):
        assert rank == alone


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


def most_elements(chunks: int) -> int:
    """Of any tensor, as 2 x 15 tokens of 40 words go through a head; its loss and gradients are the plain ones."""
    with pool_world() as device:
        model, plan = LastOnly(), ShardingPlan(tensor={"head": "head"}, init={})
        weight = model.head.weight.detach().clone().requires_grad_()
        if dist.get_world_size() > 1:
            mesh = Mesh.build(MeshTable(dp_shard=1, tp=dist.get_world_size()), device)
            assert mesh.tp is not None
            tp.apply(model, plan, mesh.tp, ParallelTable(sequence_parallel=False))
        vocab.set_loss_chunks(model, plan, chunks)
        h, labels = random(2, 15, 4, seed=1).requires_grad_(), labels_of(30, 40)
        expected = summed(F.linear(h, weight).flatten(0, 1), labels)
        wanted = torch.autograd.grad(expected, (h, weight))
        with Largest() as mode:
            loss = model.head(h, labels.view(2, 15))
            loss.backward()
        assert model.head.weight.grad is not None
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            (h.grad, whole(model.head.weight.grad)), wanted, rtol=1e-12, atol=1e-12
        )
        return mode.numel


class LastOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head(40, 4)
        self.head.weight = nn.Parameter(random(40, 4, seed=2))


@pytest.mark.parametrize(
    ("world_size", "chunks", "tokens_at_once"),
    [
        (1, 1, 30),
        (1, 3, 10),
        (1, 4, 8),
        (1, 29, 2),
        (1, 100, 1),
        (2, 1, 30),
        (2, 4, 8),
        (2, 100, 1),
    ],
)
def test_loss_in_parts_never_holds_all_logits(
    pool: Pool, world_size: int, chunks: int, tokens_at_once: int
) -> None:
    for numel in pool.run(most_elements, {"chunks": chunks}, world_size=world_size):
        assert numel == max(
            tokens_at_once * 40 // world_size, 40 * 4
        )  # 40 x 4 is the head's weight


def head_gradients(chunks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of the weight and of the input, in float64, as 2,048 tokens of 64 numbers go through a head of 512 words."""
    head = Head(512, 64)
    head.weight = nn.Parameter(random(512, 64, seed=2, dtype=torch.bfloat16).mul(0.1).to(dtype))
    head.chunks = chunks
    h = random(1, 2048, 64, seed=1, dtype=torch.bfloat16).to(dtype).requires_grad_()
    loss = head(h, labels_of(2048, 512).view(1, -1))
    (loss / 1000).backward()
    assert head.weight.grad is not None
    assert h.grad is not None
    assert head.weight.grad.dtype == h.grad.dtype == dtype
    return head.weight.grad.double(), h.grad.double()


def test_more_parts_of_the_loss_round_no_more() -> None:
    exact = head_gradients(1, torch.float64)
    errors: dict[int, list[float]] = {}
    for chunks in (1, 4, 64, 512):
        pairs = zip(head_gradients(chunks, torch.bfloat16), exact, strict=True)
        errors[chunks] = [((mine - right).norm() / right.norm()).item() for mine, right in pairs]
    # Each part's product is rounded once, then the sum: two roundings of 1.7e-3 at most, however many parts there are.
    for of_weight, of_input in errors.values():
        assert of_weight <= 1.25 * errors[1][0], errors
        assert of_weight <= 1.02 * errors[4][0], errors
        assert of_input <= 1.02 * errors[1][1], errors


def test_loss_in_parts_of_a_frozen_head() -> None:
    """What needs no gradient gets none, and the rest is as it was."""
    head, labels = Head(40, 4), labels_of(30, 40).view(2, 15)
    head.weight = nn.Parameter(random(40, 4, seed=2), requires_grad=False)
    h = random(2, 15, 4, seed=1).requires_grad_()
    (whole,) = torch.autograd.grad(head(h, labels), h)
    head.chunks = 7
    (parts,) = torch.autograd.grad(head(h, labels), h)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    head.weight.requires_grad_()
    head(h.detach(), labels).backward()
    assert head.weight.grad is not None


def test_loss_in_parts_needs_a_head_that_takes_them() -> None:
    model = Llama(SHAPE)
    vocab.set_loss_chunks(model, sharding_plan(SHAPE), 5)
    assert isinstance(model.last, Last)
    assert model.last.head.chunks == 5
    model.last.head = nn.Linear(3, 3)  # type: ignore[assignment]
    vocab.set_loss_chunks(model, sharding_plan(SHAPE), 1)
    with pytest.raises(
        PlanError,
        match=r"memory\.loss_chunks = 2: Llama has no head with the attribute `chunks`; use memory\.loss_chunks = 1",
    ):
        vocab.set_loss_chunks(model, sharding_plan(SHAPE), 2)
