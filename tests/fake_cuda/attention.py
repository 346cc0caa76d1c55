"""Two blocks of a model on a GPU in name, with attention over a part of a sequence."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.dryrun.memory import MemoryLedger
from composer3d.dryrun.stage import QUESTIONS
from composer3d.models.contract import SequenceInfo
from composer3d.models.llama.model import Block
from composer3d.models.llama.rope import rope_of
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel.context.api import Method, make_attend
from composer3d.runtime.torch_private import fake_world
from tools.fake_cuda import device
from tools.fake_cuda.counts import Copy, Watcher

SEQ_LEN = 8192


class Case(NamedTuple):
    """What attention does.

    Attributes:
        cp: ranks that hold a sequence.
        rank: the one to look at.
        method: as in ``ring_attention``.
        documents: in each row; 0: there is nothing to separate.
        window: in tokens; 0: none.
        rows: samples in a micro-batch.
    """

    cp: int = 1
    rank: int = 0
    method: Method = "ring"
    documents: int = 0
    window: int = 0
    rows: int = 1


class Layer(NamedTuple):
    """What a block does.

    Attributes:
        forward, backward: operators that a GPU or the host runs, by name, without views.
        copies: between host and device, in forward and backward of two blocks and two
            micro-batches with different documents.
    """

    forward: Counter[str]
    backward: Counter[str]
    copies: Counter[Copy]


def count_layers(cases: list[Case], library: Path) -> list[Layer]:
    """Run each case on tensors without data."""
    device.install(library)
    return [_count(case) for case in cases]


def documents_of(case: Case, seed: int) -> Tensor | None:
    """Documents of random lengths, as many in each row as the case says."""
    if case.documents == 0:
        return None
    generator = torch.Generator().manual_seed(seed)
    starts = torch.zeros(case.rows, SEQ_LEN, dtype=torch.int64)
    for row in starts:
        row[1 + torch.randperm(SEQ_LEN - 1, generator=generator)[: case.documents - 1]] = 1
    return starts.cumsum(1)


def _count(case: Case) -> Layer:
    shape = ModelShape(
        dim=256, n_layers=2, n_heads=4, n_kv_heads=2, ffn=64, vocab=32, window=case.window
    )
    watcher = Watcher(MemoryLedger(offload=False))
    rope = rope_of(shape)
    on, tokens = torch.device("cuda", 0), SEQ_LEN // case.cp
    with torch.device("meta"):
        blocks = nn.ModuleList(Block(shape, rope, layer) for layer in range(2)).to(torch.bfloat16)
    micro_batches = [documents_of(case, seed) for seed in range(2)]
    copies: Counter[Copy] = Counter()
    with fake_world(case.rank, case.cp), watcher.without_data:
        blocks.to_empty(device=on)
        group = dist.group.WORLD if case.cp > 1 else None
        for block in blocks:
            block.attn.attend = make_attend(group, case.method)  # type: ignore[union-attr]
        for documents in micro_batches:
            h = torch.empty(case.rows, tokens, shape.dim, dtype=torch.bfloat16, device=on)
            positions = torch.zeros(case.rows, tokens, dtype=torch.int64, device=on)
            seq = SequenceInfo(positions, documents)
            with watcher:
                watcher.begin()
                h = blocks[0](h.requires_grad_(), seq)
                first = watcher.begin()
                h = blocks[1](h, seq)
                forward = watcher.begin()
                h.backward(torch.empty_like(h))
                backward = watcher.begin()
            for counts in (first, forward, backward):
                copies += counts.copies
    return Layer(_run(forward.operators), _run(backward.operators, blocks=2), copies)


def _run(operators: Counter[str], blocks: int = 1) -> Counter[str]:
    """Operators of one block, without questions about tensors, such as on which device they are."""
    return Counter(
        {name: count // blocks for name, count in operators.items() if name not in QUESTIONS}
    )
