"""Compiled blocks: exact numbers, few graphs on a rank, and errors without a compiler.

Only one layout goes through Inductor, which compiles C++ for half a minute on one core. The others
run the graphs that Inductor would get with AOTAutograd.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from composer3d.facts.errors import DeviceError, PlanError
from composer3d.models.contract import DecoderBlock
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.models.moe.model import MoeLlama, moe_of
from composer3d.models.moe.plan import sharding_plan as moe_plan
from composer3d.models.moe.shape import MoeShape
from composer3d.parallel import StepShape, compile, compose
from composer3d.recipe.draft import split_overrides
from composer3d.recipe.schema import CompileTable, MemoryTable, MeshTable, ParallelTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.verify.proof import verify_layout
from tests.long import some_of
from tools.prove.paths import MOE_RECIPE
from tools.prove.paths import RECIPE as RECIPE_PATH

CPU = torch.device("cpu")
RECIPE = str(RECIPE_PATH)
SHAPE = ModelShape(dim=16, n_layers=12, n_heads=4, n_kv_heads=2, ffn=24, vocab=32, rope_theta=100.0)
MOE_SHAPE = MoeShape(
    dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn=24, vocab=32, rope_theta=100.0, experts=4
)


def compile_strictly(backend: str, cache: str, graphs: int = 2) -> None:
    """Make a break of a graph an error, and more graphs of a method as well.

    A rank needs two of each: one trains, one validates.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.compile = partial(torch.compile, backend=backend, fullgraph=True)
    torch._dynamo.config.recompile_limit = graphs
    # No pool of processes, each of which would import torch again.
    torch._inductor.config.compile_threads = 1
    # No test program that tries the vector instructions of this processor.
    torch._inductor.config.cpp.vec_isa_ok = True


@some_of(
    3,
    ("layout", "graphs"),
    [
        (
            "mesh.tp=2 memory.activation_checkpoint=full parallel.sequence_parallel=false "
            "data.packing=documents",
            2,
        ),
        ("mesh.cp=2 mesh.tp=2 memory.activation_checkpoint=selective model.n_kv_heads=1", 2),
        (
            "mesh.pp=2 mesh.dp_shard=2 parallel.schedule=Interleaved1F1B precision.compute=float32",
            2,
        ),
        ("mesh.tp=2 model.n_layers=4 memory.activation_checkpoint=every 2 blocks", 2),
        (
            "mesh.tp=2 memory.activation_checkpoint=selective model.qkv_bias=true "
            "precision.compute=bfloat16 precision.matmul=float8",
            2,
        ),
        # Two graphs for each of three kinds of blocks.
        ("mesh.cp=2 model.n_layers=8 model.window=20 model.full_every=2 model.nope_every=4", 6),
        # And for each of two.
        (
            "model.architecture=deepseek model.preset=debug-deepseek model.n_kv_heads=8 mesh.cp=2 "
            "parallel.cp_method=allgather data.packing=documents",
            4,
        ),
        (
            "model.architecture=gemma3 model.preset=debug-gemma3 mesh.cp=2 "
            "parallel.cp_method=ulysses model.tied=true",
            4,
        ),
    ],
)
def test_compiled_layout_is_exact(
    pool: Pool, references: Path, tmp_path: Path, layout: str, graphs: int
) -> None:
    verdict = verify_layout(
        pool,
        references,
        RECIPE,
        ["compile.enabled=true", *split_overrides(layout)],
        dtype="float64",
        steps=2,
        fault=partial(compile_strictly, "aot_eager", str(tmp_path), graphs),
    )
    assert verdict.passed, verdict


@some_of(
    2,
    ("layout", "graphs"),
    [
        ("mesh.ep=2 mesh.dp_shard=2 memory.activation_checkpoint=full", 2),
        # A dense block is first, before the routers' values are shared, and again later.
        ("mesh.dp_shard=2 model.moe_every=2", 3),
        (
            "mesh.ep=2 mesh.cp=2 model.router=sigmoid model.router_bias=true model.shared_ffn=48 "
            "data.micro_batch=1",
            2,
        ),
        ("mesh.tp=2 mesh.ep=1 data.packing=documents precision.compute=bfloat16", 2),
    ],
)
def test_a_layout_that_is_compiled_around_experts_is_exact(
    pool: Pool, references: Path, tmp_path: Path, layout: str, graphs: int
) -> None:
    verdict = verify_layout(
        pool,
        references,
        str(MOE_RECIPE),
        ["compile.enabled=true", *split_overrides(layout)],
        dtype="float64",
        steps=2,
        fault=partial(compile_strictly, "aot_eager", str(tmp_path), graphs),
    )
    assert verdict.passed, verdict


@pytest.fixture
def _compiler() -> None:
    try:
        compile.check_toolchain(CPU)
    except DeviceError as error:
        pytest.skip(error.lines[0])


