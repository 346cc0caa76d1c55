"""Count what the control plane of a training does at 8, 1,024 and 16,384 ranks.

python tools/scale.py                          the table of docs/scale.md
python tools/scale.py --ranks 8,1024 --json
python tools/scale.py --check                  only the small worlds, which confirm the counting

For each number of ranks, rank 0 of a recipe of that size starts, trains two steps, saves and
resumes, in torch's fake process group. Its model has the recipe's layers and mesh, and narrow
tensors. Every call of a collective over all ranks is counted, with its bytes; it returns what it
would return if all ranks held the same. Sizes of the whole checkpoint come from the shards of the
real shapes. What the counting assumes of gloo is measured in worlds of 2, 4 and 8 processes.
"""

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.tensor import DTensor

from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint import metadata as metadata_module
from composer3d.checkpoint.manifest import FileEntry
from composer3d.checkpoint.metadata import METADATA, pack_metadata, read_metadata
from composer3d.checkpoint.store import gather_state
from composer3d.data import sample_order, tokens
from composer3d.facts.token_manifest import CHUNK_BYTES
from composer3d.models.registry import architecture
from composer3d.parallel import grad_norm
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime import exchanges, process_group
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.torch_private import fake_world
from composer3d.training import loop
from composer3d.training.build import build, build_stages
from composer3d.training.optimizers import build_optimizer
from composer3d.training.step_values import StepSums

FOLDER = Path(__file__).resolve().parent.parent / "recipes"
RECIPES = {
    8: "llama3-8b-8-fsdp",
    1024: "llama-175b-1024-3d",
    16384: "llama3-405b-16384-3d",
}
CORPUS_TOKENS = 15 * 10**12  # of the Llama 3 report
TOKEN_BYTES = 4
GPUS_PER_NODE = 8
# The largest group in which composer3d connects all pairs of ranks.
MOST_ALL_PAIRS = process_group._MOST_RANKS_ALL_PAIRS

# The corpus of the narrow model: 4 KiB of text.
TEXT = bytes(1 + i % 250 for i in range(4096))
SEQ_LEN = 16

# Copies of the parts of rank 0 whose description is measured.
FEWER, MORE = 16, 64

Row = dict[str, float]

# How tensors are sharded: (dim, number of shards) for each dim of the mesh, by ``pattern``.
Cuts = dict[str, list[tuple[int, int]]]


# --- counting ---


