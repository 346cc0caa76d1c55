"""The covering matrix: the layouts that ``bash tools/prove/run matrix`` proves in float64.

Features and axes are the columns of one table. The layouts hold, as far as it is legal:

- every schedule with every ``zero`` and every mode of checkpointing;
- every two values of any two columns;
- every value of the columns in ``WITH_PAIRS``, such as every schedule, with every two values of the
  pairs of columns that stand there.

A proof runs a recipe that is made small. Where that takes a value away, the proof with an earlier
value of its column is the same, and the layout counts as one with the earlier value (``as_run``).

They are found greedily, cheap ones first. A search keeps the layouts that ``matrix.txt`` has, and
adds those that are missing; the same file always gets the same ones. Two values that no legal
layout holds must be refused with a message, and are listed with it.

The source of batches is no column: every proof takes its first and third batch from a small corpus,
through the loader of training, and its second from random numbers (``verify.worker``).
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

from composer3d.facts.ranges import Column
from composer3d.facts.schedules import (
    SCHEDULES,
    fewest_micro_batches,
    micro_batch_requirement,
)
from composer3d.planner import layouts
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import FIELDS, Entries, as_toml, entries_of_recipe, variant
from composer3d.verify.shrink import shrink
from tools.prove.paths import MATRIX, RECIPE

LIMIT = 16  # processes
STEPS = 3  # of a proof: two with batches of a corpus, and one with a random batch between them


class ScheduleFile(NamedTuple):
    """A schedule in a CSV file, and the number of stages of each of its ranks."""

    path: str
    stages_per_rank: int


# By the value of the column "micro-batches".
CSV = {
    "least": ScheduleFile("recipes/zb-h1-2x4.csv", 1),
    "more": ScheduleFile("tools/prove/v-2x4.csv", 2),
}

# The rows of keys that have a column of their own: its name and its values.
_KEYS: dict[str, Column] = {
    key: entry.metadata["column"]
    for key, entry in FIELDS.items()
    if entry.metadata["column"] is not None
}
_OF_KEYS = {column.name: tuple(column.values) for column in _KEYS.values()}


def _columns(*columns: str | tuple[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the values by column. A name alone is the column of a key.

    The columns of keys that are not named follow the others.
    """
    found = {}
    for column in columns:
        name, values = (column, _OF_KEYS[column]) if isinstance(column, str) else column
        found[name] = values
    return found | {name: values for name, values in _OF_KEYS.items() if name not in found}


# A row has the first value of a column if the column does not matter to it. The order is that of
# ``matrix.txt``.
COLUMNS = _columns(
    ("schedule", ("none", *SCHEDULES)),
    "zero",
    "checkpoint",
    ("pp", ("1", "2", "4")),
    ("data", ("1", "shard 2", "replicate 2", "HSDP 2 x 2")),
    ("cp", ("1", "2", "3")),
    "cp method",
    "cp balance",
    ("tp", ("1", "2", "4")),
    "sequence",
    "loss",
    ("kv heads", ("4 of 8", "1", "2", "8")),
    ("vocabulary", ("256", "257")),
    ("layers", ("even", "uneven")),
    "tied",
    "packing",
    ("window", ("none", "20 of 48", "20 of 48, but every second block")),
    ("norms", ("plain", "head norms and biases")),
    ("rate", ("cosine", "warmup, linear", "warmup, wsd", "constant")),
    ("micro-batches", ("least", "more")),
    "micro-batch",
    "chunks",
    "mixed",
    "offload",
    "compile",
    "unit",
    ("ep", ("none", "1", "2", "4", "8")),  # "none": a model without experts
    ("router", ("softmax", "softmax, not renormalised", "sigmoid with bias and groups")),
    ("shared", ("no", "yes")),
    ("auxiliary", ("none", "balance and z")),
    ("dense layers", ("none", "first", "every other")),
    # With experts, "Llama" is a Mixtral. A Phi-3 is a Llama but for its files.
    (
        "model",
        ("Llama", "OLMo 2", "Granite 3", "Gemma 3", "gpt-oss", "DeepSeek-V3", "GLM-4.5"),
    ),
    ("positions", ("rotary", "not in every second block", "YaRN")),
    ("further tokens", ("none", "1", "2")),  # the depths of multi-token prediction
)
# The columns that describe experts. Without experts, all of them have their first value.
EXPERTS = ("ep", "router", "shared", "auxiliary", "dense layers")
NO_EXPERTS: "Target" = tuple((column, COLUMNS[column][0]) for column in EXPERTS)
# All combinations of the values of these columns are proven.
ALWAYS = ("schedule", "zero", "checkpoint")


