"""The collectives of a step: a formula for each axis, what a dry run counts, and what a job does.

``EXPECTED`` is the table. A row says what an axis must send at least, from sizes alone. ``excess``
is what is sent beyond that, with its reason. The dry run must count exactly the sum, and real
processes must count what the dry run counts.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from composer3d.facts.flags import N_FLAGS
from composer3d.planner.traffic import traffic
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import Traffic, count_real_step, dry_run_of, recipe_of, traffic_of
from tests.long import some_of
from tools.prove.paths import ROOT

BASE = ROOT / "recipes" / "debug-1-single.toml"

# Sizes of the model, and of a step. M micro-batches of a rank follow from the layout.
L, C, F, V, T, B = 2, 64, 160, 256, 64, 1
HEADS, KV_HEADS = 8, 8
FLOAT = 4  # bytes
ATTENTION = 4 * C * C  # as many key-value heads as heads
BLOCK = ATTENTION + 3 * C * F + 2 * C
EMBED, HEAD = V * C, V * C + C
ALL = EMBED + L * BLOCK + HEAD
# On a rank of tp 2, which holds whole norms.
TP_BLOCK, TP_HEAD = (ATTENTION + 3 * C * F) // 2 + 2 * C, V * C // 2 + C

SIZES = (
    f"model.n_layers={L}",
    f"model.n_heads={HEADS}",
    f"model.n_kv_heads={KV_HEADS}",
    f"data.seq_len={T}",
    "data.global_batch=16",
)
EXPERTS = (
    'model.architecture="moe"',
    'model.preset="debug-moe"',
    "model.expert_ffn=96",
    *SIZES,
)
OLMO_2 = ('model.architecture="olmo2"', 'model.preset="debug-olmo2"')
E, K, EXPERT_F = 8, 2, 96
EXPERT_WEIGHTS = 3 * E * C * EXPERT_F
MOE_DENSE = ATTENTION + 2 * C + E * C  # of a block, without its experts


class Row(NamedTuple):
    """The calls of an operation in a step, on the first rank, and the bytes that it sends.

    Attributes:
        count: calls.
        least: the bytes that the technique must send.
        excess: further bytes.
        reason: of the excess.
    """

    count: int
    least: float
    excess: float = 0
    reason: str = ""


@dataclass(frozen=True)
class Layout:
    """A layout of 8 ranks, and the rows of its axes. ``world`` is in every layout."""

    sets: tuple[str, ...]
    rows: dict[tuple[str, str], Row]


def gathered(parameters: float, ranks: int) -> float:
    """Bytes that a rank sends so that each of ``ranks`` gets all of ``parameters``."""
    return (ranks - 1) / ranks * parameters * FLOAT


def summed(elements: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-reduce of float32."""
    return 2 * (ranks - 1) / ranks * elements * FLOAT


STREAM = B * T * C  # elements of the residual stream of a micro-batch

