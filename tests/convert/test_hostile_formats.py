"""Files that were made to harm are refused with one line, quickly and in little memory.

``tools/prove/hostile/exports.py`` has a table of them; ``bash tools/prove/run hostile`` runs all.
"""

import json
import os
import re
import resource
import struct
import time
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from composer3d.cli import main
from composer3d.convert.convert import convert
from composer3d.convert.formats import _HEADER_LIMIT
from composer3d.convert.inspect import inspect
from composer3d.facts.errors import CheckpointError
from composer3d.models.llama import huggingface as hf
from composer3d.models.llama.shape import ModelShape
from tests.convert.changes import refusal, rewrite_json
from tests.convert.sample_checkpoints import make_hf
from tools.prove.hostile.exports import (
    HEADERS,
    INDEXES,
    NEEDED,
    PARAMS,
    TEXTS,
    changed_json,
    index_file,
    text_file,
)

SECONDS, MEMORY_KB = 1.0, 200_000


@pytest.fixture
def cheap() -> Iterator[None]:
    """Require that a test takes less than 1 s of CPU time and adds less than 200 MB to the peak."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KB


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}
HUGE = 10**400  # as JSON, 401 digits
ODD_VALUES = [None, "8", "false", [], {}, [[]], True, "\ud800\0", ["\n"]]
ODD_VALUES += [-1, 0, 0.5, 7, -1.5, 1e308, HUGE, -HUGE]
SIZE_KEYS = [key for key in LLAMA if key != "model_type"]
KEYS_READ = [
    *SIZE_KEYS,
    *("head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "hidden_act"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window"),
    *("layer_types", "max_window_layers", "quantization_config", "partial_rotary_factor"),
    *("model_type", "per_layer_config"),
]


def test_tied_as_null_counts_as_absent() -> None:
    assert hf.parse_config(LLAMA | {"tie_word_embeddings": None}) == hf.parse_config(LLAMA)


def shape_or_lines(config: dict[str, Any]) -> ModelShape | None:
    """Return the shape, or None if the config is refused with a few short lines."""
    try:
        return hf.parse_config(config)
    except CheckpointError as error:
        lines = error.lines
    assert 0 < len(lines) < 8
    assert all(len(line) < 400 and "\n" not in line for line in lines)
    return None


QWEN = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize("base", [LLAMA, QWEN], ids=["llama", "qwen2"])
def test_any_value_of_a_key_is_a_shape_or_a_line(base: dict[str, Any], cheap: None) -> None:
    for key, value in product(KEYS_READ, ODD_VALUES):
        if shape := shape_or_lines(base | {key: value}):
            # A shape of these values is accepted once more, so nothing is wrong with them.
            values = {entry.name: getattr(shape, entry.name) for entry in fields(shape)}
            assert hf.make_shape(values) == shape
            assert type(shape.tied) is bool
            assert type(shape.norm_eps) is type(shape.rope_theta) is float


STRETCH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCH["original_max_position_embeddings"] = 16


def test_any_value_of_a_stretch_is_a_shape_or_a_line(cheap: None) -> None:
    for key, value in product(STRETCH, ODD_VALUES):
        config = LLAMA | {"rope_scaling": {"rope_type": "llama3", **STRETCH, key: value}}
        if shape := shape_or_lines(config):
            assert shape.rope_low_freq < shape.rope_high_freq or shape.rope_factor == 1


NO_RATIO = "the width of a head is their ratio, which must be an even integer"
NO_TRUTH = "it must be true, false or absent"
# What is added to config.json, and a part of the line that refuses it. ``tests/models`` and
# ``tests/facts`` have the other lines.
REFUSED: dict[str, tuple[str, str]] = {
    "theta 0": ('"rope_theta": 0', "rope_theta = 0 must be "),
    "tied in words": (
        '"tie_word_embeddings": "false"',
        f'"false" is not supported; {NO_TRUTH}',
    ),
    "odd heads by ratio": ('"hidden_size": 60', NO_RATIO),
    "groups": (
        '"num_key_value_heads": 3',
        "num_key_value_heads = 3 must divide num_attention_heads = 4",
    ),
    "kinds of others": ('"layer_types": ["full_attention"]', '"full_attention" for each layer'),
    "digits": (f'"vocab_size": {HUGE}', "(it holds an integer of 401 digits)"),
    "size": ('"x": "' + "x" * (1 << 20) + '"', "is larger than 1,048,576 bytes"),
}


@pytest.mark.parametrize(("added", "message"), REFUSED.values(), ids=REFUSED)
def test_a_config_is_refused_with_one_line(
    tmp_path: Path, added: str, message: str, cheap: None
) -> None:
    kept = {key: value for key, value in LLAMA.items() if f'"{key}":' not in added}
    text = json.dumps(kept)[:-1] + f", {added}}}"
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    (line,) = refusal(tmp_path, function=hf.read_shape)
    assert message in line
    assert len(line) < 500


def test_no_model_is_built_for_layers_without_tensors(tmp_path: Path, cheap: None) -> None:
    most = max(n for n in (1, 100, 10_000, 10**7) if _in_range("n_layers", n))
    folder = make_hf(tmp_path / "a")
    rewrite_json(folder / "config.json", lambda config: config.update(num_hidden_layers=most))
    assert refusal(folder, tmp_path / "b", "dcp") == [
        f"{folder} holds tensors of 2 layers, but its model has {most}; copy the missing files"
    ]


def _in_range(name: str, value: int) -> bool:
    (entry,) = (entry for entry in fields(ModelShape) if entry.name == name)
    return bool(entry.metadata["range"][0](value))


def safetensors(folder: Path, header: bytes, size: int | None = None, data: bytes = b"") -> None:
    head = struct.pack("<Q", len(header) if size is None else size)
    (folder / "model.safetensors").write_bytes(head + header + data)


def test_headers_and_tensors_are_bounded(tmp_path: Path) -> None:
    """The limits hold exactly. The file is valid in all else, since spaces may follow a header."""
    folder = make_hf(tmp_path / "a")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + size], content[8 + size :]
    room = _HEADER_LIMIT - size
    safetensors(folder, header + b" " * room, data=data)
    convert(folder, tmp_path / "b", "torch")
    safetensors(folder, header + b" " * (room + 1), data=data)
    line = "its header claims 4,194,305 bytes, at most 4,194,304 are read"
    assert line in refusal(folder, tmp_path / "c", "torch")[0]
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    safetensors(folder, json.dumps({f"{number}": empty for number in range(49)}).encode())
    line = "a holds more than 48 tensors; its model has fewer"
    assert line in refusal(folder, tmp_path / "c", "torch")[0]
    rewritten = {"weight_map": {NORM: "model.safetensors"}, "metadata": "x" * (8 << 20)}
    file.rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(rewritten))
    assert "is larger than 8,388,608 bytes" in refusal(folder, tmp_path / "c", "torch")[0]


def _refusal_of(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Convert and inspect a folder; return the lines of the refusal, which is short and cheap."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = refusal(path, tmp_path / "b", "dcp")
    assert time.process_time() - began < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KB
    assert 1 <= len(lines) <= 9
    assert all(len(line) < 600 and "\n" not in line for line in lines), lines
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "b.tmp").exists()
    capsys.readouterr()
    assert main(["inspect", str(path)]) in (1, 2)
    assert len(capsys.readouterr().out.splitlines()) < 120
    return lines


NORM = "model.norm.weight"


# A fixed slice of the table, and what it does not hold.
CHANGES = {
    **{f"weights {name}": ("hf", change) for name, change in (HEADERS | NEEDED).items()},
    **{f"index {name}": ("hf", index_file(content)) for name, content in INDEXES.items()},
    **{f"params {n}": ("meta", changed_json("params.json", new)) for n, new in PARAMS.items()},
    **{f"text {name}": ("meta", text_file("params.json", text)) for name, text in TEXTS.items()},
}
SLICE = [*sorted(CHANGES)[::6], "index pipe"]


@pytest.mark.parametrize("case", SLICE)
def test_a_changed_folder_is_refused_with_a_few_lines(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    form, change = CHANGES[case]
    path = make_hf(tmp_path / "hf")
    if form == "meta":
        path = tmp_path / "meta"
        convert(tmp_path / "hf", path, "meta")
    change(path)
    assert _refusal_of(path, tmp_path, capsys)


def test_named_pipes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_hf(tmp_path / "a")
    convert(folder, tmp_path / "meta", "meta")
    (folder / "model.safetensors").unlink()
    for path in (
        folder / "model.safetensors.index.json",
        tmp_path / "meta/consolidated.00.pth",
        tmp_path / "meta/params.json",
    ):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        assert _refusal_of(path.parent, tmp_path, capsys)


def test_a_source_that_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "pipe", "is a named pipe, not a plain file"),
        (Path("/dev/zero"), "is a device, not a plain file"),
    ):
        assert message in refusal(path, tmp_path / "b", "hf")[0]
        assert message in refusal(path, function=inspect)[0]


NAMES = ["a\0b", "a\ud800b", "x" * 300, "/proc/self/mem", "loop"]


@pytest.mark.parametrize("name", NAMES, ids=["NUL", "surrogate", "long", "proc", "loop"])
def test_odd_names_of_source_and_target_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / name
    (line,) = refusal(path, tmp_path / "b", "hf")
    odd = set("\0\ud800") & set(name)
    assert not odd or "is not a valid name of a file" in line
    assert main(["inspect", str(path)]) in (1, 2)
    make_hf(tmp_path / "a")
    targets = [path / "b"] if name in ("/proc/self/mem", "loop") else [path, path / "b"]
    for target, to in product(targets, ("hf", "torch")):
        (line,) = refusal(tmp_path / "a", target, to)
        assert not odd or "is not a valid name of a file" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "loop"]


def test_folders_without_permission_are_refused(tmp_path: Path) -> None:
    """Root may read and write everything, so the test becomes another user for a while."""
    make_hf(tmp_path / "a")
    (tmp_path / "closed").mkdir()
    (tmp_path / "a").rename(tmp_path / "closed/a")
    make_hf(tmp_path / "open")
    (tmp_path / "closed").chmod(0)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open/model.safetensors").chmod(0o644)
    opened = [path for path in (tmp_path, *tmp_path.parents) if path.stat().st_mode & 0o5 != 0o5]
    modes = {path: path.stat().st_mode & 0o7777 for path in opened}
    me = os.geteuid()
    try:
        if me == 0:
            for path in opened:
                path.chmod(0o755)
            os.seteuid(65534)
        for path in (tmp_path / "closed", tmp_path / "closed/a"):
            (inspected,) = refusal(path, function=inspect)
            (converted,) = refusal(path, tmp_path / "open/b", "hf")
            assert "Permission denied" in inspected
            assert "Permission denied" in converted
        line = refusal(tmp_path / "open", tmp_path / "closed/b", "hf")[0]
        assert re.search(r"closed/b.* cannot be written .*Permission denied", line)
    finally:
        os.seteuid(me)
        for path, mode in modes.items():
            path.chmod(mode)
        (tmp_path / "closed").chmod(0o700)