class Pairs(NamedTuple):
    """Pairs of columns: all their values are proven with each of ``values`` of ``column``."""

    column: str
    values: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]


_OF_SCHEDULES = (
    *("data", "cp", "cp method", "tp", "sequence", "kv heads", "vocabulary", "layers", "tied"),
    *("packing", "norms", "micro-batches", "micro-batch", "pp"),
)
OF_EXPERTS = (
    ("schedule", "zero"),
    ("schedule", "checkpoint"),
    *combinations(("pp", "data", "cp", "tp"), 2),
)
# What cuts a matrix, or decides where it is: Muon brings its parts together.
_OF_MATRICES = (
    *("schedule", "zero", "pp", "data", "cp", "tp", "kv heads", "vocabulary", "tied", "offload"),
    *("unit", "ep", "groups"),
)
WITH_PAIRS = (
    Pairs("schedule", COLUMNS["schedule"][1:], tuple(combinations(_OF_SCHEDULES, 2))),
    # Those of ep 8 need 8 or 16 processes: each value of every column is proven with it, as with
    # each value of any column.
    Pairs("ep", ("1", "2", "4"), OF_EXPERTS),
    Pairs("optimizer", ("muon",), tuple(combinations(_OF_MATRICES, 2))),
)
# Rows with a target that a search draws, and whose proofs it makes, before it gives up.
_MOST_TRIES = 50
# ep over ranks of every other axis at once, on 16 processes.
ALL_AXES: "Target" = (("pp", "2"), ("data", "shard 2"), ("cp", "2"), ("tp", "2"), ("ep", "2"))

HEADER = (
    "# Made by `bash tools/prove/run matrix --find`; docs/matrix.md lists what each layout proves."
)

# A value for every column.
Row = dict[str, str]
# Columns with values that a row must hold together.
Target = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Cover:
    """The layouts to prove, and the refused targets, each with a row that shows why."""

    rows: tuple[Row, ...]
    refused: tuple[tuple[Target, Row], ...]


def overrides(row: Row) -> dict[str, Any]:
    """The keys and values that turn ``tools/prove/verify.toml`` into ``row``."""
    shard, replicate = DATA[row["data"]]
    out: dict[str, Any] = {
        key: column.values[row[column.name]]
        for key, column in _KEYS.items()
        if column.values[row[column.name]] is not None
    }
    out |= {
        "mesh.pp": int(row["pp"]),
        "mesh.dp_replicate": replicate,
        "mesh.dp_shard": shard,
        "mesh.cp": int(row["cp"]),
        "mesh.tp": int(row["tp"]),
        "model.n_kv_heads": int(row["kv heads"].split()[0]),
        "model.vocab": int(row["vocabulary"]),
        "model.n_layers": _layers(row),
        "data.seq_len": 48,
        "data.global_batch": int(row["micro-batch"]) * micro_batches(row) * shard * replicate,
    }
    if row["rate"] != "cosine":
        out |= RATES[row["rate"]]
    if row["schedule"] != "none":
        out["parallel.schedule"] = row["schedule"]
    if row["schedule"] == "csv":
        schedule_file = CSV[row["micro-batches"]]
        out["parallel.schedule_csv"] = schedule_file.path
        out["parallel.virtual_stages"] = schedule_file.stages_per_rank
    out |= _model(row)
    if has_experts(row):
        # This width fits all layouts: cp 3 shards experts over 3 ranks or more.
        out |= {"mesh.ep": int(row["ep"]), "model.dim": 96}
    return out | {key: value for key, value in _model_settings(row) if key in _keys_of(row)}


def _layers(row: Row) -> int:
    """The number of layers: with units of two blocks, a stage has at least three."""
    least = max(2, stages_of(row)) if row["unit"] == "1 block" else 3 * stages_of(row)
    return least + (row["layers"] == "uneven")


def _model(row: Row) -> dict[str, Any]:
    """The keys of ``MODELS`` for a row that makes sense."""
    return MODELS[row["model"], has_experts(row)]