# Two micro-batches a rank with 8 batch ranks, 4 with 4, 16 with 1.
LAYOUTS = {
    "fsdp, both blocks a unit": Layout(
        ("mesh.dp_shard=8", "parallel.zero=3", "parallel.fsdp_blocks=2"),
        {
            # As many bytes as with a unit for each block, which is gathered by itself.
            ("fsdp", "all_gather"): Row(
                2 * (1 + 2 + 1),
                2 * (gathered(EMBED, 8) + 2 * gathered(L * BLOCK, 8) + gathered(HEAD, 8)),
            ),
            ("fsdp", "reduce_scatter"): Row(2 * 3, 2 * gathered(ALL, 8)),
        },
    ),
    "hsdp, zero 3": Layout(
        ("mesh.dp_replicate=2", "mesh.dp_shard=4", "parallel.zero=3"),
        {
            ("fsdp", "all_gather"): Row(
                2 * (1 + 2 * L + 1),
                2 * (gathered(EMBED, 4) + 2 * gathered(L * BLOCK, 4) + gathered(HEAD, 4)),
            ),
            ("fsdp", "reduce_scatter"): Row(2 * (L + 2), 2 * gathered(ALL, 4)),
            # Each rank adds up its shards over micro-batches before replicas sum them.
            ("dp_replicate", "all_reduce"): Row(L + 2, summed(ALL / 4, 2)),
        },
    ),
    "hsdp, gradients in bfloat16": Layout(
        (
            "mesh.dp_replicate=2",
            "mesh.dp_shard=4",
            "parallel.zero=1",
            "precision.reduce=bfloat16",
        ),
        {
            ("fsdp", "all_gather"): Row(L + 2, gathered(ALL, 4)),
            # Half the bytes of reduce-scatters.
            ("fsdp", "all_to_all"): Row(L + 2, gathered(ALL, 4) / 2),
            ("dp_replicate", "all_reduce"): Row(L + 2, summed(ALL / 4, 2)),  # in float32
        },
    ),
    "tp": Layout(
        ("mesh.tp=8",),
        {
            # Two a block in forward and two in backward; the embedding's backward; the head.
            ("tp", "all_gather"): Row(16 * (4 * L + 2), 16 * (4 * L + 2) * gathered(STREAM, 8)),
            ("tp", "reduce_scatter"): Row(16 * (4 * L + 2), 16 * (4 * L + 2) * gathered(STREAM, 8)),
            # The loss needs the largest logit of a token, and two sums. Norms see parts of the
            # sequence, so that their gradients are summed, all at once.
            ("tp", "all_reduce"): Row(
                16 * 2 + 1, 16 * summed(3 * B * T, 8) + summed((2 * L + 1) * C, 8)
            ),
        },
    ),
    "tp, norms over all heads": Layout(
        ("mesh.tp=8", *OLMO_2),
        {
            ("tp", "all_gather"): Row(16 * (4 * L + 2), 16 * (4 * L + 2) * gathered(STREAM, 8)),
            ("tp", "reduce_scatter"): Row(16 * (4 * L + 2), 16 * (4 * L + 2) * gathered(STREAM, 8)),
            # As "tp". And the queries and the keys of a block average a number of each token, in
            # forward and in backward.
            ("tp", "all_reduce"): Row(
                16 * (2 + 4 * L) + 1,
                16 * (summed(3 * B * T, 8) + 4 * L * summed(B * T, 8)) + summed((2 * L + 1) * C, 8),
            ),
        },
    ),
    "tp without sequence parallelism": Layout(
        ("mesh.tp=8", "parallel.sequence_parallel=false"),
        {
            # Two a block in forward and two in backward; the embedding; the head's backward. And
            # the two of the loss.
            ("tp", "all_reduce"): Row(
                16 * (4 * L + 4), 16 * ((4 * L + 2) * summed(STREAM, 8) + summed(3 * B * T, 8))
            ),
        },
    ),
    "tp, fsdp": Layout(
        ("mesh.tp=2", "mesh.dp_shard=4", "parallel.zero=3"),
        {
            ("fsdp", "all_gather"): Row(
                4 * (1 + 2 * L + 1),
                4 * (gathered(EMBED / 2, 4) + 2 * gathered(L * TP_BLOCK, 4) + gathered(TP_HEAD, 4)),
            ),
            ("fsdp", "reduce_scatter"): Row(
                4 * (L + 2), 4 * gathered(EMBED / 2 + L * TP_BLOCK + TP_HEAD, 4)
            ),
            ("tp", "all_gather"): Row(4 * (4 * L + 2), 4 * (4 * L + 2) * gathered(STREAM, 2)),
            ("tp", "reduce_scatter"): Row(4 * (4 * L + 2), 4 * (4 * L + 2) * gathered(STREAM, 2)),
            # The gradients of norms are summed as shards.
            ("tp", "all_reduce"): Row(
                4 * 2 + 1, 4 * summed(3 * B * T, 2) + summed((2 * L + 1) * C / 4, 2)
            ),
        },
    ),
    "cp ring": Layout(
        ("mesh.cp=8", "parallel.zero=1"),
        {
            ("fsdp", "all_gather"): Row(L + 2, gathered(ALL, 8)),
            ("fsdp", "reduce_scatter"): Row(L + 2, gathered(ALL, 8)),
            # Keys and values, twice; and their gradients, once. A rank has T / 8 tokens.
            ("cp", "send"): Row(16 * L * 3 * 7, 16 * L * 3 * 7 * 2 * STREAM / 8 * FLOAT),
            ("cp", "recv"): Row(16 * L * 3 * 7, 16 * L * 3 * 7 * 2 * STREAM / 8 * FLOAT),
        },
    ),
    "cp all-gather": Layout(
        ("mesh.cp=8", "parallel.zero=1", "parallel.cp_method=allgather"),
        {
            ("fsdp", "all_gather"): Row(L + 2, gathered(ALL, 8)),
            ("fsdp", "reduce_scatter"): Row(L + 2, gathered(ALL, 8)),
            ("cp", "all_gather"): Row(16 * L * 2, 16 * L * 2 * gathered(2 * STREAM, 8)),
            ("cp", "reduce_scatter"): Row(16 * L, 16 * L * gathered(2 * STREAM, 8)),
        },
    ),
    "cp ulysses": Layout(
        ("mesh.cp=8", "parallel.zero=1", "parallel.cp_method=ulysses"),
        {
            ("fsdp", "all_gather"): Row(L + 2, gathered(ALL, 8)),
            ("fsdp", "reduce_scatter"): Row(L + 2, gathered(ALL, 8)),
            # Queries, keys and values in one, then outputs; backward as much.
            ("cp", "all_to_all"): Row(16 * L * 4, 16 * L * 2 * gathered(4 * STREAM / 8, 8)),
        },
    ),
    "pp": Layout(
        ("mesh.pp=2", "mesh.dp_shard=4", "parallel.zero=1", "parallel.stages=[1, 1]"),
        {
            ("fsdp", "all_gather"): Row(2, gathered(EMBED + BLOCK, 4)),
            ("fsdp", "reduce_scatter"): Row(2, gathered(EMBED + BLOCK, 4)),
            ("pp", "send"): Row(4, 4 * STREAM * FLOAT),
            ("pp", "recv"): Row(4, 4 * STREAM * FLOAT),
        },
    ),
    "ep": Layout(
        (*EXPERTS, "mesh.dp_shard=8", "mesh.ep=4", "parallel.zero=1"),
        {
            ("fsdp", "all_gather"): Row(L + 2, gathered(EMBED + L * MOE_DENSE + HEAD, 8)),
            ("fsdp", "reduce_scatter"): Row(L + 2, gathered(EMBED + L * MOE_DENSE + HEAD, 8)),
            ("efsdp", "all_gather"): Row(L, gathered(L * EXPERT_WEIGHTS / 4, 2)),
            ("efsdp", "reduce_scatter"): Row(L, gathered(L * EXPERT_WEIGHTS / 4, 2)),
            # Rows and outputs, forward and backward, and E numbers of 8 bytes.
            ("ep", "all_to_all"): Row(
                2 * L * 5, 2 * L * (4 * gathered(B * T * K * C, 4) + 3 / 4 * E * 8)
            ),
        },
    ),
}


