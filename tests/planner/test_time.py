"""The time of a step: limits that hold for any constants, and effects that must show."""

from dataclasses import replace

import pytest

from composer3d.models.llama import counts
from composer3d.models.llama.shape import PRESETS
from composer3d.planner import compute
from composer3d.planner.constants import FITTED, PRIORS, SHIPPED
from composer3d.planner.setup import Setup, Software
from composer3d.planner.time import predict_time
from composer3d.spec.errors import PlanError
from tests.planner.test_memory import SIZES, setup_of

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


@pytest.mark.parametrize("tp", [1, 2])
def test_products_are_those_that_mfu_counts(tp: int) -> None:
    from tests.planner.test_predict import setup_for

    shape = PRESETS["llama3-8b"]
    setup = setup_for("llama3-8b", tp=tp)
    products = [*compute.attention_products(setup), *compute.ffn_products(setup, False)]
    forward = shape.n_layers * sum(product.flops for product in products)
    forward += compute.head_product(setup).flops
    keys = compute.keys_per_query(setup)
    assert keys == counts.keys_seen(setup.batch.seq_len)
    attention = 4.0 * setup.tokens * shape.n_layers * keys * shape.n_heads * shape.head_width
    counted = counts.flops_per_token(shape, setup.batch.seq_len) * setup.tokens
    assert 3 * (tp * forward + attention) == pytest.approx(counted, rel=1e-12)


def test_a_step_is_never_faster_than_its_products() -> None:
    setup = setup_of(zero=0)
    flops = 3 * 8 * sum(p.flops for p in compute.attention_products(setup))
    assert step_s(setup) > 8 * flops / setup.machine.hardware.peaks["bfloat16"]


def test_recomputation_costs_a_forward_and_stops_early() -> None:
    setup = big(zero=0)
    none = compute.block_work(setup, FREE, has_experts=False)
    full = compute.block_work(replace(setup, recompute="full"), FREE, has_experts=False)
    assert none.recompute_s == 0
    assert full.recompute_s == pytest.approx(none.forward_s)
    early = replace(setup, recompute="full", software=Software(stops_recompute_early=True))
    assert compute.block_work(early, FREE, has_experts=False).recompute_s < full.recompute_s


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
    from composer3d.planner.pipeline import compiled, length_s
    from composer3d.planner.simulate import StageTimes

    times = [StageTimes(1.0 + 0.1 * stage, 2.0, 1.0, 1.0) for stage in range(4)]

    def length(count: int) -> float:
        return length_s(compiled("1F1B", 4, 1, count), times, [0.1] * 3)

    assert length(64) == pytest.approx(length(12) + 13 * (length(12) - length(8)))


def test_more_data_ranks_expose_more_of_fsdp() -> None:
    few, many = setup_of(dp_shard=8, zero=3), setup_of(dp_shard=512, zero=3)
    assert predict_time(many, FREE).exposed_s["dp"] > predict_time(few, FREE).exposed_s["dp"]


def test_fp8_speeds_up_products_where_the_device_has_it() -> None:
    setup = big(zero=0)
    from composer3d.spec import hardware
    from composer3d.spec.errors import DeviceError

    fp8 = replace(setup, precision=replace(setup.precision, matrix="fp8"))
    with pytest.raises(DeviceError, match="A100-80GB has no peak for fp8"):
        predict_time(fp8)
    h100 = hardware.by_name("H100")
    assert h100 is not None
    on_h100 = replace(setup, machine=setup.machine._replace(hardware=h100))
    fp8 = replace(on_h100, precision=replace(setup.precision, matrix="fp8"))
    assert step_s(fp8) < step_s(on_h100)


def test_stages_must_hold_all_blocks() -> None:
    setup = setup_of(zero=0)
    with pytest.raises(PlanError, match="are not 1 stages of a model with 8 blocks"):
        replace(setup, layout=replace(setup.layout, stage_blocks=(7,)))
