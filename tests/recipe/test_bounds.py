"""The bounds of every key, a second time: written by hand, from the documentation.

The fuzzer of recipes reads the rows of the schema, so only this table would tell a slip in one.
"""

import math
from typing import Literal, get_args, get_origin

import pytest

from composer3d.facts.ranges import Bounds
from composer3d.recipe.schema import model_table
from composer3d.recipe.values import FIELDS, entries_of, type_of

_TOKENS = 2**27
_AXIS = Bounds(1, 2**20)
_STEPS = Bounds(1, 99_999_999)
_STEPS_OR_0 = Bounds(0, 99_999_999)
_SEED = Bounds(0, 2**63 - 1)
_WEEK = Bounds(0, 10_080, is_above=True)

# What a key accepts; a tuple lists the choices.
TABLES: dict[str, dict[str, Bounds | tuple[object, ...]]] = {
    "run": {
        "steps": _STEPS,
        "seed": _SEED,
        "device": ("auto", "cpu", "cuda"),
        "timeout_minutes": _WEEK,
    },
    "model": {
        "dim": Bounds(1, 2**20),
        "n_layers": Bounds(1, 10_000),
        "n_heads": Bounds(1, 2**16),
        "n_kv_heads": Bounds(1, 2**16),
        "ffn": Bounds(1, 2**22),
        "vocab": Bounds(1, 2**24),
        "rope_theta": Bounds(1, 1e12),
        "norm_eps": Bounds(1e-20, 1),
        "head_dim": Bounds(2, 2**14),
        "window": Bounds(0, _TOKENS),
        "full_every": Bounds(0, 10_000),
        "nope_every": Bounds(0, 10_000),
        "rope_factor": Bounds(1, 1e6),
        "rope_low_freq": Bounds(0, 1e6, is_above=True),
        "rope_high_freq": Bounds(0, 1e6, is_above=True),
        "rope_context": Bounds(1, _TOKENS),
        "rope_scaling": ("llama3", "linear", "dynamic", "yarn"),
        "rope_beta_fast": Bounds(1e-6, 1e6),
        "rope_beta_slow": Bounds(1e-6, 1e6),
        "rope_attention_factor": Bounds(0, 1e3, is_above=True),
    },
    "mesh": dict.fromkeys(("pp", "dp_replicate", "cp", "tp", "ep"), _AXIS)
    | {"dp_shard": Bounds(1, 2**20, also=(-1,))},
    "parallel": {
        "zero": (0, 1, 2, 3),
        "fsdp_blocks": Bounds(1, 10_000),
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
        "virtual_stages": Bounds(1, 10_000),
        "attention_kernel": ("torch", "flash3", "flash4"),
    },
    "memory": {
        "loss_chunks": Bounds(1, 2**16),
    },
    "precision": {
        "params": ("float32", "float64"),
        "compute": ("float32", "float64", "bfloat16"),
        "matmul": ("compute", "float8"),
        "reduce": ("float32", "bfloat16"),
    },
    "data": {
        "source": ("python", "text", "jsonl", "tokens"),
        "cache_gib": Bounds(0, 2**30, is_above=True),
        "seq_len": Bounds(1, _TOKENS),
        "global_batch": Bounds(1, 2**30),
        "micro_batch": Bounds(1, 2**20),
        "packing": ("none", "documents", "whole_documents"),
        "seed": _SEED,
    },
    "optim": {
        "name": ("adamw", "muon"),
        "matrix_lr": Bounds(0, 10, is_above=True),
        "lr_scale": ("match_rms_adamw", "original"),
        "momentum": Bounds(0, 0.9999),
        "newton_schulz_steps": Bounds(1, 99),
        "newton_schulz_dtype": ("bfloat16", "float32", "float64"),
        "lr": Bounds(0, 10, is_above=True),
        "eps": Bounds(0, 1, is_above=True),
        "weight_decay": Bounds(0, 10),
        "clip": Bounds(0, 1e9),
        "schedule": ("cosine", "linear", "wsd", "constant"),
        "warmup": _STEPS_OR_0,
        "decay": _STEPS,
        "decay_steps": _STEPS,
        "min_lr": Bounds(0, 10),
    },
    "checkpoint": {
        "every": _STEPS_OR_0,
        "every_minutes": Bounds(0, 60 * 24 * 365),
        "keep": Bounds(1, 10**6),
        "timeout_minutes": _WEEK,
    },
    "metrics": {
        "prometheus": Bounds(1, 65535),
        "every": _STEPS,
    },
    "validation": {"every": _STEPS_OR_0, "steps": Bounds(1, 10**6)},
    "reliability": {
        "restarts": Bounds(0, 10**6),
        "on_bad_step": ("stop", "skip", "rollback"),
        "max_bad_steps": Bounds(1, 10**6),
        "max_rollbacks": Bounds(1, 10**6),
        "spike_sigma": Bounds(2, 1000, also=(0,)),
        "spike_window": Bounds(8, 1000),
        "straggler_factor": Bounds(1.1, 100, also=(0,)),
        "straggler_window": Bounds(3, 1000),
        "digest_every": _STEPS_OR_0,
    },
}
_OF_EXPERTS: dict[str, Bounds | tuple[object, ...]] = {
    "experts": Bounds(1, 2**16),
    "experts_per_token": Bounds(1, 2**16),
    "expert_ffn": Bounds(1, 2**22),
    "shared_ffn": Bounds(0, 2**22),
    "dense_layers": Bounds(0, 10_000),
    "moe_every": Bounds(1, 10_000),
    "router": ("softmax", "sigmoid"),
    "router_scale": Bounds(0, 1000, is_above=True),
    "expert_groups": Bounds(1, 2**16),
    "groups_per_token": Bounds(1, 2**16),
    "group_best": ("two", "one"),
    "bias_rate": Bounds(0, 1),
    "balance_loss": Bounds(0, 1000),
    "z_loss": Bounds(0, 1000),
}
_OF_LATENTS: dict[str, Bounds | tuple[object, ...]] = {
    "query_rank": Bounds(0, 2**20),
    "kv_rank": Bounds(1, 2**20),
    "rope_dim": Bounds(2, 2**14),
    "value_dim": Bounds(1, 2**14),
    "rope_score_mscale": Bounds(0, 1000),
    "mtp_layers": Bounds(0, 16),
    "mtp_loss": Bounds(0, 1000, is_above=True),
}
_OF_PARTS: dict[str, Bounds | tuple[object, ...]] = {"rope_share": Bounds(0, 1, is_above=True)}
_OF_MODELS = TABLES["model"] | _OF_EXPERTS | _OF_LATENTS | _OF_PARTS

