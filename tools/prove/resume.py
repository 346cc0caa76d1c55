"""Resumes what each of 13 layouts has saved on each of them, and holds it exact.

Each trains 3 steps, saves, and trains 5 more. Then each loads what each has saved: its parts of all parameters and
moments must be bitwise those of the one that saved, its next 5 losses those that the other went on to (within 1e-5,
which is what the table shows), and it must take the same samples: in all, each sample of the data exactly once.
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer3d.runtime.launch import Pool, WorkerError

SAVED, MORE = 3, 5  # steps before and after the checkpoint
BATCH, SEQ_LEN = 12, 48
SAMPLES = (SAVED + MORE) * BATCH  # as many as the data has
BOUND = 1e-5  # between two losses in float32
LIMIT_S = 900.0

# A vocabulary that tp does not divide, tied over the stages, with fewer key-value heads than ranks of tp.
RECIPE = """\
[run]
steps = 3
device = "cpu"
[model]
preset = "debug-tiny"
dim = 96
n_layers = 5
n_heads = 8
n_kv_heads = 2
ffn = 96
vocab = 257
tied = true
[data]
source = "text"
path = "{corpus}"
seq_len = 48
global_batch = 12
[optim]
lr = 1e-3
warmup = 2
decay = 8
[metrics]
tensorboard = false
"""
ASYNC = "checkpoint.async_save=true"
# Processes and overrides. Micro-batches are as large as the schedule lets them be: it is faster.
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ("data.micro_batch=3", ASYNC)),
    "zero 3 x 2": (2, ("mesh.dp_shard=2", "data.micro_batch=3")),
    "zero 2 x 3": (3, ("mesh.dp_shard=3", "parallel.zero=2", "data.micro_batch=2", ASYNC)),
    "zero 0 x 2": (2, ("mesh.dp_replicate=2", "parallel.zero=0", "data.micro_batch=2")),
    "tp 4": (4, ("mesh.tp=4", "data.micro_batch=4", ASYNC)),
    "zero 1 x 2, tp 2": (
        4,
        ("mesh.dp_shard=2", "mesh.tp=2", "parallel.zero=1", "data.micro_batch=3"),
    ),
    "cp 3, tp 2": (6, ("mesh.cp=3", "mesh.tp=2", "data.micro_batch=4")),
    "HSDP 2 x 2, tp 2": (
        8,
        ("mesh.dp_replicate=2", "mesh.dp_shard=2", "mesh.tp=2", "data.micro_batch=3", ASYNC),
    ),
    "pp 2 1F1B, tp 2": (4, ("mesh.pp=2", "mesh.tp=2", "data.micro_batch=3", ASYNC)),
    "pp 2 Interleaved, zero 3 x 2, cp 2": (
        8,
        (
            "mesh.pp=2",
            "parallel.schedule=Interleaved1F1B",
            "mesh.dp_shard=2",
            "mesh.cp=2",
            "data.micro_batch=3",
        ),
    ),
    "pp 2 ZBV, zero 3 x 3": (
        6,
        ("mesh.pp=2", "parallel.schedule=ZBVZeroBubble", "mesh.dp_shard=3", "data.micro_batch=2"),
    ),
    "pp 4 1F1B, zero 0 x 2": (8, ("mesh.pp=4", "mesh.dp_replicate=2", "parallel.zero=0", ASYNC)),
    "pp 2 DualPipeV, zero 1, cp 2, tp 2": (
        8,
        (
            "mesh.pp=2",
            "parallel.schedule=DualPipeV",
            "mesh.cp=2",
            "mesh.tp=2",
            "parallel.zero=1",
            "data.micro_batch=3",
        ),
    ),
}


@dataclass(frozen=True)
class Steps:
    """What the steps after the checkpoint were: their losses, and the samples of each (of all steps, for a source)."""

    losses: list[float]
    samples: list[list[int]]


@dataclass(frozen=True)
class Cell:
    """A source resumed on a target. ``wrong``: tensors that are not bitwise the source's, or how it failed."""

    source: str
    target: str
    deviation: float
    wrong: tuple[str, ...]
    same_samples: bool

    @property
    def good(self) -> bool:
        return self.deviation <= BOUND and not self.wrong and self.same_samples


class Ledger:
    """A loader that notes which samples it hands out: they are known by the rank's part of their tokens."""

    def __init__(self, loader: Any, numbers: Mapping[bytes, int]) -> None:
        self._loader, self._numbers = loader, numbers
        self.steps: list[list[int]] = []

    def __next__(self) -> Any:
        batch = next(self._loader)
        rows = (tokens.numpy().tobytes() for tokens in batch.tokens_BT)
        self.steps.append([self._numbers.get(row, -1) for row in rows])
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def start(recipe: str, sets: Sequence[str], device: Any) -> Any:
    """Build a run whose loader is a ``Ledger``."""
    import numpy as np
    import torch

    from composer3d.recipe.resolve import load
    from composer3d.training import batches
    from composer3d.training.build import build

    torch.set_num_threads(1)
    resolved = load(recipe, sets, world_size=torch.distributed.get_world_size())
    run: Any = build(resolved.recipe, device, resolved.to_toml())
    corpus, _ = batches.open_data(resolved.recipe)
    samples = (
        np.asarray(corpus.tokens)[: SAMPLES * SEQ_LEN].astype(np.int64).reshape(SAMPLES, SEQ_LEN)
    )
    mine = run.stages.own_tokens(torch.from_numpy(samples)).numpy()
    run.loader = Ledger(run.loader, {row.tobytes(): number for number, row in enumerate(mine)})
    return run