def expected(layout: Layout) -> Traffic:
    traffic: Traffic = {}
    for (axis, operation), row in layout.rows.items():
        traffic.setdefault(axis, {})[operation] = (row.count, round(row.least + row.excess))
    return traffic


def recipe_of_layout(name: str) -> Recipe:
    sets = LAYOUTS[name].sets
    return recipe_of(BASE, sets if sets[0] == EXPERTS[0] else (*SIZES, *sets))


@pytest.fixture(scope="module")
def dry_run(pool: Pool) -> Callable[..., Traffic]:
    """What a dry run counts of a recipe and a pipeline rank, 0 by default. Each runs once."""
    found: dict[tuple[Recipe, int], Traffic] = {}

    def count(recipe: Recipe, pp_rank: int = 0) -> Traffic:
        if (recipe, pp_rank) not in found:
            found[recipe, pp_rank] = traffic_of(dry_run_of(pool, recipe, pp_rank))
        return deepcopy(found[recipe, pp_rank])

    return count


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_sends_what_the_formulas_say(name: str, dry_run: Callable[..., Traffic]) -> None:
    recipe = recipe_of_layout(name)
    assert recipe.world_size == 8
    counted = dry_run(recipe)
    scalars = counted.pop("world")
    assert counted == expected(LAYOUTS[name])
    # The number of labels; the loss, the norm, the flags and eight norms of parts; and what
    # routers have seen.
    loads = 8 * (E + 5) * L if recipe.mesh.ep > 1 else 0
    calls = 3 if loads else 2
    numbers = 10 + N_FLAGS
    sent = round(2 * 7 / 8 * 8) + numbers * 14 + round(1.75 * loads)
    assert scalars == {"all_reduce": (calls, sent)}


