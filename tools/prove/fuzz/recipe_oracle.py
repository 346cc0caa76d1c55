"""Decides, without the resolver and the rules, whether an accepted recipe may be accepted.

The rows of the schema give the type and the bounds of each key, and ``tests/recipe/test_bounds.py``
has them a second time, written by hand. What several keys must satisfy is written by hand here. The
text is parsed with Python's own ``tomllib``, and the merge of bases and overrides is written again.
"""

import math
import tomllib
from dataclasses import Field, dataclass
from functools import cache
from math import lcm, prod
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from composer3d.models.registry import DEFAULT, OURS
from composer3d.recipe import schema
from composer3d.recipe.values import entries_of, type_of

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Number:
    """The numbers that a key accepts: from ``least`` to ``most``, both included."""

    least: float
    most: float
    is_float: bool = False
    above: bool = False  # ``least`` itself is not included
    also: tuple[float, ...] = ()


def _allowed(key: str, entry: "Field[Any]") -> Any:
    """Return what a key accepts: a type, choices or numbers.

    A tuple lists the choices; bool, str and list are types.
    """
    if key == "model.architecture":
        return tuple(OURS)  # no module of a stranger
    kind = type_of(key, {key: entry})
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if choices and type(choices[0]) is int:
        return Number(min(choices), max(choices))
    if choices:
        return choices
    if get_origin(kind) is tuple:
        return list
    if kind not in (int, float):
        return kind
    bounds = entry.metadata["range"].bounds
    # A resolved recipe has no open axis.
    also = () if key == "mesh.dp_shard" else bounds.also
    return Number(bounds.least, bounds.most, kind is float, bounds.is_above, also)


@cache
def _tables(architecture: str) -> dict[str, dict[str, Any]]:
    """Return what each key accepts, by table and name, in recipes of one architecture."""
    model = schema.model_table(architecture)
    tables: dict[str, dict[str, Any]] = {}
    for key, entry in entries_of({**schema.TABLES, "model": model}).items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = _allowed(key, entry)
    return tables


# The keys of all architectures. Where two differ in what they accept, the later one counts.
ALL_TABLES = {
    table: {name: allowed for each in OURS for name, allowed in _tables(each)[table].items()}
    for table in _tables(DEFAULT)
}
_TEXTS_IN_SETS = {
    f"{table}.{name}"
    for table, keys in ALL_TABLES.items()
    for name, allowed in keys.items()
    if allowed is str or isinstance(allowed, tuple)
}
_TWO_STAGES = ("ZBVZeroBubble", "DualPipeV")
_MANY_STAGES = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")


def values_given(path: Path, sets: list[str]) -> dict[str, Any]:
    """Return the value of each key that the files and overrides give, by key.

    Raises ValueError if a file is not TOML, or an override has no form that this function knows.
    """
    given: dict[str, Any] = {}
    seen = set()
    while path.resolve() not in seen:
        seen.add(path.resolve())
        tables = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
        base = tables.pop("base", None)
        for table, content in tables.items():
            if not isinstance(content, dict):
                raise ValueError(f"{table} is no table")
            for name, value in content.items():
                given.setdefault(f"{table}.{name}", value)
        if base is None:
            break
        path = path.parent / base
    for text in sets:
        key, _, raw = text.partition("=")
        key, raw = key.strip(), raw.strip()
        if key in _TEXTS_IN_SETS:
            quoted = len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "'\""
            given[key] = raw[1:-1] if quoted else raw
        else:
            given[key] = tomllib.loads(f"x = {raw}")["x"]
    return given


def problems_of(recipe: dict[str, Any], given: dict[str, Any], gpus: int | None) -> list[str]:
    """Return what is wrong with a resolved recipe, which a program has accepted.

    ``given`` has the values that the files and overrides give, by key.
    """
    problems = []
    tables = _tables(recipe["model"].get("architecture", DEFAULT))
    if recipe.keys() != tables.keys():
        return [f"the recipe has the tables {sorted(recipe)}"]

    for table, keys in recipe.items():
        for name, value in keys.items():
            if name not in tables[table]:
                problems.append(f"{table}.{name} is no key that the documentation knows")
            elif value is not None and not _accepts(tables[table][name], value):
                problems.append(f"{table}.{name} = {value!r:.100} was accepted")
    for key, value in given.items():
        table, _, name = key.partition(".")
        if name not in recipe.get(table, {}):
            problems.append(f"{key} was given, accepted and ignored")
        elif not _is_same(recipe[table][name], value) and (key, value) != ("mesh.dp_shard", -1):
            problems.append(f"{key} = {value!r:.60} became {recipe[table][name]!r:.60}")
    return problems or [*_disagreements(recipe, gpus)]


def _accepts(allowed: Any, value: Any) -> bool:
    if allowed is list:
        return isinstance(value, list)
    if not isinstance(allowed, Number):
        is_choice = isinstance(allowed, tuple)
        return type(value) is str and value in allowed if is_choice else type(value) is allowed
    if type(value) is not (float if allowed.is_float else int):
        return False
    is_in = allowed.least <= value <= allowed.most and math.isfinite(value)
    return (is_in and not (allowed.above and value == allowed.least)) or value in allowed.also


