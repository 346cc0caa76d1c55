"""Layouts: who holds what, compared with the code that cuts; nothing overlaps in the pictures."""

from dataclasses import replace

import pytest

from composer3d.draw import layout_svg, layout_text
from composer3d.draw.layout import AxisTraffic, NodeLayout, fold, make_layout
from composer3d.draw.terminal import Style
from composer3d.parallel.context.ownership import owned_ranges
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from tests.draw.pictures import crossed_texts, illegible_texts, outside, overlapping_texts, read
from tools.prove.paths import ROOT

PLAIN = Style(width=100, has_colours=False, has_unicode=False)


def recipe_of(name: str, *sets: str, world_size: int | None = None) -> Recipe:
    return load(ROOT / "recipes" / f"{name}.toml", list(sets), world_size=world_size).recipe


CASES = {
    "quickstart": recipe_of("quickstart"),
    "moe-8": recipe_of("quickstart-moe"),
    "fsdp-8": recipe_of("llama3-8b-8-fsdp"),
    "cp": recipe_of("debug-2-cp"),
    "cp-64": recipe_of("llama3.1-8b-64-fsdp-cp-tp", world_size=64),
    "175b-1024": recipe_of("llama-175b-1024-3d"),
    "405b-1024": recipe_of("llama3-405b-1024-3d"),
    "405b-16384": recipe_of("llama3-405b-1024-3d", "mesh.dp_shard=128", "data.global_batch=2048"),
    "moe-1024": recipe_of("moe-64e-1024-4d"),
    "mixtral-64": recipe_of("mixtral-8x7b-64-4d"),
    "hsdp": recipe_of("quickstart", "mesh.dp_replicate=4", "mesh.pp=1", "data.micro_batch=4"),
    "all axes": recipe_of(
        "quickstart",
        "mesh.dp_replicate=2",
        "mesh.cp=2",
        "mesh.dp_shard=4",
        "parallel.zero=3",
        "data.micro_batch=2",
    ),
    "single": recipe_of("debug-1-single"),
    "405b-16384-cp": recipe_of("llama3-405b-16384-4d"),
    "128 experts": recipe_of("qwen3-30b-a3b-16-ep-pp"),
    "8 pipeline ranks": recipe_of(
        "quickstart",
        "model.n_layers=8",
        "mesh.pp=8",
        "mesh.dp_shard=1",
        "mesh.tp=1",
        "data.micro_batch=1",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gpus_per_node", [8, 4, 3])
def test_nothing_overlaps_or_leaves_the_page(name: str, gpus_per_node: int) -> None:
    layout = make_layout(CASES[name], gpus_per_node)
    page = read(layout_svg.draw(layout, heading=name, notes=["a note"]))
    assert page.width == layout_svg.WIDTH
    assert overlapping_texts(page) == []
    assert crossed_texts(page) == []
    assert illegible_texts(page) == []
    assert outside(page) == []
    assert page.height < 1600


def test_every_rank_of_a_small_job_is_shown_once() -> None:
    for name in ("quickstart", "moe-8", "fsdp-8"):
        layout = make_layout(CASES[name], 8)
        page = read(layout_svg.draw(layout, heading=name, notes=[]))
        words = [text.words for text in page.texts]
        assert sorted(word for word in words if word.startswith("rank ")) == [
            f"rank {rank}" for rank in range(8)
        ]
        lines = layout_text.render(layout, PLAIN).splitlines()
        assert sum(line.startswith("  rank ") for line in lines) == 8


def test_a_large_job_is_folded() -> None:
    layout = make_layout(CASES["175b-1024"], 8)
    page = read(layout_svg.draw(layout, heading="", notes=[]))
    words = [text.words for text in page.texts]
    ranks = [word for word in words if word.startswith("rank ")]
    assert len(ranks) == len(set(ranks)) == 16
    assert {"rank 0", "rank 7", "rank 8", "rank 1023"} <= set(ranks)
    assert "node 127, gpu 7" in words
    assert "6 more" in words
    assert "12 more" in words
    # All pipeline ranks are listed.
    assert {f"pp {pp}" for pp in range(8)} <= set(words)
    text = layout_text.render(layout, PLAIN)
    assert "... 125 more nodes ..." in text
    assert text.isascii()


def test_tokens_are_those_that_context_parallelism_cuts() -> None:
    for balance in ("zigzag", "contiguous"):
        recipe = CASES["cp-64"]
        recipe = replace(recipe, parallel=replace(recipe.parallel, cp_balance=balance))
        layout = make_layout(recipe, 8)
        tokens = recipe.data.seq_len // recipe.mesh.cp
        for rank in range(recipe.mesh.cp):
            ranges = owned_ranges(rank, recipe.mesh.cp, tokens, balanced=balance == "zigzag")
            words = ", ".join(f"{r.position}-{r.position + r.length - 1}" for r in ranges)
            assert layout.token_words(rank) == f"tokens {words}"


def test_shares_are_those_of_the_mesh() -> None:
    layout = make_layout(CASES["all axes"], 8)
    # (pp, dp_replicate, dp_shard, cp, tp) of rank 45 of (2, 2, 4, 2, 2) are 1, 0, 3, 0, 1.
    assert layout.share_words(45) == ["heads 2-3 of 4", "shard 6 of 8"]
    assert layout.place_of(45) == "node 5, gpu 5"
    assert layout.sample_words(7) == "samples 28-31 of each step"

    experts = make_layout(CASES["moe-1024"], 8)
    assert experts.share_words(5) == [
        "heads 12-23 of 48",
        "experts 40-47 of 64",
        "experts: shard 0 of 32",
        "the rest: shard 1 of 64",
    ]
    assert experts.layer_words(0) == "embedding, blocks 0-6, blocks 28-34"
    assert experts.stage_words(3) == "stages 3, 7"

    alone = make_layout(CASES["single"], 8)
    assert alone.share_words(0) == ["all weights"]
    assert [row.axis for row in alone.traffic(0)] == []


def test_shards_of_experts_are_named_apart() -> None:
    sizes = ("mesh.pp=1", "mesh.tp=4", "mesh.dp_shard=1", "mesh.dp_replicate=2", "mesh.ep=1")
    # Ranks of tp shard the experts, which they do not cut.
    sharded = make_layout(recipe_of("quickstart-moe", *sizes, "parallel.zero=3"), 8)
    assert sharded.share_words(6) == [
        "head 2 of 4",
        "experts: shard 2 of 4",
        "the rest: all of these",
    ]
    whole = make_layout(recipe_of("quickstart-moe", *sizes, "parallel.zero=0"), 8)
    assert whole.share_words(6) == ["head 2 of 4", "all of these weights"]
    # Each expert is on one rank.
    alone = make_layout(recipe_of("quickstart-moe"), 8)
    assert alone.share_words(3) == ["heads 2-3 of 4", "experts 6-7 of 8", "shard 1 of 2"]


def test_a_stage_does_not_hold_all_weights() -> None:
    sizes = ("mesh.pp=2", "mesh.tp=1", "mesh.dp_shard=1", "data.micro_batch=4")
    layout = make_layout(recipe_of("quickstart", *sizes), 8)
    assert layout.share_words(1) == ["all of these weights"]


def test_bytes_are_on_the_link_that_carries_them() -> None:
    def links(layout: NodeLayout, pp_rank: int) -> dict[str, str]:
        rows = layout.traffic(pp_rank)
        for row in rows:
            assert row.node_bytes + row.nic_bytes == pytest.approx(row.sent_bytes)
        return {row.axis: link_of(row) for row in rows}

    large = links(make_layout(CASES["175b-1024"], 8), 1)
    assert large == {"tp": "node", "fsdp": "NIC", "pp": "NIC", "world": "both"}
    assert set(links(make_layout(CASES["quickstart"], 8), 0).values()) == {"node"}
    # On nodes of 4, the pipeline of 2 x 4 ranks crosses nodes.
    small = links(make_layout(CASES["quickstart"], 4), 0)
    assert (small["pp"], small["tp"], small["fsdp"]) == ("NIC", "node", "node")


def test_links_are_the_mean_of_all_groups() -> None:
    recipe = recipe_of("debug-4-dp-tp")
    (tp,) = (row for row in make_layout(recipe, 3).traffic(0) if row.axis == "tp")
    # Group (0, 1) is on one node of 3, and group (2, 3) on two.
    assert tp.nic_bytes == pytest.approx(tp.sent_bytes / 2)


def link_of(row: AxisTraffic) -> str:
    if row.nic_bytes == 0:
        return "node"
    return "NIC" if row.node_bytes < 0.5 else "both"


@pytest.mark.parametrize(
    ("schedule", "of_nic"),
    [
        # Only the messages between ranks 1 and 2 leave a node.
        ("1F1B", [(0, 1), (1, 2), (1, 2), (0, 1)]),
        # Stages 3 and 4 are on ranks 3 and 0.
        ("Interleaved1F1B", [(1, 3), (2, 4), (2, 4), (1, 3)]),
        # They are on rank 3 alone, and stages 5 and 6 on ranks 2 and 1.
        ("ZBVZeroBubble", [(0, 2), (2, 4), (2, 4), (0, 2)]),
    ],
)
def test_a_message_of_the_pipeline_is_on_the_link_to_its_receiver(
    schedule: str, of_nic: list[tuple[int, int]]
) -> None:
    recipe = recipe_of(
        "quickstart",
        "mesh.pp=4",
        "mesh.dp_shard=1",
        "mesh.tp=1",
        "model.n_layers=8",
        "data.micro_batch=4",
        f"parallel.schedule={schedule}",
    )
    layout = make_layout(recipe, 2)
    message_bytes = 8 * 4 * 128 * 128 * 4  # of all micro-batches
    for pp_rank, (over_nic, sent) in enumerate(of_nic):
        (row,) = (row for row in layout.traffic(pp_rank) if row.axis == "pp")
        assert (row.nic_bytes, row.sent_bytes) == (over_nic * message_bytes, sent * message_bytes)


def test_the_arrow_of_the_pipeline_has_the_bytes_of_a_boundary() -> None:
    layout = make_layout(CASES["quickstart"], 8)
    # 2 micro-batches x 8 samples x 64 tokens (tp 2) x 128 wide x 4 bytes
    assert layout.most_sent("pp") == (524_288, 524_288)


def test_axes_are_folded_to_their_ends() -> None:
    assert fold(4, 4) == (0, 1, 2, 3)
    assert fold(16, 4) == (0, 1, 2, 15)
    assert fold(16, 2) == (0, 15)
    assert fold(16, 1) == (0,)


def test_the_only_rank_of_a_job_has_no_coordinates() -> None:
    text = layout_text.render(make_layout(recipe_of("debug-1-single"), 8), PLAIN)
    assert "  rank 0: all weights" in text
