"""Resume on each layout from the checkpoints of all layouts, and prove each resume exact.

There are 13 layouts of a dense model, 8 of a model with experts, 5 and 2 of these models with Muon,
and 3 of a gpt-oss, a DeepSeek, a GLM-4.5 and a Gemma 3 each. Each layout trains 3 steps, saves, and
trains 5 more. Then each loads what each has saved of the same model. Its shards of all
parameters and moments must be bitwise those of the source; the ranks together must have all of
them. Its next 5 losses must be those of the source within 1e-5, or 1e-9 for all but the first two
models, as they train in float64; the table shows the difference. It must take the same samples: in
all, each sample of the data exactly once.

Exit status: 0 if all pairs are exact, 1 if one is not.
"""

import math
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from composer3d.runtime.launch import Pool, WorkerError
from tools.prove.proof import add_names, choose, make_parser

# Steps before and after the checkpoint.
STEPS_BEFORE, STEPS_AFTER = 3, 5
BATCH, SEQ_LEN = 12, 48
SAMPLES = (STEPS_BEFORE + STEPS_AFTER) * BATCH  # of the data
BOUND = 1e-5  # between two losses in float32
BOUND_OF_FLOAT64 = 1e-9
LIMIT_S = 900.0

# A vocabulary that tp does not divide. Each model sets it, because a preset replaces no sizes of a
# recipe that writes out all of them.
VOCAB = "model.vocab=257"

# Embeddings that are tied over the stages, and fewer key-value heads than ranks of tp.
RECIPE = """\
[run]
device = "cpu"
[model]
preset = "debug-tiny"
dim = 96
n_layers = 5
n_heads = 8
n_kv_heads = 2
ffn = 96
tied = true
[data]
source = "text"
path = "{corpus}"
[optim]
lr = 1e-3
warmup = 2
[metrics]
tensorboard = false
"""
# Overrides of every run.
SIZES = (
    f"run.steps={STEPS_BEFORE}",
    f"data.seq_len={SEQ_LEN}",
    f"data.global_batch={BATCH}",
    f"optim.decay={STEPS_BEFORE + STEPS_AFTER}",
)
ASYNC = "checkpoint.async_save=true"
# Overrides. Micro-batches are as large as the schedule allows, for speed.
LAYOUTS: dict[str, str] = {
    "one process": f"data.micro_batch=3 {ASYNC}",
    "zero 3 x 2": "mesh.dp_shard=2 data.micro_batch=3",
    "zero 2 x 3": f"mesh.dp_shard=3 parallel.zero=2 data.micro_batch=2 {ASYNC}",
    "zero 0 x 2": "mesh.dp_replicate=2 parallel.zero=0 data.micro_batch=2",
    "tp 4": f"mesh.tp=4 data.micro_batch=4 {ASYNC}",
    "zero 1 x 2, tp 2": "mesh.dp_shard=2 mesh.tp=2 parallel.zero=1 data.micro_batch=3",
    "cp 3, tp 2": "mesh.cp=3 mesh.tp=2 data.micro_batch=4",
    "HSDP 2 x 2, tp 2": f"mesh.dp_replicate=2 mesh.dp_shard=2 mesh.tp=2 data.micro_batch=3 {ASYNC}",
    "pp 2 1F1B, tp 2": f"mesh.pp=2 mesh.tp=2 data.micro_batch=3 {ASYNC}",
    "pp 2 Interleaved, zero 3 x 2, cp 2": (
        "mesh.pp=2 parallel.schedule=Interleaved1F1B mesh.dp_shard=2 mesh.cp=2 data.micro_batch=3"
    ),
    "pp 2 ZBV, zero 3 x 3": (
        "mesh.pp=2 parallel.schedule=ZBVZeroBubble mesh.dp_shard=3 data.micro_batch=2"
    ),
    "pp 4 1F1B, zero 0 x 2": f"mesh.pp=4 mesh.dp_replicate=2 parallel.zero=0 {ASYNC}",
    "pp 2 DualPipeV, zero 1, cp 2, tp 2": (
        "mesh.pp=2 parallel.schedule=DualPipeV mesh.cp=2 mesh.tp=2 parallel.zero=1 "
        "data.micro_batch=3"
    ),
}


