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
    each_value,
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
# By key: values that are refused.
CONFIGS: dict[str, list[Any]] = {
    "num_hidden_layers": [10**7, _HUGE, -2, "2", 2.0, True, None],
    "hidden_size": [_HUGE, 0],
    "num_attention_heads": [_HUGE, [4], 3],
    "num_key_value_heads": [3, -1],
    "head_dim": [7, _HUGE, "8"],
    "intermediate_size": [_HUGE],
    "vocab_size": [10**12, None],
    "rms_norm_eps": [-1.0, 0, "x", [1e-5]],
    "rope_theta": [-1.0, "x", [], {"a": 1}],
    "tie_word_embeddings": ["false", 2],
    "rope_scaling": [[1], "x", 5, {"rope_type": "llama3", "factor": 1e300}, {"rope_type": [1]}],
    "rope_parameters": [5],
    "model_type": [[1], {}, None, "\u001b[2J"],
    "hidden_act": ["gelu", ["silu"]],
    "quantization_config": [{"bits": 4}],
    "sliding_window": ["x"],
    "partial_rotary_factor": [0.5],
    "mlp_bias": [True],
}
EXPERT_CONFIGS: dict[str, list[Any]] = {
    "num_experts": [_HUGE, 10**6, 0, -8, "8", 8.0, True, [8], 7, 9],
    "num_local_experts": [4],
    "num_experts_per_tok": [0, 9, _HUGE, None],
    "moe_intermediate_size": [_HUGE, 23, "24"],
    "norm_topk_prob": ["true", 1],
    "decoder_sparse_step": [0, _HUGE, "1"],
    "mlp_only_layers": [[0, 1], [0, 2], [_HUGE], [-1], "0", [{}], list(range(200_000)), None],
    "model_type": ["mixtral", "llama"],
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
_PARAMS: dict[str, list[Any]] = {
    "n_layers": [10**7, "2", -1, True],
    "dim": [_HUGE, [32], "32", None],
    "n_heads": [0, 4.5, [4]],
    "n_kv_heads": ["x", 3],
    "norm_eps": [-1, "x"],
    "rope_theta": ["x", -5.0, 10**400],
    "use_scaled_rope": ["x"],
}
PARAMS = {name: {key: value} for name, key, value in each_value(_PARAMS)} | {
    f"factor-{factor}": {"use_scaled_rope": True, "rope_scaling_factor": factor}
    for factor in (0, "8")
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


def _entry(tensor: str, **fields: Any) -> Change:
    """Change the entry of a tensor."""
    return _header(lambda header: header[tensor].update(fields))


_NORM = "model.norm.weight"
_NORM_ENTRIES: dict[str, list[Any]] = {
    "data_offsets": [[0, 128], [1 << 40, (1 << 40) + 128], [-128, 0]],
    "shape": [[31], [1 << 40, 1 << 40], [1 << 62], [-32]],
    "dtype": ["X8"],
}
HEADERS: dict[str, Change] = {
    **{name: _entry(_NORM, **{key: value}) for name, key, value in each_value(_NORM_ENTRIES)},
    "gap": _alone(_numbers(a=(0, 4), b=(8, 12)), 12),
    "twice": _alone(_numbers(a=(0, 4), a_=(4, 8)), 8),
    "backwards": _alone(_numbers(a=(4, 0)), 4),
    "cut-data": _alone(_numbers(a=(0, 4)), 2),
    "list": _alone(b"[]"),
    "no-json": _alone(b"\xff\xfe\0\0"),
    "folder": replaced("model.safetensors", empty_folder),
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


def _renamed(old: str, new: str) -> Change:
    return _header(lambda header: header.update({new: header.pop(old)}))


_EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"
_ROUTER = "model.layers.1.mlp.gate.weight"
_EXPERT_ENTRIES: dict[str, list[Any]] = {"shape": [[32, 24], [24, 32, 1 << 40]], "dtype": ["I32"]}
# In place of 7.
_NUMBERS = ("8", f"{10**30}", "-1", "7" * 5000, "007", "\u0667")
EXPERT_HEADERS: dict[str, Change] = {
    "missing": _header(lambda h: h.pop(_EXPERT)),
    **{
        f"number-{place}": _renamed(_EXPERT, _EXPERT.replace(".7.", f".{number}."))
        for place, number in enumerate(_NUMBERS)
    },
    "dense-layer": _renamed(_EXPERT, _EXPERT.replace("layers.1", "layers.0")),
    **{name: _entry(_EXPERT, **{key: value}) for name, key, value in each_value(_EXPERT_ENTRIES)},
    "also-packed": _header(
        lambda h: h.update({"model.layers.1.mlp.experts.gate_up_proj": h[_EXPERT]})
    ),
    "no-router": _header(lambda h: h.pop(_ROUTER)),
    "router-of-dense": _header(lambda h: h.update({"model.layers.0.mlp.gate.weight": h[_ROUTER]})),
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
    for name, key, value in each_value(CONFIGS):
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
    for name, key, value in each_value(EXPERT_CONFIGS):
        change = changed_json("config.json", {key: value})
        commands = ("convert", "start") if key.endswith("experts") else ("convert",)
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