class Ledger:
    """The collectives over all ranks, by phase: how many, and the bytes that a rank receives.

    Attributes:
        phase: the phase that is counted now.
        calls: by (phase, operation).
        rank_0_bytes, other_bytes: what rank 0 receives in a phase, and what another rank does.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.phase = "start"
        self.calls: Counter[tuple[str, str]] = Counter()
        self.rank_0_bytes: Counter[str] = Counter()
        self.other_bytes: Counter[str] = Counter()
        self.group_calls = 0

    def see(self, operation: str, n_bytes: int, *, rank_0_factor: float, factor: float) -> None:
        """Count a collective of ``n_bytes`` a rank; the factors give the bytes received."""
        self.calls[self.phase, operation] += 1
        self.rank_0_bytes[self.phase] += round(n_bytes * rank_0_factor)
        self.other_bytes[self.phase] += round(n_bytes * factor)


@contextmanager
def counted_world(rank: int, size: int) -> Iterator[Ledger]:
    """Form a fake world, and count its collectives over all ranks."""
    ledger = Ledger(size)
    c10d = dist.distributed_c10d
    others = size - 1
    right_new_group, right_with_tag = dist.new_group, c10d._new_group_with_tag

    def of_world(group: Any) -> bool:
        return group is None or group.size() == size

    def wrap(name: str) -> Any:
        right = getattr(c10d, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            groups = [item for item in arguments if isinstance(item, dist.ProcessGroup)]
            if of_world(groups[0] if groups else keywords.get("group")):
                see(name, *arguments)
            work = right(*arguments, **keywords)
            if name in fills:
                fills[name](*arguments, **keywords)
            return work

        return counted

    def see(name: str, first: Any = None, second: Any = None, *_: Any) -> None:
        of_rank_0, of_other = received[name]
        tensor = second if name == "all_gather" else first  # what a rank gives, or gets
        n_bytes = 0 if name == "barrier" else tensor.nbytes
        operation = name.replace("_", "-")
        ledger.see(operation, n_bytes, rank_0_factor=of_rank_0, factor=of_other)

    def fill_all(outputs: Any, own: Any = None, *_: Any, **__: Any) -> None:
        for output in outputs:
            output.copy_(own)

    def fill_gathered(own: Any, outputs: Any = None, *_: Any, **keywords: Any) -> None:
        fill_all(outputs or keywords.get("gather_list") or [], own)

    def fill_scattered(output: Any, inputs: Any = None, *_: Any, **keywords: Any) -> None:
        output.copy_((inputs or keywords.get("scatter_list"))[0])

    # How often rank 0 receives the bytes of a tensor, and how often another rank does.
    received = {
        "all_reduce": (2, 2),
        "broadcast": (0, 1),
        "gather": (others, 0),
        "scatter": (0, 1),
        "all_gather": (others, others),
        "barrier": (0, 0),
    }
    fills = {"gather": fill_gathered, "scatter": fill_scattered, "all_gather": fill_all}

    def new_group(*arguments: Any, **keywords: Any) -> Any:
        return right_new_group(*arguments, **{**keywords, "backend": "fake"})

    def with_tag(*arguments: Any, **keywords: Any) -> Any:
        ledger.group_calls += 1
        return right_with_tag(*arguments, **keywords)

    with fake_world(rank, size), mock.patch.object(c10d, "_new_group_with_tag", with_tag):
        patches = [mock.patch.object(dist, "new_group", new_group)]
        # A pipeline receives whether all stages have static shapes. They do.
        patches.append(mock.patch.object(dist, "recv", lambda value, **_: value.fill_(1)))
        for name in received:
            counted = wrap(name)
            patches += [mock.patch.object(place, name, counted) for place in (dist, c10d)]
        # What the fake groups return is not what other ranks have sent.
        right_values = exchanges._values
        patches.append(
            mock.patch.object(exchanges, "_values", lambda *each: right_values(*each) and None)
        )
        patches += _plans_of_one_rank(ledger)
        for patch in patches:
            patch.start()
        yield ledger
        for patch in patches:
            patch.stop()


def _plans_of_one_rank(ledger: Ledger) -> list[Any]:
    """Let torch plan a checkpoint with the parts of rank 0 alone.

    The plans of all ranks would take gigabytes. They are counted as if each were as large.
    """

    def gather_object(obj: Any, object_gather_list: list[Any], *_: Any, **__: Any) -> None:
        size = len(pickle.dumps(obj))
        ledger.see("all-gather", 8, rank_0_factor=ledger.size - 1, factor=ledger.size - 1)
        ledger.see("gather", size, rank_0_factor=ledger.size - 1, factor=0)
        object_gather_list[:] = [obj]

    def scatter_object_list(
        scatter_object_output_list: list[Any], scatter_object_input_list: list[Any], **_: Any
    ) -> None:
        size = len(pickle.dumps(scatter_object_input_list[0]))
        ledger.see("scatter", size, rank_0_factor=0, factor=1)
        scatter_object_output_list[0] = scatter_object_input_list[0]

    return [
        mock.patch.object(dist, "gather_object", gather_object),
        mock.patch.object(dist, "scatter_object_list", scatter_object_list),
        mock.patch.object(default_planner, "_validate_global_plan", return_value=[]),
        mock.patch.object(metadata_module, "fills", return_value=True),
    ]


# --- one size ---


def narrow(name: str, folder: Path) -> Recipe:
    """Return the recipe with its mesh and layers, but narrow tensors, on the CPU."""
    full = load(FOLDER / f"{name}.toml", check_files=False).recipe
    (folder / "text.txt").write_bytes(TEXT)
    length = SEQ_LEN * full.mesh.cp
    sets = {
        "model.dim": 64,
        "model.n_heads": 8,
        "model.n_kv_heads": 8,
        "model.ffn": 64,
        "model.vocab": 512,
        "data.source": "text",
        "data.path": folder / "text.txt",
        "data.seq_len": length,
        "run.device": "cpu",
        "run.out_dir": folder,
        "run.oversubscribe": "true",
        "run.steps": 2,
        "optim.warmup": 1,
        "compile.enabled": "false",
        "precision.compute": "float32",
        "memory.activation_checkpoint": "none",
        "memory.cpu_offload": "false",
        "checkpoint.every": 2,
        "metrics.tensorboard": "false",
        "metrics.every": 1,
    }
    return load(FOLDER / f"{name}.toml", [f"{key}={value}" for key, value in sets.items()]).recipe


def run_rank_0(recipe: Recipe) -> tuple[Ledger, Row, Cuts]:
    """Start, train two steps, save, and resume. Returns what was counted, and the shards."""
    right_gradients = loop.compute_gradients
    with counted_world(0, recipe.world_size) as ledger:
        begin_s = time.perf_counter()
        run = build(recipe, torch.device("cpu"), "")
        row: Row = {"start_s": time.perf_counter() - begin_s, "group calls": ledger.group_calls}
        sharded = cuts(gather_state(run.stages, run.optimizer))
        c10d = dist.distributed_c10d
        own = [len(ranks) for ranks in c10d._world.pg_group_ranks.values()]
        row["groups of a rank"] = len(own)
        row["peers in groups"] = sum(size - 1 for size in own)
        row["keys in groups"] = sum(own)
        row["squares of groups"] = sum(size**2 for size in own)

        def finite(*arguments: Any, **keywords: Any) -> StepSums:
            # The numbers come from memory that nobody has filled.
            right_gradients(*arguments, **keywords)
            flags, parts = arguments[2]().pack(), [0.0] * len(grad_norm.PARTS)
            return StepSums(torch.tensor([1.0, 1.0, *flags, *parts], dtype=torch.float64))

        store = run.saver.store
        save = store.save

        def counted_save(*arguments: Any) -> None:
            ledger.phase = "save"
            save(*arguments)
            ledger.phase = "end"

        store.save = counted_save  # type: ignore[method-assign]
        ledger.phase = "step"
        with mock.patch.object(loop, "compute_gradients", finite):
            loop.train(run)
        ledger.phase = "resume"
        build(recipe, torch.device("cpu"), "")
        row |= checkpoint_facts(run, recipe)
    return ledger, row, sharded


def cuts(tensors: Mapping[str, torch.Tensor]) -> Cuts:
    """Return how each tensor is sharded, by the pattern of its name."""
    found: Cuts = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            sizes = tensor.device_mesh.shape
            found[pattern(name)] = [
                (placement.dim, size)
                for placement, size in zip(tensor.placements, sizes, strict=True)
                if placement.is_shard() or hasattr(placement, "dim")
            ]
        else:
            found[pattern(name)] = []
    return found


def pattern(name: str) -> str:
    """Replace the number of a layer: ``model.blocks.*.attn.wq.weight``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def last_stage(recipe: Recipe) -> Cuts:
    """Return how the tensors of the last pipeline rank are sharded."""
    rank = recipe.world_size - recipe.world_size // recipe.mesh.pp
    with counted_world(rank, recipe.world_size):
        stages = build_stages(recipe, Mesh.build(recipe.mesh, torch.device("cpu")))
        return cuts(gather_state(stages, build_optimizer(stages.named_parameters(), recipe.optim)))


