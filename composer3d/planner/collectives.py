"""The time of a collective: latency and bandwidth, on the link that its group uses. No torch here.

The latencies and half sizes reproduce the times of nccl-tests that are published for A100, H200 and
B200 (``tests/planner/test_collectives.py``). Bandwidth is bus bandwidth: a ring moves
(n-1)/n of the bytes through each device, and twice that for an all-reduce.
"""

from math import comb, gcd, log2
from typing import Literal, NamedTuple

from composer3d.planner.constants import Constants
from composer3d.planner.setup import Machine

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]

_LAUNCH_S = 20e-6  # a collective kernel, without any data
_STEP_S = 3e-6  # for each doubling of an all-reduce's group inside a node
_STEP_BETWEEN_NODES_S = 10e-6  # the same between nodes, where trees are used
_HOP_IN_NODE_S = 0.3e-6
_RAMP_BYTES = 8e6  # a message of this size reaches half the bandwidth, without the latency


class GroupShape(NamedTuple):
    """The ranks of one collective.

    Attributes:
        ranks: their number.
        stride: the distance of neighbours in the order of ranks.
    """

    ranks: int
    stride: int

    def in_node(self, machine: Machine) -> int:
        """Return how many of the ranks share a node."""
        return max(1, min(self.ranks, machine.devices_per_node // self.stride))

    def crosses_nodes(self, machine: Machine) -> bool:
        """Return whether the ranks are on several nodes."""
        return self.ranks * self.stride > machine.devices_per_node and self.ranks > 1


def collective_s(
    operation: Operation,
    group: GroupShape,
    size_bytes: float,
    machine: Machine,
    constants: Constants,
    messages: int = 1,
) -> float:
    """Return the seconds of a collective.

    Args:
        operation: what it does.
        group: its ranks.
        size_bytes: the whole: what is gathered, or what each rank gives to a reduction.
        machine: the links.
        constants: the shares of the links' rates.
        messages: the number of calls that move these bytes, one after the other.
    """
    ranks = group.ranks
    if ranks <= 1 or size_bytes <= 0:
        return 0.0
    passes = 2 if operation == "all_reduce" else 1
    crosses = group.crosses_nodes(machine)
    measured_s = machine.nic_latency_s if crosses else machine.latency_s
    ramp_bytes = _RAMP_BYTES if measured_s is None else 0.0
    moved = passes * (ranks - 1) / ranks * (size_bytes + messages * ramp_bytes)
    ring = machine.ring_bytes_s * _share(machine, constants.nvlink_share)
    if not crosses:
        # Switches compute an all-reduce of four devices or more.
        computed_in_switch = operation == "all_reduce" and ranks >= 4
        if computed_in_switch:
            ring = machine.all_reduce_bytes_s * _share(machine, constants.nvlink_share)
        if measured_s is not None:
            latency = measured_s * log2(ranks)
        elif operation == "all_reduce":
            latency = _LAUNCH_S + 2 * _STEP_S * log2(ranks)
        else:
            latency = _LAUNCH_S + _HOP_IN_NODE_S * ranks
        return messages * latency + moved / ring
    if measured_s is not None:
        latency = measured_s * log2(ranks)
    elif operation == "all_reduce":
        latency = _LAUNCH_S + _STEP_BETWEEN_NODES_S * log2(ranks)
    else:
        latency = _LAUNCH_S + constants.hop_s * (ranks - 1)
    # Every node's cards carry the whole once.
    cards = machine.nic_bytes_s * _share(machine, constants.nic_share) * group.in_node(machine)
    return messages * latency + moved / min(ring, cards)


def _share(machine: Machine, fitted: float) -> float:
    """Return the share of a link's rate that a training reaches.

    Kernels of GPUs share processors and memory with a collective. A process on a CPU does nothing
    else while it sends, so it reaches what was measured.
    """
    is_measured = machine.latency_s is not None or machine.nic_latency_s is not None
    return 1.0 if is_measured and machine.hardware.generation == "cpu" else fitted


def all_to_all_s(
    group: GroupShape, size_bytes: float, machine: Machine, constants: Constants
) -> float:
    """Return the seconds of an all-to-all in which each rank sends ``size_bytes`` in all.

    A rank keeps 1/ranks. What goes to other nodes passes its own card; the rest its NVLink.
    """
    ranks = group.ranks
    if ranks <= 1 or size_bytes <= 0:
        return 0.0
    crosses = group.crosses_nodes(machine)
    in_node = group.in_node(machine) if crosses else ranks
    inside = size_bytes * (in_node - 1) / ranks
    outside = size_bytes * (ranks - in_node) / ranks
    seconds = inside / (machine.ring_bytes_s * _share(machine, constants.nvlink_share))
    seconds += outside / (machine.nic_bytes_s * _share(machine, constants.nic_share))
    return 2 * _launch_s(machine, crosses) + seconds


class ExpertChoice(NamedTuple):
    """The experts to which a router sends a token.

    Attributes:
        experts: their number in a block.
        chosen: those of a token.
        neighbours: whether they are neighbours, and those of the next token the next ones.
            Otherwise, all choices are equally likely.
    """

    experts: int
    chosen: int
    neighbours: bool

    def parts_reached(self, parts: int) -> float:
        """Return in how many of ``parts`` equal parts of the experts a token has one, on average.

        With s experts in a part and k chosen of E, a part has none of them with the chance
        C(E - s, k) / C(E, k). Neighbouring ones begin at a multiple of g = gcd(k, s): they reach
        the next part at one of k / g - 1 of the s / g places at which they can begin.
        """
        size = max(1, self.experts // parts)
        if self.neighbours:
            return 1 + (self.chosen - gcd(self.chosen, size)) / size
        missed = comb(self.experts - size, self.chosen) / comb(self.experts, self.chosen)
        return parts * (1 - missed)


def token_exchange_s(
    group: GroupShape,
    size_bytes: float,
    routing: ExpertChoice,
    machine: Machine,
    constants: Constants,
) -> float:
    """Return the seconds in which a rank sends each of its tokens to the ranks of its experts.

    A token passes its rank's card once for each other node that it goes to, and arrives at the rank
    with the same place there. From that one it is passed on over NVLink to each rank that needs it,
    while the next tokens still arrive (DeepEP, https://github.com/deepseek-ai/DeepEP, "normal
    kernels"). Results come back on the same way, and are added up on it.

    Args:
        group: the ranks that share the experts.
        size_bytes: of the tokens of a rank, each once.
        routing: the experts of a token.
        machine: the links.
        constants: the shares of the links' rates.
    """
    ranks = group.ranks
    if ranks <= 1 or size_bytes <= 0:
        return 0.0
    crosses = group.crosses_nodes(machine)
    in_node = group.in_node(machine) if crosses else ranks
    nodes = max(1, ranks // in_node)
    outside = size_bytes * routing.parts_reached(nodes) * (nodes - 1) / nodes
    inside = size_bytes * routing.parts_reached(ranks) * (in_node - 1) / in_node
    seconds = max(
        inside / (machine.ring_bytes_s * _share(machine, constants.nvlink_share)),
        outside / (machine.nic_bytes_s * _share(machine, constants.nic_share)),
    )
    return 2 * _launch_s(machine, crosses) + seconds


def send_s(group: GroupShape, size_bytes: float, machine: Machine, constants: Constants) -> float:
    """Return the seconds until a message of one rank has arrived at its neighbour in ``group``."""
    if group.ranks <= 1:
        return 0.0
    if group.crosses_nodes(machine):
        rate = machine.nic_bytes_s * _share(machine, constants.nic_share)
        return _launch_s(machine, True) + size_bytes / rate
    rate = machine.ring_bytes_s * _share(machine, constants.nvlink_share)
    return _launch_s(machine, False) + size_bytes / rate


def _launch_s(machine: Machine, crosses: bool) -> float:
    """Return the time of a message without data."""
    measured_s = machine.nic_latency_s if crosses else machine.latency_s
    return _LAUNCH_S if measured_s is None else measured_s
