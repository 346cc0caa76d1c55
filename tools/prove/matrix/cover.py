"""The covering matrix: ``bash tools/matrix`` proves every layout of it in float64 and writes ``tests/matrix.md``.

Features and axes are the columns of one table. The layouts that are proven hold, as far as they are legal, every
schedule with every ``zero`` and every mode of checkpointing; every two values of any two columns; and every schedule
with every two values of two further columns. They are found greedily, cheap ones first, always the same. Two values
that no legal layout holds must be refused with a message, and are listed with it.

Where batches come from is no column: every proof takes its first and third from a small corpus, through the loader that
training has, and its second from random numbers (``verify_worker``).
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any

from composer3d.recipe.resolve import load
from composer3d.recipe.rules import violations
from composer3d.recipe.schema import Recipe
from composer3d.spec.schedules import SCHEDULES, micro_batch_requirement
from tools.prove.paths import MATRIX, RECIPE

LIMIT = 16  # processes
STEPS = 3  # of a proof: two of a corpus, a random one between them
CSV = {
    "least": ("recipes/zb-h1-2x4.csv", 1),
    "more": ("tools/prove/v-2x4.csv", 2),
}  # file, stages a rank

# The first value of a column is what it is where it does not matter.
COLUMNS: dict[str, tuple[str, ...]] = {
    "schedule": ("none", *SCHEDULES),
    "zero": ("3", "0", "1", "2"),
    "checkpoint": ("none", "full", "selective"),
    "pp": ("1", "2", "4"),
    "data": ("1", "shard 2", "replicate 2", "HSDP 2 x 2"),
    "cp": ("1", "2", "3"),
    "cp method": ("ring", "allgather", "ulysses"),
    "cp balance": ("zigzag", "contiguous"),
    "tp": ("1", "2", "4"),
    "sequence": ("parallel", "whole"),
    "loss": ("parallel", "whole"),
    "kv heads": ("4 of 8", "1", "2", "8"),
    "vocabulary": ("256", "257"),
    "layers": ("even", "uneven"),
    "tied": ("no", "yes"),
    "packing": ("none", "documents"),
    "window": ("none", "20 of 48"),
    "norms": ("plain", "head norms and biases"),
    "rate": ("cosine", "warmup, linear", "warmup, wsd", "constant"),
    "micro-batches": ("least", "more"),
    "micro-batch": ("1", "2"),
    "chunks": ("1", "3"),
    "mixed": ("no", "yes"),
    "offload": ("no", "yes"),
    "compile": ("no", "yes"),
}
ALWAYS = ("schedule", "zero", "checkpoint")  # in full
WITH_SCHEDULE = (  # each two of them with each schedule
    *(
        "data",
        "cp",
        "cp method",
        "tp",
        "sequence",
        "kv heads",
        "vocabulary",
        "layers",
        "tied",
        "packing",
        "norms",
    ),
    *("micro-batches", "micro-batch", "pp"),
)
Row = dict[str, str]
Target = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Cover:
    """``rows``: the layouts to prove; ``refused``: what no layout holds, with a layout that shows why."""

    rows: tuple[Row, ...]
    refused: tuple[tuple[Target, Row], ...]


def overrides(row: Row) -> dict[str, Any]:
    """What makes ``row`` of ``tests/verify.toml``."""
    shard, replicate = DATA[row["data"]]
    out: dict[str, Any] = {
        "mesh.pp": int(row["pp"]),
        "mesh.dp_replicate": replicate,
        "mesh.dp_shard": shard,
        "mesh.cp": int(row["cp"]),
        "mesh.tp": int(row["tp"]),
        "parallel.cp_method": row["cp method"],
        "parallel.cp_balance": row["cp balance"],
        "parallel.zero": int(row["zero"]),
        "parallel.sequence_parallel": row["sequence"] == "parallel",
        "parallel.loss_parallel": row["loss"] == "parallel",
        "memory.activation_checkpoint": row["checkpoint"],
        "memory.loss_chunks": int(row["chunks"]),
        "memory.cpu_offload": row["offload"] == "yes",
        "compile.enabled": row["compile"] == "yes",
        "model.n_kv_heads": int(row["kv heads"].split()[0]),
        "model.vocab": int(row["vocabulary"]),
        "model.n_layers": max(2, stages_of(row)) + (row["layers"] == "uneven"),
        "model.tied": row["tied"] == "yes",
        "model.window": 0 if row["window"] == "none" else 20,
        "model.qk_norm": row["norms"] != "plain",
        "model.qkv_bias": row["norms"] != "plain",
        "data.packing": row["packing"],
        "data.seq_len": 48,
        "data.micro_batch": int(row["micro-batch"]),
        "data.global_batch": int(row["micro-batch"]) * micro_batches(row) * shard * replicate,
    }
    if row["rate"] != "cosine":
        out |= RATES[row["rate"]]
    if row["schedule"] != "none":
        out["parallel.schedule"] = row["schedule"]
    if row["schedule"] == "csv":
        out["parallel.schedule_csv"], out["parallel.virtual_stages"] = CSV[row["micro-batches"]]
    if row["mixed"] == "yes":
        out["precision.compute"] = "bfloat16"
    return out


def sets(row: Row) -> list[str]:
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in overrides(row).items()
    ]


# What a proof makes of these in few steps: ``verify_data.shorten``.
RATES: dict[str, dict[str, Any]] = {
    "warmup, linear": {"optim.schedule": "linear", "optim.warmup": 10},
    "warmup, wsd": {
        "optim.schedule": "wsd",
        "optim.warmup": 10,
        "optim.decay": 50,
        "optim.decay_steps": 10,
    },
    "constant": {"optim.schedule": "constant"},
}
DATA = {"1": (1, 1), "shard 2": (2, 1), "replicate 2": (1, 2), "HSDP 2 x 2": (2, 2)}


def stages_of(row: Row) -> int:
    if row["pp"] == "1" or row["schedule"] == "none":
        return 1
    each = (
        CSV[row["micro-batches"]][1]
        if row["schedule"] == "csv"
        else SCHEDULES[row["schedule"]].stages.default_per_rank
    )
    return int(row["pp"]) * each


def micro_batches(row: Row) -> int:
    """The fewest that the schedule takes, but at least two, or the next number that it takes."""
    if row["schedule"] == "csv":
        return 4
    name, pp = row["schedule"], int(row["pp"])
    start = 1 if name == "none" or pp == 1 else 2
    good = [
        n
        for n in range(start, 4 * pp + 4)
        if name == "none" or micro_batch_requirement(name, n, pp, "") is None
    ]
    return (
        good[0]
        if row["micro-batches"] == "least"
        else next(n for n in good if n > good[0] + (pp > 1))
    )


def world(row: Row) -> int:
    shard, replicate = DATA[row["data"]]
    return int(row["pp"]) * shard * replicate * int(row["cp"]) * int(row["tp"])


def sharded(row: Row) -> bool:
    return row["data"] != "1" or row["cp"] != "1" or "yes" in (row["mixed"], row["offload"])


def makes_sense(row: Row) -> bool:
    """Whether every value of ``row`` changes what is run, or is the first of its column."""
    return (
        (row["schedule"] == "none") == (row["pp"] == "1")
        and world(row) <= LIMIT
        and (sharded(row) or row["zero"] == "3")
        and (
            row["data"] != "1"
            or row["cp"] != "1"
            or row["schedule"] == "none"
            or row["zero"] == "3"
        )
        and (row["tp"] != "1" or (row["sequence"], row["loss"]) == ("parallel", "parallel"))
        and (row["cp"] != "1" or (row["cp method"], row["cp balance"]) == ("ring", "zigzag"))
        and (row["layers"] == "even" or row["pp"] != "1")
        and (row["schedule"] != "csv" or row["pp"] == "2")
        and (row["compile"] == "no" or world(row) <= 4)  # every rank compiles: minutes for more
        and (row["micro-batches"] == "more" or row["zero"] != "2" or row["pp"] != "1")
    )


@cache
def _base() -> Recipe:
    return load(RECIPE, check_files=False).recipe


def recipe_of(row: Row) -> Recipe:
    """As ``load`` makes it of ``sets(row)``, but a hundred times faster, and without a verdict on it."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in overrides(row).items():
        table, name = key.split(".")
        tables.setdefault(table, {})[name] = value
    return replace(
        _base(), **{table: replace(getattr(_base(), table), **new) for table, new in tables.items()}
    )