def count_parts(full: Recipe, sharded: Cuts) -> int:
    """Count the parts of all tensors of the real model: shards that have elements."""
    model_of = architecture(full.model.architecture)
    model = model_of.build(full.model, dtype=torch.float32, device="meta")
    parts = 0
    for name, parameter in model.named_parameters():
        for state in ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq", "optim.{}.step"):
            shards_of_dim: Counter[int] = Counter()
            for dim, shards in sharded[pattern(state.format(name))]:
                shards_of_dim[dim] = max(1, shards_of_dim[dim]) * shards
            parts += math.prod(
                _shards(parameter.shape[dim], shards) for dim, shards in shards_of_dim.items()
            )
    return parts


def _shards(length: int, shards: int) -> int:
    """Return how many of ``shards`` shards of a dim have elements."""
    return math.ceil(length / math.ceil(length / shards))


def checkpoint_facts(run: Any, recipe: Recipe) -> Row:
    """Measure the bytes that describe a part and a file, and what reading them takes."""
    folder = run.saver.store.newest()
    manifest = manifests.read(folder)
    metadata: Metadata = pickle.loads((folder / METADATA).read_bytes())
    tensors = len(metadata.state_dict_metadata)
    with tempfile.TemporaryDirectory() as place:
        sizes, seconds, held, packed = [], [], [], []
        for copies in (FEWER, MORE):
            path = Path(place, str(copies))
            path.mkdir()
            sizes.append(_write_copies(path, metadata, copies))
            tracemalloc.start()
            read_metadata(path)
            held.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            begin_s = time.process_time()
            read = read_metadata(path)
            seconds.append(time.process_time() - begin_s)
            packed.append(len(pickle.dumps(pack_metadata(read, read.state_dict_metadata))))
        more = tensors * (MORE - FEWER)
        manifest_bytes = []
        for files in (1000, 2000):
            entries = {f"__{n + 10_000}_0.distcp": FileEntry(10**8, "0" * 32) for n in range(files)}
            manifests.write(Path(place), replace(manifest, files=entries))
            manifest_bytes.append((Path(place) / manifests.FILE).stat().st_size)
    return {
        "tensors of rank 0": tensors,
        "metadata bytes a part": (sizes[1] - sizes[0]) / more,
        "seconds a part": (seconds[1] - seconds[0]) / more,
        "packed bytes a part": (packed[1] - packed[0]) / more,
        "memory a part": (held[1] - held[0]) / more,
        "manifest bytes a file": (manifest_bytes[1] - manifest_bytes[0]) / 1000,
    }