def _model_settings(row: Row) -> Iterator[tuple[str, Any]]:
    """Yield the keys of ``[model]`` that columns set, also those that the architecture lacks."""
    for column, settings in MODEL_COLUMNS.items():
        yield from settings[row[column]].items()


def _keys_of(row: Row) -> Entries:
    """The keys that a recipe with the architecture of ``row`` has."""
    return entries_of_recipe(_base(row["model"], has_experts(row)))


def sets(row: Row) -> list[str]:
    """The overrides of a row as ``--set`` takes them."""
    return [
        f"{key}={value if isinstance(value, str) else as_toml(value)}"
        for key, value in overrides(row).items()
    ]


# ``verify.data.shorten_run`` fits these to the few steps of a proof.
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
# The keys of a model by its name, and by whether it has experts. The recipe has a Llama.
MODELS: dict[tuple[str, bool], dict[str, Any]] = {
    ("Llama", False): {},
    ("Llama", True): {
        "model.architecture": "moe",
        "model.preset": "debug-moe",
        "model.ffn": 160,
        "model.expert_ffn": 48,
    },
    ("OLMo 2", False): {"model.architecture": "olmo2", "model.preset": "debug-olmo2"},
    ("Granite 3", False): {"model.architecture": "granite", "model.preset": "debug-granite"},
    ("Gemma 3", False): {"model.architecture": "gemma3", "model.preset": "debug-gemma3"},
    ("gpt-oss", True): {"model.architecture": "gpt_oss", "model.preset": "debug-gpt-oss"},
    ("DeepSeek-V3", True): {
        "model.architecture": "deepseek",
        "model.preset": "debug-deepseek",
        "model.n_kv_heads": 8,  # each head has keys and values of its own
    },
    ("GLM-4.5", True): {"model.architecture": "glm", "model.preset": "debug-glm"},
}
_SOFTMAX = {
    "model.router": "softmax",
    "model.renormalise": True,
    "model.router_scale": 1.0,
    "model.router_bias": False,
    "model.expert_groups": 1,
    "model.groups_per_token": 1,
}
# The keys of [model] that a column sets, by its value. An architecture may lack those of the first
# value, and then cannot have another one.
MODEL_COLUMNS: dict[str, dict[str, dict[str, Any]]] = {
    "norms": {
        "plain": {"model.qk_norm": False, "model.qkv_bias": False},
        "head norms and biases": {"model.qk_norm": True, "model.qkv_bias": True},
    },
    "window": {
        "none": {"model.window": 0, "model.full_every": 0},
        "20 of 48": {"model.window": 20, "model.full_every": 0},
        "20 of 48, but every second block": {"model.window": 20, "model.full_every": 2},
    },
    "positions": {
        "rotary": {},
        "not in every second block": {"model.nope_every": 2},
        "YaRN": {"model.rope_scaling": "yarn", "model.rope_factor": 4.0, "model.rope_context": 24},
    },
    "further tokens": {
        "none": {},
        "1": {"model.mtp_layers": 1, "model.mtp_loss": 0.3},
        "2": {"model.mtp_layers": 2, "model.mtp_loss": 0.3},
    },
    "router": {
        "softmax": _SOFTMAX,
        "softmax, not renormalised": _SOFTMAX | {"model.renormalise": False},
        "sigmoid with bias and groups": {
            "model.router": "sigmoid",
            "model.router_scale": 2.5,
            "model.router_bias": True,
            "model.expert_groups": 4,
            "model.groups_per_token": 2,
        },
    },
    "shared": {"no": {"model.shared_ffn": 0}, "yes": {"model.shared_ffn": 40}},
    "auxiliary": {
        "none": {"model.balance_loss": 0.0, "model.z_loss": 0.0},
        "balance and z": {"model.balance_loss": 0.5, "model.z_loss": 0.05},
    },
    "dense layers": {
        "none": {"model.dense_layers": 0, "model.moe_every": 1},
        "first": {"model.dense_layers": 1, "model.moe_every": 1},
        "every other": {"model.dense_layers": 0, "model.moe_every": 2},
    },
}
# (dp_shard, dp_replicate) by value of the column "data".
DATA = {"1": (1, 1), "shard 2": (2, 1), "replicate 2": (1, 2), "HSDP 2 x 2": (2, 2)}


