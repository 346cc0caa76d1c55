"""The fitted constants of the cost model: what each means, what pins it, and the shipped values.

``tools/planner_fit.py`` fits them to published measurements. The prior and the range of each come
from figures of kernels and links, not from training runs. None belongs to a publication or a
framework; everything else that the model uses is a fact of ``setup`` or a count.
"""

from dataclasses import asdict, dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Constants:
    """One value for each fitted constant. ``FITTED`` says what they mean."""

    matrix_share_ampere: float
    matrix_share_hopper: float
    tail_waves: float
    kernel_gap_s: float
    eager_traffic: float
    fused_traffic: float
    nvlink_share: float
    nic_share: float
    hop_s: float
    hidden_share: float
    interference: float
    tp_exposed: float
    step_overhead_s: float
    straggler_share: float
    activation_share: float
    context_gib: float
    slack_share: float

    def as_dict(self) -> dict[str, float]:
        """Return the values by name."""
        return asdict(self)


class Fitted(NamedTuple):
    """What is known of a constant before any training run is seen.

    Attributes:
        prior: the value without measurements of training runs.
        low, high: the plausible range; a fit cannot leave it.
        unit: its unit; "1" is a plain ratio.
        meaning: what it is.
        pinned_by: the figures or rows that determine it.
    """

    prior: float
    low: float
    high: float
    unit: str
    meaning: str
    pinned_by: str


FITTED: dict[str, Fitted] = {
    "matrix_share_ampere": Fitted(
        0.93,
        0.80,
        1.05,
        "1",
        "sustained rate of large products, of the fastest measured one (A100 and older)",
        "rows without communication on A100; above 1 because the time of memory traffic is added",
    ),
    "matrix_share_hopper": Fitted(
        0.85,
        0.65,
        1.00,
        "1",
        "the same on H100 and newer, whose clocks fall under the power limit in long runs",
        "rows without communication on H100, H200 and B200",
    ),
    "tail_waves": Fitted(
        0.3,
        0.05,
        0.6,
        "1",
        "the part of a wave of tiles that a matrix product waits for at its end",
        "sweeps of the micro-batch; libraries choose tiles so that it is below the mean, 0.5",
    ),
    "kernel_gap_s": Fitted(
        2.5e-6,
        1e-6,
        6e-6,
        "s",
        "time between two kernels of a stream: the end of one, the start of the next",
        "sweeps of the micro-batch; timelines of kernels show 1 to 5 us",
    ),
    "eager_traffic": Fitted(
        1.1,
        0.7,
        1.8,
        "1",
        "memory traffic of elementwise work without fusion, of the counted bytes",
        "small models, and micro-batch sweeps, of eager runs",
    ),
    "fused_traffic": Fitted(
        0.65,
        0.3,
        1.1,
        "1",
        "the same with fused kernels",
        "compiled runs and runs with kernels fused by hand",
    ),
    "nvlink_share": Fitted(
        0.85,
        0.55,
        1.0,
        "1",
        "bandwidth of collectives inside a node during training, of nccl-tests'",
        "tp sweeps inside a node",
    ),
    "nic_share": Fitted(
        0.70,
        0.45,
        0.95,
        "1",
        "bandwidth between nodes during training, of the cards' rate; nccl-tests reach 0.74 to 0.9",
        "sweeps of the number of nodes; 32 B200 reach 0.74 in collectives.csv",
    ),
    "hop_s": Fitted(
        5e-6,
        1.5e-6,
        12e-6,
        "s",
        "time of a hop in a ring over nodes",
        "gathers over hundreds of ranks; NCCL's own model has 3.4 us inside a node and 14 between",
    ),
    "hidden_share": Fitted(
        0.85,
        0.6,
        1.0,
        "1",
        "the share of computing time behind which a collective can run",
        "rows whose gathers take as long as their products",
    ),
    "interference": Fitted(
        0.30,
        0.02,
        0.8,
        "1",
        "seconds that products lose for each second of a collective beside them",
        "FSDP rows with many nodes; kernels of collectives take processors and bandwidth",
    ),
    "tp_exposed": Fitted(
        0.55,
        0.2,
        1.0,
        "1",
        "share of a tp collective that remains visible where it overlaps with its product",
        "tp rows with overlap",
    ),
    "step_overhead_s": Fitted(
        0.02,
        0.004,
        0.06,
        "s",
        "time of the host in a step: data, logging, synchronisation",
        "rows of small models with short steps",
    ),
    "straggler_share": Fitted(
        0.007,
        0.0005,
        0.02,
        "1",
        "slowdown for each doubling of the devices beyond 8",
        "weak scaling rows of 128 to 2,048 devices",
    ),
    "activation_share": Fitted(
        1.05,
        0.85,
        1.35,
        "1",
        "activations that are kept, of the counted ones",
        "memory of rows without recomputation",
    ),
    "context_gib": Fitted(
        2.5,
        0.8,
        6.0,
        "GiB",
        "memory outside of torch's allocator: CUDA contexts, kernels, buffers of NCCL",
        "rows whose memory nvidia-smi reports",
    ),
    "slack_share": Fitted(
        1.06,
        1.0,
        1.25,
        "1",
        "memory that the allocator reserves, of what is allocated",
        "rows that report reserved memory",
    ),
}

PRIORS = Constants(**{name: fitted.prior for name, fitted in FITTED.items()})

# Fitted to all rows of the published measurements by ``tools/planner_fit.py``.
SHIPPED = Constants(
    matrix_share_ampere=0.872,
    matrix_share_hopper=0.8158,
    tail_waves=0.3588,
    kernel_gap_s=2.301e-06,
    eager_traffic=1.123,
    fused_traffic=0.5608,
    nvlink_share=0.8002,
    nic_share=0.5635,
    hop_s=7.716e-06,
    hidden_share=0.8277,
    interference=0.2871,
    tp_exposed=0.3709,
    step_overhead_s=0.0526,
    straggler_share=0.002682,
    activation_share=1.099,
    context_gib=3.771,
    slack_share=1.076,
)
