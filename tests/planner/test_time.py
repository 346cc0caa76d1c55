"""The time of a step: limits that hold for any constants, and effects that must show."""

from dataclasses import replace

import pytest

from composer3d.facts.checkpointing import CheckpointedBlocks
from composer3d.facts.errors import DeviceError, PlanError
from composer3d.models import counts
from composer3d.models.llama.shape import PRESETS
from composer3d.models.llama.table import table
from composer3d.planner import compute
from composer3d.planner.collectives import collective_s, send_s
from composer3d.planner.constants import FITTED, PRIORS, SHIPPED
from composer3d.planner.pipeline import compiled, length_s
from composer3d.planner.predict import of_recipe
from composer3d.planner.setup import Recompute, Setup, Software
from composer3d.planner.simulate import StageTimes
from composer3d.planner.time import groups, predict_time
from composer3d.planner.traffic import flows
from tests.planner.setups import device, recipe_of, setup_on
from tests.tools.test_planner_foreign import SIZES, setup_of
from tools.planner.foreign import ForeignSoftware

FREE = replace(
    PRIORS,
    interference=1e-9,
    hidden_share=1.0,
    step_overhead_s=1e-12,
    straggler_share=1e-12,
)


# Large enough for the device, not the host, to set the pace.
BIG = replace(SIZES, dim=8192, heads=64, kv_heads=64, head_width=128, ffn=32768)


def big(**options: object) -> Setup:
    setup = setup_of(**{"sizes": BIG, **options})  # type: ignore[arg-type]
    return replace(setup, batch=replace(setup.batch, seq_len=4096))


def step_s(setup: Setup) -> float:
    return predict_time(setup, FREE).step_s


def test_there_are_at_most_17_constants_in_their_ranges() -> None:
    assert len(FITTED) <= 17
    for constants in (PRIORS, SHIPPED):
        for name, value in constants.as_dict().items():
            assert FITTED[name].low <= value <= FITTED[name].high, name


