"""The time of collectives agrees with nccl-tests that are published."""

from dataclasses import replace
from itertools import combinations
from statistics import fmean

import pytest

from composer3d.planner.collectives import (
    ExpertChoice,
    GroupShape,
    all_to_all_s,
    collective_s,
    send_s,
    token_exchange_s,
)
from composer3d.planner.constants import PRIORS, SHIPPED
from composer3d.planner.setup import Machine
from tests.planner.setups import device

# In nccl-tests nothing else uses the links.
ALONE = replace(PRIORS, nvlink_share=1.0, nic_share=0.74)


def machine_of(name: str) -> Machine:
    row = device(name)
    links = row.links
    assert links is not None
    return Machine(row, 8, links.ring_bytes_s, links.all_reduce_bytes_s, links.nic_bytes_s)


def test_an_all_reduce_in_a_node_takes_what_was_measured() -> None:
    # stas00/ml-engineering at 744d01e18b, network/README.md, all-reduce on 8 devices
    measured = {1 << 21: 101.4, 1 << 25: 424.0, 1 << 29: 4218.4, 1 << 33: 64074.0}
    machine = machine_of("A100-80GB")
    for size_bytes, microseconds in measured.items():
        predicted = collective_s("all_reduce", GroupShape(8, 1), size_bytes, machine, ALONE)
        assert predicted * 1e6 == pytest.approx(microseconds, rel=0.3), size_bytes


def test_a_large_all_reduce_reaches_the_measured_bus_bandwidth() -> None:
    # H200 with switches that add: 477 GB/s; 32 B200 in 4 nodes: 382 GB/s, 8 cards of 50 GB/s each
    size = float(1 << 34)
    one_node = collective_s("all_reduce", GroupShape(8, 1), size, machine_of("H200"), ALONE)
    assert 2 * 7 / 8 * size / one_node == pytest.approx(477e9, rel=0.02)
    four_nodes = collective_s("all_reduce", GroupShape(32, 1), size, machine_of("B200"), ALONE)
    assert 2 * 31 / 32 * size / four_nodes == pytest.approx(382e9, rel=0.25)


def test_a_group_with_a_stride_of_a_node_has_one_card() -> None:
    machine = machine_of("A100-80GB")
    size = 1e9
    wide = collective_s("all_gather", GroupShape(4, 8), size, machine, ALONE)
    dense = collective_s("all_gather", GroupShape(32, 1), size, machine, ALONE)
    assert wide > 5 * dense


def test_one_rank_costs_nothing() -> None:
    machine = machine_of("A100-80GB")
    assert collective_s("all_reduce", GroupShape(1, 8), 1e9, machine, ALONE) == 0
    assert all_to_all_s(GroupShape(1, 1), 1e9, machine, ALONE) == 0
    assert send_s(GroupShape(1, 1), 1e9, machine, ALONE) == 0


def test_an_all_to_all_that_leaves_the_node_is_slower() -> None:
    machine = machine_of("H100")
    inside = all_to_all_s(GroupShape(8, 1), 1e9, machine, ALONE)
    across = all_to_all_s(GroupShape(8, 8), 1e9, machine, ALONE)
    assert across > 4 * inside


@pytest.mark.parametrize("parts", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("chosen", [1, 2, 4, 6])
def test_the_parts_that_a_token_reaches_are_counted(chosen: int, parts: int) -> None:
    experts = 12
    size = experts // parts

    def reached(choices: list[list[int]]) -> float:
        return fmean(len({expert // size for expert in choice}) for choice in choices)

    any_choice = [list(choice) for choice in combinations(range(experts), chosen)]
    independent = ExpertChoice(experts, chosen, neighbours=False)
    assert independent.parts_reached(parts) == pytest.approx(reached(any_choice), rel=1e-12)
    begins = range(0, experts * chosen, chosen)
    in_a_row = [[(begin + nth) % experts for nth in range(chosen)] for begin in begins]
    neighbours = ExpertChoice(experts, chosen, neighbours=True)
    assert neighbours.parts_reached(parts) == pytest.approx(reached(in_a_row), rel=1e-12)


def test_a_token_that_is_sent_once_passes_each_link_once() -> None:
    machine, size = machine_of("H100"), 1e9
    card = machine.nic_bytes_s * SHIPPED.nic_share
    nvlink = machine.ring_bytes_s * SHIPPED.nvlink_share
    # 64 ranks on 8 nodes, 256 experts: 8 of them in a row are on two ranks of one node.
    neighbours = ExpertChoice(256, 8, neighbours=True)
    across = token_exchange_s(GroupShape(64, 1), size, neighbours, machine, SHIPPED)
    assert across == pytest.approx(40e-6 + 7 / 8 * size / card)
    # Independent ones are on 5.3 nodes on average; an all-to-all sends 8 copies of a token.
    independent = ExpertChoice(256, 8, neighbours=False)
    apart = token_exchange_s(GroupShape(64, 1), size, independent, machine, SHIPPED)
    assert apart / across == pytest.approx(5.29, abs=0.01)
    everything = all_to_all_s(GroupShape(64, 1), 8 * size, machine, SHIPPED)
    assert everything / apart > 8 / 5.29
    # In one node, NVLink brings a token to each rank but its own.
    inside = token_exchange_s(GroupShape(8, 1), size, neighbours, machine, SHIPPED)
    assert inside == pytest.approx(40e-6 + 7 / 8 * size / nvlink)
    assert token_exchange_s(GroupShape(1, 1), size, neighbours, machine, SHIPPED) == 0


def test_a_measured_latency_replaces_the_usual_one() -> None:
    usual = machine_of("H100")
    measured = usual._replace(latency_s=1e-3, nic_latency_s=4e-3)
    inside, across = GroupShape(8, 1), GroupShape(16, 1)
    size = 1e6
    # A small message takes its latency, for each doubling of the ranks, and no ramp.
    rate = usual.all_reduce_bytes_s * SHIPPED.nvlink_share
    expected = 3e-3 + 2 * 7 / 8 * size / rate
    assert collective_s("all_reduce", inside, size, measured, SHIPPED) == pytest.approx(expected)
    cards = 8 * usual.nic_bytes_s * SHIPPED.nic_share
    expected = 16e-3 + 15 / 16 * size / min(cards, usual.ring_bytes_s * SHIPPED.nvlink_share)
    assert collective_s("all_gather", across, size, measured, SHIPPED) == pytest.approx(expected)
    assert send_s(across, 0.0, measured, SHIPPED) == 4e-3
    assert all_to_all_s(inside, 1.0, measured, SHIPPED) == pytest.approx(2e-3)
    # Nothing changes without a measurement.
    assert send_s(across, 0.0, usual, SHIPPED) == 20e-6


def test_a_cpu_reaches_the_rates_that_were_measured() -> None:
    usual = machine_of("CPU")
    measured = usual._replace(latency_s=1e-3)
    size = 1e9
    seconds = collective_s("all_gather", GroupShape(2, 1), size, measured, SHIPPED)
    assert seconds == pytest.approx(1e-3 + size / 2 / usual.ring_bytes_s)
    slower = collective_s("all_gather", GroupShape(2, 1), size, usual, SHIPPED)
    assert slower > size / 2 / usual.ring_bytes_s / SHIPPED.nvlink_share