def _write_copies(folder: Path, metadata: Metadata, copies: int) -> int:
    """Write metadata in which each tensor has as many parts, as torch writes those of many ranks.

    Returns its size.
    """
    length = 1 << 16
    many = Metadata({}, storage_data={})
    for name, entry in metadata.state_dict_metadata.items():
        parts = []
        for copy in range(copies):
            dims = max(1, len(entry.size))
            at = torch.Size([1000 * copy] + [0] * (dims - 1))
            parts.append(ChunkStorageMetadata(at, torch.Size([1] * dims)))
        size = torch.Size([1000 * copies] + [1] * (dims - 1))
        many.state_dict_metadata[name] = replace(entry, chunks=parts, size=size)
    for index, info in metadata.storage_data.items():
        dims = max(1, len(metadata.state_dict_metadata[index.fqn].size))
        for copy in range(copies):
            at = torch.Size([1000 * copy] + [0] * (dims - 1))
            # Each rank sends its own copy of the name.
            own = deepcopy(replace(index, offset=at, index=copy, fqn="".join(list(index.fqn))))
            file = f"__{copy + 10_000}_0.distcp"
            many.storage_data[own] = replace(
                info, relative_path=file, offset=length * len(many.storage_data), length=length
            )
    content = pickle.dumps(many)
    (folder / METADATA).write_bytes(content)
    for copy in range(copies):
        with open(folder / f"__{copy + 10_000}_0.distcp", "wb") as file:
            file.truncate(length * len(many.storage_data))
    return len(content)