def test_a_loss_in_parts_adds_the_weight_gradient_of_each() -> None:
    """docs/gpu.md has a step of an H100 with the loss in eight parts."""
    whole = big()
    seconds = [step_s(replace(whole, loss_chunks=parts)) for parts in (1, 2, 8)]
    product = compute.head_product(whole)
    rate = compute.rates(whole, FREE)
    moved = 2.0 + 2.0 * whole.precision.gradients
    one_s = moved * product.depth * product.columns / rate.memory * whole.batch.micro_batches
    assert seconds[1] - seconds[0] == pytest.approx(2 * one_s, rel=1e-6)
    assert seconds[2] - seconds[1] == pytest.approx(6 * one_s, rel=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_products_are_those_that_mfu_counts(tp: int) -> None:
    shape = PRESETS["llama3-8b"]
    setup = setup_on("H100", "llama3-8b-8-fsdp", f"mesh.tp={tp}", f"mesh.dp_shard={8 // tp}")
    products = [*compute.attention_products(setup), *compute.ffn_products(setup, False)]
    forward = shape.n_layers * sum(product.flops for product in products)
    forward += compute.head_product(setup).flops
    keys = compute.keys_per_query(setup, 0)
    assert keys == counts.keys_seen(setup.batch.seq_len)
    attention = 4.0 * setup.tokens * shape.n_layers * keys * shape.n_heads * shape.head_width
    counted = counts.flops_per_token(table(shape), shape, setup.batch.seq_len) * setup.tokens
    assert 3 * (tp * forward + attention) == pytest.approx(counted, rel=1e-12)


def exposed_tp_s(*sets: str) -> float:
    return predict_time(setup_on("H100", "llama3-8b-8-fsdp", *sets), FREE).exposed_s["tp"]


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize(
    ("sequence_parallel", "calls", "repeated"), [("true", 8, 3), ("false", 4, 1)]
)
def test_collectives_are_repeated_as_often_as_they_are_counted(
    mode: str, sequence_parallel: str, calls: int, repeated: int
) -> None:
    """Both kinds of checkpointing gather again, and sum again what attention returns."""
    sets = (
        "mesh.tp=4",
        "mesh.dp_shard=2",
        "compile.enabled=false",
        f"parallel.sequence_parallel={sequence_parallel}",
    )
    none, again = (f"memory.activation_checkpoint={one}" for one in ("none", mode))
    one_s = exposed_tp_s(*sets, none) / calls
    assert exposed_tp_s(*sets, again) == pytest.approx((calls + repeated) * one_s)
    recipe = recipe_of("llama3-8b-8-fsdp", *sets, again)
    counted = [flow.count for flow in flows(recipe) if flow.purpose == "recomputed activations"]
    assert sum(counted) == repeated * recipe.model.n_layers * recipe.micro_batches


def test_a_shared_expert_is_cut_like_a_dense_layer() -> None:
    setup = setup_on("H100", "glm-4.5-air-64")
    sizes = replace(setup.sizes, shared_width=0)
    with_it, without = (
        predict_time(one, FREE).exposed_s["tp"] for one in (setup, replace(setup, sizes=sizes))
    )
    assert with_it == pytest.approx(2 * without)


@pytest.mark.parametrize("window", [0, 3, 8, 9, 13, 16])
def test_without_balance_the_last_rank_sees_most_keys(window: int) -> None:
    setup = setup_on("H100", "llama3-8b-8-fsdp", "mesh.dp_shard=4", "mesh.cp=2", "data.seq_len=16")
    assert compute.keys_of_busiest(setup, window) == compute.keys_per_query(setup, window)
    own = replace(setup, layout=replace(setup.layout, cp_balanced=False))
    keys = [min(query, window or 16) for query in range(9, 17)]
    assert compute.keys_of_busiest(own, window) == pytest.approx(sum(keys) / 8)
    each_has_all = replace(own, layout=replace(own.layout, cp_method="ulysses"))
    assert compute.keys_of_busiest(each_has_all, window) == compute.keys_per_query(setup, window)
    one, other = (
        compute.attend_s(each, compute.rates(each, FREE), window) for each in (own, setup)
    )
    share = sum(keys) / 8 / compute.keys_per_query(setup, window)
    assert one == pytest.approx(tuple(share * seconds for seconds in other))


def test_a_loss_of_gathered_logits_multiplies_as_one_of_parts() -> None:
    sets = ("mesh.tp=8", "mesh.dp_shard=1", "compile.enabled=false", "memory.loss_chunks=1")
    parts, whole = (
        setup_on("H100", "llama3-8b-8-fsdp", *sets, f"parallel.loss_parallel={value}")
        for value in ("true", "false")
    )
    one, other = (compute.head_work(setup, FREE) for setup in (parts, whole))
    assert other.weight_s == one.weight_s
    # The loss reads and writes the logits of all ranks, 15 bytes for each.
    rate = compute.rates(whole, FREE)
    more_s = 15 * whole.tokens * whole.sizes.vocab * (1 - 1 / 8) / rate.memory
    assert other.forward_s - one.forward_s == pytest.approx(more_s)
    assert other.input_s - one.input_s == pytest.approx(more_s)
    gather_s = collective_s(
        "all_gather",
        groups(whole)["tp"],
        2.0 * whole.tokens * whole.sizes.vocab,
        whole.machine,
        FREE,
    )
    times = [predict_time(setup, FREE) for setup in (parts, whole)]
    count = whole.batch.micro_batches
    assert times[1].exposed_s["tp"] - times[0].exposed_s["tp"] == pytest.approx(count * gather_s)
    assert times[1].head_s - times[0].head_s == pytest.approx(2 * count * more_s)


def test_the_optimizer_has_as_much_to_do_however_experts_are_spread() -> None:
    seconds = [
        predict_time(setup_on("H100", "qwen3-30b-a3b-16-ep-pp", f"mesh.ep={ep}")).optimizer_s
        for ep in (1, 2, 8)
    ]
    assert seconds == pytest.approx(3 * [seconds[0]])


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_a_rank_of_tp_sends_one_head_of_keys_at_least(method: str) -> None:
    sets = ("mesh.tp=4", "mesh.cp=2", "mesh.dp_shard=1", f"parallel.cp_method={method}")
    setup = setup_on("H100", "llama3-8b-8-fsdp", *sets)

    def cp_s(kv_heads: int) -> float:
        sizes = replace(setup.sizes, kv_heads=kv_heads)
        return predict_time(replace(setup, sizes=sizes), FREE).exposed_s["cp"]

    assert cp_s(1) == cp_s(2) == cp_s(4) < cp_s(8)


@pytest.mark.parametrize("compute_in", ["float32", "bfloat16"])
@pytest.mark.parametrize("again", ["none", "full"])
def test_a_ring_sends_the_bytes_of_traffic(compute_in: str, again: str) -> None:
    recipe = recipe_of(
        "llama3-8b-8-fsdp",
        "mesh.cp=4",
        "mesh.dp_shard=2",
        f"precision.compute={compute_in}",
        f"memory.activation_checkpoint={again}",
    )
    setup = of_recipe(recipe, device("H100"))
    # Links on which computing and starts of messages take no time.
    slow = replace(setup, machine=setup.machine._replace(ring_bytes_s=1.0, nic_bytes_s=1.0))
    one_s = send_s(groups(setup)["cp"], 1.0, slow.machine, FREE)
    sent = sum(flow.sent_bytes for flow in flows(recipe) if flow.axis == "cp")
    assert predict_time(slow, FREE).exposed_s["cp"] == pytest.approx(sent * one_s, rel=1e-3)


def latents_over_cp(*sets: str) -> tuple[Setup, Setup]:
    """DeepSeek-V3 over four ranks of cp, which send latents; and the same with keys and values."""
    layers = ("model.n_layers=4", "parallel.stages=[4]")
    sets = ("mesh.pp=1", "mesh.cp=4", *layers, "data.global_batch=64", *sets)
    setup = setup_on("H100", "deepseek-v3-1024", *sets)
    assert setup.layout.sends_latents
    return setup, replace(setup, layout=replace(setup.layout, sends_latents=False))


@pytest.mark.parametrize("tp", [1, 8])
def test_each_rank_of_cp_projects_the_latents_of_all(tp: int) -> None:
    setups = latents_over_cp(f"mesh.tp={tp}")
    tokens = 4096 // 4
    one = compute.Product(tokens, 128 / tp * (128 + 128), 512)
    flops, work = [], []
    for setup in setups:
        flops.append(sum(product.flops for product in compute.attention_products(setup)))
        work.append(compute.block_work(setup, FREE, has_experts=True, window=0))
    assert flops[0] - flops[1] == 3 * one.flops

    rate = compute.rates(setups[0], FREE)
    latents, keys = work
    all_four = one._replace(copies=4)

    def seconds(product: compute.Product) -> float:
        return compute.product_s(product, rate.matrix, rate)

    more_s = seconds(all_four) - seconds(one)
    more_input_s = seconds(all_four.input_gradient()) - seconds(one.input_gradient())
    more_weight_s = seconds(all_four.weight_gradient()) - seconds(one.weight_gradient())
    # Keys and values of all ranks are written, too: more than products alone.
    assert latents.forward_s - keys.forward_s > more_s
    # Backward makes them once more.
    assert latents.input_s - keys.input_s > more_input_s + seconds(all_four)
    assert latents.weight_s - keys.weight_s == pytest.approx(more_weight_s)
    more = more_s + more_input_s + seconds(all_four) + more_weight_s
    assert latents.products_s - keys.products_s == pytest.approx(more)


@pytest.mark.parametrize(("tp", "fewer"), [(1, 49_152 / 576), (8, 6_144 / 576)])
def test_latents_take_as_much_less_time_as_they_are_fewer(tp: int, fewer: float) -> None:
    setups = latents_over_cp(f"mesh.tp={tp}", "parallel.cp_method=allgather")
    # Messages that start at once.
    machine = setups[0].machine._replace(latency_s=0.0, nic_latency_s=0.0)
    exposed = [
        predict_time(replace(setup, machine=machine), FREE).exposed_s["cp"] for setup in setups
    ]
    assert exposed[1] / exposed[0] == pytest.approx(fewer)


def test_a_step_is_never_faster_than_its_products() -> None:
    setup = setup_of(zero=0)
    flops = 3 * 8 * sum(p.flops for p in compute.attention_products(setup))
    assert step_s(setup) > 8 * flops / setup.machine.hardware.peaks["bfloat16"]


def test_recomputation_costs_a_forward_and_stops_early() -> None:
    setup = big(zero=0)
    none = compute.block_work(setup, FREE, has_experts=False, window=0)
    full = compute.block_work(replace(setup, recompute="full"), FREE, has_experts=False, window=0)
    assert none.recompute_s == 0
    assert full.recompute_s == pytest.approx(none.forward_s)
    early = replace(setup, recompute="full", software=Software(stops_recompute_early=True))
    assert (
        compute.block_work(early, FREE, has_experts=False, window=0).recompute_s < full.recompute_s
    )


def test_blocks_that_are_checkpointed_cost_more_than_others() -> None:
    def recompute_s(recompute: Recompute, every: int = 1) -> float:
        setup = big(zero=0, pp=2)
        layout = replace(setup.layout, stage_blocks=(5, 3))
        setup = replace(
            setup, layout=layout, recompute=recompute, recomputed=CheckpointedBlocks(every)
        )
        return predict_time(setup, FREE).recompute_s

    assert recompute_s("none", 2) == 0
    # The slower stage has five blocks, of which two or three are checkpointed.
    for every, blocks in {2: 3, 3: 2, 4: 2, 5: 1, 8: 1}.items():
        assert recompute_s("full", every) == pytest.approx(recompute_s("full") * blocks / 5)


def test_blocks_cost_what_their_windows_show_them() -> None:
    """Stages of 5 and 3 blocks: the fourth and the last one see all tokens, one in each stage."""
    setup = big(zero=0, pp=2, cp=2)
    setup = replace(setup, layout=replace(setup.layout, stage_blocks=(5, 3)))
    blocks = setup.sizes.layers

    def with_windows(*windows: int) -> Setup:
        return replace(setup, sizes=replace(setup.sizes, windows=windows))

    mixed = with_windows(*(512, 512, 512, 0) * (blocks // 4))
    kinds = [{kind.window: count for kind, count in stage.items()} for stage in mixed.block_kinds]
    assert kinds == [{512: 4, 0: 1}, {512: 2, 0: 1}]
    narrow, wide = with_windows(*[512] * blocks), with_windows(*[0] * blocks)
    assert predict_time(wide, FREE) == predict_time(with_windows(), FREE)
    # The slower stage has five blocks, one of which sees all.
    seconds = [predict_time(each, FREE).compute_s for each in (narrow, mixed, wide)]
    assert seconds[1] - seconds[0] == pytest.approx((seconds[2] - seconds[0]) / 5)
    assert step_s(narrow) < step_s(mixed) < step_s(wide)


def test_small_products_wait_for_their_last_tiles() -> None:
    rate = compute.rates(big(zero=0), PRIORS)._replace(memory=1e18)

    def flops_s(rows: int) -> float:
        product = compute.Product(rows, 4096, 4096)
        return product.flops / compute.product_s(product, rate.matrix, rate)

    # 512 x 4,096 outputs are one wave of 128 tiles of 128 x 128.
    waiting = flops_s(512) / flops_s(1 << 17)
    assert waiting == pytest.approx(1 / (1 + PRIORS.tail_waves), rel=2e-3)


def test_unfused_attention_of_unaligned_heads_runs_on_vector_units() -> None:
    setup = replace(big(zero=0), software=Software(attention="unfused"))
    rate = compute.rates(setup, PRIORS)

    def forward_s(head_width: int) -> float:
        sizes = replace(BIG, head_width=head_width)
        return compute.attend_s(replace(setup, sizes=sizes), rate, 0)[0]

    # The traffic of the scores bounds aligned heads, so that narrower ones are hardly faster.
    assert 0.8 < forward_s(96) / forward_s(128) < 1
    # A100: 19.5 TFLOP/s in float32 against 312 in 16 bits.
    assert 4 < forward_s(126) / forward_s(128) < 16
    flops = 4.0 * setup.tokens * 64 * 126 * setup.batch.seq_len
    assert flops / forward_s(126) < 19.5e12


def test_flash_attention_has_the_rate_that_was_measured_on_b200() -> None:
    setup = replace(big(zero=0), software=Software(attention="flash3"))
    setup = replace(setup, machine=setup.machine._replace(hardware=device("B200")))

    def flops_s(seq_len: int) -> float:
        at = replace(setup, batch=replace(setup.batch, seq_len=seq_len))
        forward, backward = compute.attend_s(at, compute.rates(at, PRIORS), 0)
        done = 14.0 * at.tokens * compute.keys_per_query(at, 0) * 64 * 128
        return done / (forward + backward)

    assert flops_s(8192) == pytest.approx(834e12, rel=0.01)
    assert flops_s(2048) < 0.8 * flops_s(8192) < 0.8 * flops_s(65536)


def test_a_lower_power_limit_lowers_the_clock() -> None:
    setup = big(zero=0)
    limited = replace(setup, machine=setup.machine._replace(power_share=0.7))
    share = compute.rates(limited, FREE).matrix / compute.rates(setup, FREE).matrix
    assert 0.7 < share < 0.7**0.5


@pytest.mark.parametrize(
    ("gpu", "low", "high"),
    [("H100", 1.0, 1.0), ("B200", 0.74, 0.82), ("GB200", 0.8, 0.88), ("H100-80GB PCIe", 0.75, 0.85),
     ("A100-80GB", 1.0, 1.0)],
)  # fmt: skip
def test_more_flops_for_each_watt_than_h100_lower_the_clock(
    gpu: str, low: float, high: float
) -> None:
    """The measured products of B200 have a median of 0.485 of its peak, 0.63 of its fastest."""
    hardware = device(gpu)
    setup = big(zero=0)
    setup = replace(setup, machine=setup.machine._replace(hardware=hardware))
    rate = compute.rates(setup, FREE)
    is_old = hardware.generation == "ampere"
    fitted = FREE.matrix_share_ampere if is_old else FREE.matrix_share_hopper
    share = rate.matrix / hardware.matrix_rate("bfloat16") / fitted
    assert low - 1e-9 <= share <= high + 1e-9
    # Attention never draws as much.
    assert rate.attention == hardware.matrix_rate("bfloat16")


def test_reductions_run_behind_the_other_stages_of_a_rank() -> None:
    def visible_s(stages_per_rank: int, schedule: str) -> float:
        setup = big(
            zero=1,
            tp=8,
            pp=4,
            dp_shard=8,
            stages_per_rank=stages_per_rank,
            schedule=schedule,
            micro_batches=16,
        )
        slow = setup.machine._replace(nic_bytes_s=5e9)
        software = ForeignSoftware(overlaps_gathers=True)
        return predict_time(replace(setup, machine=slow, software=software), FREE).exposed_s["dp"]

    assert visible_s(2, "Interleaved1F1B") < 0.8 * visible_s(1, "1F1B")


def test_blocks_with_experts_are_priced_where_they_are() -> None:
    """A pipeline whose stages have as many blocks with experts as without is balanced."""
    sizes = replace(
        BIG, experts=8, experts_per_token=4, expert_width=32768, expert_blocks=4, vocab=1
    )
    first = big(zero=0, pp=4, micro_batches=16, sizes=sizes)
    assert first.expert_blocks == (0, 0, 2, 2)
    turns = big(zero=0, pp=4, micro_batches=16, sizes=replace(sizes, expert_every=2))
    assert turns.expert_blocks == (1, 1, 1, 1)
    assert step_s(turns) < 0.8 * step_s(first)


def test_tp_over_nodes_is_slower_than_inside() -> None:
    inside = big(zero=0, tp=8)
    across = replace(inside, machine=inside.machine._replace(devices_per_node=4))
    assert step_s(across) > step_s(inside)
    # Four cards of 20 GB/s in a node, against a ring of 200 GB/s.
    exposed = predict_time(across, FREE).exposed_s
    assert exposed["tp"] > 2 * predict_time(inside, FREE).exposed_s["tp"] > 0


def test_the_bubble_of_1f1b_is_that_of_the_closed_form() -> None:
    setup = big(zero=0, pp=4, micro_batches=16, sizes=replace(BIG, vocab=1))
    fast = setup.machine._replace(ring_bytes_s=1e18, nic_bytes_s=1e18)
    time = predict_time(replace(setup, machine=fast, software=Software(overlaps_sends=True)), FREE)
    assert time.bubble_s / time.compute_s == pytest.approx(3 / 16, rel=0.02)
    fewer = replace(setup, batch=replace(setup.batch, micro_batches=4))
    assert predict_time(fewer, FREE).bubble_s > 0.7 * predict_time(fewer, FREE).compute_s


def test_many_micro_batches_are_extrapolated_exactly() -> None:
    times = [StageTimes(1.0 + 0.1 * stage, 2.0, 1.0, 1.0) for stage in range(4)]

    def length(count: int) -> float:
        return length_s(compiled("1F1B", 4, 1, count), times, [0.1] * 3)

    assert length(64) == pytest.approx(length(12) + 13 * (length(12) - length(8)))


def test_more_data_ranks_expose_more_of_fsdp() -> None:
    few, many = setup_of(dp_shard=8, zero=3), setup_of(dp_shard=512, zero=3)
    assert predict_time(many, FREE).exposed_s["dp"] > predict_time(few, FREE).exposed_s["dp"]


@pytest.mark.parametrize(
    ("layout", "is_faster"),
    [
        # Inside a node, half the bytes take less time. So they do if each rank has a node, with
        # its cards, to itself.
        ({"dp_shard": 8}, True),
        ({"dp_shard": 8, "tp": 8}, True),
        # Otherwise a reduce-scatter sums inside of nodes first, and an all-to-all does not.
        ({"dp_shard": 64}, False),
    ],
    ids=str,
)
def test_gradients_in_bfloat16_pay_where_no_sum_is_made_before_the_network(
    layout: dict[str, int], is_faster: bool
) -> None:
    setup = big(zero=1, **layout)
    wide = replace(setup, precision=replace(setup.precision, reduced=4.0))
    narrow = replace(setup, precision=replace(wide.precision, exchanged=2.0))
    assert (step_s(narrow) < step_s(wide)) == is_faster


def test_fp8_speeds_up_products_where_the_device_has_it() -> None:
    setup = big(zero=0)
    fp8 = replace(setup, precision=replace(setup.precision, matrix="fp8"))
    with pytest.raises(DeviceError, match="A100-80GB has no peak for fp8"):
        predict_time(fp8)
    on_h100 = replace(setup, machine=setup.machine._replace(hardware=device("H100")))
    fp8 = replace(on_h100, precision=replace(setup.precision, matrix="fp8"))
    assert step_s(fp8) < step_s(on_h100)


def test_stages_must_hold_all_blocks() -> None:
    setup = setup_of(zero=0)
    with pytest.raises(PlanError, match="are not 1 stages of a model with 8 blocks"):
        replace(setup, layout=replace(setup.layout, stage_blocks=(7,)))


def test_messages_in_float32_have_twice_the_bytes() -> None:
    narrow = setup_of(tp=2)
    machine = narrow.machine._replace(latency_s=1e-12, nic_latency_s=1e-12)
    seconds = []
    for matrix in ("bfloat16", "float32"):
        precision = replace(narrow.precision, matrix=matrix)
        setup = replace(narrow, machine=machine, precision=precision)
        seconds.append(predict_time(setup, FREE).exposed_s["tp"])
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=1e-6)


def with_units_of(blocks: int, setup: Setup) -> Setup:
    return replace(setup, layout=replace(setup.layout, fsdp_blocks=blocks))


@pytest.mark.parametrize("zero", [2, 3])
def test_small_blocks_of_one_unit_share_a_latency(zero: int) -> None:
    tiny = replace(SIZES, dim=64, heads=1, kv_heads=1, ffn=256)
    setup = setup_of(sizes=tiny, dp_shard=512, zero=zero)
    exposed = [
        predict_time(with_units_of(blocks, setup), FREE).exposed_s["dp"] for blocks in (1, 2, 4)
    ]
    assert exposed[0] > exposed[1] > exposed[2] > 0


def test_nothing_hides_the_first_unit_of_large_blocks() -> None:
    setup = big(dp_shard=8, zero=3)
    exposed = [
        predict_time(with_units_of(blocks, setup), FREE).exposed_s["dp"] for blocks in (1, 2, 8, 99)
    ]
    assert exposed[0] < exposed[1] < exposed[2]
    assert exposed[2] == exposed[3]  # there are eight blocks


def test_units_of_several_blocks_change_nothing_on_one_rank() -> None:
    setup = big(zero=3)
    assert predict_time(with_units_of(4, setup), FREE) == predict_time(setup, FREE)


def test_the_last_unit_of_a_stage_may_be_smaller() -> None:
    layout = replace(big(zero=3).layout, stage_blocks=(5, 3), pp=2, fsdp_blocks=2)
    assert layout.blocks_of_unit == 8 / 5
    assert replace(layout, fsdp_blocks=1).blocks_of_unit == 1
    assert replace(layout, fsdp_blocks=10).blocks_of_unit == 4


def test_the_ranks_of_a_stage_share_the_products_of_muon() -> None:
    def added_s(*sets: str) -> float:
        setup = setup_on("H100", "llama3-8b-8-fsdp", "optim.name=muon", *sets)
        with_muon, without = (
            predict_time(each, FREE) for each in (setup, replace(setup, matrices=None))
        )
        return with_muon.optimizer_s - without.optimizer_s

    # X X^T, its square, and the product with X, in each of five steps; a multiply-add counts as 2.
    sides = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    of_block = sum(5 * 2 * (2 * m * m * n + m**3) for m, n in sides)
    rate = device("H100").matrix_rate("bfloat16") * FREE.matrix_share_hopper
    products_s = 32 * of_block / 8 / rate
    assert products_s < added_s() < 1.2 * products_s
    # In float32, products are slower and messages are longer.
    assert added_s("optim.newton_schulz_dtype=float32") > 2 * products_s
    assert added_s("optim.newton_schulz_steps=10") > 1.8 * products_s
