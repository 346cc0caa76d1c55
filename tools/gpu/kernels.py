"""The parts that time single kernels. Their argument is whether they are rehearsed on a CPU.

Times are medians over repeats; a repeat is timed by events of the device, so that the host's own
time does not count.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def device_of(rehearse: bool) -> torch.device:
    """Return the GPU, or the CPU for a rehearsal. Raises SystemExit: there is no GPU."""
    if not rehearse and not torch.cuda.is_available():
        raise SystemExit("tools.gpu: torch sees no CUDA GPU here; --rehearse runs on the CPU")
    return torch.device("cpu" if rehearse else "cuda")


def name_of_card() -> str:
    """Return the name of the GPU as CUDA gives it, or "a CPU"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"


def time_of(function: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the median seconds of a call. The first three calls do not count."""
    times = []
    for number in range(3 + repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            function()
            seconds = time.perf_counter() - start
        if number >= 3:
            times.append(seconds)
    return statistics.median(times)


# --- machine ---


def machine(rehearse: bool) -> dict[str, Any]:
    """The card, its software, and the rates of products and of memory."""
    device = device_of(rehearse)
    figures: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    figures["cpu"] = os.cpu_count()
    if not rehearse:
        fields = "name,driver_version,memory.total,power.limit,clocks.max.sm"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        shown = dict(zip(fields.split(","), answer.strip().split(", "), strict=False))
        figures |= {name.replace(".", "_"): value for name, value in shown.items()}
        figures["cuda"], figures["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        figures["compiler"] = _try_compiler(device)
    size = 256 if rehearse else 8192
    rates: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        rates[str(dtype)] = 2 * size**3 / time_of(partial(torch.matmul, a, b), device)
    if not rehearse and torch.cuda.get_device_capability() >= (8, 9):
        rates["float8_e4m3fn, a scale for each row"] = (
            2 * size**3 / time_of(_float8_product(size, device), device)
        )
    figures["products_tflops"] = {name: rate / 1e12 for name, rate in rates.items()}
    x = torch.empty(2**20 if rehearse else 2**30, dtype=torch.uint8, device=device)
    figures["memory_gb_s"] = 2 * x.numel() / time_of(lambda: x.clone(), device) / 1e9
    return figures


def _try_compiler(device: torch.device) -> Any:
    """Return whether a function can be compiled here: half of the parts would fail without that."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:
        return {"failed": str(error)[:500]}
    return "works"


def _float8_product(size: int, device: torch.device) -> Callable[[], Tensor]:
    a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones(size, 1, device=device)
    return lambda: torch._scaled_mm(
        a, a.t(), scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


# --- attention ---


def attention(rehearse: bool) -> dict[str, Any]:
    """Time, rate and error of each kernel of attention, with the heads of Llama 3 8B."""
    from composer3d.models.layers.attention import sdpa
    from composer3d.parallel.context.kernels import attend_block
    from composer3d.parallel.context.ring import attend_in_rounds

    device = device_of(rehearse)
    heads, kv_heads, width, tokens, dtype = _sizes_of_attention(rehearse)
    window = tokens // 8
    documents = (torch.arange(tokens) // (tokens // 16))[None]

    def over_ring(q: Tensor, k: Tensor, v: Tensor, documents: Any, window: int) -> Tensor:
        out: Tensor = attend_in_rounds(q, k, v, None, documents, window, "ring", False, "")[0]
        return out

    cases: dict[str, tuple[Callable[..., Tensor], float]] = {
        # With the share of all pairs of a query and a key that it computes.
        "whole sequence": (lambda q, k, v: sdpa(q, k, v), 0.5),
        "block, causal": (lambda q, k, v: attend_block(q, k, v, causal=True)[0], 0.5),
        "block, all keys": (lambda q, k, v: attend_block(q, k, v, causal=False)[0], 1.0),
        "16 documents": (lambda q, k, v: over_ring(q, k, v, documents, 0), 0.5 / 16),
        "window of an eighth": (lambda q, k, v: over_ring(q, k, v, None, window), 0.125),
    }
    rows: dict[str, Any] = {}
    for name, (attend, share) in cases.items():
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, n, tokens, width, device=device, dtype=dtype, requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        )
        row: dict[str, Any] = {}
        try:
            out = attend(q, k, v)
            flops = 4 * heads * tokens**2 * width * share
            with torch.no_grad():
                forward_s = time_of(partial(attend, q, k, v), device)
            row["forward_ms"], row["forward_tflops"] = forward_s * 1e3, flops / forward_s / 1e12
            row["kernel"] = _kernel(partial(attend, q, k, v), device)
            row["error"] = _error(out, name, q, k, v, documents, window)
            if out.requires_grad:
                grad = torch.randn_like(out)

                def step(a: Any = attend, x: Any = (q, k, v), grad: Tensor = grad) -> None:
                    a(*x).backward(grad)

                row["step_ms"] = time_of(step, device) * 1e3
        except (RuntimeError, NotImplementedError) as error:
            row["failed"] = str(error)[:500]
        rows[name] = row
    return {"tokens": tokens, "heads": [heads, kv_heads, width], "rows": rows}


def _sizes_of_attention(rehearse: bool) -> tuple[int, int, int, int, torch.dtype]:
    """Return heads, key-value heads, their width, tokens, dtype: on a GPU, those of Llama 3 8B."""
    return (4, 2, 16, 64, torch.float32) if rehearse else (32, 8, 128, 8192, torch.bfloat16)


def _kernel(call: Callable[[], object], device: torch.device) -> str:
    """Return the name of the kernel that took most of the time of a call; "" on a CPU."""
    if device.type != "cuda":
        return ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    longest = max(profile.key_averages(), key=lambda one: one.device_time_total)
    return longest.key[:80]


def _error(
    out: Tensor, name: str, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int
) -> float:
    """Return the largest difference from float32 scores, of the first head alone."""
    tokens = q.shape[2]
    place = torch.arange(tokens, device=q.device)
    sees = place[:, None] >= place
    if name == "block, all keys":
        sees = torch.ones_like(sees)
    elif name == "16 documents":
        row = documents[0].to(q.device)
        sees &= row[:, None] == row
    elif name.startswith("window"):
        sees &= place[:, None] - place < window
    with torch.no_grad():
        scores = q[0, 0].float() @ k[0, 0].float().mT * q.shape[-1] ** -0.5
        expected = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v[0, 0].float()
        return (out[0, 0].float() - expected).abs().max().item()


def cudnn(rehearse: bool) -> dict[str, Any]:
    """A block of the ring by cuDNN's kernel beside the one that composer3d calls.

    Backward gets the output and the logsumexp of rows that have more keys than the block's, as in
    the ring. On a CPU, both sides are composer3d's.
    """
    from composer3d.parallel.context.kernels import attend_block, attend_block_backward

    device = device_of(rehearse)
    heads, kv_heads, width, tokens, dtype = _sizes_of_attention(rehearse)
    aten = torch.ops.aten

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        if rehearse:
            return attend_block(q, k, v, causal=causal)
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        return found[0], found[1].view(q.shape[:3])

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, ...]:
        if rehearse:
            return attend_block_backward(grad, q, k, v, out, lse, causal=causal)
        seed = torch.zeros((), dtype=torch.int64, device=device)
        sizes = (None, None, None, q.shape[2], k.shape[2], 0.0, causal)
        found: tuple[Tensor, ...] = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None].contiguous(), seed, seed, *sizes
        )
        return found

    rows: dict[str, Any] = {}
    for causal in (True, False):
        torch.manual_seed(0)
        q, k, v, grad = (
            torch.randn(1, n, tokens, width, device=device, dtype=dtype)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        out, lse = attend_block(q, k, v, causal=causal)
        own_out, own_lse = forward(q, k, v, causal)
        row: dict[str, Any] = {"out_error": _relative(own_out, out)}
        row["lse_error"] = _relative(own_lse, lse)
        row["forward_ms"] = 1e3 * time_of(partial(forward, q, k, v, causal), device)
        call: Callable[[], object] = partial(attend_block, q, k, v, causal=causal)
        row["composer3d_forward_ms"] = 1e3 * time_of(call, device)
        # As if the rows had other keys too. Both kernels get the same numbers, so any will do.
        merged = (out * 0.5).to(dtype), lse + 0.85
        try:
            own = backward(grad, q, k, v, *merged, causal)
            expected = attend_block_backward(grad, q, k, v, *merged, causal=causal)
            for name, one, other in zip(("dq", "dk", "dv"), own, expected, strict=True):
                row[f"{name}_error"] = _relative(one, other)
            call = partial(backward, grad, q, k, v, *merged, causal)
            row["backward_ms"] = 1e3 * time_of(call, device)
            call = partial(attend_block_backward, grad, q, k, v, *merged, causal=causal)
            row["composer3d_backward_ms"] = 1e3 * time_of(call, device)
        except (RuntimeError, TypeError) as error:
            row["failed"] = str(error)[:500]
        rows["causal" if causal else "all keys"] = row
    return rows


def _relative(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference over that of ``b``."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# --- products in float8 ---


def float8(rehearse: bool) -> dict[str, Any]:
    """Products in float8 beside the same products in float64 on the CPU, eager and compiled."""
    from composer3d.parallel import float8

    device = device_of(rehearse)
    tokens, dim, ffn = (32, 64, 128) if rehearse else (4096, 4096, 14336)
    torch.manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape).bfloat16() for shape in ((tokens, dim), (ffn, dim), (tokens, ffn))
    )
    found: dict[str, Any] = {}
    for name, product, first in (
        ("output", float8.output_product, x),
        ("input gradient", float8.input_gradient, grad),
    ):
        expected = product(first.double(), weight.double())
        compiled = product if rehearse else torch.compile(product)
        row = {}
        for kind, function in {"eager": product, "compiled": compiled}.items():
            call = partial(function, first.to(device), weight.to(device))
            row[f"{kind}_error"] = _relative(call().cpu(), expected)
            row[f"{kind}_ms"] = time_of(call, device) * 1e3
        found[name] = row
    return found | _float8_of_experts(x, grad, device)