def meeting(size: int) -> Row:
    """Count the requests of ``agree_on_round``, of rank 0 and of another rank."""

    class Answering(dist.Store):
        """Answers as the store of a job in which all other ranks have done their part."""

        def __init__(self) -> None:
            super().__init__()
            self.requests = 0
            self.values: dict[str, bytes] = {}

        def set(self, key: str, value: str) -> None:
            self.requests += 1
            self.values[key] = value.encode() if isinstance(value, str) else value

        def check(self, keys: list[str]) -> bool:
            self.requests += 1
            return True

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self.requests += 1
            return [self.values.get(key, b"word") for key in keys]

        def get(self, key: str) -> bytes:
            self.requests += 1
            rank = key.rpartition("/")[2]
            word = self.values[f"composer3d/greeting/{rank}"].decode()
            return self.values.get(key, f"name {word}".encode())

        def add(self, key: str, amount: int) -> int:
            self.requests += 1
            return size

    row: Row = {}
    for rank, name in ((0, "rank 0"), (1, "other")):
        store = Answering()
        process_group.agree_on_round(store, rank, size, timeout_s=60.0)
        row[f"requests to meet, {name}"] = store.requests
    return row


def data_facts() -> Row:
    """Measure the host memory of the order of samples, and count what a start reads of tokens."""

    def peak_bytes(samples: int) -> int:
        tracemalloc.start()
        sample_order(samples, 0, 0, 8)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(10**5)  # what is cached once
    fewer, more = peak_bytes(10**6 - 1), peak_bytes(2 * 10**6 - 1)
    chunks = CORPUS_TOKENS * TOKEN_BYTES / CHUNK_BYTES
    read = min(chunks, tokens._MOST_CHUNKS * GPUS_PER_NODE)
    samples = CORPUS_TOKENS / 8192
    return {
        "order bytes": more + max(0.0, (more - fewer) / 10**6 * (samples - 2 * 10**6)),
        "token bytes a node": read * CHUNK_BYTES,
    }


def count(size: int, name: str) -> dict[str, Any]:
    """Count everything for one number of ranks, in this process."""
    torch.set_num_threads(1)
    full = load(FOLDER / f"{name}.toml", check_files=False).recipe
    if full.world_size != size:
        raise SystemExit(f"{name} has {full.world_size} ranks, not {size}")
    with tempfile.TemporaryDirectory() as folder:
        recipe = narrow(name, Path(folder))
        ledger, row, sharded = run_rank_0(recipe)
    row |= meeting(size) | data_facts()
    if full.mesh.pp > 1:
        sharded |= json.loads(_run_self("--last-stage", name))
    row["parts"] = count_parts(full, sharded)
    calls: dict[str, dict[str, int]] = {}
    for (phase, operation), number in ledger.calls.items():
        calls.setdefault(phase, {})[operation] = number
    return {
        "ranks": size,
        "recipe": name,
        "calls": calls,
        "rank_0_bytes": dict(ledger.rank_0_bytes),
        "other_bytes": dict(ledger.other_bytes),
        **row,
    }


def _run_self(*arguments: str) -> str:
    """Run this program in a process of its own: torch caches meshes. Returns its last line."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


# --- small worlds ---


class Recording(dist.Store):
    """A store that counts the requests of gloo, and the bytes that it reads."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store
        self.sets = self.gets = self.set_bytes = self.get_bytes = 0

    def set(self, key: str, value: bytes) -> None:
        self.sets += 1
        self.set_bytes += len(value)
        self.store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.gets += 1
        value = self.store.get(key)
        self.get_bytes += len(value)
        return value

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self.store.wait(keys, *timeout)


def connections() -> int:
    """Count the established TCP connections of this process (Linux)."""
    inodes = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            inodes.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and row[9] in inodes for row in rows)