# Eight experts with a bias and losses that balance them, a shared one with a gate, and a dense
# first block.
EXPERTS = (
    "model.architecture=moe",
    "model.preset=debug-moe",
    VOCAB,
    "model.dense_layers=1",
    "model.shared_ffn=32",
    "model.shared_gate=true",
    "model.router=sigmoid",
    "model.router_bias=true",
    "model.balance_loss=0.1",
    "model.z_loss=0.01",
)
LAYOUTS_WITH_EXPERTS: dict[str, str] = {
    "experts on one process": f"data.micro_batch=3 {ASYNC}",
    "ep 1, zero 2 x 3": "mesh.dp_shard=3 parallel.zero=2 data.micro_batch=2",
    "ep 2 of zero 3 x 2": f"mesh.ep=2 mesh.dp_shard=2 data.micro_batch=3 {ASYNC}",
    "ep 4 of tp 4": f"mesh.ep=4 mesh.tp=4 data.micro_batch=4 {ASYNC}",
    "ep 2 of HSDP 2 x 2, tp 2": (
        "mesh.ep=2 mesh.dp_replicate=2 mesh.dp_shard=2 mesh.tp=2 data.micro_batch=3"
    ),
    "ep 4 of cp 2, tp 2, pp 2 1F1B": (
        f"mesh.ep=4 mesh.pp=2 mesh.cp=2 mesh.tp=2 data.micro_batch=3 {ASYNC}"
    ),
    "ep 8 of zero 1 x 2, cp 2, tp 2": (
        "mesh.ep=8 mesh.dp_shard=2 mesh.cp=2 mesh.tp=2 parallel.zero=1 data.micro_batch=3"
    ),
    "ep 2 of zero 3 x 2, pp 2 ZBV": (
        "mesh.ep=2 mesh.pp=2 parallel.schedule=ZBVZeroBubble mesh.dp_shard=2 data.micro_batch=3"
    ),
}


# Muon has one moment of a matrix, which is cut as FSDP and tp cut the matrix; AdamW has two of all
# other parameters. In float64, Newton-Schulz too: in bfloat16 it rounds otherwise on each layout.
MUON = (
    *("optim.name=muon", "optim.newton_schulz_dtype=float64"),
    "precision.params=float64",
)
LAYOUTS_WITH_MUON: dict[str, str] = {
    "Muon on one process": f"data.micro_batch=3 {ASYNC}",
    "Muon, zero 3 x 3": "mesh.dp_shard=3 data.micro_batch=2",
    "Muon, zero 1 x 2, tp 2": (
        f"mesh.dp_shard=2 mesh.tp=2 parallel.zero=1 data.micro_batch=3 {ASYNC}"
    ),
    "Muon, HSDP 2 x 2": f"mesh.dp_replicate=2 mesh.dp_shard=2 data.micro_batch=3 {ASYNC}",
    "Muon, pp 2 Interleaved, tp 2": (
        "mesh.pp=2 parallel.schedule=Interleaved1F1B mesh.tp=2 data.micro_batch=3"
    ),
}
LAYOUTS_WITH_EXPERTS_AND_MUON: dict[str, str] = {
    "Muon, ep 2 of zero 3 x 2": f"mesh.ep=2 mesh.dp_shard=2 data.micro_batch=3 {ASYNC}",
    "Muon, ep 4 of tp 4": "mesh.ep=4 mesh.tp=4 data.micro_batch=4",
}


class Model(NamedTuple):
    """A model that resumes on layouts of its own.

    Attributes:
        layouts: overrides by name; a name belongs to one model.
        sets: overrides that make the model.
        bound: the largest relative difference of two losses.
    """

    layouts: Mapping[str, str]
    sets: tuple[str, ...] = ()
    bound: float = BOUND


def _family(preset: str, *sets: str) -> tuple[str, ...]:
    """The overrides of a model in float64."""
    return (f"model.preset={preset}", VOCAB, "precision.params=float64", *sets)


