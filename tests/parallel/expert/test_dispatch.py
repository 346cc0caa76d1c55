"""The exchange of tokens: which rows a rank gets, and how many bytes travel."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer3d.models.contract import SequenceInfo
from composer3d.models.layers.moe import Router, Routing
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.plan import sharding_plan
from composer3d.models.moe.shape import MoeShape
from composer3d.parallel import StepShape, compose
from composer3d.parallel.expert import dispatch
from composer3d.recipe.schema import MemoryTable, MeshTable, ParallelTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world

SHAPE = MoeShape(16, 3, 4, 2, 24, 32, 100.0, experts=4, experts_per_token=2, dense_layers=1)
EXPERTS, TOKENS, MICRO_BATCHES = 4, 8, 3


def check_order_of_rows() -> None:
    """An expert gets the rows of all ranks, and each comes back to its place."""
    with pool_world():
        rank, size = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        assert group is not None
        seq = SequenceInfo(torch.zeros(1, 1, dtype=torch.int64))
        for counts in ([3, 1, 0, 2], [0, 0, 5, 0], [0, 0, 0, 0]):
            counts = counts[rank % 2 :] + counts[: rank % 2]
            tokens_E = torch.tensor(counts)
            # A row says which rank it is from, for which expert, and which of those it is.
            rows = [[rank, e, i] for e, count in enumerate(counts) for i in range(count)]
            rows_MC = torch.tensor(rows, dtype=torch.float64).view(-1, 3)
            exchanged = dispatch.exchange_over(group)(tokens_E, seq)(rows_MC)
            own = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
            received = exchanged.rows_MC.split(exchanged.tokens_E.tolist())
            for expert, part in zip(own, received, strict=True):
                assert (part[:, 1] == expert).all()
                # In the order of the ranks, and in each in the order in which they were sent.
                assert part[:, [0, 2]].tolist() == sorted(part[:, [0, 2]].tolist())
            back = exchanged.send_back(exchanged.rows_MC * 10)
            assert torch.equal(back, rows_MC * 10)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_get_the_rows_of_all_ranks(pool: Pool, size: int) -> None:
    pool.run(check_order_of_rows, {}, world_size=size)


def count_bytes(mesh_sizes: dict[str, int], mode: Any) -> dict[str, int]:
    """Run a step; return what this rank sends to others, and what its routers have chosen."""
    counts = {"sent": 0, "calls": 0, "leaving": 0, "routed": 0}
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(**mesh_sizes), device)
        stages = compose(
            MoeLlama(SHAPE),
            sharding_plan(SHAPE),
            mesh,
            parallel=ParallelTable(),
            memory=MemoryTable(activation_checkpoint=mode),
            step=StepShape(micro_batch=1, micro_batches=MICRO_BATCHES, seq_len=TOKENS),
            seed=0,
        )
        send = dist.all_to_all_single

        def counting_send(
            out: torch.Tensor, rows: torch.Tensor, arriving: Any = None, sent: Any = None, **kw: Any
        ) -> Any:
            if sent is not None:
                others = sum(sent) - sent[dist.get_rank(kw["group"])]
                counts["sent"] += others * rows.shape[1] * rows.element_size()
                counts["calls"] += 1
            return send(out, rows, arriving, sent, **kw)

        own_experts = EXPERTS // mesh.sizes.ep
        first = mesh.sparse["ep"].get_local_rank() * own_experts
        seen: set[int] = set()

        def count_routing(router: Router, inputs: Any, routing: Routing) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # backward runs a checkpointed block again
            seen.add(id(router))
            is_here = (routing.experts_NK >= first) & (routing.experts_NK < first + own_experts)
            counts["leaving"] += int((~is_here).sum())
            counts["routed"] += is_here.numel()

        for module in stages.modules[0].modules():
            if isinstance(module, Router):
                module.register_forward_hook(count_routing)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", counting_send)
            generator = torch.Generator().manual_seed(mesh.batch_rank)
            tokens = torch.randint(SHAPE.vocab, (MICRO_BATCHES, TOKENS), generator=generator)
            positions = torch.arange(TOKENS).expand_as(tokens)
            stages.forward_backward(tokens, tokens, positions, torch.tensor(32.0))
        assert len(seen) == 2
    return counts


@pytest.mark.parametrize(
    ("mesh_sizes", "mode"),
    [
        ({"dp_shard": 2, "ep": 2}, "none"),
        ({"dp_shard": 2, "ep": 2}, "full"),
        ({"dp_shard": 2, "tp": 2, "ep": 2}, "full"),
        ({"dp_shard": 1, "tp": 2, "ep": 2}, "selective"),
        ({"dp_shard": 2, "tp": 2, "ep": 4}, "selective"),
    ],
)
def test_a_token_travels_once_to_each_of_its_experts(
    pool: Pool, mesh_sizes: dict[str, int], mode: str
) -> None:
    """Bytes are exactly those of the rows whose expert is elsewhere, there and back, twice.

    Selective checkpointing sends nothing again; full checkpointing runs forward once more.
    """
    world_size = mesh_sizes["dp_shard"] * mesh_sizes.get("tp", 1)
    ranks = pool.run(count_bytes, {"mesh_sizes": mesh_sizes, "mode": mode}, world_size=world_size)
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    # tp ranks hold different tokens: no token is routed twice.
    step_tokens = mesh_sizes["dp_shard"] * MICRO_BATCHES * TOKENS
    assert total["routed"] == 2 * step_tokens * SHAPE.experts_per_token
    passes = 3 if mode == "full" else 2
    assert total["leaving"] > 0
    assert total["sent"] == passes * 2 * total["leaving"] * SHAPE.dim * 4
    assert total["calls"] == world_size * passes * 2 * 2 * MICRO_BATCHES
