"""The command ``layers``: what the host launches for one layer, eagerly and compiled.

``counts`` runs on CUDA tensors without data, for which nothing can be compiled. Here a block runs
on the CPU, and torch's profiler sees each operator and each kernel that the compiler made. On a GPU
the compiler makes other kernels; their number is similar, as it fuses the same operators.
"""

import argparse
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from composer3d.dryrun.stage import LAUNCH_NOTHING
from composer3d.models.contract import Decoder, SequenceInfo
from composer3d.models.registry import architecture
from composer3d.parallel import compile
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import CompileTable
from tools.bench.tables import print_head, print_row

_HERE = Path(__file__).parent
_RECIPES = {"dense": "bench.toml", "experts": "moe.toml"}

# Few tokens, as nothing is timed. The first block also computes what all of them share.
_SETS = ("model.n_layers=2", "model.dim=64", "model.n_heads=4", "model.n_kv_heads=2")
_ROWS, _LENGTH = 2, 32
_STEPS = 3  # the first ones compile

# One kernel on a GPU. On a CPU, torch calls a product for each group.
_ONE_KERNEL = "aten::_grouped_mm"


class Launches(NamedTuple):
    """How often the host launches something in forward and in backward."""

    forward: int
    backward: int


def layers(_: argparse.Namespace) -> int:
    """Print a row for each kind of layer, eager and compiled."""
    print(f"torch {torch.__version__}")
    print_head("layer", "launches, forward", "backward")
    for kind in _RECIPES:
        for is_compiled in (False, True):
            name = f"{kind}, {'compiled' if is_compiled else 'eager'}"
            print_row(name, *map(str, measure(kind, is_compiled=is_compiled)))
    return 0


def measure(kind: str, *, is_compiled: bool) -> Launches:
    """Count what one block launches for a micro-batch in bfloat16.

    Args:
        kind: of ``_RECIPES``.
        is_compiled: whether the block is compiled as in a training.
    """
    shape = load(_HERE / _RECIPES[kind], list(_SETS), check_files=False).recipe.model
    model: Decoder = architecture(shape.architecture).build(
        shape, dtype=torch.bfloat16, device="cpu"
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    device = torch.device("cpu")
    compiling = CompileTable(enabled=is_compiled)
    compile.prepare(compiling, device)
    compile.apply(model.blocks, compiling, {})
    h_BTC = torch.randn(_ROWS, _LENGTH, shape.dim, dtype=torch.bfloat16, requires_grad=True)
    positions_BT = torch.arange(_LENGTH).expand(_ROWS, _LENGTH)
    # The compiler gives each kernel that it makes a name in the profile.
    with inductor_config.patch("cpp.enable_kernel_profile", True):
        for _ in range(_STEPS):
            model.zero_grad(set_to_none=True)
            seq = SequenceInfo(positions_BT)
            first_BTC = model.blocks["0"](h_BTC, seq).detach().requires_grad_()
            with profile(activities=[ProfilerActivity.CPU]) as forward:
                out_BTC = model.blocks["1"](first_BTC, seq)
            grad_BTC = torch.ones_like(out_BTC)
            with profile(activities=[ProfilerActivity.CPU]) as backward:
                out_BTC.backward(grad_BTC)
            seen = Launches(_launched(forward), _launched(backward))
    return seen


def _launched(seen: profile) -> int:
    """Count the operators and the compiler's kernels in a profile that a GPU would be sent."""
    events = seen.events() or ()
    return sum(_count(event) for event in events if event.cpu_parent is None)


def _count(event: FunctionEvent) -> int:
    """Count the launches of an event: an operator launches what it calls, or itself."""
    if event.name == _ONE_KERNEL:
        return 1
    called = sum(_count(child) for child in event.cpu_children)
    return called or int("_cpp_fused_" in event.name or _computes(event.name))


@cache
def _computes(name: str) -> bool:
    """Return whether an operator, such as "aten::mul", makes or changes numbers."""
    space, _, operator = name.partition("::")
    if space not in ("aten", "composer3d") or name in LAUNCH_NOTHING:
        return False
    packet = getattr(getattr(torch.ops, space), operator)
    schema = getattr(packet, packet.overloads()[0])._schema
    # A view's result is an alias of its input. An operator that returns no tensor reads a value.
    return any(
        str(entry.type) == "Tensor" and (entry.alias_info is None or entry.alias_info.is_write)
        for entry in schema.returns
    )