WRITTEN = {
    f"{table}.{name}": allowed
    for table, keys in {**TABLES, "model": _OF_MODELS}.items()
    for name, allowed in keys.items()
}
ENTRIES = {
    **entries_of({"model": model_table("moe")}),
    **entries_of({"model": model_table("deepseek")}),
    **entries_of({"model": model_table("glm")}),
    **FIELDS,
}


def test_every_number_and_every_choice_is_written_here() -> None:
    types = {key: type_of(key, ENTRIES) for key in ENTRIES}
    bounded = [key for key, kind in types.items() if kind in (int, float)]
    chosen = [key for key, kind in types.items() if get_origin(kind) is Literal]
    assert {*bounded, *chosen} == WRITTEN.keys()


@pytest.mark.parametrize("key", WRITTEN)
def test_the_bounds_of_a_key(key: str) -> None:
    written, kind = WRITTEN[key], type_of(key, ENTRIES)
    if not isinstance(written, Bounds):
        assert set(get_args(kind)) == set(written)
        return
    allowed = ENTRIES[key].metadata["range"]
    assert allowed.bounds == written

    least, most = written.least, written.most
    below, beyond = least - 1, most + 1
    if kind is float:
        below, beyond = math.nextafter(least, -math.inf), math.nextafter(most, math.inf)
    assert allowed.accepts(least) is not written.is_above
    assert all(map(allowed.accepts, (most, *written.also)))
    assert not any(map(allowed.accepts, (below, beyond, math.nan, math.inf, -math.inf)))
