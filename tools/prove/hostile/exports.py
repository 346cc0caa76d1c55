"""Hostile folders in the formats of Hugging Face and Meta, and hostile folders of runs."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.prove.hostile.base import RECIPE_WITHOUT_SIZES
from tools.prove.hostile.case import Case, cases_of
from tools.prove.hostile.checkpoints import command, touch
from tools.prove.hostile.files import (
    Change,
    device,
    empty_folder,
    flipped,
    pipe,
    replaced,
    safetensors,
    secret,
)
from tools.prove.proof import overrides

_SEED = 20261122


def _case(form: str, name: str, change: Change, message: str | None, *commands: str) -> list[Case]:
    """A valid folder of ``form`` after ``change``, as a case of each of ``commands``."""

    def make(met: str, folder: Path) -> list[str]:
        evil = folder / "evil"
        shutil.copytree(folder.parent / "base" / form, evil)
        change(evil)
        if met == "start":
            (folder / "recipe.toml").write_text(RECIPE_WITHOUT_SIZES)
            sets = overrides("model.hf=evil", "data.path=../base/tokens")
            return ["train", "recipe.toml", *sets]
        return command(met, "evil")

    return cases_of(f"{form}-{name}", make, message, commands or ("inspect", "convert"))


# config.json and params.json


def changed_json(file: str, changes: dict[str, Any]) -> Change:
    """Replace keys of a file that holds a JSON object."""

    def change(evil: Path) -> None:
        config = json.loads((evil / file).read_text())
        (evil / file).write_text(json.dumps(config | changes))

    return change


def text_file(file: str, content: str) -> Change:
    return lambda evil: (evil / file).write_text(content)


_HUGE = 10**18
CONFIGS: dict[str, tuple[str, Any]] = {
    "layers-1e7": ("num_hidden_layers", 10**7),
    "layers-huge": ("num_hidden_layers", _HUGE),
    "layers-negative": ("num_hidden_layers", -2),
    "layers-text": ("num_hidden_layers", "2"),
    "layers-float": ("num_hidden_layers", 2.0),
    "layers-bool": ("num_hidden_layers", True),
    "layers-none": ("num_hidden_layers", None),
    "hidden-huge": ("hidden_size", _HUGE),
    "hidden-zero": ("hidden_size", 0),
    "heads-huge": ("num_attention_heads", _HUGE),
    "heads-list": ("num_attention_heads", [4]),
    "heads-three": ("num_attention_heads", 3),
    "kv-heads-three": ("num_key_value_heads", 3),
    "kv-heads-negative": ("num_key_value_heads", -1),
    "head-dim-odd": ("head_dim", 7),
    "head-dim-huge": ("head_dim", _HUGE),
    "head-dim-text": ("head_dim", "8"),
    "ffn-huge": ("intermediate_size", _HUGE),
    "vocab-huge": ("vocab_size", 10**12),
    "vocab-none": ("vocab_size", None),
    "eps-negative": ("rms_norm_eps", -1.0),
    "eps-zero": ("rms_norm_eps", 0),
    "eps-text": ("rms_norm_eps", "x"),
    "eps-list": ("rms_norm_eps", [1e-5]),
    "theta-negative": ("rope_theta", -1.0),
    "theta-text": ("rope_theta", "x"),
    "theta-list": ("rope_theta", []),
    "theta-object": ("rope_theta", {"a": 1}),
    "tied-text": ("tie_word_embeddings", "false"),
    "tied-number": ("tie_word_embeddings", 2),
    "rope-list": ("rope_scaling", [1]),
    "rope-text": ("rope_scaling", "x"),
    "rope-number": ("rope_scaling", 5),
    "rope-factor-huge": ("rope_scaling", {"rope_type": "llama3", "factor": 1e300}),
    "rope-type-list": ("rope_scaling", {"rope_type": [1]}),
    "parameters-number": ("rope_parameters", 5),
    "type-list": ("model_type", [1]),
    "type-object": ("model_type", {}),
    "type-none": ("model_type", None),
    "type-unknown": ("model_type", "\u001b[2J"),
    "act": ("hidden_act", "gelu"),
    "act-list": ("hidden_act", ["silu"]),
    "quantized": ("quantization_config", {"bits": 4}),
    "window-text": ("sliding_window", "x"),
    "partial": ("partial_rotary_factor", 0.5),
    "mlp-bias": ("mlp_bias", True),
}
TEXTS = {
    "digits": '{"hidden_size": ' + "9" * 400 + "}",
    "more-digits": '{"hidden_size": ' + "9" * 100_000 + "}",
    "deep": "[" * 100_000,
    "deep-objects": '{"a":' * 100_000,
    "constant": '{"rms_norm_eps": Infinity}',
    "nan": '{"rope_theta": NaN}',
    "float-digits": '{"rope_theta": 1' + "0" * 400 + "}",
    "list": "[]",
    "number": "5",
    "empty": "",
    "surrogate": '{"model_type": "\\ud800"}',
    "nul": '{"model_type": "\\u0000"}',
    "twice": '{"model_type": "llama", "model_type": "bert"}',
    "megabytes": '{"model_type": "' + "a" * (1 << 23) + '"}',
}
PARAMS: dict[str, dict[str, Any]] = {
    "layers-1e7": {"n_layers": 10**7},
    "layers-text": {"n_layers": "2"},
    "layers-negative": {"n_layers": -1},
    "layers-bool": {"n_layers": True},
    "dim-huge": {"dim": _HUGE},
    "dim-list": {"dim": [32]},
    "dim-text": {"dim": "32"},
    "dim-none": {"dim": None},
    "heads-zero": {"n_heads": 0},
    "heads-float": {"n_heads": 4.5},
    "heads-list": {"n_heads": [4]},
    "kv-heads-text": {"n_kv_heads": "x"},
    "kv-heads-three": {"n_kv_heads": 3},
    "eps-negative": {"norm_eps": -1},
    "eps-text": {"norm_eps": "x"},
    "theta-text": {"rope_theta": "x"},
    "theta-negative": {"rope_theta": -5.0},
    "theta-digits": {"rope_theta": 10**400},
    "scaled-text": {"use_scaled_rope": "x"},
    "factor-zero": {"use_scaled_rope": True, "rope_scaling_factor": 0},
    "factor-text": {"use_scaled_rope": True, "rope_scaling_factor": "8"},
}

# safetensors and its index


def _header(edit: Callable[[dict[str, Any]], object]) -> Change:
    def change(evil: Path) -> None:
        path = evil / "model.safetensors"
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        edit(header)
        path.write_bytes(safetensors(header, content[8 + length :]))

    return change


def _raw(content: Callable[[bytes], bytes]) -> Change:
    def change(evil: Path) -> None:
        path = evil / "model.safetensors"
        path.write_bytes(content(path.read_bytes()))

    return change


def _alone(header: bytes, data: int = 0) -> Change:
    """Another file: ``header`` and ``data`` bytes of zeros."""
    return _raw(lambda content: safetensors(header, bytes(data)))


def _numbers(**offsets: tuple[int, int]) -> bytes:
    """A header of tensors of one number each, by their names; the name of ``a_`` is "a" as well."""
    entries = [
        f'"{name[0]}": {{"dtype": "F32", "shape": [1], "data_offsets": [{begin}, {end}]}}'
        for name, (begin, end) in offsets.items()
    ]
    return f"{{{', '.join(entries)}}}".encode()


_NORM = "model.norm.weight"
HEADERS: dict[str, Change] = {
    "overlap": _header(lambda h: h[_NORM].update(data_offsets=[0, 128])),
    "gap": _alone(_numbers(a=(0, 4), b=(8, 12)), 12),
    "twice": _alone(_numbers(a=(0, 4), a_=(4, 8)), 8),
    "backwards": _alone(_numbers(a=(4, 0)), 4),
    "cut-data": _alone(_numbers(a=(0, 4)), 2),
    "list": _alone(b"[]"),
    "no-json": _alone(b"\xff\xfe\0\0"),
    "shape-other": _header(lambda h: h[_NORM].update(shape=[31])),
    "shape-overflow": _header(lambda h: h[_NORM].update(shape=[1 << 40, 1 << 40])),
    "folder": replaced("model.safetensors", empty_folder),
    "beyond": _header(lambda h: h[_NORM].update(data_offsets=[1 << 40, (1 << 40) + 128])),
    "negative": _header(lambda h: h[_NORM].update(data_offsets=[-128, 0])),
    "shape-huge": _header(lambda h: h[_NORM].update(shape=[1 << 62])),
    "shape-negative": _header(lambda h: h[_NORM].update(shape=[-32])),
    "dtype": _header(lambda h: h[_NORM].update(dtype="X8")),
    "text-entry": _header(lambda h: h.update({_NORM: "x"})),
    "extra": _header(lambda h: h.update({"x\u0000y": h[_NORM]})),
    "many": _header(lambda h: h.update({f"x{i}": h[_NORM] for i in range(20_000)})),
    "length-huge": _raw(lambda content: struct.pack("<Q", 1 << 62) + content[8:]),
    "length-long": _raw(lambda content: struct.pack("<Q", 1 << 30) + content[8:]),
    "length-zero": _raw(lambda content: struct.pack("<Q", 0) + content[8:]),
    "deep": _alone(b"[" * 200_000),
    "deep-entry": _alone(b'{"x": ' + b"[" * 100_000),
    "empty": _raw(lambda content: b""),
    "short": _raw(lambda content: content[:7]),
    "pickle": _raw(lambda content: b"\x80\x02cos\nsystem\n(X\x01\x00\x00\x00xtR."),
}


EXPERT_CONFIGS: dict[str, tuple[str, Any]] = {
    "experts-huge": ("num_experts", _HUGE),
    "experts-1e6": ("num_experts", 10**6),
    "experts-zero": ("num_experts", 0),
    "experts-negative": ("num_experts", -8),
    "experts-text": ("num_experts", "8"),
    "experts-float": ("num_experts", 8.0),
    "experts-bool": ("num_experts", True),
    "experts-list": ("num_experts", [8]),
    "experts-fewer": ("num_experts", 7),
    "experts-more": ("num_experts", 9),
    "experts-other-key": ("num_local_experts", 4),
    "per-token-zero": ("num_experts_per_tok", 0),
    "per-token-more": ("num_experts_per_tok", 9),
    "per-token-huge": ("num_experts_per_tok", _HUGE),
    "per-token-none": ("num_experts_per_tok", None),
    "width-huge": ("moe_intermediate_size", _HUGE),
    "width-other": ("moe_intermediate_size", 23),
    "width-text": ("moe_intermediate_size", "24"),
    "renormalise-text": ("norm_topk_prob", "true"),
    "renormalise-number": ("norm_topk_prob", 1),
    "step-zero": ("decoder_sparse_step", 0),
    "step-huge": ("decoder_sparse_step", _HUGE),
    "step-text": ("decoder_sparse_step", "1"),
    "dense-all": ("mlp_only_layers", [0, 1]),
    "dense-beyond": ("mlp_only_layers", [0, 2]),
    "dense-huge": ("mlp_only_layers", [_HUGE]),
    "dense-negative": ("mlp_only_layers", [-1]),
    "dense-text": ("mlp_only_layers", "0"),
    "dense-objects": ("mlp_only_layers", [{}]),
    "dense-many": ("mlp_only_layers", list(range(200_000))),
    "dense-none": ("mlp_only_layers", None),
    "type-mixtral": ("model_type", "mixtral"),
    "type-llama": ("model_type", "llama"),
}


def _renamed(old: str, new: str) -> Change:
    return _header(lambda header: header.update({new: header.pop(old)}))


_EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"
EXPERT_HEADERS: dict[str, Change] = {
    "missing": _header(lambda h: h.pop(_EXPERT)),
    "beyond": _renamed(_EXPERT, _EXPERT.replace(".7.", ".8.")),
    "huge-number": _renamed(_EXPERT, _EXPERT.replace(".7.", f".{10**30}.")),
    "negative-number": _renamed(_EXPERT, _EXPERT.replace(".7.", ".-1.")),
    "long-number": _renamed(_EXPERT, _EXPERT.replace(".7.", f".{'7' * 5000}.")),
    "zeros-before": _renamed(_EXPERT, _EXPERT.replace(".7.", ".007.")),
    "other-digits": _renamed(_EXPERT, _EXPERT.replace(".7.", ".\u0667.")),
    "dense-layer": _renamed(_EXPERT, _EXPERT.replace("layers.1", "layers.0")),
    "shape": _header(lambda h: h[_EXPERT].update(shape=[32, 24])),
    "shape-huge": _header(lambda h: h[_EXPERT].update(shape=[24, 32, 1 << 40])),
    "dtype": _header(lambda h: h[_EXPERT].update(dtype="I32")),
    "also-packed": _header(
        lambda h: h.update({"model.layers.1.mlp.experts.gate_up_proj": h[_EXPERT]})
    ),
    "no-router": _header(lambda h: h.pop("model.layers.1.mlp.gate.weight")),
    "router-of-dense": _header(
        lambda h: h.update({"model.layers.0.mlp.gate.weight": h["model.layers.1.mlp.gate.weight"]})
    ),
}


def index_file(content: Any) -> Change:
    def change(evil: Path) -> None:
        (evil / "model.safetensors").rename(evil / "model-1.safetensors")
        for suffix in ("safetensors", "bin"):
            os.mkfifo(evil / f"pipe.{suffix}")
        text = content if isinstance(content, str) else json.dumps(content)
        (evil / "model.safetensors.index.json").write_text(text)

    return change


INDEXES: dict[str, Any] = {
    "list": [],
    "no-map": {},
    "map-list": {"weight_map": [1]},
    "map-empty-list": {"weight_map": []},
    "map-number": {"weight_map": 5},
    "map-none": {"weight_map": None},
    "number-file": {"weight_map": {_NORM: 5}},
    "list-file": {"weight_map": {_NORM: []}},
    "elsewhere": {"weight_map": {_NORM: "../../outside/model.safetensors"}},
    "absolute": {"weight_map": {_NORM: "/etc/passwd"}},
    "nul": {"weight_map": {_NORM: "a\0b"}},
    "surrogate": {"weight_map": {_NORM: "\ud800"}},
    "above": {"weight_map": {_NORM: "../x.safetensors"}},
    "dot": {"weight_map": {_NORM: "."}},
    "dots": {"weight_map": {_NORM: ".."}},
    "pipe": {"weight_map": {_NORM: "pipe.safetensors"}},
    "pipe-of-torch": {"weight_map": {_NORM: "pipe.bin"}},
    "absent-tensors": {"weight_map": {f"{i}": "model-1.safetensors" for i in range(50_000)}},
    "large": {"weight_map": {f"{i:0100}": "x" for i in range(100_000)}},
    "empty-name": {"weight_map": {_NORM: ""}},
    "long": {"weight_map": {_NORM: "a" * 5000}},
    "many": {"weight_map": {f"x{number}": f"f{number}" for number in range(50_000)}},
    "deep": "[" * 100_000,
    "constant": "NaN",
    "constant-as-file": '{"weight_map": {"x": NaN}}',
    "cut": "{",
}

# Links, pipes and devices


_CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "README.md",
    "LICENSE",
)
LINKS = {
    f"link-{name}": replaced(name, secret)
    for name in (*_CARRIED, "private.txt", "notes.md", "x.json")
}
PIPES = {f"pipe-{name}": replaced(name, pipe) for name in (*_CARRIED, "x.json")}
NEEDED = {
    f"{kind}-{name}": replaced(name, make)
    for kind, make in (("pipe", pipe), ("device", device))
    for name in ("config.json", "model.safetensors")
}


def _pickled(evil: Path) -> None:
    (evil / "model.safetensors").unlink()
    torch.save({"x": touch(evil.parent)}, evil / "pytorch_model.bin")


# A run's folder that somebody prepared


def _run_case(name: str, change: Change) -> Case:
    def make(folder: Path) -> list[str]:
        run = folder / "runs/victim"
        run.mkdir(parents=True)
        change(run)
        return ["train", "../base/recipe.toml", *overrides("data.path=../base/tokens")]

    return Case(f"run-{name}", make, None)


def _outside_link(name: str, target: str) -> Change:
    def change(run: Path) -> None:
        (run / name).symlink_to(run.parents[2] / "outside" / target)

    return change


def _continued(name: str, content: bytes) -> Change:
    """A run with a checkpoint, and with a file that was changed since."""

    def change(run: Path) -> None:
        shutil.copytree(run.parents[2] / "base/runs/victim/checkpoints", run / "checkpoints")
        (run / name).write_bytes(content)

    return change


METRICS = {
    "junk": bytes(range(256)) * 50,
    "lists": b"[1]\n5\nnull\n",
    "text-step": b'{"step": "x"}\n',
    "no-step": b'{"loss": 1}\n',
    "constants": b'{"step": NaN}\n{"step": Infinity}\n',
    "deep": b"[" * 200_000 + b"\n",
    "digits": b'{"step": ' + b"9" * 10_000 + b"}\n",
    "torn": b'{"step": 1}\n{"ste',
}


def _flipped_beginning(file: str, seed: int) -> Change:
    """Change bytes where the header of a file of tensors is; the weights have no digests."""
    return flipped(file, seed, counts=(1, 3, 10), most=3000, cuts=False)


def _cases() -> list[Case]:
    cases: list[Case] = []
    for name, (key, value) in CONFIGS.items():
        change = changed_json("config.json", {key: value})
        cases += _case("hf", f"config-{name}", change, "evil", "inspect", "start")
    for name, content in TEXTS.items():
        change = text_file("config.json", content)
        cases += _case("hf", f"config-text-{name}", change, "evil", "convert", "start")
    for name, changes in PARAMS.items():
        change = changed_json("params.json", changes)
        cases += _case("meta", f"params-{name}", change, "params.json")
    for name, content in TEXTS.items():
        change = text_file("params.json", content)
        cases += _case("meta", f"params-text-{name}", change, "params.json", "inspect")
    for name, change in HEADERS.items():
        cases += _case("hf", f"header-{name}", change, "evil")
    for name, (key, value) in EXPERT_CONFIGS.items():
        change = changed_json("config.json", {key: value})
        commands = ("convert", "start") if name.startswith("experts-") else ("convert",)
        cases += _case("hf-moe", f"config-{name}", change, "evil", *commands)
    for name, change in EXPERT_HEADERS.items():
        cases += _case("hf-moe", f"experts-{name}", change, "evil", "convert", "start")
    for number in range(20):
        file = ("config.json", "model.safetensors")[number % 2]
        flip = _flipped_beginning(file, _SEED + 1000 + number)
        cases += _case("hf-moe", f"flip-{number:02d}", flip, None, "convert")
    for name, content in INDEXES.items():
        cases += _case("hf", f"index-{name}", index_file(content), "evil")
    for name, change in {**LINKS, **PIPES}.items():
        cases += _case("hf", name, change, None, "convert")
    for name, change in NEEDED.items():
        cases += _case("hf", f"needed-{name}", change, "evil", "inspect", "convert", "start")
    cases += _case("hf", "pickle", _pickled, "evil")
    cases += _case(
        "meta",
        "pickle",
        lambda evil: torch.save({"x": touch(evil.parent)}, evil / "consolidated.00.pth"),
        "evil",
    )
    for number in range(30):
        file = ("config.json", "model.safetensors")[number % 2]
        flip = _flipped_beginning(file, _SEED + number)
        cases += _case("hf", f"flip-{number:02d}", flip, None, "inspect")

    for name, target in (
        ("lock", "secret.txt"),
        ("recipe.toml", "secret.txt"),
        ("metrics.jsonl", "metrics.jsonl"),
        ("metrics.new", "secret.txt"),
        ("metrics.jsonl.new", "secret.txt"),
    ):
        cases.append(_run_case(f"link-{name}", _outside_link(name, target)))
        cases.append(_run_case(f"pipe-{name}", replaced(name, pipe)))
    for name, content in METRICS.items():
        cases.append(_run_case(f"metrics-{name}", _continued("metrics.jsonl", content)))
    return cases


CASES = _cases()