def _is_same(resolved: Any, given: Any) -> bool:
    if isinstance(given, list):
        return (
            isinstance(resolved, list)
            and len(resolved) == len(given)
            and all(map(_is_same, resolved, given))
        )
    if type(resolved) is float and type(given) is int:
        return resolved == float(given)
    return type(resolved) is type(given) and resolved == given


def _disagreements(recipe: dict[str, Any], gpus: int | None) -> list[str]:
    """Return the parts of a recipe that do not fit together."""
    model, mesh, parallel, data = (recipe[name] for name in ("model", "mesh", "parallel", "data"))
    optim, precision, run = recipe["optim"], recipe["precision"], recipe["run"]
    pp, cp, tp, ep = mesh["pp"], mesh["cp"], mesh["tp"], mesh["ep"]
    world = prod(mesh[axis] for axis in AXES)
    batch_ranks = mesh["dp_replicate"] * mesh["dp_shard"]
    schedule, per_rank = parallel["schedule"], parallel["virtual_stages"]
    heads, kv_heads = model["n_heads"], model["n_kv_heads"]
    experts = model.get("experts", 0)
    per_rank = per_rank or (2 if schedule in (*_TWO_STAGES, *_MANY_STAGES) else 1)
    chunks = 2 if cp > 1 and parallel["cp_balance"] == "zigzag" else 1
    unit = cp * lcm(chunks, tp if parallel["sequence_parallel"] else 1)
    micro_batches, left = divmod(data["global_batch"], data["micro_batch"] * batch_ranks)
    stages = parallel["stages"]
    wide = precision["params"] == "float64"

    must = {
        "the mesh fills the world": gpus is None or world == gpus,
        "a world has at most 2^24 processes": world <= 2**24,
        "key-value heads divide heads": heads % kv_heads == 0,
        "a head has an even width": model["head_dim"] is not None
        or model["dim"] % (2 * heads) == 0,
        "head_dim is even": (model["head_dim"] or 2) % 2 == 0,
        "rope_high_freq is above rope_low_freq": model["rope_high_freq"] > model["rope_low_freq"],
        "linear positions have no context": model["rope_scaling"] != "linear"
        or model["rope_context"] == 8192,
        "dynamic positions are not stretched": model["rope_scaling"] != "dynamic"
        or data["seq_len"] <= model["rope_context"],
        "the bounds of yarn are in order": model["rope_beta_slow"] <= model["rope_beta_fast"],
        "only yarn has its keys": model["rope_scaling"] == "yarn"
        or (model["rope_beta_fast"], model["rope_beta_slow"]) == (32, 1),
        "tp divides heads": heads % tp == 0,
        "tp fits the key-value heads": kv_heads % tp == 0 or tp % kv_heads == 0,
        "tp divides ffn": model["ffn"] % tp == 0,
        "the sequence divides": data["seq_len"] % unit == 0,
        "the batch divides": left == 0 and micro_batches >= 1,
        "ulysses divides heads": cp == 1
        or parallel["cp_method"] != "ulysses"
        or (heads // tp) % cp == 0,
        "every stage has a layer": pp == 1 or pp * per_rank <= model["n_layers"],
        "stages hold all layers": not stages
        or (sum(stages) == model["n_layers"] and min(stages) >= 1),
        "there are as many stages as ranks hold": not stages
        or len(stages) == pp * (per_rank if pp > 1 else 1),
        "V schedules have two stages": schedule not in _TWO_STAGES or per_rank == 2,
        "ep divides the ranks": (mesh["dp_shard"] * cp * tp) % ep == 0,
        "ep divides the experts": experts % ep == 0 if experts else ep == 1,
        "a token finds its experts": model.get("experts_per_token", 0) <= experts,
        "zero 0 does not shard": parallel["zero"] != 0 or mesh["dp_shard"] == 1,
        "zero 2 has no pipeline": parallel["zero"] != 2 or pp == 1,
        "computing is not wider than parameters": not wide
        or precision["compute"] in (None, "float64"),
        "float64 is not computed in float32": precision["compute"] != "float64" or wide,
        "float8 computes in bfloat16": precision["matmul"] != "float8"
        or precision["compute"] == "bfloat16",
        "bytes have a token each": data["source"] == "tokens" or model["vocab"] >= 256,
        "the first weights come from one place": recipe["checkpoint"]["init"] is None
        or (model["hf"] is None and recipe["checkpoint"]["resume"] in ("auto", "none")),
        "text has a path": data["source"] == "python" or data["path"] is not None,
        "the warmup ends in the run": optim["warmup"] <= run["steps"],
        "the decay follows the warmup": (optim["decay"] or 10**10) > optim["warmup"],
        "min_lr is at most lr": optim["min_lr"] <= optim["lr"],
        "there are two betas, below 1": len(optim["betas"]) == 2
        and all(type(beta) is float and 0 <= beta < 1 for beta in optim["betas"]),
        "globs of trained parameters are texts": all(
            type(glob) is str for glob in optim["train"] or []
        ),
        "digests compare ranks": not recipe["reliability"]["digest_every"] or batch_ranks > 1,
    }
    return [f"accepted, although not: {rule}" for rule, holds in must.items() if not holds]