def stages_of(row: Row) -> int:
    """The number of pipeline stages."""
    if row["pp"] == "1" or row["schedule"] == "none":
        return 1
    if row["schedule"] == "csv":
        stages_per_rank = CSV[row["micro-batches"]].stages_per_rank
    else:
        stages_per_rank = SCHEDULES[row["schedule"]].stages.default_per_rank
    return int(row["pp"]) * stages_per_rank


def micro_batches(row: Row) -> int:
    """The fewest micro-batches that the schedule accepts, or a larger number that it accepts.

    With pp there are at least two.
    """
    if row["schedule"] == "csv":
        return 4
    name, pp = row["schedule"], int(row["pp"])
    if pp == 1:
        return 1 if row["micro-batches"] == "least" else 2
    fewest = fewest_micro_batches(name, pp)
    if row["micro-batches"] == "least":
        return fewest
    return next(
        count
        for count in range(fewest + 2, 4 * pp)
        if micro_batch_requirement(name, count, pp, "") is None
    )


def world(row: Row) -> int:
    """The number of processes."""
    shard, replicate = DATA[row["data"]]
    return int(row["pp"]) * shard * replicate * int(row["cp"]) * int(row["tp"])


def has_experts(row: Row) -> bool:
    return row["ep"] != "none"


def expert_shards(row: Row) -> int:
    """The number of ranks that shard each expert; 1 without experts."""
    return _ranks_of_experts(row) // int(row["ep"]) if has_experts(row) else 1


def _ranks_of_experts(row: Row) -> int:
    """The number of ranks that ep groups: dp_shard x cp x tp."""
    return DATA[row["data"]][0] * int(row["cp"]) * int(row["tp"])


def zero_matters(row: Row) -> bool:
    """Whether FSDP shards or replicates parameters, or gathers them for another reason."""
    if row["data"] != "1" or row["cp"] != "1" or expert_shards(row) > 1:
        return True
    return row["schedule"] == "none" and "yes" in (row["mixed"], row["offload"])


def makes_sense(row: Row) -> bool:
    """Whether every value of ``row`` changes what is run, or is the first of its column."""
    has_pp, has_cp, has_tp = row["pp"] != "1", row["cp"] != "1", row["tp"] != "1"
    if (row["schedule"] != "none") != has_pp or world(row) > LIMIT:
        return False
    if has_experts(row):
        if _ranks_of_experts(row) % int(row["ep"]):
            return False
    elif any(row[column] != value for column, value in NO_EXPERTS):
        return False
    if not _suits_model(row):
        return False
    if not zero_matters(row) and (row["zero"], row["unit"]) != ("3", "1 block"):
        return False
    if not has_tp and (row["sequence"], row["loss"]) != ("parallel", "parallel"):
        return False
    if not has_cp and (row["cp method"], row["cp balance"]) != ("ring", "zigzag"):
        return False
    if row["layers"] == "uneven" and not has_pp:
        return False
    if row["schedule"] == "csv" and row["pp"] != "2":
        return False
    # Every rank compiles: more of them take minutes. ep 8 needs eight.
    if row["compile"] == "yes" and world(row) > (8 if row["ep"] == "8" else 4):
        return False
    # With one micro-batch, zero 2 is zero 1.
    return not (row["zero"] == "2" and not has_pp and row["micro-batches"] == "least")


def _suits_model(row: Row) -> bool:
    """Whether the model of ``row`` exists, and has what the columns say of it."""
    if (row["model"], has_experts(row)) not in MODELS:
        return False
    if row["model"] == "DeepSeek-V3" and row["kv heads"] != "8":
        return False
    return not any(_lacks(row, column) for column in MODEL_COLUMNS)


def _lacks(row: Row, column: str) -> bool:
    """Whether the architecture of ``row`` lacks a key that its value of a model column sets."""
    value = row[column]
    if value == COLUMNS[column][0]:
        return False
    return any(key not in _keys_of(row) for key in MODEL_COLUMNS[column][value])


@cache
def _base(model: str, has_experts: bool) -> Recipe:
    sets = [f"{key}={value}" for key, value in MODELS[model, has_experts].items()]
    return load(RECIPE, sets, check_files=False).recipe


def recipe_of(row: Row) -> Recipe:
    """The recipe that ``load`` makes with ``sets(row)``, legal or not, a hundred times faster."""
    return variant(_base(row["model"], has_experts(row)), overrides(row))