# What they have and the others have not: biases and sinks, latents and neighbouring pairs, heads of
# which a part is rotated and multi-token prediction, norms after layers and two rotary bases. The
# seams of cp, tp, ep and pp cut each.
MODELS: dict[str, Model] = {
    "dense": Model(LAYOUTS, (VOCAB,)),
    "experts": Model(LAYOUTS_WITH_EXPERTS, EXPERTS),
    "Muon": Model(LAYOUTS_WITH_MUON, MUON, BOUND_OF_FLOAT64),
    "experts and Muon": Model(LAYOUTS_WITH_EXPERTS_AND_MUON, (*EXPERTS, *MUON), BOUND_OF_FLOAT64),
    "gpt-oss": Model(
        {
            "gpt-oss, ep 2 of zero 3 x 2": f"mesh.ep=2 mesh.dp_shard=2 data.micro_batch=3 {ASYNC}",
            "gpt-oss, ep 2 of tp 2, pp 2 1F1B": (
                "mesh.ep=2 mesh.tp=2 mesh.pp=2 data.micro_batch=3"
            ),
            "gpt-oss, ep 4 of cp 2, zero 1 x 2": (
                "mesh.ep=4 mesh.cp=2 mesh.dp_shard=2 parallel.zero=1 data.micro_batch=3"
            ),
        },
        _family("debug-gpt-oss", "model.architecture=gpt_oss"),
        BOUND_OF_FLOAT64,
    ),
    "DeepSeek": Model(
        {
            "DeepSeek, ep 2 of zero 3 x 2": f"mesh.ep=2 mesh.dp_shard=2 data.micro_batch=3 {ASYNC}",
            "DeepSeek, ep 2 of tp 2, pp 2 1F1B": (
                "mesh.ep=2 mesh.tp=2 mesh.pp=2 data.micro_batch=3"
            ),
            "DeepSeek, ep 4 of cp 2, zero 1 x 2": (
                "mesh.ep=4 mesh.cp=2 mesh.dp_shard=2 parallel.zero=1 data.micro_batch=3"
            ),
        },
        _family("debug-deepseek", "model.architecture=deepseek", "model.n_kv_heads=8"),
        BOUND_OF_FLOAT64,
    ),
    "GLM-4.5": Model(
        {
            "GLM-4.5, ep 2 of zero 3 x 2": f"mesh.ep=2 mesh.dp_shard=2 data.micro_batch=3 {ASYNC}",
            "GLM-4.5, ep 2 of tp 2, pp 2 1F1B": "mesh.ep=2 mesh.tp=2 mesh.pp=2 data.micro_batch=3",
            "GLM-4.5, ep 4 of cp 2, zero 1 x 2": (
                "mesh.ep=4 mesh.cp=2 mesh.dp_shard=2 parallel.zero=1 data.micro_batch=3"
            ),
        },
        _family("debug-glm", "model.architecture=glm", "model.mtp_layers=1"),
        BOUND_OF_FLOAT64,
    ),
    "Gemma 3": Model(
        {
            "Gemma 3, zero 3 x 2, cp 2": f"mesh.dp_shard=2 mesh.cp=2 data.micro_batch=3 {ASYNC}",
            "Gemma 3, tp 2, pp 2 1F1B": "mesh.tp=2 mesh.pp=2 data.micro_batch=3",
            "Gemma 3, HSDP 2 x 2": "mesh.dp_replicate=2 mesh.dp_shard=2 data.micro_batch=3",
        },
        _family("debug-gemma3", "model.architecture=gemma3"),
        BOUND_OF_FLOAT64,
    ),
}


def processes_of(layout: str) -> int:
    """The number of processes of a layout: the product of its axes; ep cuts none of its own."""
    sizes = re.findall(r"mesh\.(?!ep=)\w+=(\d+)", layout)
    return math.prod(map(int, sizes))


@dataclass(frozen=True)
class Steps:
    """The steps after the checkpoint; of a source, ``samples`` holds all steps."""

    losses: list[float]
    samples: list[list[int]]


