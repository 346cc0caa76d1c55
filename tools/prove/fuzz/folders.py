"""Hostile folders of Hugging Face: each is refused, or converted exactly.

safetensors have no digests, so a changed bit of a weight is a weight like any other. What is
accepted is compared with an independent reading: the header as the format's page defines it, and
the bytes at its offsets. Every converted tensor must have these bytes, and the exported config.json
must describe the same model.
"""

import io
import json
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.prove.fuzz.child import Case, WrongError, command
from tools.prove.fuzz.mutate import (
    ODD_VALUES,
    change_json,
    flip,
    odd_like,
    read_json,
    replace_file,
    written,
)
from tools.prove.hostile.base import RECIPE_WITHOUT_SIZES
from tools.prove.hostile.case import SECRET
from tools.prove.hostile.checkpoints import (
    nested,
    read_archive,
    touch,
    touching,
    write_archive,
)
from tools.prove.hostile.files import safetensors
from tools.prove.proof import overrides

_FOLDERS = ("hf", "hf", "hf-moe", "hf-parts", "hf-parts", "hf-bin")
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "U8": 8, "BOOL": 8}
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"


def make_base(base: Path) -> None:
    """Make folders with an index and with torch files from the folders of ``hostile``."""
    for name in ("hf-parts", "hf-bin"):
        shutil.copytree(base / "hf", base / name)
        (base / name / "model.safetensors").unlink()
    tensors = _read_safetensors(base / "hf" / "model.safetensors")
    weight_map: dict[str, str] = {}
    for number in range(3):
        part = dict(list(tensors.items())[number::3])
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        _write_safetensors(base / "hf-parts" / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (base / "hf-parts" / _INDEX).write_text(json.dumps(index))

    state = {
        name: torch.frombuffer(bytearray(tensor.content), dtype=torch.float32).reshape(tensor.shape)
        for name, tensor in tensors.items()
    }
    torch.save(state, base / "hf-bin" / "pytorch_model.bin")
    for name in set(_FOLDERS):
        (base / name / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
        (base / name / "chat_template.jinja").write_text("{{ messages }}")


def make(base: Path, draw: random.Random) -> Case:
    """Change a folder, and open it in all ways."""
    name = draw.choice(_FOLDERS)
    evil = Path("evil")
    shutil.copytree(base / name, evil)
    ways: list[Callable[[Path, Path, random.Random], str]] = [
        *(_config, _config, _config, _size, _size, _any_bytes, _replace, _carried, _extra_file),
    ]
    if name == "hf-bin":
        ways += [_pickle, _pickle, _archive, _archive]
    else:
        ways += [_header, _header, _header, _raw_header, _weights]
    if name == "hf-parts":
        ways += [_index, _index, _index, _parts]
    changes = [draw.choice(ways)(evil, base, draw)]
    if draw.random() < 0.1:
        changes.append(draw.choice(ways)(evil, base, draw))
    target = draw.choice(("hf", "hf", "torch", "dcp"))
    trains = draw.random() < 0.35
    return Case(
        f"{name}: {'; '.join(changes)}",
        lambda: _act(evil, base, name, target, trains=trains),
        cpu_s=8.0,
    )


# Ways to change a folder. Each returns what was changed.


def _config(evil: Path, base: Path, draw: random.Random) -> str:
    document = read_json(evil / _CONFIG)
    changed, shown = change_json(document, draw)
    (evil / _CONFIG).write_bytes(written(changed, draw))
    return f"config: {shown}"


_FURTHER_KEYS = (
    *("rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "sliding_window"),
    *("layer_types", "partial_rotary_factor", "quantization_config", "auto_map", "model_type"),
    *("use_sliding_window", "max_window_layers", "tie_word_embeddings", "num_local_experts"),
    *("hidden_act", "torch_dtype", "head_dim", "decoder_sparse_step", "original_max_position"),
)
_ROPES = (
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "factor": 1e300},
    {"type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    {"type": "yarn", "factor": 1e300, "beta_fast": 1e-300, "mscale": 1e300, "mscale_all_dim": 1},
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_theta": "1e4"},
)


def _size(evil: Path, base: Path, draw: random.Random) -> str:
    """Change one number of the config a little, or add a key that changes the model."""
    document = read_json(evil / _CONFIG)
    if not isinstance(document, dict) or not document:
        return "config left alone"
    if draw.random() < 0.6:
        key = draw.choice([key for key, value in document.items() if type(value) in (int, float)])
        document[key] = odd_like(document[key], draw)
    else:
        key = draw.choice(_FURTHER_KEYS)
        types = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt2")
        document[key] = draw.choice((*ODD_VALUES[:20], True, *_ROPES, *types, {"x": "../x.py"}))
    (evil / _CONFIG).write_bytes(written(document, draw))
    return f"config: {key} = {str(document[key])[:60]!r}"


def _files(evil: Path) -> list[Path]:
    return [path for path in sorted(evil.iterdir()) if path.is_file() and not path.is_symlink()]


def _any_bytes(evil: Path, base: Path, draw: random.Random) -> str:
    path = draw.choice([path for path in _files(evil) if path.stat().st_size < 1 << 24])
    path.write_bytes(flip(path.read_bytes(), draw))
    return f"bytes of {path.name}"


def _replace(evil: Path, base: Path, draw: random.Random) -> str:
    path = draw.choice(_files(evil))
    return f"{path.name}: {replace_file(path, base.parent / 'outside', draw)}"


def _carried(evil: Path, base: Path, draw: random.Random) -> str:
    """Change a file that conversions copy."""
    name = draw.choice(("tokenizer.json", "tokenizer_config.json", "generation_config.json"))
    content: Any = draw.choice(
        (
            {"auto_map": {"AutoTokenizer": "evil.Evil"}},
            {"chat_template": "{% for x in range(10**9) %}{{ ''.__class__.__mro__ }}{% endfor %}"},
            {"chat_template": [{"name": "x", "template": "{% include '/etc/passwd' %}"}]},
            "[" * 50_000,
            "x" * (1 << 20),
            {"eos_token_id": [10**30, "x"]},
            {"model": {"type": "BPE", "vocab": {}, "merges": []}},
        )
    )
    text = content if isinstance(content, str) else json.dumps(content)
    if draw.random() < 0.3:
        name = draw.choice(("chat_template.jinja", "README.md", "LICENSE"))
    (evil / name).write_text(text)
    return f"{name} of {len(text)} bytes"


def _extra_file(evil: Path, base: Path, draw: random.Random) -> str:
    names: tuple[str, ...]
    names = ("modeling_evil.py", "x\ny.safetensors", "pytorch_model.bin", ".metadata", "evil.so")
    names += ("model.safetensors", "manifest.json", "consolidated.a\nb.pth")
    name = draw.choice(names)
    if (evil / name).exists():
        return "nothing"
    if draw.random() < 0.3:
        (evil / name).symlink_to(base.parent / "outside" / "secret.txt")
    else:
        (evil / name).write_bytes(draw.choice((b"", b"x", pickle.dumps(touch(evil.resolve())))))
    return f"one more file {name!r}"


def _safetensors(evil: Path, draw: random.Random) -> Path | None:
    files = [path for path in _files(evil) if path.suffix == ".safetensors"]
    files = [path for path in files if 8 < path.stat().st_size < 1 << 24]
    return draw.choice(files) if files else None


def _split(content: bytes) -> tuple[Any, bytes]:
    """Split the content of a safetensors file into its header and the bytes of its tensors."""
    (size,) = struct.unpack("<Q", content[:8])
    if size > len(content):
        return {}, b""
    try:
        return json.loads(content[8 : 8 + size]), content[8 + size :]
    except ValueError:
        return {}, b""


def _header(evil: Path, base: Path, draw: random.Random) -> str:
    """Change a header: shapes, dtypes, offsets and names that lie."""
    path = _safetensors(evil, draw)
    if path is None:
        return "header left alone"
    header, rest = _split(path.read_bytes())
    names = [name for name in header if isinstance(header[name], dict) and "shape" in header[name]]
    if len(names) < 2:
        return "header left alone"
    name, other = draw.sample(names, 2)
    entry = header[name]
    begin, end = entry["data_offsets"]
    size = end - begin
    ways: dict[str, Callable[[], Any]] = {
        "any": lambda: header.update(change_json({name: entry}, draw)[0]),
        "overlap": lambda: entry.update(data_offsets=list(header[other]["data_offsets"])),
        "offsets swapped": lambda: _swap(entry, header[other], "data_offsets"),
        "shapes swapped": lambda: _swap(entry, header[other], "shape"),
        "entries swapped": lambda: _swap(header, header, name, other),
        "moved": lambda: entry.update(data_offsets=[begin + 4, end + 4]),
        "shorter": lambda: entry.update(data_offsets=[begin, end - 4]),
        "empty": lambda: entry.update(data_offsets=[begin, begin], shape=[0]),
        "reversed": lambda: entry.update(data_offsets=[end, begin]),
        "beyond": lambda: entry.update(data_offsets=[len(rest), len(rest) + size]),
        "shape": lambda: entry.update(shape=entry["shape"][::-1]),
        "flat": lambda: entry.update(shape=[prod(entry["shape"])]),
        "dims": lambda: entry.update(shape=[1, *entry["shape"]]),
        "huge shape": lambda: entry.update(shape=[2**62, 4]),
        "dtype": lambda: entry.update(dtype=draw.choice(("I32", "F64", "BF16", "U8", "f32", "F8"))),
        "half": lambda: entry.update(
            dtype="F16", shape=[2 * n for n in entry["shape"][:1]] + entry["shape"][1:]
        ),
        "renamed": lambda: header.update(
            {draw.choice((name + "x", "", "a\nb", "x" * 5000, "__metadata__x")): header.pop(name)}
        ),
        "missing": lambda: header.pop(name),
        "another layer": lambda: header.update(
            {
                name.replace(
                    "layers.0", f"layers.{draw.choice(('2', '-1', '00', '9' * 40))}"
                ): header.pop(name)
            }
        ),
        "metadata": lambda: header.update(
            __metadata__=draw.choice(({"format": "pt"}, {"x": 1}, [], "x", {"format": "x" * 10**6}))
        ),
        "many": lambda: header.update({f"x{n}": entry for n in range(5000)}),
    }
    way = draw.choice(list(ways))
    ways[way]()
    text = json.dumps(header)
    if draw.random() < 0.1:
        text = f"{{{json.dumps(name)}: {json.dumps(header.get(other, 1))}, {text[1:]}"
        way += ", a name twice"
    content = text.encode()
    content += b" " * (draw.choice((0, -len(content) % 8)))
    path.write_bytes(safetensors(content, rest))
    return f"header: {way} of {name}"


def _swap(one: dict[str, Any], two: dict[str, Any], key: str, other_key: str = "") -> None:
    other_key = other_key or key
    one[key], two[other_key] = two[other_key], one[key]


def _raw_header(evil: Path, base: Path, draw: random.Random) -> str:
    """Change the length of a header, or its bytes."""
    path = _safetensors(evil, draw)
    if path is None:
        return "header left alone"
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    if draw.random() < 0.5:
        other = draw.choice(
            (0, 1, size - 1, size + 1, size + 8, len(content), 2**32, 2**63, 2**64 - 1)
        )
        path.write_bytes(struct.pack("<Q", other) + content[8:])
        return f"a header of {other} bytes"
    path.write_bytes(flip(content, draw, within=(8, min(8 + size, len(content)))))
    return "bytes of a header"


def _weights(evil: Path, base: Path, draw: random.Random) -> str:
    path = _safetensors(evil, draw)
    if path is None:
        return "weights left alone"
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    path.write_bytes(flip(content, draw, within=(min(8 + size, len(content)), len(content))))
    return f"bytes of the weights of {path.name}"


def _index(evil: Path, base: Path, draw: random.Random) -> str:
    index = read_json(evil / _INDEX)
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        return "index left alone"
    weight_map = index["weight_map"]
    name = draw.choice(list(weight_map))
    file = weight_map[name]
    odd: tuple[str, ...]
    odd = ("../outside/model.safetensors", "/etc/passwd", f"./{file}", f"x/../{file}", "..", "")
    odd += ("a\0b", "\ud800", f"{file}\n", "config.json", "x" * 5000, ".", f"{file}/")
    odd += (str((base.parent / "outside" / "secret.txt").resolve()), "../base/hf/model.safetensors")
    ways: dict[str, Callable[[], Any]] = {
        "any": lambda: index.update(change_json(index, draw)[0]),
        "path": lambda: weight_map.update({name: draw.choice(odd)}),
        "another file": lambda: weight_map.update({name: draw.choice(list(weight_map.values()))}),
        "missing": lambda: weight_map.pop(name),
        "one more": lambda: weight_map.update({draw.choice(("x", "a\nb", "lm_head.bias")): file}),
        "all in one": lambda: weight_map.update(dict.fromkeys(weight_map, file)),
        "many files": lambda: weight_map.update({f"x{n}": f"f{n}" for n in range(5000)}),
        "size": lambda: index.update(metadata={"total_size": draw.choice(ODD_VALUES)}),
    }
    way = draw.choice(list(ways))
    ways[way]()
    (evil / _INDEX).write_bytes(written(index, draw))
    return f"index: {way}"


def _parts(evil: Path, base: Path, draw: random.Random) -> str:
    """Let two files hold one name, or drop one, or rename one to an odd name with the index."""
    files = [path for path in _files(evil) if path.suffix == ".safetensors"]
    index = read_json(evil / _INDEX)
    if len(files) < 3 or index is None:
        return "parts left alone"
    first, second, _ = files
    way = draw.choice(("twice", "swapped", "odd name"))
    if way == "twice":
        tensors = _read_safetensors(first)
        name = next(iter(tensors))
        _write_safetensors(second, {**_read_safetensors(second), name: tensors[name]})
    elif way == "swapped":
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    else:
        odd = draw.choice(("a\nb.safetensors", "\u202ex.safetensors", "x.txt", " .safetensors"))
        first.rename(evil / odd)
        index["weight_map"] = {
            name: odd if file == first.name else file for name, file in index["weight_map"].items()
        }
        (evil / _INDEX).write_text(json.dumps(index))
        if draw.random() < 0.5:
            (evil / odd).write_bytes(flip((evil / odd).read_bytes(), draw, within=(0, 400)))
    return f"parts: {way}"


def _pickle(evil: Path, base: Path, draw: random.Random) -> str:
    """Change the pickle in a torch file, keep it a sound archive."""
    path = evil / "pytorch_model.bin"
    if not path.is_file() or path.stat().st_size < 100:
        return "torch file left alone"
    calls = (
        touching(evil.resolve().parent) + b"0",
        b"cbuiltins\neval\n0",
        b"ctorch.hub\nload\n0",
        b"ctorch._utils\n_rebuild_tensor\n0",
        b"]" * 3000,
        b"N0" * 3000,
    )
    items, pickled = read_archive(path)
    content = items[pickled]
    way = draw.choice(("flip", "call", "whole", "deep"))
    if way == "flip":
        items[pickled] = flip(content, draw)
    elif way == "call":
        items[pickled] = content[:2] + draw.choice(calls) + content[2:]
    elif way == "whole":
        items[pickled] = pickle.dumps(touch(evil.resolve().parent))
    else:
        items[pickled] = nested(100_000)
    method = draw.choice((zipfile.ZIP_STORED,) * 4 + (zipfile.ZIP_DEFLATED,))
    write_archive(path, items, method)
    return f"pickle: {way}"


def _archive(evil: Path, base: Path, draw: random.Random) -> str:
    """Change bytes of the archive: records of tensors, headers, or the list of records."""
    path = evil / "pytorch_model.bin"
    if not path.is_file() or path.stat().st_size < 2000:
        return "torch file left alone"
    content = path.read_bytes()
    directory = content.rfind(b"PK\x05\x06")
    (begin,) = struct.unpack("<I", content[directory + 16 : directory + 20])
    begin = min(begin, len(content) - 1)
    within = draw.choice(((begin, len(content)), (0, begin), (max(0, begin - 5000), begin)))
    path.write_bytes(flip(content, draw, within=within))
    return f"bytes {within[0]} to {within[1]} of the archive"


# The independent reading.


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    content: bytes


def _read_safetensors(path: Path) -> dict[str, _Tensor]:
    """Read a safetensors file by the rules of its format. Raises ValueError if one is broken."""
    content = path.read_bytes()
    if len(content) < 8:
        raise ValueError("no header")
    (size,) = struct.unpack("<Q", content[:8])
    if size > len(content) - 8:
        raise ValueError("the header is longer than the file")
    header = json.loads(content[8 : 8 + size], object_pairs_hook=_without_duplicates)
    rest = content[8 + size :]
    tensors, covered = {}, 0
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        bits = _BITS.get(entry["dtype"])
        if bits is None or begin != covered or (end - begin) * 8 != bits * prod(entry["shape"]):
            raise ValueError(f"the place of {name!r} is wrong")
        covered = end
        tensors[name] = _Tensor(entry["dtype"], tuple(entry["shape"]), rest[begin:end])
    if covered != len(rest):
        raise ValueError("bytes are left")
    return tensors


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def _write_safetensors(path: Path, tensors: dict[str, _Tensor]) -> None:
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + len(tensor.content)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(safetensors(text, b"".join(tensor.content for tensor in tensors.values())))


def _read_folder(folder: Path) -> dict[str, _Tensor]:
    """Read all tensors of a folder. Raises ValueError or OSError if it breaks a rule."""
    if (folder / "model.safetensors").exists():
        return _read_safetensors(folder / "model.safetensors")
    if (folder / _INDEX).exists():
        files = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
        found: dict[str, _Tensor] = {}
        for file in sorted(files):
            if Path(file).name != file:
                raise ValueError("a file elsewhere")
            part = _read_safetensors(folder / file)
            if found.keys() & part.keys():
                raise ValueError("a name in two files")
            found |= part
        return found
    return _read_torch_file(folder / "pytorch_model.bin")


def _read_torch_file(path: Path) -> dict[str, _Tensor]:
    """Read a torch file whose pickle names only what a state_dict needs; sums are checked."""
    with zipfile.ZipFile(path) as archive:
        items = {item: archive.read(item) for item in archive.namelist()}  # checks each CRC
    (at,) = [item for item in items if item.endswith("data.pkl")]
    found = {}
    for name, (dtype, shape, begin, key) in _Plain(io.BytesIO(items[at])).load().items():
        assert dtype is torch.float32
        data = items[at.replace("data.pkl", f"data/{key}")]
        found[name] = _Tensor("F32", tuple(shape), data[4 * begin : 4 * (begin + prod(shape))])
    return found


class _Plain(pickle.Unpickler):
    """Unpickles a state_dict of contiguous float32 tensors to plain values."""

    def find_class(self, module: str, name: str) -> Any:
        known: dict[str, Any] = {
            "torch.FloatStorage": torch.float32,
            "torch._utils._rebuild_tensor_v2": lambda storage, begin, shape, *_: (
                storage[0],
                shape,
                begin,
                storage[1],
            ),
            "collections.OrderedDict": dict,
        }
        if f"{module}.{name}" not in known:
            raise ValueError(f"{module}.{name}")
        return known[f"{module}.{name}"]

    def persistent_load(self, identity: Any) -> Any:
        return identity[1], identity[2]


# The judgement.


def _act(evil: Path, base: Path, name: str, target: str, *, trains: bool) -> str:
    inspected = command("inspect", "evil", statuses=(0, 1, 2))
    converted = command("convert", "evil", "out", "--to", target)
    is_whole = inspected.status == 0
    if is_whole and converted.status != 0:
        raise WrongError("inspect finds nothing, but convert refuses")
    if not is_whole and converted.status == 0:
        raise WrongError("inspect finds problems, but convert goes on")
    if converted.status != 0 and Path("out").exists():
        raise WrongError("a refused conversion left something behind")
    started = _start(base, name) if trains else None
    if started == 0 and not is_whole:
        raise WrongError("training starts from a folder that inspect refuses")
    if not is_whole:
        return "refused"

    if target != "hf":
        # A second conversion, to compare the tensors by their names.
        again = command("convert", "out", "out-hf", "--to", "hf")
        if again.status != 0:
            raise WrongError(f"the copy as {target} cannot be converted again")
    exported = Path("out" if target == "hf" else "out-hf")
    try:
        expected = _read_folder(evil)
    except (ValueError, OSError, KeyError, TypeError, zipfile.BadZipFile, pickle.PickleError) as e:
        raise WrongError(f"it was converted, although it breaks the format: {e!r}") from None
    _compare(_read_folder(exported), expected)
    _compare_configs(evil, exported)
    for path in exported.iterdir():
        if path.is_file() and SECRET.encode() in path.read_bytes():
            raise WrongError(f"{path} holds a secret")
    return "converted exactly"


def _compare(found: dict[str, _Tensor], expected: dict[str, _Tensor]) -> None:
    for name, tensor in found.items():
        if expected.get(name) != tensor:
            raise WrongError(f"{name} was not converted exactly")
    for name in expected.keys() - found.keys():
        # A tied head is a copy, and the frequencies of positions are computed.
        is_copy = name == "lm_head.weight" and expected[name].content == next(
            tensor.content for other, tensor in expected.items() if "embed_tokens" in other
        )
        if not is_copy and "inv_freq" not in name:
            raise WrongError(f"{name} was lost")


_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}


def _compare_configs(evil: Path, exported: Path) -> None:
    """Require that both config.json give the same numbers, of the same kind."""
    before, after = (json.loads((folder / _CONFIG).read_bytes()) for folder in (evil, exported))
    for key in (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    ):
        values = []
        for config in (before, after):
            value = config.get(key)
            scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
            if key == "rope_theta" and scaling.get("rope_theta") is not None:
                value = scaling["rope_theta"]
            if key == "num_key_value_heads" and value is None:
                value = config.get("num_attention_heads")
            values.append(_DEFAULTS.get(key) if value is None else value)
        is_odd = isinstance(values[0], bool) != isinstance(values[1], bool)
        if (values[0] is not None and values[0] != values[1]) or is_odd:
            raise WrongError(f"config.json has {key} = {values[0]!r}, the copy {values[1]!r}")


def _start(base: Path, name: str) -> int:
    """Train one step that starts from the folder. Return the exit status."""
    Path("start.toml").write_text(RECIPE_WITHOUT_SIZES)
    sets = ["model.hf=evil", f"data.path={base / 'tokens'}", "run.steps=1", 'run.name="start"']
    if name == "hf-moe":
        sets.append('model.architecture="moe"')
    # Weights that are not finite end the training with status 1.
    return command("train", "start.toml", *overrides(*sets), statuses=(0, 1, 2)).status
