"""A table of devices: names, peak FLOP/s, memory, links, measured rates. No torch here.

Peaks are dense FLOP/s from the vendors' datasheets: NVIDIA A100, H100, H200, HGX B200, GB200 and
L40S; AMD Instinct MI300X. Peaks that a datasheet quotes with sparsity are halved. Memory is about
the ``total_memory`` of ``torch.cuda.get_device_properties()``, which is less than the name of the
device says.

``memory_bytes_s`` and the NVLink and PCIe figures are the datasheets'. The measured rates are those
of Bekman's "Machine Learning Engineering" (github.com/stas00/ml-engineering at 744d01e18b): the
largest matrix product that was found (compute/accelerator, "Maximum Achievable Matmul FLOPS"), and
the bus bandwidth of nccl-tests (network). Those of H20 are a user's, in torch (issue 77 of
github.com/zzc0721/torch-performance-test-data). A rate that nobody published is absent, and the
planner says so and takes a usual share of the peak.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from composer3d.facts.calibration import Observation, observations
from composer3d.facts.errors import DeviceError
from composer3d.facts.files import read_plain
from composer3d.facts.text import in_quotes, short_json
from composer3d.facts.toml import parse_toml

# The major number of the compute capability of H100 and H200.
HOPPER_MAJOR = 9

Generation = Literal["ampere", "ada", "hopper", "blackwell", "cdna3", "cpu"]


# The links inside a node of a generation that has no NVLink, where ``Links`` name none.
_NODE_LINKS: dict[Generation, str] = {
    "ada": "PCIe",
    "cdna3": "Infinity Fabric",
    "cpu": "host memory",
}


class Links(NamedTuple):
    """The links of a device; bytes/s are in one direction.

    Attributes:
        nvlink_bytes_s: the datasheet's rate of the links inside a node or rack (NVLink, Infinity
            Fabric, or a CPU's own memory).
        ring_bytes_s: the bus bandwidth that nccl-tests measured in a ring inside a node.
        all_reduce_bytes_s: the same for all-reduce, which NVLink switches may compute.
        domain: the devices that these links join.
        nic_bytes_s: a usual network rate for each device.
        host_bytes_s: the link to host memory.
        latency_s: measured time of a small all-reduce inside a node, for each doubling of its
            ranks; None: not measured.
        nic_latency_s: the same between nodes.
        name: what the links inside a node are called; None: as usual for the generation.
    """

    nvlink_bytes_s: float
    ring_bytes_s: float
    all_reduce_bytes_s: float
    domain: int
    nic_bytes_s: float
    host_bytes_s: float
    latency_s: float | None = None
    nic_latency_s: float | None = None
    name: str | None = None


class Hardware(NamedTuple):
    """A device.

    Attributes:
        name: our name for it.
        aliases: parts of the name that ``torch.cuda.get_device_name`` returns.
        memory_gib: memory that a program can use.
        peaks: dense peak FLOP/s by dtype; a dtype that is not supported or not known is absent.
        generation: what its matrix units can do.
        memory_bytes_s: the datasheet's memory bandwidth; 0: not known.
        matrix_rates: measured FLOP/s of the fastest matrix product, by dtype.
        links: the links; None: not known.
        power_w: the power limit in watts that the rates belong to; 0: not known.
        is_fitted: whether the constants of the planner were fitted to training runs on it.
        is_measured: whether its matrix rates were measured on the very machine.
        calibration: what runs on the machine measured.
    """

    name: str
    aliases: tuple[str, ...]
    memory_gib: float
    peaks: dict[str, float]
    generation: Generation = "ampere"
    memory_bytes_s: float = 0.0
    matrix_rates: Mapping[str, float] = MappingProxyType({})
    links: Links | None = None
    power_w: float = 0.0
    is_fitted: bool = False
    is_measured: bool = False
    calibration: tuple[Observation, ...] = ()

    @property
    def node_link(self) -> str:
        """The name of the links inside a node."""
        named = self.links.name if self.links is not None else None
        return named or _NODE_LINKS.get(self.generation, "NVLink")

    def matrix_rate(self, dtype_name: str) -> float:
        """Return the FLOP/s of the fastest matrix product, measured or estimated from the peak.

        Raises:
            DeviceError: neither a rate nor a peak is known for this dtype.
        """
        rate = self.matrix_rates.get(dtype_name)
        if rate:
            return rate
        peak = self.peaks.get(dtype_name)
        if not peak:
            known = ", ".join(self.peaks) or "none"
            raise DeviceError(f"{self.name} has no peak for {dtype_name}; it has one for: {known}")
        return peak * _USUAL_SHARE


# Of the peak, for a device whose fastest product nobody published: between A100 (271 of 312
# TFLOP/s), H100 (795 of 989) and B200 (1,745 of 2,250).
_USUAL_SHARE = 0.8


def _peaks(*, half: float, tf32: float, fp32: float, fp8: float = 0.0) -> dict[str, float]:
    """Convert peaks from TFLOP/s to FLOP/s. ``half`` is bf16 and fp16; 0 means no support."""
    tflops = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": fp32, "fp8": fp8}
    return {dtype: peak * 1e12 for dtype, peak in tflops.items() if peak}


def _links(
    nvlink: float, ring: float, all_reduce: float, domain: int, nic_gbit: float, host: float
) -> Links:
    """Make ``Links`` from GB/s, and Gbit/s for the network."""
    return Links(nvlink * 1e9, ring * 1e9, all_reduce * 1e9, domain, nic_gbit / 8 * 1e9, host * 1e9)


_A100 = _peaks(half=312.0, tf32=156.0, fp32=19.5)
_H100 = _peaks(half=989.0, tf32=494.5, fp32=67.0, fp8=1979.0)
_A100_RATES = {"bfloat16": 271.2e12, "float16": 271.2e12}
_H100_RATES = {"bfloat16": 794.5e12, "float16": 794.5e12, "fp8": 1402.6e12}
_A100_LINKS = _links(300, 234.9, 234.9, 8, 200, 32)
# The ring's 362 GB/s and the switches' 480 were measured on H200, which has the links of H100.
_H100_LINKS = _links(450, 362.0, 480.0, 8, 400, 64)
_PCIE_LINKS = _links(64, 40.0, 40.0, 8, 200, 64)._replace(name="PCIe")

_A100_40GB = Hardware(
    "A100-40GB",
    ("A100-SXM4-40GB", "A100-SXM-40GB", "A100-PCIE-40GB"),
    39.4,
    _A100,
    "ampere",
    1.555e12,
    _A100_RATES,
    _A100_LINKS,
    400,
    is_fitted=True,
)
_A100_80GB = _A100_40GB._replace(
    name="A100-80GB",
    aliases=("A100-SXM4-80GB", "A100-SXM-80GB", "A100 80GB PCIe"),
    memory_gib=79.1,
    memory_bytes_s=2.039e12,
)
_H100_SXM = Hardware(
    "H100-80GB SXM",
    ("H100 80GB HBM3", "H100-SXM5-80GB"),
    79.1,
    _H100,
    "hopper",
    3.35e12,
    _H100_RATES,
    _H100_LINKS,
    700,
    is_fitted=True,
)

DEVICES: tuple[Hardware, ...] = (
    _A100_40GB,
    _A100_80GB,
    _A100_80GB._replace(  # with 8 of its 12 NVLinks
        name="A800-80GB",
        aliases=("A800-SXM4-80GB",),
        links=_links(200, 156.6, 156.6, 8, 200, 32),
    ),
    _H100_SXM,
    _H100_SXM._replace(  # Meta's part of 500 W; its matrix rate is not published
        name="H100-96GB HBM2e",
        aliases=("H100-96GB-HBM2e",),
        memory_gib=95.0,
        memory_bytes_s=2.4e12,
    ),
    Hardware(
        "H100-80GB PCIe",
        ("H100 PCIe",),
        79.1,
        _peaks(half=756.0, tf32=378.0, fp32=51.0, fp8=1513.0),
        "hopper",
        2.0e12,
        {},
        _PCIE_LINKS,
        350,
    ),
    _H100_SXM._replace(  # with fewer NVLinks; the ring is the rate that DeepSeek-V3's paper quotes
        name="H800-80GB",
        aliases=("H800",),
        links=_links(200, 160.0, 200.0, 8, 400, 64),
        is_fitted=False,
    ),
    _H100_SXM._replace(
        name="H200-141GB SXM",
        aliases=("H200",),
        memory_gib=139.8,
        memory_bytes_s=4.8e12,
        matrix_rates={**_H100_RATES, "fp8": 1453.4e12},
    ),
    Hardware(
        "H200-141GB NVL",
        ("H200 NVL",),
        139.8,
        _peaks(half=835.5, tf32=417.5, fp32=60.0, fp8=1671.0),
        "hopper",
        4.8e12,
        {},
        _PCIE_LINKS,
        600,
    ),
    _H100_SXM._replace(  # with 0.15 of the peak, and the links of H100
        name="H20-96GB",
        aliases=("H20",),
        memory_gib=95.0,
        peaks=_peaks(half=148.0, tf32=74.0, fp32=44.0, fp8=296.0),
        memory_bytes_s=4.0e12,
        matrix_rates={"bfloat16": 142.25e12, "float16": 142.09e12},
        power_w=400,
        is_fitted=False,
    ),
    Hardware(
        "B200-180GB SXM",
        ("B200",),
        178.3,
        _peaks(half=2250.0, tf32=1125.0, fp32=75.0, fp8=4500.0),
        "blackwell",
        8.0e12,
        {"bfloat16": 1745.0e12, "float16": 1745.0e12, "fp8": 3432.5e12},
        _links(900, 677.0, 845.7, 8, 400, 64),
        1000,
    ),
    Hardware(
        "GB200-186GB",
        ("GB200",),
        184.0,
        _peaks(half=2500.0, tf32=1250.0, fp32=80.0, fp8=5000.0),
        "blackwell",
        8.0e12,
        {"bfloat16": 1822.0e12, "float16": 1822.0e12, "fp8": 3615.6e12},
        _links(900, 680.0, 850.0, 72, 400, 450),
        1200,
    ),
    Hardware(
        "L40S-48GB",
        ("L40S",),
        44.4,
        _peaks(half=362.0, tf32=183.0, fp32=91.6, fp8=733.0),
        "ada",
        0.864e12,
        {},
        _links(32, 20.0, 20.0, 8, 100, 32),
        350,
    ),
    Hardware(  # 7 links of 64 GB/s to each neighbour; no collective rate is published
        "MI300X-192GB",
        ("MI300X",),
        191.7,
        _peaks(half=1307.4, tf32=653.7, fp32=163.4, fp8=2614.9),
        "cdna3",
        5.3e12,
        {"bfloat16": 668.4e12, "float16": 668.4e12},
        _links(448, 300.0, 300.0, 8, 400, 64),
        750,
    ),
)


def find(device_name: str) -> Hardware | None:
    """Return the row with the longest name or alias that occurs in ``device_name``, else None.

    Case is ignored. An alias must be a word: "H200" does not occur in "GH200", nor "B200" in
    "GB200". A slice of a device (MIG) has no row, because its peak is lower than the peak of the
    whole device.
    """
    device_name = device_name.lower()
    if re.search(r"\bmig\b", device_name):
        return None
    longest, best_row = 0, None
    for row in DEVICES:
        for alias in (row.name, *row.aliases):
            pattern = rf"(?<![a-z0-9]){re.escape(alias.lower())}(?![a-z0-9])"
            if len(alias) >= longest and re.search(pattern, device_name):
                longest, best_row = len(alias), row
    return best_row


def peak_flops(hw: Hardware, dtype_name: str) -> float | None:
    """Return the dense peak of ``hw`` in FLOP/s, or None if it is not known.

    Args:
        hw: a row of the table.
        dtype_name: "bfloat16", "float16", "float32", "tf32" or "fp8". "float32" is the peak of the
            vector units, without TF32; use "tf32" if matrix products run in TF32.
    """
    return hw.peaks.get(dtype_name)


def by_name(name: str) -> Hardware | None:
    """Return the row that a person means by ``name``: "H100", "A100-80GB", "h200", ...

    A short name means the first row that begins with it, so "H100" is the SXM one. Unlike
    ``find``, it takes no longer text with a name somewhere in it.
    """
    wanted = re.sub(r"[\s_]+", "-", name.strip().lower())
    if not wanted:
        return None
    if wanted == "cpu":
        return CPU
    for row in DEVICES:
        if wanted in (known.lower().replace(" ", "-") for known in (row.name, *row.aliases)):
            return row
    for row in DEVICES:
        if row.name.lower().replace(" ", "-").startswith(wanted + "-"):
            return row
    return None


# The CPUs that developers and CI use: one rank on one core of a server. The figures are orders of
# magnitude for a plan that runs anywhere; a file with measured ones is better.
CPU = Hardware(
    "CPU",
    ("cpu",),
    16.0,
    {"float32": 60e9, "bfloat16": 60e9},
    "cpu",
    10e9,
    {"float32": 40e9, "bfloat16": 20e9},
    _links(2, 1.0, 1.0, 64, 10, 2),
)

_ROW_BYTES = 1 << 16
# Of the numbers in a row, whatever their unit is.
_LEAST, _MOST = 1e-9, 1e9
_MOST_DOMAIN = 1 << 20  # devices
_DTYPES = ("bfloat16", "float16", "float32", "tf32", "fp8")
_REQUIRED = ("name", "memory_gib", "memory_gb_s", "nvlink_gb_s", "nic_gbit")
_OPTIONAL = ("generation", "ring_gb_s", "all_reduce_gb_s", "domain", "host_gb_s", "peak_tflops",
             "matrix_tflops", "power_w", "latency_us", "nic_latency_us",
             "calibration")  # fmt: skip


def text_of_row(path: str) -> str:
    """Return the text of a file with a row.

    Raises:
        DeviceError: it cannot be read.
    """
    try:
        return read_plain(path, limit=_ROW_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeviceError(f"{path} cannot be read as a row of hardware ({reason})") from None


def read_row(path: str) -> Hardware:
    """Read a device of the user's own from a TOML file.

    Its keys are ``name``, ``memory_gib``, ``memory_gb_s``, ``nvlink_gb_s`` (one direction),
    ``nic_gbit`` (for each device), and the tables ``[peak_tflops]`` and ``[matrix_tflops]`` with a
    number for each dtype. Optional are ``generation``, ``ring_gb_s`` and ``all_reduce_gb_s``
    (measured bus bandwidth; absent: 0.8 of nvlink_gb_s), ``domain``, ``host_gb_s``, ``power_w``,
    and ``latency_us`` and ``nic_latency_us`` (of a small all-reduce inside a node and between
    nodes, for each doubling of its ranks; absent: those of NCCL on usual GPUs).
    ``composer3d doctor --write`` makes such a file. A file may have ``base`` in place of them all,
    the name of a device of the table. At the end of either, ``[[calibration]]`` has what runs
    measured, which ``composer3d plan --calibrate`` adds. Nothing in it is trusted.

    Raises:
        DeviceError: the file cannot be read, or a key is missing, unknown or out of range.
    """
    try:
        values = parse_toml(text_of_row(path).encode())
    except ValueError as error:
        raise DeviceError(f"{path} cannot be read as a row of hardware ({error})") from None
    if "base" in values:
        return _row_of_ours(values, path)
    problems = [f"{path}: the key '{key}' is missing" for key in _REQUIRED if key not in values]
    known = (*_REQUIRED, *_OPTIONAL)
    problems += [
        f"{path}: unknown key {in_quotes(key, 80)}; the keys are {', '.join(known)}"
        for key in values
        if key not in known
    ]
    if "peak_tflops" not in values and "matrix_tflops" not in values:
        problems.append(f"{path}: give the table [peak_tflops] or [matrix_tflops]")
    if problems:
        raise DeviceError(problems)

    def number(key: str, default: float = 0.0) -> float:
        return _positive(values.get(key, default), key, path)

    def rates(key: str) -> dict[str, float]:
        table = values.get(key, {})
        if not isinstance(table, Mapping):
            raise DeviceError(f"{path}: {key} must be a table of numbers by dtype")
        for dtype in table:
            if dtype not in _DTYPES:
                allowed = ", ".join(_DTYPES)
                raise DeviceError(
                    f"{path}: unknown dtype {in_quotes(dtype, 80)} in {key}; use {allowed}"
                )
        return {dtype: _positive(v, f"{key}.{dtype}", path) * 1e12 for dtype, v in table.items()}

    name = values["name"]
    if not isinstance(name, str) or not 0 < len(name) <= 80 or not name.isprintable():
        raise DeviceError(f"{path}: name must be a text of 1 to 80 printable characters")
    domain = values.get("domain", 8)
    if type(domain) is not int or not 1 <= domain <= _MOST_DOMAIN:
        raise DeviceError(
            f"{path}: domain = {short_json(domain)} must be a whole number from 1 to {_MOST_DOMAIN}"
        )
    generation = values.get("generation", "ampere")
    if generation not in get_args(Generation):
        allowed = ", ".join(get_args(Generation))
        raise DeviceError(f"{path}: generation = {short_json(generation)} must be one of {allowed}")

    def seconds(key: str) -> float | None:
        return number(key) / 1e6 if key in values else None

    nvlink = number("nvlink_gb_s")
    ring = number("ring_gb_s", 0.8 * nvlink)
    return Hardware(
        name,
        (),
        number("memory_gib"),
        rates("peak_tflops"),
        generation,
        number("memory_gb_s") * 1e9,
        rates("matrix_tflops"),
        _links(
            nvlink,
            ring,
            number("all_reduce_gb_s", ring),
            domain,
            number("nic_gbit"),
            number("host_gb_s", 32),
        )._replace(latency_s=seconds("latency_us"), nic_latency_s=seconds("nic_latency_us")),
        number("power_w") if "power_w" in values else 0.0,
        is_measured="matrix_tflops" in values,
        calibration=observations(values.get("calibration", []), path),
    )


def _row_of_ours(values: Mapping[str, Any], path: str) -> Hardware:
    """Return the row of the table that ``base`` names, with what runs on a machine measured."""
    others = values.keys() - {"base", "calibration"}
    if others:
        known = in_quotes(min(others), 80)
        raise DeviceError(f"{path}: beside base, a row has calibration alone, not {known}")
    base = values["base"]
    row = by_name(base) if isinstance(base, str) else None
    if row is None:
        known = ", ".join(device.name for device in DEVICES)
        raise DeviceError(f"{path}: base = {short_json(base)} must be a device: {known} or CPU")
    return row._replace(calibration=observations(values.get("calibration", []), path))


def _positive(value: Any, key: str, path: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN is in no range, and an int of any size can be compared.
    if not is_number or not _LEAST < value < _MOST:
        raise DeviceError(
            f"{path}: {key} = {short_json(value)} must be a number above 0: at least {_LEAST:g}, "
            f"and below {_MOST:g}"
        )
    return float(value)