@dataclass(frozen=True)
class Cell:
    """The result of one source, resumed on one target.

    Attributes:
        source: the layout that saved.
        target: the layout that resumed.
        deviation: the largest relative difference of a loss.
        wrong: the tensors that are not bitwise those of the source, or how the run failed.
        same_samples: whether the same samples were taken.
        bound: the largest deviation of an exact resume.
    """

    source: str
    target: str
    deviation: float
    wrong: tuple[str, ...]
    same_samples: bool
    bound: float

    @property
    def is_exact(self) -> bool:
        return self.deviation <= self.bound and not self.wrong and self.same_samples


class Ledger:
    """A loader that records the samples it returns; it knows them by the rank's tokens."""

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
    local_samples = run.stages.own_tokens(torch.from_numpy(samples)).numpy()
    numbers = {tokens.tobytes(): number for number, tokens in enumerate(local_samples)}
    run.loader = Ledger(run.loader, numbers)
    return run


def train_on(run: Any) -> list[float]:
    """Train ``STEPS_AFTER`` steps without a save, and return their losses."""
    from composer3d.training.optim import learning_rate
    from composer3d.training.step import compute_gradients, update

    losses = []
    for _ in range(STEPS_AFTER):
        sums = compute_gradients(run.stages, next(run.loader))
        lr = learning_rate(run.step, run.recipe.optim, STEPS_BEFORE + STEPS_AFTER)
        values = update(run.stages, run.optimizer, sums, max_norm=run.recipe.optim.clip, lr=lr)
        run.step += 1
        losses.append(values.loss)
    return losses


def parts(run: Any) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Any]]:
    """Yield (name, shape, offset, local elements) of this rank's parameters and their moments.

    Raises:
        LookupError: there are no parameters, or no moments of one, so nothing would be compared.
    """
    from composer3d.parallel.init import local_part

    named = list(run.stages.named_parameters())
    if not named:
        raise LookupError("this rank has no parameters")
    for name, parameter in named:
        state = run.optimizer.state[parameter]
        if parameter.requires_grad and not state:
            raise LookupError(f"the optimizer has no moments of {name}")
        for key, tensor in (
            (name, parameter),
            *((f"{name} {key}", tensor) for key, tensor in state.items()),
        ):
            local, offset = local_part(tensor)
            yield key, tuple(tensor.shape), offset, local


def box(offset: Sequence[int], local: Any) -> tuple[slice, ...]:
    """The slices of a shard, which begins at ``offset``, in the whole tensor."""
    return tuple(
        slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True)
    )


def train_source(recipe: str, sets: Sequence[str], folder: Path) -> tuple[int, Steps]:
    """Train, save, store this rank's shards, and train on; a task of the pool.

    Returns:
        The rank's place in the batch, and its steps.
    """
    import torch

    from composer3d.runtime.process_group import pool_world
    from composer3d.training.loop import train

    with pool_world() as device:
        run = start(recipe, [*sets, f"run.out_dir={folder}"], device)
        train(run)
        saved = [(key, shape, offset, local.clone()) for key, shape, offset, local in parts(run)]
        torch.save(saved, folder / f"rank-{run.stages.mesh.rank}.pt")
        return run.stages.mesh.batch_rank, Steps(train_on(run), run.loader.steps)


def merge(folder: Path) -> tuple[set[str], list[str]]:
    """Join the shards of all ranks in ``whole.pt``; a task of the pool.

    Returns:
        The names of all tensors; and of those that have a hole, or on which ranks disagree.
    """
    import torch

    whole: dict[str, Any] = {}
    filled: dict[str, Any] = {}
    wrong = set()
    for path in sorted(folder.glob("rank-*.pt")):
        for key, shape, offset, local in torch.load(path, weights_only=True):
            tensor = whole.setdefault(key, torch.zeros(shape, dtype=local.dtype))
            is_filled = filled.setdefault(key, torch.zeros(shape, dtype=torch.bool))
            place = box(offset, local)
            if not torch.equal(tensor[place][is_filled[place]], local[is_filled[place]]):
                wrong.add(key)
            tensor[place] = local
            is_filled[place] = True
    torch.save(whole, folder / "whole.pt")
    with_hole = {key for key, is_filled in filled.items() if not is_filled.all()}
    return set(whole), sorted(wrong | with_hole)