# Two or four micro-batches each.
REAL = {
    "fsdp, both blocks a unit": recipe_of_layout("fsdp, both blocks a unit"),
    "hsdp, gradients in bfloat16": recipe_of_layout("hsdp, gradients in bfloat16"),
    "ep": recipe_of_layout("ep"),
    "tp": recipe_of(BASE, (*SIZES, "mesh.tp=8", "data.global_batch=2")),
    "cp ring": recipe_of(BASE, (*SIZES, "mesh.cp=8", "parallel.zero=1", "data.global_batch=2")),
    "zero bubble, offload, several blocks a unit": recipe_of(
        BASE,
        (
            *SIZES,
            "mesh.pp=2",
            "mesh.dp_shard=2",
            "data.global_batch=8",
            "model.n_layers=12",
            "parallel.schedule=ZBVZeroBubble",
            "parallel.fsdp_blocks=2",
            "memory.cpu_offload=true",
            "precision.compute=bfloat16",
        ),
    ),
    "latents over cp, all-gather, checkpointing": recipe_of(
        BASE,
        (
            *SIZES,
            'model.architecture="deepseek"',
            'model.preset="debug-deepseek"',
            "mesh.cp=4",
            "mesh.tp=2",
            "data.global_batch=2",
            "parallel.cp_method=allgather",
            "memory.activation_checkpoint=full",
        ),
    ),
    "interleaved, cp, documents, checkpointing": recipe_of(
        BASE,
        (
            *SIZES,
            "mesh.pp=2",
            "mesh.cp=2",
            "mesh.tp=2",
            "data.global_batch=4",
            "model.n_layers=4",
            "parallel.schedule=Interleaved1F1B",
            "memory.activation_checkpoint=selective",
            "data.packing=documents",
        ),
    ),
}


@some_of(4, "name", REAL)
def test_real_processes_send_what_the_dry_run_counts(
    name: str, pool: Pool, dry_run: Callable[..., Traffic]
) -> None:
    recipe = REAL[name]
    ranks = pool.run(count_real_step, {"recipe": recipe}, world_size=recipe.world_size)
    for pp_rank in range(recipe.mesh.pp):
        counted = dry_run(recipe, pp_rank)
        for calls in ranks:
            if calls.coords["pp"] == pp_rank:
                assert calls.traffic == counted


@pytest.mark.parametrize(
    "layout",
    [
        # FSDP cuts the rows that tp has cut, and not evenly.
        ("mesh.dp_shard=4", "mesh.tp=2", "model.ffn=132"),
        # The owner of a matrix holds all of it.
        ("mesh.dp_shard=1", "mesh.dp_replicate=4", "parallel.zero=0"),
    ],
    ids=str,
)
def test_a_step_of_muon_sends_what_the_dry_run_and_the_planner_count(
    layout: tuple[str, ...], pool: Pool
) -> None:
    recipe = recipe_of(BASE, (*SIZES, *layout, "optim.name=muon"))
    ranks = pool.run(count_real_step, {"recipe": recipe}, world_size=recipe.world_size)
    # The dry run takes the step of the first rank. Others own other matrices.
    assert ranks[0].traffic == traffic_of(dry_run_of(pool, recipe))
    (planned,) = traffic(recipe)["stage"].values()
    # The ranks of a stage may be those of another axis, too.
    (counted,) = (
        usage["all_to_all"] for usage in ranks[0].traffic.values() if "all_to_all" in usage
    )
    assert counted == (planned.count, round(planned.bytes))


def test_whole_experts_do_not_travel_to_their_owner() -> None:
    layout = ("mesh.dp_shard=8", "mesh.ep=8", 'optim.matrices=["*.experts.*"]')
    (planned,) = traffic(recipe_of(BASE, (*EXPERTS, *layout, "optim.name=muon")))["stage"].values()
    assert planned.bytes == 0
    assert planned.payload_bytes > 0


NARROW = {
    "hsdp": ("mesh.dp_replicate=2", "mesh.dp_shard=4", "parallel.zero=2"),
    "pp, tp": ("mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2", "precision.compute=bfloat16"),
    "both blocks a unit": ("mesh.dp_shard=8", "parallel.zero=3", "parallel.fsdp_blocks=2"),
}