def is_legal(row: Row) -> bool:
    """Whether the enumerator of layouts, which judges by the rules of recipes, accepts the row."""
    return layouts.is_legal(recipe_of(row))


def as_run(row: Row) -> Row:
    """The row with the values that its proof runs.

    Where the proof with an earlier value of a column is the same, the row gets that value.
    """
    proof = shrink(recipe_of(row))
    for column, values in COLUMNS.items():
        for earlier in values[: values.index(row[column])]:
            other = row | {column: earlier}
            if makes_sense(other) and is_legal(other) and shrink(recipe_of(other)) == proof:
                row = other
                break
    return row


def targets() -> list[Target]:
    """All cells that rows must hold together, if it is legal."""
    combined = product(*([(column, value) for value in COLUMNS[column]] for column in ALWAYS))
    # The combinations with pp, which refuses zero 2.
    out = [cells for cells in combined if cells[0][1] != "none" and cells[1][1] != "2"]
    for a, b in combinations(COLUMNS, 2):
        out += [((a, x), (b, y)) for x, y in product(COLUMNS[a], COLUMNS[b])]
    for pairs in WITH_PAIRS:
        for a, b in pairs.columns:
            cells = product(pairs.values, COLUMNS[a], COLUMNS[b])
            out += [((pairs.column, value), (a, x), (b, y)) for value, x, y in cells]
    return [*out, ALL_AXES]


def held_targets(row: Row, wanted: set[Target]) -> set[Target]:
    """The targets among ``wanted`` that the row holds."""
    return {target for target in _all_targets(row) if target in wanted}


def _holds(row: Row, target: Target) -> bool:
    return all(row[column] == value for column, value in target)


def _all_targets(row: Row) -> Iterator[Target]:
    yield tuple((column, row[column]) for column in ALWAYS)
    items = list(row.items())
    yield from combinations(items, 2)
    for pairs in WITH_PAIRS:
        for a, b in pairs.columns:
            yield (pairs.column, row[pairs.column]), (a, row[a]), (b, row[b])
    yield tuple((column, row[column]) for column, _ in ALL_AXES)


def cost(row: Row) -> float:
    """The rough time of a proof on two cores, in seconds."""
    stages = max(stages_of(row), 2) / int(row["pp"])
    compiling = 10.0 * world(row) if row["compile"] == "yes" else 0.0
    return 1.0 + world(row) * (0.35 + 0.02 * micro_batches(row) * stages) + compiling


def complete(fixed: Target, generator: random.Random) -> Row | None:
    """Draw a row that holds ``fixed``; None if the drawn row is not legal or makes no sense."""
    fixed_values = dict(fixed)
    row = {
        column: fixed_values.get(column) or generator.choice(values)
        for column, values in COLUMNS.items()
    }
    # Draw seldom what is slow, or goes together with little.
    for column in ("window", "positions", "mixed", "offload", "compile", "unit"):
        if column not in fixed_values and generator.random() < 0.6:
            row[column] = COLUMNS[column][0]
    if "pp" not in fixed_values:
        row["pp"] = "1" if row["schedule"] == "none" else generator.choice(("2", "2", "2", "4"))
    if "cp" not in fixed_values and ("cp method" in fixed_values or "cp balance" in fixed_values):
        row["cp"] = generator.choice(("2", "3"))
    for column in ("cp method", "cp balance"):
        if row["cp"] == "1" and column not in fixed_values:
            row[column] = COLUMNS[column][0]
    if "schedule" not in fixed_values and row["pp"] == "1":
        row["schedule"] = "none"
    _draw_experts(row, fixed_values, generator)
    _draw_model(row, fixed_values, generator)
    return row if makes_sense(row) and is_legal(row) else None


def _draw_experts(row: Row, fixed_values: Row, generator: random.Random) -> None:
    """Decide whether a drawn row has experts, and change what does not fit to that."""
    can_have = {has for model, has in MODELS if fixed_values.get("model", model) == model}
    if "ep" not in fixed_values:
        needs_experts = any(
            fixed_values.get(column, value) != value for column, value in NO_EXPERTS
        )
        if needs_experts or can_have == {True}:
            row["ep"] = generator.choice(COLUMNS["ep"][1:])
        elif can_have == {False} or generator.random() < 0.6:
            row["ep"] = "none"
    if not has_experts(row):
        unfit = EXPERTS
    elif row["tp"] == "1":
        unfit = ("sequence", "loss")
    else:
        unfit = ("sequence",)
    for column in unfit:
        if column not in fixed_values:
            row[column] = COLUMNS[column][0]