def resume_all(
    recipe: str,
    sets: Sequence[str],
    folder: Path,
    sources: Mapping[str, Path],
    fault: Callable[[], None] | None,
) -> tuple[int, dict[str, tuple[dict[str, bool], Steps]]]:
    """Resume from every source in turn, after ``fault`` is planted; a task of the pool.

    Returns:
        The rank's place in the batch; and by source, whether each of its tensors is that of the
        source, and the steps.
    """
    import torch

    from composer3d.runtime.process_group import pool_world
    from composer3d.training.resume import resume

    results = {}
    with pool_world() as device:
        if fault is not None:
            fault()
        run = start(recipe, [*sets, f"run.out_dir={folder}"], device)
        for name, source in sources.items():
            path = next((source / "run" / "checkpoints").iterdir())
            table = replace(run.recipe.checkpoint, resume=str(path))
            recipe_of_source = replace(run.recipe, checkpoint=table)
            run.step = resume(
                recipe_of_source,
                run.saver.store,
                run.stages,
                run.optimizer,
                run.loader,
                run.recovery.history,
            )
            run.loader.steps.clear()
            whole = torch.load(source / "whole.pt", weights_only=True, mmap=True)
            compared = {
                key: same(whole.get(key), offset, local) for key, _, offset, local in parts(run)
            }
            results[name] = compared, Steps(train_on(run), list(run.loader.steps))
    return run.stages.mesh.batch_rank, results


def same(whole: Any, offset: Sequence[int], local: Any) -> bool:
    """Whether a shard is bitwise equal: 0 is not -0, and NaN equals itself."""
    if whole is None:
        return False
    return whole[box(offset, local)].numpy().tobytes() == local.numpy().tobytes()


def in_order(ranks: Sequence[tuple[int, list[list[int]]]]) -> list[list[int]]:
    """The samples of each step over all ranks; ranks of the same place in the batch must agree."""
    steps_of_rank: dict[int, list[list[int]]] = {}
    for batch_rank, steps in ranks:
        if steps_of_rank.setdefault(batch_rank, steps) != steps:
            return [[-1]] * len(steps)
    in_batch_order = [steps_of_rank[batch_rank] for batch_rank in sorted(steps_of_rank)]
    return [
        [sample for rows in step for sample in rows] for step in zip(*in_batch_order, strict=True)
    ]


