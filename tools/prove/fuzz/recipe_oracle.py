"""Decides, without code of ``composer3d.recipe``, whether an accepted recipe may be accepted.

The bounds here were written by hand, from the documentation. The text is parsed with Python's own
``tomllib``, and the merge of bases and overrides is written again.
"""

import math
import tomllib
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path
from typing import Any

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_TOKENS = 2**27


@dataclass(frozen=True)
class Number:
    """The numbers that a key accepts: from ``least`` to ``most``, both included."""

    least: float
    most: float
    is_float: bool = False
    above: bool = False  # ``least`` itself is not included
    also: tuple[float, ...] = ()


def _ints(least: int, most: int) -> Number:
    return Number(least, most)


def _floats(least: float, most: float, *, above: bool = False, also: float | None = None) -> Number:
    return Number(least, most, True, above, () if also is None else (also,))


_AXIS = _ints(1, 2**20)
_STEPS = _ints(1, 10**9)
_STEPS_OR_0 = _ints(0, 10**9)
_SEED = _ints(0, 2**63 - 1)
_WEEK = _floats(0, 10_080, above=True)

# A tuple lists the choices; bool and str are types.
TABLES: dict[str, dict[str, Any]] = {
    "run": {
        "name": str,
        "steps": _STEPS,
        "seed": _SEED,
        "device": ("auto", "cpu", "cuda"),
        "out_dir": str,
        "timeout_minutes": _WEEK,
        "deterministic": bool,
        "oversubscribe": bool,
    },
    "model": {
        "dim": _ints(1, 2**20),
        "n_layers": _ints(1, 10_000),
        "n_heads": _ints(1, 2**16),
        "n_kv_heads": _ints(1, 2**16),
        "ffn": _ints(1, 2**22),
        "vocab": _ints(1, 2**24),
        "rope_theta": _floats(1, 1e12),
        "norm_eps": _floats(1e-20, 1),
        "head_dim": _ints(2, 2**14),
        "tied": bool,
        "qk_norm": bool,
        "qkv_bias": bool,
        "window": _ints(0, _TOKENS),
        "rope_factor": _floats(1, 1e6),
        "rope_low_freq": _floats(0, 1e6, above=True),
        "rope_high_freq": _floats(0, 1e6, above=True),
        "rope_context": _ints(1, _TOKENS),
        "architecture": ("llama", "moe", "olmo2"),
        "preset": str,
        "hf": str,
    },
    "mesh": dict.fromkeys((*AXES, "ep"), _AXIS),
    "parallel": {
        "zero": _ints(0, 3),
        "fsdp_blocks": _ints(1, 10_000),
        "sequence_parallel": bool,
        "loss_parallel": bool,
        "async_tp": bool,
        "cp_method": ("ring", "allgather", "ulysses"),
        "cp_balance": ("zigzag", "contiguous"),
        "schedule": (
            "GPipe",
            "1F1B",
            "LoopedBFS",
            "Interleaved1F1B",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
            "DualPipeV",
            "csv",
        ),
        "schedule_csv": str,
        "virtual_stages": _ints(1, 10_000),
        "stages": list,
    },
    "memory": {
        "activation_checkpoint": str,
        "loss_chunks": _ints(1, 2**16),
        "cpu_offload": bool,
    },
    "precision": {
        "params": ("float32", "float64"),
        "compute": ("float32", "float64", "bfloat16"),
        "matmul": ("compute", "float8"),
        "reduce": ("float32", "bfloat16"),
    },
    "compile": {"enabled": bool},
    "data": {
        "source": ("python", "text", "jsonl", "tokens"),
        "path": str,
        "sources": list,
        "field": str,
        "seq_len": _ints(1, _TOKENS),
        "global_batch": _ints(1, 2**30),
        "micro_batch": _ints(1, 2**20),
        "packing": ("none", "documents", "whole_documents"),
        "seed": _SEED,
        "other_tokenizer": bool,
    },
    "optim": {
        "lr": _floats(0, 10, above=True),
        "betas": list,
        "eps": _floats(0, 1, above=True),
        "weight_decay": _floats(0, 10),
        "clip": _floats(0, 1e9),
        "schedule": ("cosine", "linear", "wsd", "constant"),
        "warmup": _STEPS_OR_0,
        "decay": _STEPS,
        "decay_steps": _STEPS,
        "min_lr": _floats(0, 10),
        "train": list,
    },
    "checkpoint": {
        "every": _STEPS_OR_0,
        "every_minutes": _floats(0, 60 * 24 * 365),
        "keep": _ints(1, 10**6),
        "async_save": bool,
        "timeout_minutes": _WEEK,
        "resume": str,
        "init": str,
    },
    "metrics": {
        "every": _STEPS,
        "tensorboard": bool,
        "wandb": bool,
        "mlflow": bool,
        "timeline_steps": list,
        "profile_steps": list,
        "profile_ranks": list,
    },
    "validation": {"every": _STEPS_OR_0, "steps": _ints(1, 10**6), "path": str},
    "reliability": {
        "restarts": _ints(0, 10**6),
        "on_bad_step": ("stop", "skip", "rollback"),
        "max_bad_steps": _ints(1, 10**6),
        "max_rollbacks": _ints(1, 10**6),
        "spike_sigma": _floats(2, 1000, also=0),
        "spike_window": _ints(8, 1000),
        "straggler_factor": _floats(1.1, 100, also=0),
        "straggler_window": _ints(3, 1000),
        "digest_every": _STEPS_OR_0,
    },
}
_OF_EXPERTS: dict[str, Any] = {
    "experts": _ints(1, 2**16),
    "experts_per_token": _ints(1, 2**16),
    "expert_ffn": _ints(1, 2**22),
    "shared_ffn": _ints(0, 2**22),
    "dense_layers": _ints(0, 10_000),
    "moe_every": _ints(1, 10_000),
    "router": ("softmax", "sigmoid"),
    "renormalise": bool,
    "router_scale": _floats(0, 1000, above=True),
    "expert_groups": _ints(1, 2**16),
    "groups_per_token": _ints(1, 2**16),
    "router_bias": bool,
    "bias_rate": _floats(0, 1),
    "balance_loss": _floats(0, 1000),
    "z_loss": _floats(0, 1000),
}
ALL_TABLES = {**TABLES, "model": TABLES["model"] | _OF_EXPERTS}
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

    Args:
        recipe: the resolved recipe: tables with values.
        given: the values that the files and overrides give, by key.
        gpus: the number of processes that the mesh must fill, if one was asked for.
    """
    problems = []
    has_experts = recipe["model"].get("architecture") == "moe"
    tables = {**TABLES, "model": TABLES["model"] | (_OF_EXPERTS if has_experts else {})}
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