def is_legal(row: Row) -> bool:
    return not violations(recipe_of(row))


def targets() -> list[Target]:
    """What the rows must hold, if it is legal: in full, every two, and every two with each schedule."""
    full = product(*([(column, value) for value in COLUMNS[column]] for column in ALWAYS))
    out = [cells for cells in full if cells[0][1] != "none" and cells[1][1] != "2"]
    for a, b in combinations(COLUMNS, 2):
        out += [((a, x), (b, y)) for x, y in product(COLUMNS[a], COLUMNS[b])]
    for a, b in combinations(WITH_SCHEDULE, 2):
        cells = product(COLUMNS["schedule"][1:], COLUMNS[a], COLUMNS[b])
        out += [(("schedule", name), (a, x), (b, y)) for name, x, y in cells]
    return out


def held(row: Row, wanted: set[Target]) -> set[Target]:
    """Which of ``wanted`` the row holds."""
    return {cells for cells in _cells(row) if cells in wanted}


def _cells(row: Row) -> Iterator[Target]:
    yield tuple((column, row[column]) for column in ALWAYS)
    items = list(row.items())
    yield from combinations(items, 2)
    for a, b in combinations([(column, row[column]) for column in WITH_SCHEDULE], 2):
        yield ("schedule", row["schedule"]), a, b