def go_on(run: Any) -> list[float]:
    """Train ``MORE`` steps, in which nothing is saved."""
    from composer3d.training.optim import learning_rate
    from composer3d.training.step import compute_gradients, update

    losses = []
    for _ in range(MORE):
        loss, norm = compute_gradients(run.stages, next(run.loader))
        lr = learning_rate(run.step, run.recipe.optim, SAVED + MORE)
        update(run.stages, run.optimizer, norm=norm, max_norm=run.recipe.optim.clip, lr=lr)
        run.step += 1
        losses.append(loss)
    return losses


def parts(run: Any) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Any]]:
    """(name, shape, offset, this rank's elements) of every parameter and everything that its optimizer keeps."""
    from composer3d.parallel.init import local_part

    for name, parameter in run.stages.named_parameters():
        state = run.optimizer.state[parameter]
        for key, tensor in (
            (name, parameter),
            *((f"{name} {key}", tensor) for key, tensor in state.items()),
        ):
            local, offset = local_part(tensor)
            yield key, tuple(tensor.shape), offset, local


def box(offset: Sequence[int], local: Any) -> tuple[slice, ...]:
    return tuple(
        slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True)
    )


def train_source(recipe: str, sets: Sequence[str], folder: Path) -> tuple[int, Steps]:
    """A task: train, save, note what was saved, train on. Returns the rank's place in the batch, and its steps."""
    import torch

    from composer3d.runtime.process_group import pool_world
    from composer3d.training.loop import train

    with pool_world() as device:
        run = start(recipe, [*sets, f"run.out_dir={folder}"], device)
        train(run)
        saved = [(key, shape, offset, local.clone()) for key, shape, offset, local in parts(run)]
        torch.save(saved, folder / f"rank-{run.stages.mesh.rank}.pt")
        return run.stages.mesh.batch_rank, Steps(go_on(run), run.loader.steps)


def merge(folder: Path) -> list[str]:
    """A task: put the ranks' parts together as ``whole.pt``. Returns tensors with a hole, or that ranks disagree on."""
    import torch

    whole: dict[str, Any] = {}
    filled: dict[str, Any] = {}
    wrong = set()
    for path in sorted(folder.glob("rank-*.pt")):
        for key, shape, offset, local in torch.load(path, weights_only=True):
            tensor = whole.setdefault(key, torch.zeros(shape, dtype=local.dtype))
            there = filled.setdefault(key, torch.zeros(shape, dtype=torch.bool))
            at = box(offset, local)
            if not torch.equal(tensor[at][there[at]], local[there[at]]):
                wrong.add(key)
            tensor[at], there[at] = local, True
    torch.save(whole, folder / "whole.pt")
    return sorted(wrong | {key for key, there in filled.items() if not there.all()})


def resume_all(
    recipe: str,
    sets: Sequence[str],
    folder: Path,
    sources: Mapping[str, Path],
    fault: Callable[[], None] | None,
) -> tuple[int, dict[str, tuple[list[str], Steps]]]:
    """A task: resume from every source in turn. Returns the rank's place in the batch; what is wrong, and the steps."""
    import torch

    from composer3d.runtime.process_group import pool_world
    from composer3d.training.resume import resume

    out = {}
    with pool_world() as device:
        if fault is not None:
            fault()
        run = start(recipe, [*sets, f"run.out_dir={folder}"], device)
        for name, source in sources.items():
            path = next((source / "run" / "checkpoints").iterdir())
            wanted = replace(
                run.recipe, checkpoint=replace(run.recipe.checkpoint, resume=str(path))
            )
            run.step = resume(wanted, run.store, run.stages, run.optimizer, run.loader)
            run.loader.steps.clear()
            whole = torch.load(source / "whole.pt", weights_only=True, mmap=True)
            wrong = [
                key
                for key, _, offset, local in parts(run)
                if not same(whole.get(key), offset, local)
            ]
            out[name] = wrong, Steps(go_on(run), list(run.loader.steps))
    return run.stages.mesh.batch_rank, out


def same(whole: Any, offset: Sequence[int], local: Any) -> bool:
    """Bit for bit: 0 is not -0 here, and a NaN is itself."""
    return (
        whole is not None and whole[box(offset, local)].numpy().tobytes() == local.numpy().tobytes()
    )