def small_world(most_all_pairs: int | None) -> Row:
    """A task: form a world and a second group of all ranks, and use the world.

    ``most_all_pairs`` ranks is the largest group in which composer3d connects all pairs; with None,
    gloo connects all pairs by itself.
    """
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(most_all_pairs is not None))
    if most_all_pairs is not None:
        process_group._MOST_RANKS_ALL_PAIRS = most_all_pairs
    store = Recording(process_group.open_store())
    of_store = connections()
    with process_group.world(torch.device("cpu"), timeout_s=60.0, store=store):
        dist.new_group(backend="gloo")
        dist.barrier()
        formed = connections() - of_store
        value = torch.zeros(4)
        dist.all_reduce(value)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        dist.broadcast(value, 0)
        dist.barrier()
        used = connections() - of_store
        row: Row = {"formed": formed, "used": used, "sets": store.sets, "gets": store.gets}
        row |= {"set bytes": store.set_bytes, "get bytes": store.get_bytes}
        dist.barrier()
    return row


def connected_peers(size: int, rank: int, most_all_pairs: int = MOST_ALL_PAIRS) -> int:
    """Return to how many ranks a rank is connected once the world of ``size`` is formed.

    See ``composer3d.runtime.process_group._connect``.
    """
    if size <= most_all_pairs or rank == 0:
        return size - 1
    distances = [sign * 2**k for k in range((size - 1).bit_length()) for sign in (1, -1)]
    return len({(rank + distance) % size for distance in distances} | {0})


def check_small_worlds() -> list[str]:
    """Compare worlds of processes with what the table assumes of gloo. Returns the differences."""
    problems = []
    with Pool() as pool:
        for size in (2, 4, 8):
            # All pairs by gloo itself, all pairs by composer3d, and as composer3d connects more
            # ranks than these.
            for most_all_pairs in (None, MOST_ALL_PAIRS, 1):
                rows = pool.run(small_world, {"most_all_pairs": most_all_pairs}, world_size=size)
                where = f"{size} ranks, most_all_pairs {most_all_pairs}"
                found: dict[str, float] = {}
                expected: dict[str, float] = {}
                for rank, row in enumerate(rows):
                    if most_all_pairs is None:
                        peers, gets = 2 * (size - 1), 2 * size
                    else:
                        peers = gets = connected_peers(size, rank, most_all_pairs)
                    for key, value in {"formed": peers, "used": peers, "gets": gets}.items():
                        found[f"rank {rank}: {key}"] = row[key]
                        expected[f"rank {rank}: {key}"] = value
                # In each group, each rank publishes its addresses. The last rank to arrive also
                # tells the others, with one byte.
                bytes_each = address_bytes(size if most_all_pairs is None else None)
                for key, each in {"sets": 2, "set bytes": 2 * bytes_each}.items():
                    found[f"all ranks: {key}"] = sum(row[key] for row in rows)
                    expected[f"all ranks: {key}"] = size * each + 1
                problems += [
                    f"{where}, {key} is {found[key]}, not {value}"
                    for key, value in expected.items()
                    if found[key] != value
                ]
    return problems


def address_bytes(size: int | None) -> int:
    """Return the bytes that a rank publishes for a group of ``size``; None: lazily connected."""
    return 154 + (0 if size is None else 8 * size)


# --- the table ---


