"""Shrinking: a small recipe has all properties of the full one that decide how it is computed."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from composer3d.facts.checkpointing import Checkpointing
from composer3d.facts.errors import RecipeError, UserError
from composer3d.full.predicates import completed
from composer3d.planner.stages import checkpointed_stages_of_ranks
from composer3d.recipe.resolve import load
from composer3d.recipe.rules import violations
from composer3d.recipe.schema import AXES, MeshTable, Recipe
from composer3d.recipe.stages import n_stages_of, stage_ranges
from composer3d.recipe.values import variant
from composer3d.verify.blocks import kinds_of_predicting_blocks
from composer3d.verify.shrink import LIMIT, lost_kinds, shrink, shrink_to
from tools.prove.paths import RECIPE as RECIPE_PATH
from tools.prove.paths import ROOT

MOE = "architecture=moe preset=debug-moe"
BASE = load(str(RECIPE_PATH), [], check_files=False).recipe


def recipes(count: int, most: int, seed: int) -> Iterator[Recipe]:
    """Random legal recipes of at most ``most`` ranks; shards do not divide most of their sizes."""
    draw = random.Random(seed)
    while count:
        mesh = MeshTable(
            pp=draw.choice((1, 1, 2, 3, 4, 8)),
            dp_replicate=draw.choice((1, 1, 1, 2, 4)),
            dp_shard=draw.choice((1, 2, 3, 4, 5, 6, 7, 8, 16)),
            cp=draw.choice((1, 1, 1, 2, 3, 4, 6)),
            tp=draw.choice((1, 2, 3, 4, 6, 8, 16)),
        )
        n_kv_heads = draw.choice((1, 2, 3, 4, 8, 12, 16))
        n_heads, width = (
            n_kv_heads * draw.choice((1, 2, 3, 4, 6)),
            draw.choice((2, 4, 6, 8, 10, 12, 64, 128)),
        )
        dim = draw.choice((n_heads * width, n_heads * width, draw.randrange(8, 3000)))
        seq_len = mesh.cp * draw.choice((1, 1, 7, 16, 30, 48, 640, 4096))
        micro_batch = draw.choice((1, 2, 4))
        recipe = replace(
            BASE,
            mesh=mesh,
            model=replace(
                BASE.model,
                dim=dim,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                head_dim=None if dim == n_heads * width and draw.random() < 0.8 else width,
                ffn=mesh.tp * draw.randrange(1, 2000),
                vocab=draw.choice(
                    (draw.randrange(256, 60000), mesh.tp * draw.randrange(256, 9000))
                ),
                n_layers=draw.randrange(1, 40),
                qk_norm=draw.random() < 0.5,
                window=draw.choice(
                    (0, 0, 1, 2, 3, seq_len // (2 * mesh.cp), seq_len // 2, seq_len - 1, seq_len)
                ),
            ),
            parallel=replace(
                BASE.parallel,
                zero=draw.choice((3, 3, 1, 0)),
                schedule=draw.choice(
                    ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
                ),
                cp_method=draw.choice(("ring", "allgather", "ulysses")),
                cp_balance=draw.choice(("zigzag", "contiguous")),
                sequence_parallel=draw.random() < 0.6,
            ),
            memory=replace(BASE.memory, loss_chunks=draw.choice((1, 4))),
            data=replace(
                BASE.data,
                seq_len=seq_len,
                micro_batch=micro_batch,
                global_batch=micro_batch * mesh.batch_ranks * draw.choice((1, 2, 3, 5, 8, 24)),
            ),
        )
        if mesh.world_size <= most and not violations(recipe):
            yield recipe
            count -= 1


@cache
def shrunk(most: int, seed: int) -> list[tuple[Recipe, list[Recipe]]]:
    """Random recipes, and the small ones that stand for each."""
    return [(full, shrink(full)) for full in recipes(250, most, seed)]


def properties(recipe: Recipe) -> dict[str, object]:
    """Properties that every small recipe shares with the full one, whatever its mesh."""
    model, data = recipe.model, recipe.data
    stream = model.head_width * model.n_heads
    window = model.window if 0 < model.window < data.seq_len else 0
    return {
        "heads in groups": model.n_kv_heads < model.n_heads,
        "heads wider than the stream": stream > model.dim,
        "heads narrower than the stream": stream < model.dim,
        "window": window > 0,
        "window of one": window == 1,
        "one token": data.seq_len == 1,
        "several micro-batches": recipe.micro_batches > 1,
        "several samples": data.micro_batch > 1,
        "chunks of the loss": recipe.memory.loss_chunks > 1,
    }


def properties_with_cp(recipe: Recipe) -> dict[str, object]:
    chunks = recipe.mesh.cp * (2 if recipe.parallel.cp_balance == "zigzag" else 1)
    chunk, window, seq_len = recipe.data.seq_len // chunks, recipe.model.window, recipe.data.seq_len
    return {
        "window beyond a chunk": chunk < window < seq_len,
        "window beyond two": chunk + 1 < window < seq_len,
    }


def properties_with_pp(recipe: Recipe) -> dict[str, object]:
    return {
        "uneven layers": recipe.model.n_layers % (recipe.mesh.pp * recipe.parallel.stages_per_rank)
        > 0
    }


def properties_with_tp(recipe: Recipe) -> dict[str, object]:
    model, tp = recipe.model, recipe.mesh.tp
    return {
        "key-value heads": (model.n_kv_heads > tp) - (model.n_kv_heads < tp),
        "one key-value head": model.n_kv_heads == 1,
        "vocabulary": model.vocab % tp > 0,
    }


@pytest.mark.parametrize(("lr", "proven"), [(1e-6, 1e-4), (1e-3, 1e-3), (1.0, 1e-2)])
def test_the_updates_of_a_proof_are_neither_tiny_nor_wild(lr: float, proven: float) -> None:
    (small,) = shrink(replace(BASE, optim=replace(BASE.optim, lr=lr, min_lr=lr, eps=1e-15)))
    assert (small.optim.lr, small.optim.min_lr, small.optim.eps) == (proven, min(lr, proven), 1e-12)


@pytest.mark.parametrize(("pp", "count"), [(2, 5), (2, 24), (4, 9), (4, 24), (8, 64)])
def test_more_micro_batches_than_the_fewest_stay_more(pp: int, count: int) -> None:
    sets = [f"mesh.pp={pp}", "parallel.schedule=DualPipeV", f"data.global_batch={count}"]
    sets += ["model.n_layers=16", "data.micro_batch=1"]
    (small,) = shrink(load(RECIPE_PATH, sets, check_files=False).recipe)
    assert small.micro_batches > 2 * small.mesh.pp


@pytest.mark.parametrize("mesh", ["tp=1", "dp_shard=2", "cp=3", "tp=2"])
def test_an_odd_vocabulary_stays_odd_and_an_even_one_even(mesh: str) -> None:
    for vocab in (256, 257, 32_000, 50_257):
        sets = [f"mesh.{mesh}", f"model.vocab={vocab}", "data.micro_batch=1", "data.seq_len=48"]
        (small,) = shrink(load(RECIPE_PATH, sets, check_files=False).recipe)
        assert small.model.vocab % 2 == vocab % 2


@pytest.mark.parametrize("tp", [1, 2, 16])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("of_a_rank", [1, 2, 4])
def test_a_rank_of_ulysses_keeps_one_key_value_head_or_several(
    tp: int, cp: int, of_a_rank: int
) -> None:
    heads = tp * cp * of_a_rank
    sets = ["parallel.cp_method=ulysses", f"mesh.cp={cp}", f"mesh.tp={tp}", "model.dim=4096"]
    sets += [f"model.n_heads={2 * heads}", f"model.n_kv_heads={heads}", f"model.ffn={16 * tp}"]
    sets += ["model.head_dim=16"]
    for small in shrink(load(RECIPE_PATH, sets, check_files=False).recipe):
        mesh = small.mesh
        if mesh.cp > 1:
            assert (small.model.n_kv_heads > mesh.tp * mesh.cp) == (of_a_rank > 1), small


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_more_than_two_ranks_of_cp_stay_more(method: str) -> None:
    shared = [
        (full, smalls)
        for full, smalls in shrunk(4096, 2)
        if full.mesh.cp > 2 and full.parallel.cp_method == method
    ]
    assert len(shared) > 5
    for full, smalls in shared:
        assert max(small.mesh.cp for small in smalls) > 2, full


def test_gradients_are_sent_narrow_on_the_small_meshes_that_have_shards() -> None:
    mesh = MeshTable(pp=4, dp_replicate=2, dp_shard=4, cp=2, tp=2)
    full = replace(
        BASE,
        mesh=mesh,
        data=replace(BASE.data, global_batch=64, seq_len=64),
        precision=replace(BASE.precision, reduce="bfloat16"),
    )
    assert not violations(full)
    shrunk = shrink(full)
    reduces = {small.mesh.dp_shard * small.mesh.cp > 1: small.precision.reduce for small in shrunk}
    assert reduces == {True: "bfloat16", False: None}


def test_a_small_mesh_without_data_parallel_ranks_compares_none() -> None:
    mesh = MeshTable(pp=4, dp_replicate=2, dp_shard=4, cp=2, tp=2)
    full = replace(
        BASE,
        mesh=mesh,
        data=replace(BASE.data, global_batch=64, seq_len=64),
        reliability=replace(BASE.reliability, digest_every=100),
    )
    assert not violations(full)
    small = shrink(full)
    assert any(recipe.mesh.batch_ranks == 1 for recipe in small)


@pytest.mark.parametrize(
    ("pp", "layers", "stages", "fsdp_blocks", "small_layers", "small_stages"),
    [
        (1, 32, None, 1, 2, None),
        (1, 32, None, 4, 3, None),  # a unit of two blocks, and one of one
        (1, 33, None, 100, 2, None),  # one unit of several blocks
        (1, 1, None, 2, 1, None),
        (2, 32, None, 4, 6, None),
        (2, 16, (10, 6), 4, 7, (4, 3)),
        (2, 16, (10, 6), 8, 5, (3, 2)),
        (2, 16, (10, 6), 1, 3, (2, 1)),
    ],
)
def test_a_small_recipe_has_units_of_several_blocks(
    pp: int,
    layers: int,
    stages: tuple[int, ...] | None,
    fsdp_blocks: int,
    small_layers: int,
    small_stages: tuple[int, ...] | None,
) -> None:
    full = replace(
        BASE,
        mesh=MeshTable(pp=pp, dp_shard=2),
        model=replace(BASE.model, n_layers=layers),
        parallel=replace(BASE.parallel, stages=stages, fsdp_blocks=fsdp_blocks),
    )
    assert not violations(full)
    (small,) = shrink(full)
    assert small.model.n_layers == small_layers
    assert small.parallel.stages == small_stages
    assert small.parallel.fsdp_blocks == min(2, fsdp_blocks)


@pytest.mark.parametrize("scaling", ["linear", "yarn", "dynamic"])
def test_stretched_positions_are_kept(scaling: str) -> None:
    sets = [f"model.rope_scaling={scaling}", "model.rope_factor=4", "mesh.dp_shard=32"]
    full = load(str(RECIPE_PATH), [*sets, "data.global_batch=64"], check_files=False).recipe
    for small in shrink(full):
        assert (small.model.rope_scaling, small.model.rope_factor) == (scaling, 4)
        assert small.model.rope_context == 8192


def kinds_of_stages(recipe: Recipe) -> set[frozenset[tuple[bool, bool, bool]]]:
    """The kinds of blocks that stages hold: with a window, with positions, with experts."""
    model: Any = recipe.model

    def kind(block: int) -> tuple[bool, bool, bool]:
        has_window = 0 < model.window_of(block) < recipe.data.seq_len
        has_experts = model.experts > 0 and model.has_experts(block)
        is_rotary = not hasattr(model, "is_rotary") or model.is_rotary(block)
        return has_window, is_rotary, has_experts

    return {frozenset(map(kind, blocks)) for blocks in stage_ranges(recipe)}


def begin_alike(recipe: Recipe, name: str) -> bool:
    """Whether all stages begin with a block of the same number in the period."""
    every = getattr(recipe.model, name) or 1
    return all(blocks.start % every == 0 for blocks in stage_ranges(recipe))


@pytest.mark.parametrize(
    ("pp", "sets", "small_layers", "periods"),
    [
        (1, "n_layers=32 window=16 full_every=4", 2, (2, 0)),
        (1, "n_layers=32 window=256 full_every=4", 2, (0, 0)),  # windows as long as the sequence
        (1, "preset=smollm3-3b n_layers=3", 2, (0, 0)),  # a period that is longer than the model
        (1, "n_layers=36 nope_every=4", 2, (0, 2)),
        (1, "n_layers=4 nope_every=1", 2, (0, 1)),
        (1, "n_layers=32 window=16 full_every=4 nope_every=4", 2, (2, 2)),
        (1, "n_layers=32 window=16 full_every=2 nope_every=4", 4, (2, 4)),
        (1, "n_layers=32 window=16 full_every=5 nope_every=4", 6, (2, 3)),
        (4, "n_layers=32 window=16 full_every=4", 8, (2, 0)),
        (2, "n_layers=28 window=16 full_every=4", 6, (2, 0)),  # 14 is no multiple of 4
        (2, "n_layers=16 window=16 full_every=2 nope_every=3", 16, (2, 3)),
        (8, "n_layers=16 window=16 full_every=4", 16, (3, 0)),  # stages without a full block
        (1, f"{MOE} n_layers=8 nope_every=4 moe_every=2", 4, (0, 4)),
        # Dense blocks come before those with windows and experts, which are most of the model.
        (1, f"{MOE} n_layers=32 dense_layers=1 window=16 full_every=4", 3, (2, 0)),
        (1, f"{MOE} n_layers=32 dense_layers=1 nope_every=4", 3, (0, 2)),
        # No stage has all kinds of blocks.
        (8, "n_layers=24 window=16 full_every=6 nope_every=4", 24, (6, 4)),
        (8, f"{MOE} n_layers=24 moe_every=3 window=16 full_every=4 nope_every=4", 24, (4, 4)),
    ],
)
def test_small_stages_have_the_kinds_of_blocks_of_the_full_ones(
    pp: int, sets: str, small_layers: int, periods: tuple[int, int]
) -> None:
    overrides = [f"model.{each}" for each in sets.split()]
    full = load(str(RECIPE_PATH), [f"mesh.pp={pp}", *overrides], check_files=False).recipe
    (small,) = shrink(full)
    model: Any = small.model
    assert (model.n_layers, (model.full_every, model.nope_every)) == (small_layers, periods)
    assert kinds_of_stages(small) == kinds_of_stages(full)
    for name in ("full_every", "nope_every"):
        assert begin_alike(small, name) == begin_alike(full, name)


def test_a_base_of_windows_is_dropped_with_the_window() -> None:
    sets = ["model.architecture=gemma3", "model.preset=debug-gemma3", "model.rope_local_theta=50.0"]
    for window, theta in ((64, 50.0), (256, 1e4)):
        full = load(str(RECIPE_PATH), [*sets, f"model.window={window}"], check_files=False).recipe
        assert full.data.seq_len == 256
        (small,) = shrink(full)
        model: Any = small.model
        assert (model.window > 0) == (window < 256)
        assert model.rope_local_theta == theta


def patterns(count: int, pps: tuple[int, ...], seed: int) -> Iterator[Recipe]:
    """Random legal recipes whose blocks differ by their number."""
    draw = random.Random(seed)
    while count:
        sets = [f"mesh.pp={draw.choice(pps)}", f"model.n_layers={draw.randrange(4, 49)}"]
        sets += [f"parallel.schedule={draw.choice(('GPipe', 'Interleaved1F1B'))}"]
        sets += ["model.window=16", f"model.full_every={draw.choice((0, 2, 3, 4, 6))}"]
        sets += [f"model.nope_every={draw.choice((0, 0, 2, 3, 4))}", "data.global_batch=64"]
        if draw.random() < 0.5:
            sets += [f"model.{each}" for each in MOE.split()]
            sets += [f"model.moe_every={draw.choice((1, 2, 3))}"]
            sets += [f"model.dense_layers={draw.randrange(4)}"]
        try:
            yield load(str(RECIPE_PATH), sets, check_files=False).recipe
        except RecipeError:  # no experts, or more stages than layers
            continue
        count -= 1


@pytest.mark.parametrize("seed", [1, 2])
def test_small_recipes_have_the_kinds_of_blocks_of_the_full_ones(seed: int) -> None:
    number_in_stages = 0
    for full in patterns(150, (1, 1, 2, 4, 8), seed):
        (small,) = shrink(full)
        ours, theirs = kinds_of_stages(small), kinds_of_stages(full)
        assert frozenset().union(*ours) == frozenset().union(*theirs), full
        assert lost_kinds(full, [small]) == []
        assert small.model.n_layers <= full.model.n_layers
        if max(map(len, stage_ranges(full))) <= 8:
            assert ours == theirs, full
            number_in_stages += 1
    assert number_in_stages > 60


def test_fewer_stages_have_the_kinds_of_blocks_of_all() -> None:
    for full in patterns(100, (8, 16), 3):
        on_many = replace(full, mesh=replace(full.mesh, dp_shard=8))
        smalls = shrink(on_many)
        assert any(1 < small.mesh.pp < full.mesh.pp for small in smalls)
        for small in smalls:
            kinds = frozenset().union(*kinds_of_stages(small))
            assert kinds == frozenset().union(*kinds_of_stages(full)), full


def test_fewer_stages_have_the_kinds_of_a_stage_in_which_dense_blocks_end() -> None:
    """Of the full model, it is the second: the first one has dense blocks alone."""
    stages = f"parallel.stages={[2] * 29 + [1] * 3}"
    sets = ["parallel.schedule=Interleaved1F1B", stages]
    full = load(ROOT / "recipes" / "deepseek-v3-1024.toml", sets, check_files=False).recipe
    small = shrink(full)[0]
    assert small.mesh.pp < full.mesh.pp
    assert len(kinds_of_stages(full)) == 3
    assert kinds_of_stages(small) == kinds_of_stages(full)


def test_kinds_of_blocks_that_are_lost_are_told() -> None:
    sets = [f"model.{each}" for each in f"{MOE} window=16 full_every=2 nope_every=4".split()]
    full = load(str(RECIPE_PATH), sets, check_files=False).recipe
    without = replace(full, model=replace(full.model, nope_every=0))
    assert lost_kinds(full, [without, full]) == []
    assert lost_kinds(full, [without]) == [
        "blocks without a window, without positions, with experts"
    ]


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize(("every", "layers"), [(4, 8), (3, 8), (5, 13)])
def test_blocks_of_multi_token_prediction_keep_their_kinds(
    depths: int, every: int, layers: int
) -> None:
    """They are counted on from the last block, so a small model may have others."""
    sets = ["architecture=glm", "preset=debug-glm", "window=16", f"mtp_layers={depths}"]
    sets += [f"full_every={every}", f"n_layers={layers}", "dense_layers=0"]
    full = load(str(RECIPE_PATH), [f"model.{each}" for each in sets], check_files=False).recipe
    (small,) = shrink(full)
    kinds, small_kinds = (
        {*kinds_of_predicting_blocks(each.model, full.data.seq_len)} for each in (full, small)
    )
    assert small_kinds == kinds
    assert lost_kinds(full, [small]) == []
    model: Any = small.model
    # Blocks that all have a window, or none.
    others = [replace(small, model=replace(model, **{key: 0})) for key in ("full_every", "window")]
    lost = [blocks for other in others for blocks in lost_kinds(full, [other])]
    assert any(blocks.startswith("blocks of multi-token prediction with") for blocks in lost)


def test_stages_of_an_explicit_cut_have_all_kinds_of_blocks() -> None:
    sets = ["mesh.pp=2", "model.n_layers=16", "parallel.stages=[9,7]", "model.nope_every=4"]
    full = load(str(RECIPE_PATH), sets, check_files=False).recipe
    (small,) = shrink(full)
    assert (small.parallel.stages, small.model.n_layers) == ((3, 2), 5)
    assert kinds_of_stages(small) == kinds_of_stages(full)
    assert not begin_alike(small, "nope_every")


def test_a_window_over_a_whole_sequence_is_kept() -> None:
    full = replace(BASE, model=replace(BASE.model, window=13), data=replace(BASE.data, seq_len=16))
    (small,) = shrink(full)
    assert (small.data.seq_len, small.model.window) == (16, 13)


def rows_over(recipe: Recipe, shards: int) -> dict[str, list[bool]]:
    """For each kind of parameter: whether shards divide its rows, and whether one holds none."""
    model, tp = recipe.model, recipe.mesh.tp
    kv_rows = model.n_kv_heads * model.head_width
    chunk = -(-model.vocab // tp)
    rows_of = {
        "norm, wo, w2": [model.dim],
        "wq": [model.n_heads * model.head_width // tp],
        "wk, wv": [kv_rows if model.n_kv_heads < tp else kv_rows // tp],
        "w1, w3": [model.ffn // tp],
        "embed, head": [chunk],
        "embed, head, last rank": [model.vocab - chunk * (tp - 1)],
    }
    if model.qk_norm:
        rows_of["q_norm, k_norm"] = [model.head_width]
    return {
        name: [
            value
            for count in rows
            for value in (count % shards == 0, -(-count // shards) * (shards - 1) >= count)
        ]
        for name, rows in rows_of.items()
    }


SAMPLES = pytest.mark.parametrize(
    ("most", "seed"), [(LIMIT, 1), (4096, 2)], ids=["whole mesh", "large mesh"]
)


@SAMPLES
def test_a_small_recipe_is_like_the_full_one(most: int, seed: int) -> None:
    for full, smalls in shrunk(most, seed):
        for small in smalls:
            assert small.world_size <= LIMIT
            assert not violations(small)
            assert all(
                (getattr(small.mesh, axis) > 1) <= (getattr(full.mesh, axis) > 1) for axis in AXES
            )
            assert properties(small) == properties(full), (full, small)
            for axis, properties_with_axis in (
                ("tp", properties_with_tp),
                ("cp", properties_with_cp),
                ("pp", properties_with_pp),
            ):
                if getattr(small.mesh, axis) > 1:
                    assert properties_with_axis(small) == properties_with_axis(full), (full, small)
            if full.world_size <= LIMIT:
                assert small.mesh == full.mesh
                assert small.data.seq_len % 2 == full.data.seq_len % 2


@SAMPLES
def test_fsdp_cuts_every_tensor_of_a_small_recipe_as_in_the_full_one(most: int, seed: int) -> None:
    number, lost = 0, []
    for full, small_recipes in shrunk(most, seed):
        shards = full.mesh.dp_shard * full.mesh.cp
        if shards == 1 or full.parallel.zero == 0:
            continue
        smalls = [(small, small.mesh.dp_shard * small.mesh.cp) for small in small_recipes]
        for name, cut in rows_over(full, shards).items():
            if "embed" in name and cut[1]:
                # A small vocabulary has at least 256 rows, so each of 16 ranks holds some.
                continue
            number += 1
            if not any(
                cut == rows_over(small, count)[name] for small, count in smalls if count > 1
            ):
                lost.append(
                    (name, cut, full.mesh, full.model, [small.model for small, _ in smalls])
                )
    assert number > 500
    assert lost == []


@pytest.mark.parametrize("kv_rank", [512, 509, 1024])
@pytest.mark.parametrize("tp", [4, 32, 64])
@pytest.mark.parametrize("dp_shard", [16, 64])
def test_small_ranks_of_cp_send_what_the_full_ones_send(
    kv_rank: int, tp: int, dp_shard: int
) -> None:
    """Latents, or keys and values, of which a rank has fewer with more tp."""
    sets = ["model.architecture=deepseek", "model.preset=deepseek-v3", f"mesh.tp={tp}"]
    sets += ["mesh.cp=2", f"mesh.dp_shard={dp_shard}", "mesh.ep=128"]
    sets += ["model.n_heads=128", "model.n_kv_heads=128", f"model.kv_rank={kv_rank}"]
    sets += [f"data.global_batch={dp_shard}", "data.micro_batch=1", "data.seq_len=4096"]
    full = load(str(RECIPE_PATH), sets, check_files=False).recipe
    assert full.sends_latents == (kv_rank + 64 < 2 * 128 * 192 // tp)
    with_cp = [small for small in shrink(full) if small.mesh.cp > 1]
    assert with_cp
    assert all(small.sends_latents == full.sends_latents for small in with_cp)


@pytest.mark.parametrize("query_rank", [0, 1536])
@pytest.mark.parametrize("value_dim", [128, 192])
@pytest.mark.parametrize("kv_rank", [512, 509])
def test_small_latents_are_like_the_full_ones(
    query_rank: int, value_dim: int, kv_rank: int
) -> None:
    """With or without a latent of queries, padded values, positions of YaRN, and uneven shards."""
    sets = ["model.architecture=deepseek", "model.preset=deepseek-v3", "mesh.dp_shard=64"]
    sets += ["mesh.tp=4", "mesh.ep=64", "data.global_batch=64", "data.micro_batch=1"]
    sets += ["model.n_heads=128", "model.n_kv_heads=128", f"model.query_rank={query_rank}"]
    sets += [f"model.value_dim={value_dim}", f"model.kv_rank={kv_rank}", "data.seq_len=4096"]
    full = load(str(RECIPE_PATH), sets, check_files=False).recipe
    for small in shrink(full):
        model: Any = small.model
        assert violations(small) == []
        assert (model.query_rank > 0) == (query_rank > 0)
        assert (model.value_dim < model.head_width) == (value_dim < 192)
        assert 0 < model.rope_dim < model.head_width
        assert model.n_kv_heads == model.n_heads >= small.mesh.tp
        assert (model.rope_scaling, model.rope_score_mscale) == ("yarn", 1.0)
        assert 1 < model.groups_per_token < model.expert_groups
        assert 0 < model.dense_layers < model.n_layers
        shards = small.mesh.dp_shard
        assert (model.kv_rank % shards > 0) == (kv_rank % 64 > 0)


@pytest.mark.parametrize(
    "sets",
    [
        "mesh.pp=16",
        "mesh.pp=8 parallel.schedule=Interleaved1F1B",
        "mesh.pp=8 parallel.schedule=Interleaved1F1B parallel.virtual_stages=4",
        "mesh.pp=8 parallel.schedule=ZBVZeroBubble",
        "mesh.pp=8 parallel.schedule=DualPipeV",
    ],
)
def test_about_the_same_share_of_stages_is_checkpointed(sets: str) -> None:
    sets += " model.n_layers=32 mesh.dp_shard=4 data.global_batch=128"
    full = load(str(RECIPE_PATH), sets.split(), check_files=False).recipe
    stages = n_stages_of(full)
    kept = Checkpointing("full")
    for count in range(1, stages):
        part = variant(full, {"memory.activation_checkpoint": str(kept.in_first(count))})
        alone = shrink_to(part, MeshTable(dp_shard=2))
        assert alone.memory.checkpointing == kept
        small = shrink_to(part, MeshTable(pp=4, dp_shard=1))
        blocks = small.memory.checkpointing.blocks
        assert 0 < blocks.stages < n_stages_of(small)
        smalls = [small, *completed(part, [small])]
        kinds = [checkpointed_stages_of_ranks(one) for one in smalls]
        assert checkpointed_stages_of_ranks(part) in kinds, count
        if stages == 16 and full.mesh.pp == 16:
            assert abs(blocks.stages - count / 4) < 1


def test_a_small_recipe_that_breaks_a_rule_is_an_error() -> None:
    sets = ["model.rope_scaling=dynamic", "model.rope_context=8", "model.rope_factor=4.0"]
    sets += ["data.seq_len=8", "mesh.cp=4", "mesh.dp_shard=8", "data.global_batch=16"]
    full = load(str(RECIPE_PATH), sets, check_files=False).recipe
    with pytest.raises(UserError, match=r"cannot make this recipe small: data\.seq_len = 24"):
        shrink(full)
