"""Async tensor parallelism: which operators a block's graph has, and exact numbers with them.

No GPU runs here. Torch's own pass fuses the graphs, and the fused operators run on the CPU as the
plain collective and the products that they replace (torch's fallbacks of them).
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor

from composer3d.facts.errors import DeviceError
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel import StepShape, compile, compose
from composer3d.recipe.schema import (
    CompileTable,
    MemoryTable,
    MeshTable,
    ParallelTable,
    PrecisionTable,
)
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.verify.proof import verify_layout
from tests.long import some_of
from tests.parallel.test_compile import RECIPE, compile_strictly

SHAPE = ModelShape(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn=24, vocab=32, rope_theta=100.0)
SEQ_LEN = 8
Checkpoint = Literal["none", "selective", "full"]

# The names that ``Graph`` gives to operators.
NAMES = {
    "aten.mm.default": "product",
    "aten.cat.default": "cat",
    "_c10d_functional.all_gather_into_tensor.default": "gather",
    "_c10d_functional.reduce_scatter_tensor.default": "scatter",
    "symm_mem.fused_all_gather_matmul.default": "gather and products",
    "symm_mem.fused_matmul_reduce_scatter.default": "product and scatter",
}


class Step(NamedTuple):
    """The result of a step on one rank.

    Attributes:
        graphs: the operators of each compiled graph, by the names in ``NAMES``.
        loss: this rank's share of the loss; rank 0 has all of it.
        grads: whole gradients, by parameter.
    """

    graphs: list[dict[str, int]]
    loss: float
    grads: dict[str, Tensor]


def fuse_on_cpu() -> list[dict[str, int]]:
    """Let this process compile and run fused graphs. Return a list that gets their operators."""
    # Here, because their import warns about torch.jit, which torch itself calls.
    from torch._inductor import config as inductor_config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    # The pass asks for NCCL and for symmetric memory before it fuses anything.
    dist.is_nccl_available = lambda: True
    symmetric_memory._is_test_mode = True
    compile.prepare_async_tp = lambda device, group: None
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        fallback = getattr(symmetric_memory, f"_{name}_fallback")
        library.impl(name, fallback, "CPU")
    # The registration ends with the library.
    fuse_on_cpu.library = library  # type: ignore[attr-defined]

    graphs: list[dict[str, int]] = []

    def backend(graph: Any, inputs: Any, *, options: dict[str, Any] | None = None) -> Any:
        """Do to a graph what Inductor does before it makes code, with these options of it."""

        def run(module: torch.fx.GraphModule, inputs: Any) -> Any:
            # Inductor's options, one for each program that it makes.
            fake_mode = detect_fake_mode(
                [node.meta["val"] for node in list(module.graph.nodes)[:1]]
            )
            with inductor_config.patch(options or {}), V.set_fake_mode(fake_mode):
                view_to_reshape(module)
                post_grad_passes(module, is_inference=False)
            module.recompile()
            names = [NAMES.get(str(node.target)) for node in module.graph.nodes]
            graphs.append(dict(Counter(name for name in names if name is not None)))
            return make_boxed_func(module.forward)

        compiler = aot_autograd(
            fw_compiler=run,
            bw_compiler=run,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )
        return compiler(graph, inputs)

    torch.compile = partial(torch.compile, backend=backend, fullgraph=True)
    return graphs


def take_step(
    tensor_parallel: int, checkpoint: Checkpoint, micro_batch: int, async_tp: bool = True
) -> Step:
    """Take a step of two micro-batches, compiled with tensor parallelism and eager without."""
    graphs = fuse_on_cpu()
    with pool_world() as device:
        stages = compose(
            Llama(SHAPE).to(torch.float64),
            sharding_plan(SHAPE),
            Mesh.build(MeshTable(dp_shard=1, tp=tensor_parallel), device),
            parallel=ParallelTable(async_tp=async_tp),
            memory=MemoryTable(activation_checkpoint=checkpoint),
            precision=PrecisionTable(params="float64"),
            compiling=CompileTable(enabled=tensor_parallel > 1),
            step=StepShape(micro_batch=micro_batch, micro_batches=2, seq_len=SEQ_LEN),
            seed=0,
        )
        rows = 2 * micro_batch
        tokens = torch.randint(32, (rows, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(SEQ_LEN).repeat(rows, 1)
        loss = stages.forward_backward(
            tokens[:, :-1], tokens[:, 1:], positions, torch.tensor(float(rows * SEQ_LEN))
        )
        grads = {}
        for name, parameter in stages.named_parameters():
            grad = parameter.grad
            assert grad is not None
            grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        return Step(graphs, loss.item(), grads)


# A block's forward gathers twice (for three and for two products) and sums twice (each time after
# one product): all four collectives fuse. Backward gathers twice, each time for one product: both
# fuse. Its two sums do not: each is of the sum of three products, or of two, and a product fuses
# with a sum only if nothing is added to it before. Backward has 14 products: 2 are fused. A
# collective that is not fused has a cat, which orders the shards.
FORWARD = {"gather and products": 2, "product and scatter": 2}
BACKWARD = {"gather and products": 2, "scatter": 2, "cat": 2, "product": 12}
EXPECTED = {
    "none": [FORWARD, BACKWARD],
    # Backward gathers the inputs of products again, for the gradients of weights. Their outputs are
    # saved, so these gathers have no products to fuse with.
    "selective": [FORWARD, {**BACKWARD, "gather": 2, "cat": 4}],
    # Backward computes the block again, except its last product and sum.
    "full": [FORWARD, {**BACKWARD, "gather and products": 4, "product and scatter": 1}],
}


@some_of(
    1,
    ("checkpoint", "micro_batch"),
    [("none", 2), ("selective", 1), ("full", 2)],
)
def test_fused_blocks_are_exact(pool: Pool, checkpoint: Checkpoint, micro_batch: int) -> None:
    arguments = {"checkpoint": checkpoint, "micro_batch": micro_batch}
    (alone,) = pool.run(take_step, {"tensor_parallel": 1, **arguments}, world_size=1)
    assert alone.graphs == []

    steps = pool.run(take_step, {"tensor_parallel": 2, **arguments}, world_size=2)
    assert sum(step.loss for step in steps) == pytest.approx(alone.loss, rel=1e-9)
    for step in steps:
        assert step.graphs == EXPECTED[checkpoint]
        for name, grad in alone.grads.items():
            error = float((step.grads[name] - grad).norm() / grad.norm())
            assert error < 1e-9, name


def test_nothing_fuses_without_the_key(pool: Pool) -> None:
    arguments = {"checkpoint": "none", "micro_batch": 2, "async_tp": False}
    for step in pool.run(take_step, {"tensor_parallel": 2, **arguments}, world_size=2):
        assert step.graphs == [
            {"gather": 2, "scatter": 2, "product": 7},
            {"gather": 2, "scatter": 2, "product": 14},
        ]


def test_a_cpu_is_refused() -> None:
    with pytest.raises(DeviceError) as error:
        compile.prepare_async_tp(torch.device("cpu"), None)  # type: ignore[arg-type]
    assert error.value.lines == (
        "parallel.async_tp = true needs GPUs that read each other's memory, and this run is on a "
        "CPU; use parallel.async_tp = false",
    )


def test_verify_leaves_it_out_and_says_so(pool: Pool, references: Path, tmp_path: Path) -> None:
    verdict = verify_layout(
        pool,
        references,
        RECIPE,
        ["mesh.tp=2", "compile.enabled=true", "parallel.async_tp=true"],
        dtype="float64",
        steps=1,
        fault=partial(compile_strictly, "aot_eager", str(tmp_path)),
    )
    assert verdict.passed, verdict
    assert verdict.layout.endswith(", without async_tp, which needs GPUs")