def rows_of(counted: Mapping[str, Any]) -> dict[str, str]:
    """Return the lines of the table for one number of ranks."""
    size = counted["ranks"]
    calls, rank_0, other = counted["calls"], counted["rank_0_bytes"], counted["other_bytes"]
    rows = {"recipe": counted["recipe"]}
    for phase in ("start", "step", "save", "resume"):
        found = calls.get(phase, {})
        steps = 2 if phase == "step" else 1
        rows[f"{phase}: collectives over all ranks"] = ", ".join(
            f"{number // steps} {operation}" for operation, number in sorted(found.items())
        )
        rows[f"{phase}: rank 0 receives"] = show_bytes(rank_0.get(phase, 0) / steps)
        rows[f"{phase}: another rank receives"] = show_bytes(other.get(phase, 0) / steps)
    keys, peers = counted["keys in groups"], counted["peers in groups"]
    rows["process groups of a rank"] = f"{counted['groups of a rank']:,.0f}"
    rows["process groups that a rank names"] = f"{counted['group calls']:,.0f}"
    rows["gloo: connections of a rank, all pairs"] = f"{peers:,.0f}"
    eager = size * (154 * keys + 8 * counted["squares of groups"])
    rows["gloo: bytes from the store, all pairs, all ranks"] = show_bytes(eager)
    connected = [connected_peers(size, rank) for rank in range(size)]
    rows["gloo: connections of a rank for collectives over all ranks"] = f"{max(connected[1:])}"
    rows["gloo: the same, of rank 0"] = f"{connected[0]:,}"
    rows["gloo: bytes from the store, as connected, all ranks"] = show_bytes(
        address_bytes(None) * sum(connected)
    )
    rows["store: requests to meet, rank 0"] = f"{counted['requests to meet, rank 0']:,.0f}"
    rows["store: requests to meet, another rank"] = f"{counted['requests to meet, other']:,.0f}"
    parts = counted["parts"]
    rows["checkpoint: files"] = f"{size + 2:,}"
    rows["checkpoint: parts of tensors"] = f"{parts:,}"
    rows["checkpoint: .metadata"] = show_bytes(parts * counted["metadata bytes a part"])
    rows["checkpoint: manifest.json"] = show_bytes(size * counted["manifest bytes a file"])
    rows["checkpoint: parsing .metadata, processor seconds"] = (
        f"{parts * counted['seconds a part']:,.1f}"
    )
    rows["checkpoint: parsing .metadata, host memory"] = show_bytes(
        parts * counted["memory a part"]
    )
    rows["checkpoint: .metadata as rank 0 sends it"] = show_bytes(
        parts * counted["packed bytes a part"]
    )
    rows["data: host memory of the order, a rank"] = show_bytes(counted["order bytes"])
    rows["data: token files that a start reads, a node"] = show_bytes(counted["token bytes a node"])
    return rows


def show_bytes(number: float) -> str:
    """Return a number of bytes in a unit that people read."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if number < 1000:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} PB"


def main() -> int:
    """Print the table. Return 1 if the small worlds differ from what it assumes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", default="8,1024,16384", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="only check the small worlds")
    parser.add_argument("--one", nargs=2, metavar=("RANKS", "RECIPE"), help=argparse.SUPPRESS)
    parser.add_argument("--last-stage", metavar="RECIPE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(count(int(arguments.one[0]), arguments.one[1])))
        return 0
    if arguments.last_stage:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(last_stage(narrow(arguments.last_stage, Path(folder)))))
        return 0

    columns = []
    for text in [] if arguments.check else arguments.ranks.split(","):
        size = int(text)
        if size not in RECIPES:
            raise SystemExit(f"--ranks {size}: there are recipes for {sorted(RECIPES)}")
        columns.append(json.loads(_run_self("--one", text, RECIPES[size])))
    if columns:
        print_table(columns, as_json=arguments.json)
    problems = check_small_worlds()
    for line in problems:
        print(line, file=sys.stderr)
    if not problems and not arguments.json:
        print("worlds of 2, 4 and 8 processes have the connections and requests assumed of gloo")
    return 1 if problems else 0


def print_table(columns: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print a table with a column for each number of ranks, or a JSON object."""
    if as_json:
        print(json.dumps({"sizes": list(columns)}))
        return
    shown = [rows_of(column) for column in columns]
    print("| ranks | " + " | ".join(f"{column['ranks']:,}" for column in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in shown[-1]:
        print(f"| {name} | " + " | ".join(rows.get(name, "") for rows in shown) + " |")


if __name__ == "__main__":
    sys.exit(main())