def in_order(ranks: Sequence[tuple[int, list[list[int]]]]) -> list[list[int]]:
    """The samples of each step over all ranks: those of one place in the batch must agree."""
    places: dict[int, list[list[int]]] = {}
    for place, steps in ranks:
        if places.setdefault(place, steps) != steps:
            return [[-1]] * len(steps)
    each = [places[place] for place in sorted(places)]
    return [[sample for rows in step for sample in rows] for step in zip(*each, strict=True)]


class Matrix:
    """Runs sources and targets, in one temporary folder."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        corpus = folder / "corpus.txt"
        corpus.write_bytes(bytes(random.Random(5).choices(range(1, 256), k=SAMPLES * SEQ_LEN + 1)))
        self._recipe = folder / "recipe.toml"
        self._recipe.write_text(RECIPE.format(corpus=corpus))
        self._sources: dict[str, Steps] = {}

    def _run(self, task: Callable[..., Any], name: str, **arguments: Any) -> list[Any]:
        processes, sets = LAYOUTS[name]
        arguments |= {"recipe": str(self._recipe), "sets": sets}
        return self._pool.run(task, arguments, world_size=processes, limit_s=LIMIT_S)

    def _place(self, name: str) -> Path:
        return self._folder / f"source-{list(LAYOUTS).index(name)}"

    def save(self, name: str) -> list[str]:
        """Train on one layout. Returns what is wrong of its own: its tensors, or its samples."""
        try:
            answers = self._run(train_source, name, folder=self._place(name))
        except WorkerError as error:
            return [str(error)]
        samples = in_order([(place, steps.samples) for place, steps in answers])
        self._sources[name] = Steps(answers[0][1].losses, samples)
        (wrong,) = self._pool.run(merge, {"folder": self._place(name)}, world_size=1)
        every = sorted(sample for step in samples for sample in step)
        return [
            *wrong,
            *([] if every == list(range(SAMPLES)) else ["samples are skipped or repeated"]),
        ]

    def resume(
        self,
        name: str,
        fault: Callable[[], None] | None = None,
        sources: Sequence[str] | None = None,
    ) -> list[Cell]:
        """Resume on one layout from ``sources``, or from every one that was saved."""
        places = {source: self._place(source) for source in sources or self._sources}
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            answers = self._run(resume_all, name, folder=folder, sources=places, fault=fault)
        except WorkerError as error:
            return [Cell(source, name, math.inf, (str(error),), False) for source in places]
        cells = []
        for source in places:
            wanted = self._sources[source]
            got = [(place, *each[source]) for place, each in answers]
            pairs = zip(got[0][2].losses, wanted.losses, strict=True)
            deviation = max(abs(a - b) / abs(b) for a, b in pairs)
            samples = in_order([(place, steps.samples) for place, _, steps in got])
            wrong = tuple(sorted({key for _, keys, _ in got for key in keys}))
            cells.append(Cell(source, name, deviation, wrong, samples == wanted.samples[SAVED:]))
        return cells


def main(arguments: Sequence[str]) -> int:
    epilog, how = (
        "\n  ".join(["layouts, of which NAME is a part:", *LAYOUTS]),
        argparse.RawDescriptionHelpFormatter,
    )
    parser = argparse.ArgumentParser(
        "tools/resume_matrix", description=__doc__, epilog=epilog, formatter_class=how
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these layouts; absent: all")
    names = parser.parse_args(arguments).names
    layouts = [name for name in LAYOUTS if not names or any(part in name for part in names)]
    if not layouts:
        parser.error(f"no layout's name holds {' or '.join(names)}")
    begin, cells, problems = time.monotonic(), [], []
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-resume-") as folder:
        matrix = Matrix(pool, Path(folder))
        for number, name in enumerate(layouts, 1):
            wrong = matrix.save(name)
            problems += [f"{name}: {line}" for line in wrong]
            print(f"{number:>2} {name:<36} {'WRONG' if wrong else 'saved'}", flush=True)
        print(
            f"resumed on, from: {' ' * 21}"
            + "".join(f"{number:>7}" for number in range(1, len(layouts) + 1))
        )
        for number, name in enumerate(layouts, 1):
            row = matrix.resume(name)
            cells += row
            told = (f"{cell.deviation:.0e}" if cell.good else "WRONG" for cell in row)
            print(f"{number:>2} {name:<36}" + "".join(f"{each:>7}" for each in told), flush=True)
    problems += [str(cell) for cell in cells if not cell.good]
    print(*problems, sep="\n")
    worst = max((cell.deviation for cell in cells), default=0.0)
    verdict = (
        "0 problems: all bitwise, the same samples" if not problems else f"{len(problems)} PROBLEMS"
    )
    print(
        f"{len(cells)} pairs, {verdict}, losses within {worst:.1e}, in {time.monotonic() - begin:.0f} s"
    )
    return 1 if problems else 0