def cost(row: Row) -> float:
    """What a proof takes, roughly, in seconds of two cores."""
    stages = max(stages_of(row), 2) / int(row["pp"])
    compiling = 10.0 * world(row) if row["compile"] == "yes" else 0.0
    return 1.0 + world(row) * (0.35 + 0.02 * micro_batches(row) * stages) + compiling


def complete(fixed: Target, generator: random.Random) -> Row | None:
    """A legal row that holds ``fixed``, its other values drawn; None where the draw is none."""
    given = dict(fixed)
    row = {
        column: given.get(column) or generator.choice(values) for column, values in COLUMNS.items()
    }
    for column, values in COLUMNS.items():  # what costs most, or goes with little, is drawn seldom
        if (
            column not in given
            and column in ("compile", "window", "offload", "mixed")
            and generator.random() < 0.6
        ):
            row[column] = values[0]
    if "pp" not in given:
        row["pp"] = "1" if row["schedule"] == "none" else generator.choice(("2", "2", "2", "4"))
    if "cp" not in given and ("cp method" in given or "cp balance" in given):
        row["cp"] = generator.choice(("2", "3"))
    for column in ("cp method", "cp balance"):
        if row["cp"] == "1" and column not in given:
            row[column] = COLUMNS[column][0]
    if "schedule" not in given and row["pp"] == "1":
        row["schedule"] = "none"
    return row if makes_sense(row) and is_legal(row) else None


@cache
def cover() -> Cover:
    """The matrix: deterministic."""
    generator, order = random.Random(3), targets()
    missing, rows, hopeless = set(order), [], []
    for target in order:
        if target not in missing:
            continue
        drawn = [row for _ in range(60) if (row := complete(target, generator)) is not None]
        if not drawn:
            drawn = [row for _ in range(1500) if (row := complete(target, generator)) is not None][
                :10
            ]
        if not drawn:
            hopeless.append(target)
            missing.discard(target)
            continue
        best = max(drawn, key=lambda row: len(held(row, missing)) / cost(row) ** 0.7)
        rows.append(best)
        missing -= held(best, missing)
    refused = [(target, row) for target in hopeless if (row := _why(target, generator)) is not None]
    # Two cells that are refused say all that three, of which they are two, could say.
    small = [set(target) for target, _ in refused if len(target) == 2]
    kept = [
        (t, row) for t, row in refused if len(t) == 2 or not any(pair < set(t) for pair in small)
    ]
    return Cover(tuple(rows), tuple(kept))