def _draw_model(row: Row, fixed_values: Row, generator: random.Random) -> None:
    """Draw a model, a Llama more often than not, and change what it does not have."""
    if "model" not in fixed_values:
        models = [model for model, has in MODELS if has == has_experts(row)]
        row["model"] = generator.choice(models) if generator.random() < 0.4 else "Llama"
    if (row["model"], has_experts(row)) not in MODELS:
        return
    if row["model"] == "DeepSeek-V3" and "kv heads" not in fixed_values:
        row["kv heads"] = "8"
    for column in MODEL_COLUMNS:
        if column not in fixed_values and _lacks(row, column):
            row[column] = COLUMNS[column][0]


def _draw(target: Target, generator: random.Random, tries: int) -> list[Row]:
    """The legal rows among ``tries`` drawn ones."""
    rows = [complete(target, generator) for _ in range(tries)]
    return [row for row in rows if row is not None]


def cover(kept: Iterable[Row] = ()) -> Cover:
    """Find the matrix. The result depends on ``kept`` alone.

    Args:
        kept: the first rows of the matrix, which get the values that their proofs run. Those that
            make no sense, or are not legal, are left out. The rows that are found follow, cheap
            ones first.
    """
    generator, order = random.Random(3), targets()
    missing, found, impossible = set(order), [], []
    first_rows = [as_run(row) for row in kept if makes_sense(row) and is_legal(row)]
    for row in first_rows:
        missing -= held_targets(row, missing)

    for target in order:
        if target not in missing:
            continue
        candidates = _draw(target, generator, 300) or _draw(target, generator, 1500)
        candidates.sort(
            key=lambda row: len(held_targets(row, missing)) / cost(row) ** 0.7, reverse=True
        )
        best = next(
            (row for row in map(as_run, candidates[:_MOST_TRIES]) if _holds(row, target)), None
        )
        if best is None:
            impossible.append(target)
            missing.discard(target)
            continue
        found.append(best)
        missing -= held_targets(best, missing)
    rows = [*first_rows, *sorted(_drop_superfluous(found, first_rows), key=cost)]

    refused = []
    for target in impossible:
        row = _find_refused(target)
        if row is not None:
            refused.append((target, row))
    # A refused pair explains every refused triple that holds it.
    pairs = [set(target) for target, _ in refused if len(target) == 2]
    unexplained = [
        (target, row)
        for target, row in refused
        if len(target) == 2 or not any(pair < set(target) for pair in pairs)
    ]
    return Cover(tuple(rows), tuple(unexplained))


def _drop_superfluous(found: list[Row], kept: list[Row]) -> list[Row]:
    """Leave out the found rows, expensive ones first, whose targets other rows hold too."""
    wanted = set(targets())
    holders = Counter(target for row in (*kept, *found) for target in held_targets(row, wanted))
    needed = []
    for row in sorted(found, key=cost, reverse=True):
        held = held_targets(row, wanted)
        if all(holders[target] > 1 for target in held):
            holders.subtract(held)
        else:
            needed.append(row)
    return needed


def _find_refused(target: Target) -> Row | None:
    """Find a row that holds ``target``, makes sense and is refused.

    As few values as possible differ from the first of their columns. None if the first row that
    makes sense is legal, or none does.
    """
    fixed = dict(target)
    free = [column for column in COLUMNS if column not in fixed]
    plain = {column: fixed.get(column, values[0]) for column, values in COLUMNS.items()}
    candidates = [plain]
    candidates += [plain | {column: value} for column in free for value in COLUMNS[column][1:]]
    for a, b in combinations(free, 2):
        values = product(COLUMNS[a][1:], COLUMNS[b][1:])
        candidates += [plain | {a: x, b: y} for x, y in values]
    for row in candidates:
        if makes_sense(row):
            return row if not is_legal(row) else None
    return None


