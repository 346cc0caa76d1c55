"""Compare the planner's memory with what dry runs count, for small recipes of many layouts.

python tools/memory_agreement.py                       all recipes
python tools/memory_agreement.py zero3 ring            some of them
python tools/memory_agreement.py --limit 0.01          the largest error that is allowed

The planner's bytes are those of ``RankMemory.allocated_bytes``: without the allocator's slack, and
without CUDA's context and NCCL's buffers, which a dry run cannot see. The dry run's are the peak.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from composer3d.dryrun.report import StageReport
from composer3d.dryrun.run import run_ranks
from composer3d.facts import hardware
from composer3d.planner.memory import GIB, predict_memory
from composer3d.planner.predict import of_recipe
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
BASE = RECIPES / "debug-1-single.toml"

# A model that is wide enough for its vectors and counters not to matter, with few layers.
DENSE = (
    "run.device=cuda",
    "model.preset=llama3-8b",
    "model.dim=2048",
    "model.n_heads=16",
    "model.n_kv_heads=4",
    "model.ffn=7168",
    "model.vocab=32000",
    "model.n_layers=4",
    "data.seq_len=2048",
)
EXPERTS = (
    "run.device=cuda",
    "model.architecture=moe",
    "model.preset=mixtral-8x7b",
    "model.dim=1024",
    "model.n_heads=16",
    "model.n_kv_heads=4",
    "model.head_dim=64",
    "model.expert_ffn=3584",
    "model.vocab=4096",
    "model.n_layers=4",
    "data.seq_len=2048",
)
OLMO_2 = (
    "run.device=cuda",
    "model.architecture=olmo2",
    "model.preset=olmo2-1b",
    "model.vocab=4096",
    "model.n_layers=4",
    "data.seq_len=2048",
)
GPT_OSS = (
    "model.architecture=gpt_oss",
    "model.preset=gpt-oss-20b",
    "model.vocab=4096",
    "model.n_layers=4",
    "model.dim=1024",
    "model.ffn=1024",
    "data.seq_len=2048",
)
GEMMA_3 = (
    "run.device=cuda",
    "model.architecture=gemma3",
    "model.preset=gemma3-1b",
    "model.vocab=4096",
    "model.n_layers=6",
    "data.seq_len=2048",
)
DEEPSEEK = (
    "run.device=cuda",
    "model.architecture=deepseek",
    "model.preset=deepseek-v2-lite",
    "model.experts=16",
    "model.vocab=4096",
    "model.n_layers=4",
    "data.seq_len=2048",
)
GLM = (
    "run.device=cuda",
    "model.architecture=glm",
    "model.preset=glm-4.5-air",
    "model.dim=1024",
    "model.n_heads=24",
    "model.ffn=2736",
    "model.expert_ffn=704",
    "model.shared_ffn=704",
    "model.experts=16",
    "model.experts_per_token=4",
    "model.vocab=4096",
    "model.n_layers=4",
    "data.seq_len=2048",
)
BF16 = "precision.compute=bfloat16"
NARROW = "precision.reduce=bfloat16"
SELECTIVE = "memory.activation_checkpoint=selective"
FULL = "memory.activation_checkpoint=full"
EVERY_2 = "memory.activation_checkpoint=every 2 blocks"
IN_FIRST = "memory.activation_checkpoint=full in the first {} stages"
EVERY_3 = "memory.activation_checkpoint=every 3 blocks"
BY_2, BY_4 = "parallel.fsdp_blocks=2", "parallel.fsdp_blocks=4"
# With a small vocabulary, the peak is in the blocks and not in the loss.
BLOCKS = "model.vocab=4096"
LARGE_HEAD = "model.vocab=128256"


def batch(samples: int) -> str:
    return f"data.global_batch={samples}"


def _dense(*sets: str) -> tuple[str, ...]:
    return (*DENSE, *sets)


def _experts(*sets: str) -> tuple[str, ...]:
    return (*EXPERTS, *sets)


FSDP, TP4 = "mesh.dp_shard=8", ("mesh.tp=4", "mesh.dp_shard=2")
CP4 = ("mesh.cp=4", "mesh.dp_shard=2", "data.seq_len=16384", batch(4))
PP2, PP2_TP2 = (
    ("mesh.pp=2", "mesh.dp_shard=4"),
    ("mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2", batch(8)),
)

# Overrides of ``BASE``, by name.
CASES: dict[str, tuple[str, ...]] = {
    "zero0": _dense("mesh.dp_replicate=8", "mesh.dp_shard=1", "parallel.zero=0", batch(16)),
    "zero1": _dense(FSDP, "parallel.zero=1", BF16, batch(16)),
    "zero1-blocks": _dense(FSDP, "parallel.zero=1", BF16, BLOCKS, batch(16)),
    "zero2-full": _dense(FSDP, "parallel.zero=2", BF16, FULL, BLOCKS, batch(16)),
    "zero2-narrow": _dense(FSDP, "parallel.zero=2", BF16, FULL, NARROW, batch(16)),
    "zero3": _dense(FSDP, "parallel.zero=3", batch(16)),
    "zero3-narrow": _dense(
        FSDP, "parallel.zero=3", BF16, FULL, NARROW, LARGE_HEAD, "data.seq_len=512", batch(16)
    ),
    "zero3-one-micro-batch": _dense(FSDP, "parallel.zero=3", BLOCKS, batch(8)),
    "zero3-selective": _dense(FSDP, "parallel.zero=3", BF16, SELECTIVE, BLOCKS, batch(16)),
    "zero3-every-2-blocks": _dense(FSDP, "parallel.zero=3", BF16, EVERY_2, BLOCKS, batch(16)),
    "every-3-blocks": _dense(FSDP, BF16, EVERY_3, BLOCKS, "model.n_layers=7", batch(16)),
    "zero3-2-blocks-a-unit": _dense(FSDP, BF16, BY_2, FULL, BLOCKS, "model.n_layers=7", batch(16)),
    "zero3-4-blocks-a-unit": _dense(FSDP, BF16, BY_4, BLOCKS, "model.n_layers=9", batch(16)),
    "zero3-one-unit": _dense(FSDP, BF16, BY_4, FULL, BLOCKS, "data.seq_len=512", batch(16)),
    "zero3-2-blocks-a-unit-narrow": _dense(
        FSDP, BF16, BY_2, FULL, NARROW, BLOCKS, "data.seq_len=512", batch(16)
    ),
    "zero1-2-blocks-a-unit": _dense(FSDP, "parallel.zero=1", BF16, BY_2, BLOCKS, batch(16)),
    "zero2-2-blocks-a-unit": _dense(
        FSDP, "parallel.zero=2", BF16, BY_2, FULL, BLOCKS, "model.n_layers=7", batch(16)
    ),
    "micro-batch-of-4": _dense(FSDP, "data.micro_batch=4", BF16, FULL, batch(64)),
    "hsdp": _dense(
        "mesh.dp_replicate=2", "mesh.dp_shard=4", "parallel.zero=3", BF16, SELECTIVE, batch(16)
    ),
    "tp8": _dense("mesh.tp=8", "mesh.dp_shard=1", "model.n_kv_heads=8", batch(2)),
    "olmo2": (*OLMO_2, FSDP, BF16, batch(8)),
    "short": _dense("mesh.dp_shard=2", BF16, "data.seq_len=128", batch(4)),
    "qk-norms": _dense(FSDP, BF16, "model.qk_norm=true", BLOCKS, batch(16)),
    "qk-norms-tp-selective": _dense(*TP4, "model.qk_norm=true", BF16, SELECTIVE, BLOCKS, batch(4)),
    "pattern-selective": _dense(
        *(FSDP, BF16, SELECTIVE, BLOCKS, "model.n_layers=5", batch(16)),
        *("model.window=512", "model.full_every=2", "model.nope_every=2"),
    ),
    "pattern": _dense(
        *(FSDP, BF16, BLOCKS, "model.n_layers=5", batch(16)),
        *("model.window=512", "model.full_every=2", "model.nope_every=2"),
    ),
    "olmo3-tp-full": (
        *OLMO_2,
        "model.window=512",
        "model.full_every=4",
        "mesh.tp=2",
        "mesh.dp_shard=4",
        BF16,
        FULL,
        batch(8),
    ),
    "olmo2-tp": (*OLMO_2, "mesh.tp=2", "mesh.dp_shard=4", BF16, batch(8)),
    "olmo2-tp-full": (*OLMO_2, "mesh.tp=2", "mesh.dp_shard=4", BF16, FULL, batch(8)),
    "gemma3": (*GEMMA_3, FSDP, BF16, batch(8)),
    "gemma3-tp-selective": (*GEMMA_3, *TP4, BF16, SELECTIVE, batch(2)),
    "gemma3-full": (*GEMMA_3, FSDP, BF16, FULL, "data.micro_batch=4", batch(32)),
    "gemma3-large-head": (*GEMMA_3, FSDP, BF16, FULL, "model.vocab=262144", batch(8)),
    "olmo2-selective": (*OLMO_2, *TP4, BF16, SELECTIVE, batch(2)),
    "gpt-oss": (*GPT_OSS, FSDP, "mesh.ep=4", BF16, batch(8)),
    "gpt-oss-selective": (*GPT_OSS, FSDP, "mesh.ep=8", BF16, SELECTIVE, batch(8)),
    "glm": (*GLM, "model.qk_norm=true", "model.mtp_layers=1", FSDP, "mesh.ep=8", BF16, batch(8)),
    "glm-tp-pp": (*GLM, *PP2_TP2, "mesh.ep=4", BF16),
    "prediction": (*DEEPSEEK, "model.mtp_layers=1", FSDP, BF16, batch(16)),
    "prediction-pp": (*DEEPSEEK, "model.mtp_layers=1", *PP2, BF16, batch(8)),
    "prediction-tp-pp": (
        *DEEPSEEK,
        "model.mtp_layers=2",
        "model.tied=true",
        *PP2_TP2,
        "mesh.ep=4",
        *(BF16, FULL),
    ),
    "prediction-loss-in-parts": (
        *DEEPSEEK,
        "model.mtp_layers=2",
        "model.vocab=32000",
        *(FSDP, BF16, FULL, "memory.loss_chunks=4", batch(8)),
    ),
    "latents": (*DEEPSEEK, FSDP, BF16, batch(8)),
    "latents-tp": (*DEEPSEEK, "mesh.tp=4", "mesh.dp_shard=2", "mesh.ep=8", BF16, batch(2)),
    "latents-tp-full": (
        *DEEPSEEK,
        *("mesh.tp=4", "mesh.dp_shard=2", "mesh.ep=4", "model.query_rank=1536", BF16, FULL),
        batch(4),
    ),
    "latents-selective": (
        *DEEPSEEK,
        *("mesh.tp=2", "mesh.dp_shard=4", "model.query_rank=1536", BF16, SELECTIVE),
        batch(4),
    ),
    "latents-ring": (
        *DEEPSEEK,
        *("mesh.cp=4", "mesh.dp_shard=2", "model.query_rank=1536", BF16, "data.seq_len=8192"),
        batch(2),
    ),
    "latents-allgather": (
        *DEEPSEEK,
        *("mesh.cp=4", "mesh.dp_shard=2", "parallel.cp_method=allgather", BF16),
        *("data.seq_len=8192", batch(2)),
    ),
    "latents-ring-selective": (
        *DEEPSEEK,
        *("mesh.cp=2", "mesh.tp=2", "mesh.ep=2", "mesh.dp_shard=2", BF16, SELECTIVE),
        batch(2),
    ),
    "latents-ring-of-keys": (
        *DEEPSEEK,
        *("mesh.cp=4", "mesh.dp_shard=2", "model.kv_rank=8192", BF16, "data.seq_len=8192"),
        batch(2),
    ),
    "latents-ulysses": (
        *DEEPSEEK,
        *("mesh.cp=2", "mesh.dp_shard=4", "parallel.cp_method=ulysses", BF16),
        batch(4),
    ),
    "latents-zero-bubble": (
        *DEEPSEEK,
        *("mesh.pp=2", "mesh.dp_shard=4", "parallel.schedule=ZBVZeroBubble", BF16),
        batch(32),
    ),
    "muon-replicas": _dense(
        "optim.name=muon",
        *("mesh.dp_replicate=8", "parallel.zero=0", BF16, FULL, BLOCKS, "data.seq_len=64"),
        batch(8),
    ),
    "muon": _dense(
        *("optim.name=muon", "mesh.dp_shard=2", BF16, FULL, BLOCKS, "data.seq_len=64", batch(2))
    ),
    "muon-pp": _dense("optim.name=muon", *PP2, BF16, FULL, "data.seq_len=64", batch(16)),
    "tp-selective": _dense(*TP4, "parallel.zero=3", BF16, SELECTIVE, BLOCKS, batch(4)),
    "tp-zero1": _dense(*TP4, "parallel.zero=1", BF16, BLOCKS, batch(4)),
    "tp-without-sequence": _dense(
        *TP4, BF16, "parallel.sequence_parallel=false", "parallel.loss_parallel=false", batch(4)
    ),
    "ring": _dense(*CP4, BF16, BLOCKS),
    "ring-full": _dense(*CP4, BF16, FULL, BLOCKS),
    "allgather": _dense(
        "mesh.cp=8",
        "mesh.dp_shard=1",
        "data.seq_len=65536",
        "parallel.cp_method=allgather",
        *(BF16, SELECTIVE, BLOCKS, batch(1)),
    ),
    "allgather-contiguous": _dense(
        *("mesh.cp=8", "mesh.dp_shard=1", "data.seq_len=16384", "parallel.cp_method=allgather"),
        *("parallel.cp_balance=contiguous", BF16, "model.vocab=1024", "model.ffn=512"),
        *("model.n_layers=1", batch(1)),
    ),
    "ulysses": _dense(*CP4, BF16, "parallel.cp_method=ulysses", BLOCKS),
    "ulysses-selective": _dense(*CP4, BF16, "parallel.cp_method=ulysses", SELECTIVE),
    "1f1b": _dense("mesh.pp=4", "mesh.dp_shard=2", "model.n_layers=8", batch(12)),
    "1f1b-zero3": _dense(*PP2, "parallel.zero=3", BF16, batch(16)),
    "1f1b-narrow": _dense(*PP2, BF16, FULL, NARROW, LARGE_HEAD, batch(16)),
    "1f1b-zero1-full": _dense(*PP2_TP2, "parallel.zero=1", BF16, FULL, BLOCKS),
    "1f1b-2-blocks-a-unit": _dense(
        *PP2, "model.n_layers=8", BF16, BY_2, FULL, BLOCKS, "data.seq_len=512", batch(16)
    ),
    "1f1b-first-stage": _dense(*PP2, BF16, IN_FIRST.format(1), BLOCKS, batch(16)),
    "interleaved-first-stages": _dense(
        *(*PP2, "parallel.schedule=Interleaved1F1B", BF16, IN_FIRST.format(2), BLOCKS),
        *("model.n_layers=8", batch(16)),
    ),
    "zbv-first-stage": _dense(
        *(*PP2, "parallel.schedule=ZBVZeroBubble", BF16, IN_FIRST.format(1), BLOCKS, batch(16))
    ),
    "1f1b-one-unit": _dense(*PP2, BF16, BY_4, FULL, BLOCKS, batch(16)),
    "interleaved": _dense(
        *PP2_TP2, "parallel.schedule=Interleaved1F1B", "parallel.zero=1", BF16, SELECTIVE
    ),
    "interleaved-every-2-blocks": _dense(
        *PP2_TP2, "parallel.schedule=Interleaved1F1B", BF16, EVERY_2, BLOCKS, "model.n_layers=8"
    ),
    "zbv-every-2-blocks": _dense(
        *(*PP2, "parallel.schedule=ZBVZeroBubble", BF16, EVERY_2, BLOCKS, "model.n_layers=10"),
        batch(16),
    ),
    "gpipe": _dense(*PP2_TP2, "parallel.schedule=GPipe", BF16, FULL),
    "breadth-first": _dense(*PP2, "parallel.schedule=LoopedBFS", BF16, FULL, batch(16)),
    "zbv": _dense(*PP2, "parallel.schedule=ZBVZeroBubble", BF16, batch(16)),
    "zbv-blocks": _dense(*PP2, "parallel.schedule=ZBVZeroBubble", BF16, BLOCKS, batch(16)),
    "zbv-2-blocks-a-unit": _dense(
        *(*PP2, "parallel.schedule=ZBVZeroBubble", BF16, BY_2, BLOCKS, "model.n_layers=12"),
        batch(16),
    ),
    "zbv-one-unit": _dense(
        *(*PP2, "parallel.schedule=ZBVZeroBubble", BF16, BY_4, BLOCKS, "model.n_layers=12"),
        *("data.seq_len=512", batch(16)),
    ),
    "zero-bubble": _dense(*PP2_TP2, "parallel.schedule=InterleavedZeroBubble", BF16, SELECTIVE),
    "dualpipev": _dense(*PP2, "parallel.schedule=DualPipeV", BF16, FULL, batch(16)),
    "dualpipev-selective": _dense(
        *PP2, "parallel.schedule=DualPipeV", BF16, SELECTIVE, BLOCKS, batch(16)
    ),
    "csv": _dense(
        *PP2,
        "parallel.schedule=csv",
        f"parallel.schedule_csv={RECIPES / 'zb-h1-2x4.csv'}",
        *(BF16, batch(16)),
    ),
    "ep": _experts(FSDP, "mesh.ep=8", BF16, batch(16)),
    "ep-full": _experts(FSDP, "mesh.ep=4", BF16, FULL, batch(16)),
    "ep-every-2-blocks": _experts(FSDP, "mesh.ep=4", BF16, EVERY_2, batch(16)),
    "ep-2-blocks-a-unit": _experts(FSDP, "mesh.ep=4", BF16, BY_2, FULL, batch(16)),
    "experts-selective": _experts(
        *(FSDP, BF16, SELECTIVE, "model.experts_per_token=8", "model.expert_ffn=512"),
        *("model.vocab=1024", "model.n_layers=2", batch(8)),
    ),
    "ep-pp": _experts(*PP2, "mesh.ep=4", BF16, FULL, "model.vocab=32000", batch(8)),
    "ep-tp-selective": _experts(
        "mesh.dp_shard=4", "mesh.tp=2", "mesh.ep=8", BF16, SELECTIVE, batch(8)
    ),
    "experts-without-ep": _experts(FSDP, "mesh.ep=1", BF16, batch(16)),
    "ep-tp-pp": _experts(*PP2_TP2, "mesh.ep=4", BF16, SELECTIVE, batch(4)),
    "loss-in-parts": _dense(FSDP, "memory.loss_chunks=8", LARGE_HEAD, BF16, FULL, batch(16)),
    "cpu-offload": _dense(FSDP, "memory.cpu_offload=true", BF16, SELECTIVE, batch(16)),
    "documents": _dense(FSDP, "data.packing=documents", BF16, batch(16)),
    "documents-ring": _dense(*CP4, "data.packing=documents", BF16, SELECTIVE),
    "tied": _dense(FSDP, "model.tied=true", LARGE_HEAD, BF16, batch(16)),
    "tied-pp": _dense(*PP2, "model.tied=true", LARGE_HEAD, BF16, batch(8)),
    "cpu": _dense("run.device=cpu", FSDP, "parallel.zero=1", BF16, batch(16)),
    "cpu-tp-pp": _dense("run.device=cpu", *PP2_TP2),
}

# What the tests run: for each part of the model, a case that it decides. None of them is slow.
SLICE = (
    "zero1-blocks",
    "1f1b-first-stage",
    "zero3-narrow",
    "loss-in-parts",
    "every-3-blocks",
    "zero3-2-blocks-a-unit",
    "short",
    "olmo2-selective",
    "gemma3-tp-selective",
    "gpt-oss",
    "allgather",
    "allgather-contiguous",
    "muon",
    "muon-replicas",
    "1f1b-zero1-full",
    "interleaved-every-2-blocks",
    "zbv-blocks",
    "dualpipev",
    "ep",
    "experts-selective",
    "ep-pp",
    "ep-tp-pp",
    "prediction-tp-pp",
)


class Agreement(NamedTuple):
    """The bytes of one pipeline rank.

    Attributes:
        name: of the case.
        pp_rank: the pipeline rank.
        planned: what the planner predicts.
        counted: the peak of the dry run.
    """

    name: str
    pp_rank: int
    planned: float
    counted: float

    @property
    def error(self) -> float:
        return self.planned / self.counted - 1


class _Item(NamedTuple):
    name: str
    recipe: Recipe
    pp_rank: int


def compare(pool: Pool, names: Sequence[str], at_once: int) -> list[Agreement]:
    """Compare all pipeline ranks of some cases. ``at_once`` dry runs share the machine."""
    items = []
    for name in names:
        recipe = load(BASE, list(CASES[name]), check_files=False).recipe
        items += [_Item(name, recipe, pp_rank) for pp_rank in range(recipe.mesh.pp)]
    found = []
    for first in range(0, len(items), at_once):
        group = items[first : first + at_once]
        reports = run_ranks(pool, [(item.recipe, item.pp_rank) for item in group])
        found += [_agreement(item, report) for item, report in zip(group, reports, strict=True)]
    return found


def _agreement(item: _Item, report: StageReport) -> Agreement:
    device = hardware.by_name("cpu" if item.recipe.run.device == "cpu" else "H100")
    assert device is not None
    planned = predict_memory(of_recipe(item.recipe, device))[item.pp_rank].allocated_bytes
    return Agreement(item.name, item.pp_rank, planned, report.memory.peak)


def main() -> int:
    """Print a line for each pipeline rank. Return 1 if one is beyond the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", metavar="CASE", nargs="*", help="default: all")
    parser.add_argument("--limit", type=float, default=0.02, help="default: %(default)g")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(CASES)}")

    print(f"{'recipe':<24}{'pp rank':>8}{'planned GiB':>13}{'dry run GiB':>13}{'error':>8}")
    over = 0
    with Pool() as pool:
        for name in arguments.cases or CASES:
            for row in compare(pool, [name], at_once=2):
                is_over = abs(row.error) > arguments.limit
                over += is_over
                print(
                    f"{row.name:<24}{row.pp_rank:>8}{row.planned / GIB:>13.3f}"
                    f"{row.counted / GIB:>13.3f}{row.error:>+8.1%}{'  OVER' if is_over else ''}",
                    flush=True,
                )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