@pytest.mark.parametrize("name", NARROW)
def test_the_planner_counts_what_the_dry_run_counts_of_gradients_in_bfloat16(
    name: str, pool: Pool
) -> None:
    recipe = recipe_of(BASE, (*SIZES, *NARROW[name], "precision.reduce=bfloat16"))
    for pp_rank in range(recipe.mesh.pp):
        counted = traffic_of(dry_run_of(pool, recipe, pp_rank))
        planned = traffic(recipe, pp_rank)
        for axis in ("fsdp", "dp_replicate"):
            operations: dict[Any, Any] = dict(planned.get(axis, {}))  # type: ignore[call-overload]
            assert counted.get(axis, {}) == {
                operation: (flow.count, round(flow.bytes)) for operation, flow in operations.items()
            }
        assert "reduce_scatter" not in counted["fsdp"]


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_the_planner_counts_the_means_of_norms_that_are_computed_again(
    checkpointing: str, pool: Pool
) -> None:
    """Backward averages over the ranks once more, and sums the outputs that norms read.

    The means are wide, whatever the dtype of the activations is.
    """
    mode = f"memory.activation_checkpoint={checkpointing}"
    recipe = recipe_of(BASE, (*SIZES, "mesh.tp=8", *OLMO_2, mode, "precision.compute=bfloat16"))
    planned = {
        operation: (usage.count, round(usage.bytes))
        for operation, usage in traffic(recipe)["tp"].items()
    }
    assert planned == traffic_of(dry_run_of(pool, recipe))["tp"]


# The first block is dense, the second has experts. Their latents are 32 and 24 + 8 wide.
LATENTS = (
    'model.architecture="deepseek"',
    'model.preset="debug-deepseek"',
    "mesh.tp=4",
    "mesh.cp=2",
    "mesh.ep=8",
    *SIZES,
)
LATENT_LAYOUTS = {
    "ring": (),
    "all-gather, all recomputed": (
        "parallel.cp_method=allgather",
        "memory.activation_checkpoint=full",
    ),
    "ulysses, bfloat16, some recomputed": (
        "parallel.cp_method=ulysses",
        "memory.activation_checkpoint=selective",
        "precision.compute=bfloat16",
    ),
    "no latent of queries, some recomputed": (
        "model.query_rank=0",
        "memory.activation_checkpoint=selective",
    ),
    "keys and values, which are fewer": ("model.kv_rank=96",),
    "all-gather of keys and values, some recomputed": (
        "parallel.cp_method=allgather",
        "model.kv_rank=96",
        "memory.activation_checkpoint=selective",
        "precision.compute=bfloat16",
    ),
}


@some_of(3, "name", LATENT_LAYOUTS)
def test_the_planner_counts_what_latent_attention_sends(
    name: str, dry_run: Callable[..., Traffic]
) -> None:
    recipe = recipe_of(BASE, (*LATENTS, *LATENT_LAYOUTS[name]))
    counted = dry_run(recipe)
    planned: Any = traffic(recipe)
    for axis in ("tp", "cp"):
        of_axis = {
            operation: (usage.count, round(usage.bytes))
            for operation, usage in planned[axis].items()
        }
        counted[axis].pop("recv", None)  # what another rank sends
        assert of_axis == counted[axis]


@pytest.mark.parametrize(
    ("kv_rank", "numbers"),
    # A rank of tp 4 has 2 heads of 24 numbers: its keys and values are 96 numbers of a token.
    [(24, 24 + 8), (87, 87 + 8), (88, 96)],
)
def test_ranks_of_cp_send_the_fewer_numbers(
    kv_rank: int, numbers: int, dry_run: Callable[..., Traffic]
) -> None:
    recipe = recipe_of(BASE, (*LATENTS, f"model.kv_rank={kv_rank}", "precision.compute=bfloat16"))
    counted = dry_run(recipe)["cp"]
    calls, tokens = 16 * L, B * T / 2
    # Twice in bfloat16; and their gradients in float32.
    expected = {"send": (3 * calls, calls * (2 * 2 + 4) * tokens * numbers)}
    assert counted == expected | {"recv": expected["send"]}


def test_ranks_of_tp_gather_latents_in_place_of_the_stream(
    dry_run: Callable[..., Traffic],
) -> None:
    counted = dry_run(recipe_of(BASE, LATENTS))["tp"]
    tokens, queries, keys = B * T / 2, 32, 24 + 8
    # Latents of both blocks; the inputs of a dense layer, of a shared expert and of the head. And
    # in backward two outputs a block, and that of the embedding.
    gathered_widths = L * (queries + keys) + 3 * C + (2 * L + 1) * C
    least = 16 * gathered(tokens * gathered_widths, 4)
    assert counted["all_gather"] == counted["reduce_scatter"] == (16 * (7 + 5), least)
    # Of a rank's shards over cp: what it computes of its own tokens alone, each summed once.
    of_block = (queries + keys) * C + 2 * C + queries + 24
    whole = L * of_block + 8 * C + C
    losses = 16 * summed(3 * tokens, 4)
    assert counted["all_reduce"] == (16 * 2 + 1, losses + summed(whole / 2, 4))