def context() -> list[Row]:
    """All legal rows of context parallelism on 2 to 8 ranks, with each mask and head grouping."""
    columns: dict[str, tuple[str, ...]] = {"cp": ("2", "3", "4", "8")}
    for column in ("cp method", "cp balance", "kv heads", "packing", "window"):
        columns[column] = COLUMNS[column]
    plain = {column: values[0] for column, values in COLUMNS.items()}
    rows = [
        plain | dict(zip(columns, values, strict=True)) for values in product(*columns.values())
    ]
    return [row for row in rows if is_legal(row)]


def slice_of(rows: Iterable[Row], budget: float = 50.0) -> list[Row]:
    """The fixed slice that the tests prove.

    It holds values with each schedule, in ``budget`` seconds, and a cheap row of each ep.
    """
    by_cost = sorted(rows, key=cost)
    return [
        *_values_slice([row for row in by_cost if not has_experts(row)], budget),
        *_experts_slice([row for row in by_cost if has_experts(row)]),
    ]


def _values_slice(candidates: list[Row], budget: float) -> list[Row]:
    """Rows that together hold as many values with each schedule as ``budget`` seconds allow."""
    missing = {pair for row in candidates for pair in _values_with_schedule(row)}
    chosen: list[Row] = []
    while missing and sum(map(cost, chosen)) < budget:
        best = max(
            candidates, key=lambda row: len(missing & _values_with_schedule(row)) / cost(row)
        )
        chosen.append(best)
        missing -= _values_with_schedule(best)
    return chosen


def _experts_slice(candidates: list[Row]) -> list[Row]:
    """A row of each ep; together they hold many values of the columns of experts."""
    missing = {cell for row in candidates for cell in _cells_of_experts(row)}
    chosen: list[Row] = []
    for ep in COLUMNS["ep"][1:]:
        best = max(
            (row for row in candidates if row["ep"] == ep),
            key=lambda row: len(missing & _cells_of_experts(row)) / cost(row),
            default=None,
        )
        if best is not None:
            chosen.append(best)
            missing -= _cells_of_experts(best)
    return chosen


def _cells_of_experts(row: Row) -> set[tuple[str, str]]:
    return {(column, row[column]) for column, value in NO_EXPERTS if row[column] != value}


def _values_with_schedule(row: Row) -> set[tuple[str, tuple[str, str]]]:
    return {(row["schedule"], cell) for cell in row.items()}


def to_text(matrix: Cover) -> str:
    """Write a line for each layout: the values that are not the first of their columns.

    The lines of refused layouts end with the cells that cannot go together.
    """
    lines = [HEADER]
    lines += [line_of(row) for row in matrix.rows]
    lines += [f"{line_of(row)} ! {line_of(dict(target))}" for target, row in matrix.refused]
    return "\n".join(lines) + "\n"


def line_of(cells: Row) -> str:
    """The cells of a row that are not the first of their columns, or all cells of a target."""
    is_row = len(cells) == len(COLUMNS)
    shown = [
        f"{column}: {value}"
        for column, value in cells.items()
        if not is_row or value != COLUMNS[column][0]
    ]
    return "; ".join(shown) or "-"


def from_text(text: str) -> Cover:
    """Read what ``to_text`` has written."""
    rows: list[Row] = []
    refused: list[tuple[Target, Row]] = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        row_text, _, target_text = line.partition(" ! ")
        cells = dict(_cells_of(row_text))
        row = {column: cells.get(column, values[0]) for column, values in COLUMNS.items()}
        if target_text:
            refused.append((_cells_of(target_text), row))
        else:
            rows.append(row)
    return Cover(tuple(rows), tuple(refused))


def _cells_of(line: str) -> Target:
    cells = []
    for cell in line.split("; ") if line != "-" else ():
        column, value = cell.split(": ")
        cells.append((column, value))
    return tuple(cells)


def read() -> Cover:
    """Read the matrix that is in the repository."""
    return from_text(MATRIX.read_text())


def uncovered(matrix: Cover) -> Iterator[Target]:
    """Yield the targets that the matrix lacks.

    No row holds them and no refusal explains them, but a legal row that holds them is easily
    drawn.
    """
    missing = set(targets())
    for row in matrix.rows:
        missing -= held_targets(row, missing)
    refused = [set(target) for target, _ in matrix.refused]
    missing = {target for target in missing if not any(cells <= set(target) for cells in refused)}
    generator = random.Random(5)
    for target in sorted(missing):
        drawn = (complete(target, generator) for _ in range(20))
        if any(row is not None and _holds(as_run(row), target) for row in drawn):
            yield target