@pytest.mark.usefixtures("_compiler")
def test_inductor_code_is_exact(pool: Pool, references: Path, tmp_path: Path) -> None:
    verdict = verify_layout(
        pool,
        references,
        RECIPE,
        ["compile.enabled=true", "memory.cpu_offload=true"],
        dtype="float32",
        steps=2,
        fault=partial(compile_strictly, "inductor", str(tmp_path)),
    )
    assert verdict.passed, verdict
    assert verdict.max_grad_rel_err is not None
    assert verdict.max_grad_rel_err > 0.0


def count_graphs(checkpointing: Any, tensor_parallel: int) -> list[int]:
    """Count the graphs of twelve blocks and of the loss, so far, after each of four phases.

    The phases are two steps, a validation, three steps and a validation.
    """
    torch.compile = partial(torch.compile, backend="aot_eager", fullgraph=True)
    with pool_world() as device:
        stages = compose(
            Llama(SHAPE),
            sharding_plan(SHAPE),
            Mesh.build(MeshTable(dp_shard=1, tp=tensor_parallel), device),
            parallel=ParallelTable(),
            memory=MemoryTable(activation_checkpoint=checkpointing),
            compiling=CompileTable(enabled=True),
            step=StepShape(micro_batch=1, micro_batches=2, seq_len=16),
            seed=0,
        )
        tokens, labels = torch.randint(32, (2, 16)), torch.randint(32, (2, 16))
        positions = torch.arange(16).repeat(2, 1)
        graphs = []
        for steps in (2, 3):
            for _ in range(steps):
                stages.forward_backward(tokens, labels, positions, torch.tensor(32.0))
            graphs.append(counters["stats"]["unique_graphs"])
            stages.evaluate(tokens, labels, positions)
            graphs.append(counters["stats"]["unique_graphs"])
        return graphs


@pytest.mark.parametrize(
    ("checkpointing", "tensor_parallel", "graphs"),
    # The loss has as many graphs as a block, unless tp cuts the vocabulary.
    [("none", 1, [2, 4, 4, 4]), ("full", 2, [1, 2, 2, 2])],
)
def test_blocks_share_a_graph(
    pool: Pool, checkpointing: str, tensor_parallel: int, graphs: list[int]
) -> None:
    arguments = {"checkpointing": checkpointing, "tensor_parallel": tensor_parallel}
    found = pool.run(count_graphs, arguments, world_size=tensor_parallel)
    assert found == [graphs] * tensor_parallel


class _WholeBlock(DecoderBlock):
    """A block that would be one graph, experts included."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = moe_of(MOE_SHAPE)


def test_a_block_that_is_not_split_around_its_experts_is_refused() -> None:
    model = MoeLlama(MOE_SHAPE)
    plan = moe_plan(MOE_SHAPE)
    tables = CompileTable(enabled=True), MemoryTable(), ParallelTable()
    compile.check(model, plan, *tables)
    model.blocks["1"] = _WholeBlock()
    words = r"makes graphs of forward of blocks\.1, .*name the methods before and after"
    with pytest.raises(PlanError, match=words):
        compile.check(model, plan, *tables)
    model.blocks["1"].compiled = ("before_experts", "after")
    with pytest.raises(PlanError, match=r"makes graphs of before_experts, after of blocks\.1"):
        compile.check(model, plan, *tables)


def hide_compiler() -> None:
    os.environ["CXX"] = "no-such-compiler"


def test_a_missing_compiler_is_reported_before_training(pool: Pool, references: Path) -> None:
    sets = ["compile.enabled=true", "data.global_batch=2"]
    verdict = verify_layout(
        pool, references, RECIPE, sets, dtype="float64", steps=1, fault=hide_compiler
    )
    assert verdict.refused
    assert verdict.error == (
        "compile.enabled = true needs a C++ compiler on a CPU, and there is no 'no-such-compiler' "
        "on this machine; install one, name another in the environment variable CXX, or use "
        "compile.enabled = false"
    )


def test_a_cache_on_a_noexec_mount_is_reported_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount is real, in a namespace of mounts that only the child process has."""
    (tmp_path / "mount").mkdir()
    mount = f'mount -t tmpfs -o noexec none {tmp_path}/mount || exit 77; exec "$@"'
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    child = subprocess.run(
        [
            *("unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", sys.executable),
            *("-m", "composer3d", "train", "debug-1-single", "--set", "compile.enabled=true"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "mount" / "deeper")},
        cwd=tmp_path,
    )
    if child.returncode == 77 or "unshare failed" in child.stderr:
        pytest.skip("this process may not mount anything")
    assert child.returncode == 2
    assert child.stderr.splitlines()[-1].endswith(
        f"compile.enabled = true puts machine code into {tmp_path}/mount/deeper, and its mount has "
        "the option noexec, so that the code cannot be loaded; name a folder on another mount in "
        "the environment variable TORCHINDUCTOR_CACHE_DIR, or use compile.enabled = false"
    )


def test_a_missing_triton_is_reported_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "find_spec", lambda name: None)
    with pytest.raises(
        DeviceError, match="needs Triton on a GPU, and this Python has none; install it, or use"
    ):
        compile.check_toolchain(torch.device("cuda"))