class Matrix:
    """Run sources and targets of a model in one temporary folder."""

    def __init__(self, pool: Pool, folder: Path, model: Model = MODELS["dense"]) -> None:
        self._pool, self._folder, self._model = pool, folder, model
        corpus = folder / "corpus.txt"
        corpus.write_bytes(bytes(random.Random(5).choices(range(1, 256), k=SAMPLES * SEQ_LEN + 1)))
        self._recipe = folder / "recipe.toml"
        self._recipe.write_text(RECIPE.format(corpus=corpus))
        self._sources: dict[str, Steps] = {}
        self._tensors: dict[str, set[str]] = {}  # their names, by source

    def _run(self, task: Callable[..., Any], name: str, **arguments: Any) -> list[Any]:
        layout = self._model.layouts[name]
        arguments |= {
            "recipe": str(self._recipe),
            "sets": [*SIZES, *self._model.sets, *layout.split()],
        }
        world_size = processes_of(layout)
        return self._pool.run(task, arguments, world_size=world_size, limit_s=LIMIT_S)

    def _folder_of(self, name: str) -> Path:
        return self._folder / f"source-{list(self._model.layouts).index(name)}"

    def save(self, name: str) -> list[str]:
        """Train and save on one layout; return the problems of its tensors and samples."""
        try:
            answers = self._run(train_source, name, folder=self._folder_of(name))
        except WorkerError as error:
            return [str(error)]
        samples = in_order([(batch_rank, steps.samples) for batch_rank, steps in answers])
        self._sources[name] = Steps(answers[0][1].losses, samples)
        ((self._tensors[name], problems),) = self._pool.run(
            merge, {"folder": self._folder_of(name)}, world_size=1
        )
        all_samples = sorted(sample for step in samples for sample in step)
        if all_samples != list(range(SAMPLES)):
            problems.append("samples are skipped or repeated")
        return problems

    def resume(
        self,
        name: str,
        fault: Callable[[], None] | None = None,
        sources: Sequence[str] | None = None,
    ) -> list[Cell]:
        """Resume on one layout from ``sources``, by default from all that were saved."""
        folders = {source: self._folder_of(source) for source in sources or self._sources}
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            answers = self._run(resume_all, name, folder=folder, sources=folders, fault=fault)
        except WorkerError as error:
            failed = (math.inf, (str(error),), False, self._model.bound)
            return [Cell(source, name, *failed) for source in folders]
        cells = []
        for source in folders:
            expected = self._sources[source]
            wrong: set[str] = set()
            seen: set[str] = set()
            samples_of_ranks = []
            for batch_rank, results in answers:
                compared, steps = results[source]
                seen |= set(compared)
                wrong |= {key for key, is_same in compared.items() if not is_same}
                samples_of_ranks.append((batch_rank, steps.samples))
            # All ranks have the same losses.
            losses = answers[0][1][source][1].losses
            deviation = max(
                abs(a - b) / abs(b) for a, b in zip(losses, expected.losses, strict=True)
            )
            same_samples = in_order(samples_of_ranks) == expected.samples[STEPS_BEFORE:]
            tensors = tuple(sorted(wrong | (self._tensors[source] - seen)))
            cells.append(Cell(source, name, deviation, tensors, same_samples, self._model.bound))
        return cells


def main(arguments: Sequence[str]) -> int:
    layouts = [name for model in MODELS.values() for name in model.layouts]
    parser = make_parser("resume", __doc__, "\n  ".join(["layouts:", *layouts]))
    add_names(parser, "layout's name")
    names = parser.parse_args(arguments).names
    chosen = choose(parser, layouts, names, "no layout's name holds")
    begin, cells, problems = time.monotonic(), [], []
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-resume-") as folder:
        for number, model in enumerate(MODELS.values()):
            root = Path(folder) / str(number)
            root.mkdir()
            of_model = [name for name in model.layouts if name in chosen]
            if not of_model:
                continue
            new_cells, new_problems = prove(Matrix(pool, root, model), of_model)
            cells += new_cells
            problems += new_problems
    print(*problems, sep="\n")
    worst = max((cell.deviation for cell in cells), default=0.0)
    verdict = "0 problems: all bitwise, the same samples"
    if problems:
        verdict = f"{len(problems)} PROBLEMS"
    seconds = time.monotonic() - begin
    print(f"{len(cells)} pairs, {verdict}, losses within {worst:.1e}, in {seconds:.0f} s")
    return 1 if problems else 0


def prove(
    matrix: Matrix, layouts: Sequence[str], on: Sequence[str] | None = None
) -> tuple[list[Cell], list[str]]:
    """Resume each layout's checkpoint, and print the table; return pairs and problems.

    Args:
        matrix: of the model.
        layouts: those that save.
        on: those that resume; None: all that save.
    """
    cells, problems = [], []
    for number, name in enumerate(layouts, 1):
        wrong = matrix.save(name)
        problems += [f"{name}: {line}" for line in wrong]
        print(f"{number:>2} {name:<36} {'WRONG' if wrong else 'saved'}", flush=True)
    numbers = "".join(f"{number:>7}" for number in range(1, len(layouts) + 1))
    print(f"resumed on, from: {' ' * 21}{numbers}")
    for number, name in enumerate(layouts, 1):
        if on is not None and name not in on:
            continue
        row = matrix.resume(name)
        cells += row
        shown = ""
        for cell in row:
            word = f"{cell.deviation:.0e}" if cell.is_exact else "WRONG"
            shown += f"{word:>7}"
        print(f"{number:>2} {name:<36}{shown}", flush=True)
    problems += [str(cell) for cell in cells if not cell.is_exact]
    return cells, problems