def _why(target: Target, generator: random.Random) -> Row | None:
    """A row that makes sense and is refused, with as few values that are not the first as can be; None: none does."""
    given = dict(target)
    free = [column for column in COLUMNS if column not in given]
    plain = {column: given.get(column, values[0]) for column, values in COLUMNS.items()}
    tries = [plain, *({**plain, column: value} for column in free for value in COLUMNS[column][1:])]
    for first, second in combinations(free, 2):
        tries += [
            {**plain, first: x, second: y}
            for x, y in product(COLUMNS[first][1:], COLUMNS[second][1:])
        ]
    for row in tries:
        if makes_sense(row):
            return row if not is_legal(row) else None
    return None


def context() -> list[Row]:
    """Every way of context parallelism with every mask and grouping of heads, on 2 to 8 ranks, as far as legal."""
    columns = {"cp": ("2", "3", "4", "8")}
    columns |= {
        column: COLUMNS[column]
        for column in ("cp method", "cp balance", "kv heads", "packing", "window")
    }
    plain = {column: values[0] for column, values in COLUMNS.items()}
    rows = [
        plain | dict(zip(columns, values, strict=True)) for values in product(*columns.values())
    ]
    return [row for row in rows if is_legal(row)]


def slice_of(rows: Iterable[Row], budget: float = 90.0) -> list[Row]:
    """A fixed part of the matrix for the test suite: each value with each schedule, as far as ``budget`` goes."""
    order = sorted(rows, key=cost)
    missing = {(row["schedule"], cell) for row in order for cell in row.items()}
    out: list[Row] = []
    while missing and sum(map(cost, out)) < budget:
        best = max(order, key=lambda row: len(missing & _seen(row)) / cost(row))
        out.append(best)
        missing -= _seen(best)
    return out


def _seen(row: Row) -> set[tuple[str, tuple[str, str]]]:
    return {(row["schedule"], cell) for cell in row.items()}


def to_text(matrix: Cover) -> str:
    """One line a layout: the values that are not the first of their columns. Refused ones end with what is at fault."""
    lines = ["# Made by tools/matrix.py --find; what each layout proves is in matrix.md."]
    lines += [line_of(row) for row in matrix.rows]
    return (
        "\n".join(
            [
                *lines,
                *(f"{line_of(row)} ! {line_of(dict(target))}" for target, row in matrix.refused),
            ]
        )
        + "\n"
    )


def line_of(cells: Row) -> str:
    return (
        "; ".join(
            f"{c}: {v}" for c, v in cells.items() if v != COLUMNS[c][0] or len(cells) < len(COLUMNS)
        )
        or "-"
    )


def from_text(text: str) -> Cover:
    rows: list[Row] = []
    refused: list[tuple[Target, Row]] = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        shown, _, fault = line.partition(" ! ")
        cells = dict(cell.split(": ") for cell in shown.split("; ") if cell != "-")
        row = {column: cells.get(column, values[0]) for column, values in COLUMNS.items()}
        if fault:
            refused.append(
                (tuple((c, v) for c, v in (cell.split(": ") for cell in fault.split("; "))), row)
            )
        else:
            rows.append(row)
    return Cover(tuple(rows), tuple(refused))


def read() -> Cover:
    return from_text(MATRIX.read_text())


def uncovered(matrix: Cover) -> list[Target]:
    """Targets that neither a row nor a refusal holds, though a legal row holding them is easily drawn."""
    wanted = set(targets())
    for row in matrix.rows:
        wanted -= held(row, wanted)
    generator = random.Random(5)
    wanted = {t for t in wanted if not any(set(fault) <= set(t) for fault, _ in matrix.refused)}
    return sorted(t for t in wanted if any(complete(t, generator) is not None for _ in range(20)))