def _float8_of_experts(x: Tensor, grad: Tensor, device: torch.device) -> dict[str, Any]:
    """The same for the rows of four experts, of which one has none: Hopper has one kernel."""
    from composer3d.parallel import float8

    rows = len(x) // 4
    tokens = torch.tensor([rows - 3, 0, 2 * rows + 1, rows + 2])
    weight = torch.randn(4, grad.shape[1], x.shape[1]).bfloat16()
    found: dict[str, Any] = {}
    for name, product, first in (
        ("output of experts", float8.grouped_output, x),
        ("input gradient of experts", float8.grouped_input_gradient, grad),
    ):
        expected = product(first.double(), weight.double(), tokens)
        call = partial(product, first.to(device), weight.to(device), tokens.to(device))
        found[name] = {
            "eager_error": _relative(call().cpu(), expected),
            "eager_ms": time_of(call, device) * 1e3,
        }
    return found


# --- grouped products ---


def grouped(rehearse: bool) -> dict[str, Any]:
    """The product of experts with even, uneven and empty groups beside a loop over them.

    ``error`` is that of the product, ``gradient_error`` that of the weights' gradient: each the
    largest difference from the loop.
    """
    device = device_of(rehearse)
    experts, dim, ffn, rows = (4, 32, 64, 64) if rehearse else (64, 2048, 1408, 32768)
    weight = torch.randn(experts, ffn, dim, device=device, dtype=torch.bfloat16)
    x = torch.randn(rows, dim, device=device, dtype=torch.bfloat16)
    torch.manual_seed(0)
    uneven = torch.rand(experts).cumsum(0)
    uneven = (uneven / uneven[-1] * rows).to(torch.int32)
    half_empty = (torch.arange(1, experts + 1) // 2 * 2 * rows // experts).to(torch.int32)
    half_empty[-1] = rows
    even = (torch.arange(1, experts + 1) * rows // experts).to(torch.int32)
    found: dict[str, Any] = {}
    for name, ends in {"even": even, "uneven": uneven, "half are empty": half_empty}.items():
        offsets = ends.to(device)
        sizes = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int32)).tolist()

        def loop(weight: Tensor = weight, sizes: Sequence[int] = sizes) -> Tensor:
            parts = zip(x.split(list(sizes)), weight, strict=True)
            return torch.cat([part @ matrix.mT for part, matrix in parts])

        def grouped(weight: Tensor = weight, offsets: Tensor = offsets) -> Tensor:
            out: Tensor = F.grouped_mm(x, weight.mT, offs=offsets)
            return out

        of_grouped, of_loop_alone = (_weight_gradient(each, weight) for each in (grouped, loop))
        seconds, of_loop = time_of(grouped, device), time_of(loop, device)
        found[name] = {
            "tflops": 2 * rows * dim * ffn / seconds / 1e12,
            "of_loop": seconds / of_loop,
            "error": (grouped().float() - loop().float()).abs().max().item(),
            "gradient_error": (of_grouped - of_loop_alone).abs().max().item(),
        }
    return found


def _weight_gradient(product: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """Return the gradient of ``product(weight).sum()`` with respect to ``weight``: (E, F, C).

    The memory that torch's allocator gives it has held 3e38 in bfloat16. If a kernel leaves out the
    experts without rows (PyTorch issue 172439), that number is still there.
    """
    weight = weight.detach().requires_grad_()
    out = product(weight)
    grad = torch.ones_like(out)
    torch.full_like(weight, 3e38)  # is freed at once
    (gradient,) = torch.autograd.grad(out, weight, grad)
    return gradient.float()
