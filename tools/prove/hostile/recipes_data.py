"""Recipes, data and tokenizers that were made to harm, and the message that refuses each.

Each is refused with status 2 and one line, or a line for each problem of a recipe.
"""

import base64
import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from composer3d.facts.token_manifest import digest_of, digest_of_manifest
from composer3d.models.registry import DEFAULT
from tools.prove.fuzz.recipe_oracle import tables_of
from tools.prove.hostile import case
from tools.prove.hostile.files import NO_PLAIN, Change, pipe, place_of, replaced, sparse, write

Make = Callable[[Path], list[str]]
# By name: what writes the input and returns the arguments, and what the message must match.
Rows = dict[str, tuple[Make, str]]


def _refused(name: str, make: Make, message: str) -> case.Case:
    """A case that must be refused with status 2 and a line that matches ``message``.

    ``name`` becomes the name of its folder.
    """
    folder_name = re.sub(r"[^A-Za-z0-9_.=-]+", "-", name)[:120]
    # The command line may refuse it first.
    early = "^composer3d: the argument .* contains a NUL byte or bytes that are not UTF-8"
    return case.Case(folder_name, make, f"(?m)({message}|{early})", statuses=(2,))


def _alike(message: str, makes: Mapping[str, Make]) -> Rows:
    """Inputs that are refused with the same message."""
    return {name: (make, message) for name, make in makes.items()}


TINY = '[model]\npreset = "debug-tiny"\n'
SIZES = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn": 160, "vocab": 256}
AGAIN = "make the folder again with composer3d prepare$"
# A byte that is not UTF-8, as Python shows it in an argument or in the name of a file.
SURROGATE = "caf\udce9"
NO_FILE = "is (a named pipe|a socket|a device|a folder|a named pipe or a socket), not a plain file"


def recipe(text: str | bytes, *sets: str, command: tuple[str, ...] = ("check",)) -> Make:
    """Make the input of a case whose only file is a recipe."""

    def make(where: Path) -> list[str]:
        path = write(where / "x.toml", text)
        return [*command, str(path), *(f"--set={each}" for each in sets)]

    return make


def table_of(key: str, value: str) -> str:
    """A complete recipe in which one key has another value."""
    table, name = key.split(".")
    if table == "model":
        shape = dict(SIZES) | ({name: value} if name in SIZES else {})
        rest = "" if name in SIZES else f"{name} = {value}\n"
        return "[model]\n" + "".join(f"{each} = {size}\n" for each, size in shape.items()) + rest
    return f"{TINY}[{table}]\n{name} = {value}\n"


# Values.

# Keys whose values around each bound are refused, by table. ``recipe_oracle`` says where the bounds
# come from.
INTS = {
    "model": ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn", "vocab", "window", "rope_context"),
    "run": ("steps",),
    "mesh": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    "parallel": ("virtual_stages",),
    "memory": ("loss_chunks",),
    "data": ("seq_len", "global_batch", "micro_batch"),
    "optim": ("warmup", "decay"),
    "checkpoint": ("every", "keep"),
    "metrics": ("every",),
    "validation": ("every", "steps"),
}
FLOATS = {
    "model.rope_theta": ("0.5", "1e13"),
    "model.norm_eps": ("-1.0", "2.0"),
    "model.rope_factor": ("0.0", "1e9"),
    "model.rope_low_freq": ("0.0", "1e300"),
    "model.rope_high_freq": ("-1.0", "1e300"),
    "optim.lr": ("-1.0", "1e300"),
    "optim.eps": ("0.0", "1e12"),
    "optim.weight_decay": ("-1.0", "1e9"),
    "optim.clip": ("-1.0", "1e300"),
    "optim.min_lr": ("-1.0", "1e300"),
}


def _values() -> Rows:
    cases: Rows = {}
    for key in (f"{table}.{name}" for table, names in INTS.items() for name in names):
        table, _, name = key.partition(".")
        allowed = tables_of(DEFAULT)[table][name]
        least, most = int(allowed.least), int(allowed.most)
        for value in (least - 1 if key != "mesh.dp_shard" else -2, most + 1, 2**63 - 1):
            message = rf"x\.toml:\d+: {key} = {value} must be from {least:_} to {most:_}"
            cases[f"{key} = {value}"] = (recipe(table_of(key, str(value))), message)
        message = rf"x\.toml:\d+: '{key}' must be an int of 64 bits, got 1{{24}}"
        cases[f"{key} of 24 digits"] = (recipe(table_of(key, "1" * 24)), message)
    for key, values in FLOATS.items():
        for value in values:
            message = rf"x\.toml:\d+: {key} = \S+ must be (from|above) "
            cases[f"{key} = {value}"] = (recipe(table_of(key, value)), message)
        for value in ("nan", "inf", "-inf"):
            message = rf"x\.toml:\d+: '{key}' must be a finite float, got {value}"
            cases[f"{key} = {value}"] = (recipe(table_of(key, value)), message)
    other_values = {
        "model.head_dim": ["1", "7", str(2**40)],
        "run.seed": ["-1"],
        "data.seed": ["-1"],
        "optim.betas": ["[0.9, nan]", "[1.0, 0.9]", "[0.9, inf]", "[-0.1, 0.9]"],
        "model.rope_theta": ['"1e4"', "true"],
        "model.tied": ['"false"'],
        "run.steps": ["1e30", "1" * 5000, "true"],
    }
    for key, values in other_values.items():
        for value in values:
            message = (
                rf"x\.toml(:\d+)?: ('?{key}'? (= \S+ |= \[.*\] )?must"
                r"|an integer has more than 64 bits)"
            )
            cases[f"{key} = {value[:30]}"] = (recipe(table_of(key, value)), message)
    products = {
        "a world beyond all": (
            "[mesh]\npp = 4\ndp_replicate = 1024\ndp_shard = 1024\ncp = 1024\ntp = 4\n"
        ),
        "a billion micro-batches": (
            "[mesh]\npp = 3\n[data]\nglobal_batch = 1073741823\n"
            '[parallel]\nschedule = "Interleaved1F1B"\n'
        ),
        "a pipeline as deep": "[mesh]\npp = 1048576\n[data]\nglobal_batch = 1048576\n",
        "as many virtual stages": (
            '[mesh]\npp = 4\n[parallel]\nvirtual_stages = 10000\nschedule = "LoopedBFS"\n'
        ),
        "a warmup beyond the run": "[optim]\nwarmup = 1000000000\n",
    }
    for name, text in products.items():
        cases[name] = (
            recipe(TINY + text),
            r"x\.toml:\d+: \S+ = \S+ .*(must|more than|needs|world of)",
        )
    return cases


# Texts of recipes.

PATH_KEYS = (
    "data.path",
    "validation.path",
    "parallel.schedule_csv",
    "model.hf",
    "run.out_dir",
    "checkpoint.resume",
    "checkpoint.init",
)
BEFORE = {
    "data.path": '[data]\nsource = "text"\n',
    "validation.path": '[data]\nsource = "text"\npath = "."\n[validation]\n',
    "parallel.schedule_csv": '[mesh]\npp = 2\n[parallel]\nschedule = "csv"\n',
    "run.out_dir": "[run]\n",
    "checkpoint.resume": "[checkpoint]\n",
    "checkpoint.init": "[checkpoint]\n",
}
BAD_TEXTS = {
    "a NUL byte": r'"a\u0000b"',
    "a line break": r'"a\nb"',
    "an escape": r'"a\u001b[2Jb"',
    "nothing": '""',
}


def _texts() -> Rows:
    cases: Rows = {}
    for key in PATH_KEYS:
        name = key.split(".")[1]
        for what, value in (BAD_TEXTS | {"5,000 letters": f'"{"x" * 5000}"'}).items():
            text = (
                f"[model]\n{name} = {value}\n"
                if key == "model.hf"
                else f"{TINY}{BEFORE[key]}{name} = {value}\n"
            )
            message = (
                rf"x\.toml:\d+: {key} = .* must be (a path of 1 to 4096 characters, without "
                r"control characters|a path, or the URL of a folder in an object store: .*)$"
            )
            cases[f"{key} of {what}"] = (recipe(text), message)
        message = rf"^--set {key}=caf\S+: the text must be UTF-8$"
        cases[f"{key} of no UTF-8"] = (recipe(TINY, f"{key}={SURROGATE}"), message)
    for what, value in (
        BAD_TEXTS | {"300 letters": f'"{"x" * 300}"', "300 bytes": f'"{"é" * 150}"'}
    ).items():
        message = (
            r"x\.toml:4: run\.name = .* cannot name the folder of the run: it must not be empty"
        )
        cases[f"run.name of {what}"] = (recipe(f"{TINY}[run]\nname = {value}\n"), message)
    for number, value in enumerate(("..", ".", "a/b", "/etc", "a\\b", "  ")):
        message = r"x\.toml:4: run\.name = .* cannot name the folder of the run"
        cases[f"run.name that is no name {number}"] = (
            recipe(f"{TINY}[run]\nname = '{value}'\n"),
            message,
        )
    message = r"x\.toml:3: 'base' must be the path of one recipe"
    for what, value in (
        BAD_TEXTS | {"a number": "7", "a list": "[[[[]]]]", "a table": "{ a = 1 }"}
    ).items():
        cases[f"base of {what}"] = (recipe(f"# a\n\nbase = {value}\n"), message)

    size = 256 << 10
    unread = r"x\.toml: cannot be read as TOML: "
    lines = "".join(f"  {number},\n" for number in range(3000))
    texts: dict[str, tuple[str | bytes, str]] = {
        "3,000 lines of an array": (
            f"{TINY}[parallel]\nstages = [\n{lines}]\n",
            r"x\.toml:4: parallel\.stages = \[0, 1, .* \([\d,]+ characters\) has 3000 stages",
        ),
        "3,000 lines of texts": (
            f"{TINY}[parallel]\nstages = [\n" + '  """a""",\n' * 3000 + "]\n",
            r"x\.toml:4: 'parallel\.stages' must be an array of ints, got",
        ),
        "open brackets": (
            "x = " + "[" * (size - 4),
            unread + "line 1 nests brackets deeper than 16",
        ),
        "open braces": (
            "x = " + "{a = " * (size // 5 - 4),
            unread + "line 1 nests brackets deeper than 16",
        ),
        "a deep array": (
            f"{TINY}x = {'[' * 300}{']' * 300}\n",
            unread + "line 3 nests brackets deeper than 16",
        ),
        "a deep header": (
            f"[{'a.' * 1000}b]\n",
            unread + "line 1 nests the parts of a key deeper than 16",
        ),
        "a deep key": (
            "a." * (size // 2 - 4) + "b = 1",
            unread + "line 1 nests the parts of a key",
        ),
        "a deep key of a table": (
            "x = { " + "a." * 9999 + "b = 1 }",
            unread + "line 1 nests the parts of a key",
        ),
        "a deep key of texts with commas": (
            ".".join(['"a,"'] * 900) + " = 1",
            unread + "line 1 nests the parts of a key",
        ),
        "a deep key over several levels": (
            f"{TINY}junk.a.b.c.d.e.f.g = {{ h.i.j.k.l.m.n.o = [[1]] }}\n",
            r"x\.toml:1: 'model' nests deeper than 16 levels",
        ),
        "a long hex number": (
            f"{TINY}[run]\nsteps = 0x{'f' * 4000}\n",
            r"x\.toml:4: 'run\.steps' must be an int of 64 bits, got one of 16,000 bits",
        ),
        "a long number in a table of an array": (
            f"{TINY}[data]\nsources = [{{ path = 'a', weight = 0b1{'0' * 70} }}]\n",
            r"x\.toml:4: 'data\.sources\.0\.weight' must be an int of 64 bits",
        ),
        "keys by the thousand": (
            "".join(f"k{number} = 1\n" for number in range(size // 14)),
            unread + "it has more than 4_000 statements",
        ),
        "unknown keys": (
            TINY + "[run]\n" + "".join(f"k{number} = 1\n" for number in range(3900)),
            r"x\.toml:\d+: the recipe has 100 problems up to here; fix them first",
        ),
        "unknown tables": (
            "".join(f"[t{number}]\n" for number in range(3900)),
            "the recipe has 100 problems up to here; fix them first",
        ),
        "quotes": ("x = " + '"' * (size - 4), r"x\.toml:1: not TOML: "),
        "literal quotes": ("x = " + "'" * (size - 4), r"x\.toml:1: not TOML: "),
        "a string without end": (
            'x = """' + "a\n" * (size // 2 - 8),
            r"x\.toml:\d+: not TOML: Unterminated string",
        ),
        "a long key": (
            f"{TINY}[run]\n{'x' * (size - 99)} = 1",
            r"x\.toml:4: unknown key 'run\.x+\.\.\. \([\d,]+ characters\)'",
        ),
        "a long text": (
            f"{TINY}[run]\nname = '{'x' * (size - 100)}'\n",
            r"x\.toml:4: run\.name = \"x{290,}\.\.\. ",
        ),
        "a long number": ("x = " + "9" * (size - 8), r"x\.toml:1: an integer has more than 64 "),
        "a long exponent": (
            f"{TINY}[optim]\nlr = 1e{'9' * 9999}\n",
            r"x\.toml:4: 'optim\.lr' must be a finite float",
        ),
        "a long date": (
            f"{TINY}[run]\nsteps = 1979-05-27T00:32:00.{'9' * 9999}\n",
            r"x\.toml:4: 'run\.steps' must be int, got 1979-05-27",
        ),
        "a NUL byte": ("[run]\nname = 'a\0b'\n", r"x\.toml:2: not TOML: "),
        "half a pair": (r"[run]" + "\n" + r'name = "\ud800"' + "\n", r"x\.toml:2: not TOML: "),
        "UTF-16": ("[run]\n".encode("utf-16"), unread),
        "bytes": (bytes(range(256)) * 16, unread),
        "too large": (b"#" * (size + 1), r"x\.toml: is larger than 262,144 bytes"),
    }
    cases |= {
        f"recipe of {name}": (recipe(text), message) for name, (text, message) in texts.items()
    }
    deep = "[" * 300 + "]" * 300
    cases |= {
        "an override that is deep": (
            recipe(TINY, f"mesh.tp={deep}"),
            r"^--set mesh\.tp=\[+.*must be int, got",
        ),
        "an override of two": (
            recipe(TINY, "mesh.tp=1\nmesh.pp=2"),
            r"^--set mesh\.tp=1\\nmesh\.pp=2: .* must be int",
        ),
        "an override of digits": (
            recipe(TINY, f"mesh.tp={'9' * 9999}"),
            r"^--set mesh\.tp=9+.*: an integer has more than 64 bits",
        ),
        "an override of a long key": (
            recipe(TINY, f"mesh.{'x' * 99_999}=1"),
            r"^--set mesh\.x+.*unknown key",
        ),
        "an override without a key": (
            recipe(TINY, "=" * 99_999),
            r"^--set =+.*: write it as table\.key=value$",
        ),
    }
    return cases


def _files() -> Rows:
    cases: Rows = {}

    def of(name: str) -> Make:
        return lambda where: ["check", str(where / name)]

    def named_by(text: str) -> Make:
        """A recipe that names the file y, which is beside it."""
        return lambda where: [
            "check",
            str(write(where / "x.toml", text.replace("HERE", str(where)))),
        ]

    def layouts(where: Path) -> list[str]:
        return ["verify", str(write(where / "x.toml", TINY)), "--layouts", str(where / "l.txt")]

    def tokenizer(where: Path) -> list[str]:
        return prepare(where, write(where / "a.txt", "a"), tokenizer=where / "t.json")

    csv = '[mesh]\npp = 2\n[parallel]\nschedule = "csv"\nschedule_csv = "HERE/y"\n'
    data = TINY + '[data]\nsource = "{}"\npath = "HERE/y"\n'
    no_data = r'x\.toml:5: data\.path = ".*/y" is neither a file nor a folder; give'
    # The file that is no plain file, what reads it, and the message.
    readers: dict[str, tuple[str, Make, str]] = {
        "recipe is": ("x.toml", of("x.toml"), rf"x\.toml: {NO_FILE}$"),
        "base is": (
            "y",
            named_by('base = "y"\n'),
            rf"x\.toml:1: base cannot be read: .*/y: {NO_FILE}$",
        ),
        "schedule is": (
            "y",
            named_by(TINY + csv),
            rf"the schedule .*/y cannot be read \({NO_FILE}\)$",
        ),
        "layouts is": ("l.txt", layouts, rf"^--layouts .*/l\.txt: cannot be read \({NO_FILE}\)$"),
        "tokenizer is": ("t.json", tokenizer, rf"^--tokenizer .*/t\.json: {NO_FILE}; give bytes"),
        "text is": ("y", named_by(data.format("text")), no_data),
        "jsonl is": ("y", named_by(data.format("jsonl")), no_data),
        "prepare of": (
            "y",
            lambda where: prepare(where, where / "y"),
            rf"/y: cannot be read: {NO_FILE}; make it",
        ),
    }
    for what, kind in NO_PLAIN.items():
        for reader, (name, make, message) in readers.items():
            # These read folders.
            if what == "folder" and reader in ("text is", "jsonl is", "prepare of"):
                continue

            def placed(
                where: Path, name: str = name, kind: Change = kind, make: Make = make
            ) -> list[str]:
                kind(where / name)
                return make(where)

            cases[f"{reader} a {what}"] = (placed, message)

    def chain(bases: int, padding: str = "") -> Make:
        """A recipe whose bases are as many files, one the base of the other."""

        def make(where: Path) -> list[str]:
            for number in range(bases):
                write(where / f"{number}.toml", f'base = "{number + 1}.toml"\n{padding}\n')
            write(where / f"{bases}.toml", TINY)
            return ["check", str(where / "0.toml")]

        return make

    def loop(where: Path) -> list[str]:
        (where / "x.toml").symlink_to("x.toml")
        return ["check", str(where / "x.toml")]

    def circle_by_link(where: Path) -> list[str]:
        (where / "y.toml").symlink_to("x.toml")
        return ["check", str(write(where / "x.toml", 'base = "y.toml"\n'))]

    def layouts_too_large(where: Path) -> list[str]:
        sparse(where / "l.txt", 1 << 40)
        return layouts(where)

    def schedule(content: bytes) -> Make:
        def make(where: Path) -> list[str]:
            path = write(where / "y.csv", content)
            text = f'{TINY}[mesh]\npp = 2\n[parallel]\nschedule = "csv"\nschedule_csv = "{path}"\n'
            return ["check", str(write(where / "x.toml", text))]

        return make

    cases |= {
        "a chain of 40 bases": (
            chain(40),
            r"32\.toml:1: base = \"33\.toml\" is base number 33; use at most 32$",
        ),
        "bases of a megabyte": (
            chain(20, "#" * 30_000),
            r"\d+\.toml: the recipe and its bases are larger than 262_144 bytes$",
        ),
        "a recipe that links to itself": (loop, r"x\.toml: Too many levels of symbolic links$"),
        "a circle by a link": (
            circle_by_link,
            r'x\.toml:1: base = "y\.toml" makes a cycle; remove one base$',
        ),
        "a recipe of a terabyte": (
            lambda where: ["check", str(sparse(where / "x.toml", 1 << 40))],
            "is larger than",
        ),
        "a recipe of no UTF-8": (of(SURROGATE), r"caf\S+: No such file or directory$"),
        "a recipe of two lines": (of("a\nb"), r"/a\\nb: No such file or directory$"),
        "a recipe of 300 letters": (of("x" * 300), r"x{300}: File name too long$"),
        "a recipe by a name of 300 letters": (
            lambda _: ["check", "x" * 300],
            r"x{300}: there is no such file, and no such recipe in composer3d",
        ),
        "a copy of 300 letters": (
            lambda _: ["recipes", "cp", "quickstart", "x" * 300 + ".toml"],
            r"x{300}\.toml: the file cannot be made \(File name too long\)",
        ),
        "a script of 300 letters": (
            lambda _: ["launch", "cp", "node", "x" * 300],
            r"x{300}: the file cannot be made \(File name too long\)",
        ),
        "an import to 300 letters": (
            lambda where: ["import", str(write(where / "x.toml", TINY)), "-o", "x" * 300],
            r"x\.toml: has no words of a program that import knows",
        ),
        "a recipe of a NUL byte": (of("a\0b"), r"a\\u0000b: no file has such a name"),
        "layouts of a terabyte": (
            layouts_too_large,
            r"^--layouts .*: cannot be read \(is larger than 1,048,576 bytes",
        ),
        "a schedule of garbage": (
            schedule(b"\xff" * 999),
            r"cannot be read \('utf-8' codec",
        ),
        "a schedule of long numbers": (
            schedule(b"0F" + b"9" * 9999 + b"\n1F0\n"),
            r":1: '0F9+\.\.\. .*is not an action",
        ),
        "a schedule of many lines": (
            schedule(b"0F0\n" * 99_999),
            r"has 99999 lines, but needs one for each of mesh\.pp = 2 pipeline ranks",
        ),
        "a schedule of many cells": (
            schedule(b"0F0," * 999_999 + b"\n1F0\n"),
            r":1 has 999999 cells, but 1 stages",
        ),
        "a schedule that is too large": (
            schedule(b"0F0," * (1 << 20) + b"\n"),
            r"is larger than 4,194,304 bytes",
        ),
    }
    return cases


# Token folders.


def prepare(where: Path, source: Path, *more: str, tokenizer: str | Path = "bytes") -> list[str]:
    return ["prepare", str(source), "-o", str(where / "out"), "--tokenizer", str(tokenizer), *more]


def manifest_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    return {
        "format": "composer3d tokens",
        "version": 1,
        "dtype": "uint16",
        "vocab": 256,
        "tokens": 100,
        "documents": 1,
        "end_of_document": 0,
        "tokenizer": {"name": "t.json", "digest": digest_of(files["tokenizer.json"])},
        "files": {
            name: {"bytes": len(content), "digests": [digest_of(content)]}
            for name, content in files.items()
        },
    }


def tokens(
    change: Callable[[dict[str, Any]], object] = lambda manifest: None,
    after: Callable[[Path], object] = lambda where: None,
    text: str | bytes | None = None,
) -> Make:
    """Make the input of a case with a folder of token files.

    Args:
        change: changes the manifest, which gets a right digest afterwards.
        after: changes the finished folder.
        text: replaces the manifest.
    """

    def make(where: Path) -> list[str]:
        files = {
            "tokens.bin": struct.pack("<100H", *[1] * 99, 0),
            "documents.bin": struct.pack("<2q", 0, 100),
            "tokenizer.json": b"{}",
        }
        for name, content in files.items():
            write(where / "t" / name, content)
        manifest = manifest_of(files)
        change(manifest)
        manifest.setdefault("digest", digest_of_manifest(manifest))
        write(where / "t" / "tokens.json", json.dumps(manifest) if text is None else text)
        after(where / "t")
        data = f'[data]\nsource = "tokens"\npath = {json.dumps(str(where / "t"))}\n'
        return ["check", str(write(where / "x.toml", TINY + data))]

    return make


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set a key of a manifest, which ``place_of`` finds."""

    def change(manifest: dict[str, Any]) -> None:
        owner, name = place_of(manifest, key)
        owner[name] = value

    return change


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        owner, name = place_of(manifest, key)
        del owner[name]

    return change


def _tokens() -> Rows:
    unusable = r'x\.toml:5: data\.path = ".*/t" cannot be used: .*/t/tokens\.json cannot be used \('
    a_file = {"bytes": 200, "digests": ["0" * 32]}
    values: dict[str, list[Any]] = {
        "format": ["other", 1, None, ["composer3d tokens"]],
        "version": [0, 2, "1", 1.0, True, None, 10**30, [1], {"a": 1}],
        "dtype": [
            *("uint8", "<u2", "object", "O", "float64"),
            *(2, None, ["uint16"], {"a": "uint16"}, "u" * 9999),
        ],
        "vocab": [0, -1, 65_537, 10**30, "256", 256.0, None, True, [256], {}],
        "tokens": [0, -100, 99, 101, 10**30, "100", 100.5, None, True, []],
        "documents": [0, -1, 2, 101, 10**30, "1", 1.0, None, True, {}],
        "end_of_document": [-1, 256, 10**30, "0", 0.0, None, False, []],
        "tokenizer": [
            *(None, "t.json", [], {}, {"name": "t"}),
            *({"name": 1, "digest": None}, {"name": "t", "digest": 1}),
        ],
        "tokenizer/digest": [None, "", "0" * 32, "z" * 32, "0" * 31, 7, ["0" * 32]],
        "files": [None, [], {}, "tokens.bin", {"tokens.bin": None}],
        "files/tokens.bin": [None, [], {}, 200, {"bytes": 200}, {"digests": []}],
        "files/tokens.bin/bytes": [0, -200, 199, 201, 10**30, "200", 200.0, None, True],
        "files/tokens.bin/digests": [
            *([], None, "0" * 32, ["0" * 31], ["Z" * 32], [None], ["0" * 32] * 2, {"0": "0"}),
        ],
        "files/documents.bin/bytes": [0, 15, 24, None],
        "files/documents.bin/digests": [[], [[]], ["0" * 64]],
        "files/tokenizer.json/bytes": [0, 1 << 40, -1],
        "files/tokenizer.json/digests": [[], ["0" * 32]],
        "files/..": [a_file],
        "files/\0": [a_file],
        "files/caf\udce9": [a_file],
        "more": [1],
        "digest": ["0" * 32, "", None, 5, []],
    }
    cases: Rows = {
        f"tokens.json: {key!a} = {str(value)[:40]!a} ({number})": (
            tokens(put(key, value)),
            unusable,
        )
        for key, each in values.items()
        for number, value in enumerate(each)
    }
    for name in ("../secret", "/etc/passwd", "a/b"):

        def add(manifest: dict[str, Any], name: str = name) -> None:
            manifest["files"][name] = manifest["files"]["tokens.bin"]

        cases[f"tokens.json names {name}"] = (
            tokens(add),
            unusable + "files has .* does not belong there",
        )
    for key in (
        "version",
        "dtype",
        "vocab",
        "files",
        "tokenizer",
        "files/tokens.bin",
        "files/documents.bin",
    ):
        cases[f"tokens.json without {key}"] = (tokens(drop(key)), unusable + ".* lacks ")
    texts: dict[str, tuple[str | bytes, str]] = {
        "nothing": ("", "Expecting value"),
        "a torn object": ('{"version": 1', "Expecting"),
        "brackets": ("[" * 100_000, "it nests too deep"),
        "braces": ('{"a":' * 100_000, "it nests too deep"),
        "an array": ("[]", r"it must be an object, not \[\]"),
        "null": ("null", "it must be an object, not null"),
        "Infinity": ('{"version": Infinity}', "it holds Infinity, which JSON does not have"),
        "NaN": ('{"version": NaN}', "it holds NaN, which JSON does not have"),
        "1e999": ('{"version": 1e999}', "it holds 1e999, which is beyond the range of a float"),
        "400 digits": ('{"version": 1' + "0" * 400 + "}", "it holds an integer of 401 digits"),
        "5,000 digits": ('{"version": ' + "9" * 5_000 + "}", "it holds an integer of 5,000 digits"),
        "no UTF-8": (b'{"version": "\xff"}', ".*codec can't decode"),
        "bytes": (bytes(range(128, 256)) * 99, "(.*codec can't decode|Expecting)"),
        "half a pair": (r'{"version": "\ud800"}', "'version' has a lone surrogate"),
        "too much": (b" " * (65 << 20), "is larger than 67,108,864 bytes"),
        "a long text": ('{"version": "' + "x" * 999_999 + '"}', r"it has version .{100}"),
        "many lists": ("[" + "[]," * 999_999 + "[]]", r"it must be an object, not \[\[\], \[\]"),
    }
    cases |= {
        f"tokens.json of {name}": (tokens(text=text), unusable + reason)
        for name, (text, reason) in texts.items()
    }

    for what, kind in NO_PLAIN.items():
        cases[f"tokens.json is a {what}"] = (
            tokens(after=replaced("tokens.json", kind)),
            unusable + NO_FILE,
        )
        for name in ("tokens.bin", "documents.bin", "tokenizer.json"):
            reason = rf"x\.toml:5: data\.path = .* cannot be used: .*/t/{name} (is|cannot)"
            cases[f"{name} is a {what}"] = (tokens(after=replaced(name, kind)), reason)
    for name in ("tokens.bin", "documents.bin", "tokenizer.json"):
        prefix = rf"x\.toml:5: data\.path = .* cannot be used: .*/t/{name} "
        cases |= {
            f"{name} is missing": (
                tokens(after=lambda where, name=name: (where / name).unlink()),
                prefix + "is missing",
            ),
            f"{name} is huge": (
                tokens(after=lambda where, name=name: sparse(where / name, 1 << 40)),
                prefix + "has 1099511627776 bytes",
            ),
            f"{name} is empty": (
                tokens(after=lambda where, name=name: sparse(where / name, 0)),
                prefix + "has 0 bytes",
            ),
        }
    link = replaced("tokenizer.json", lambda path: path.symlink_to("/etc/hostname"))
    cases["tokenizer.json is a link"] = (
        tokens(after=link),
        r"tokenizer\.json is a symbolic link, which is not",
    )
    return cases


# Sources and tokenizers.


def lines(content: bytes, *more: str) -> Make:
    return lambda where: prepare(where, write(where / "a.jsonl", content), *more)


def tokenizer(changed: Mapping[str, Any] | bytes, text: bytes = b"a") -> Make:
    """A tokenizer.json of two words with other keys, or of other bytes, and a text for it."""

    def make(where: Path) -> list[str]:
        content = changed
        if not isinstance(content, bytes):
            vocab = {"a": 0, "</s>": 1, "<unk>": 2}
            rules = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
            whole: dict[str, Any] = dict.fromkeys(("truncation", "padding", *rules))
            whole |= {"version": "1.0", "added_tokens": []}
            whole["model"] = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
            content = json.dumps(whole | dict(content)).encode()
        path = write(where / "t.json", content)
        return prepare(where, write(where / "a.txt", text), tokenizer=path)

    return make


def split(regex: str) -> dict[str, Any]:
    return {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": regex},
            "behavior": "Isolated",
            "invert": False,
        }
    }


def times(number: int, of: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": of}, "content": "a" * number}


def charsmap(content: bytes) -> dict[str, Any]:
    return {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(content).decode(),
        }
    }


def _sources() -> Rows:
    needed = r'/a\.jsonl:1: must be a JSON object such as \{"text": "\.\.\."\}: '
    texts: dict[str, tuple[bytes, str]] = {
        "a million brackets": (b"[" * 1_000_000, needed),
        "a million braces": (b'{"a":' * 1_000_000, needed),
        "half a pair": (rb'{"text": "\ud800"}', needed + "'utf-8' codec can't encode"),
        "half a pair elsewhere": (rb'["\ud800"]', needed + "got"),
        "5,000 digits": (b"9" * 5_000, needed + "Exceeds the limit"),
        "no UTF-8": (b'{"text": "\xff"}', needed + "'utf-8' codec"),
        "no UTF-8 elsewhere": (b'["\xff"]', needed),
        "UTF-16": ('{"text": "a"}\n'.encode("utf-16"), needed),
        "a NUL byte": (
            rb'{"text": "a\u0000b"}',
            r"/a\.jsonl:1: byte 0 at offset 1 would end a document there",
        ),
        "a number": (b'{"text": 1}', needed + "got"),
        "a long line": (
            b'{"text": "' + b"x" * (16 << 20) + b'"}',
            r"/a\.jsonl:1: the line is longer than 16_777_216 bytes",
        ),
        "a line of escapes": (b'["\\u001b[2J\\n"]\r', needed + "got"),
        "a line of controls": (b'["a"]\x0b\x0c', needed),
    }
    cases: Rows = {
        f"JSONL of {name}": (lines(text), reason) for name, (text, reason) in texts.items()
    }

    def huge_line(where: Path) -> list[str]:
        return prepare(where, sparse(where / "a.jsonl", 1 << 40))

    def huge_text(where: Path) -> list[str]:
        return prepare(where, sparse(where / "a.txt", 1 << 40))

    def inside(name: str, content: bytes) -> Make:
        def make(where: Path) -> list[str]:
            (where / "in").mkdir()
            with open(os.fsencode(where / "in") + b"/" + os.fsencode(name), "wb") as file:
                file.write(content)
            return prepare(where, where / "in")

        return make

    def links(where: Path) -> list[str]:
        (where / "in").mkdir()
        (where / "in" / "self").symlink_to(".")
        (where / "in" / "zero").symlink_to("/dev/zero")
        pipe(where / "in" / "pipe")
        return prepare(where, where / "in")

    def link_to_itself_inside(where: Path) -> list[str]:
        (where / "in").mkdir()
        write(where / "in" / "a.txt", "a")
        (where / "in" / "b.txt").symlink_to("b.txt")
        return prepare(where, where / "in")

    def link_to_itself(where: Path) -> list[str]:
        (where / "a.txt").symlink_to("a.txt")
        return prepare(where, where / "a.txt")

    def named(option: str, name: str) -> Make:
        def make(where: Path) -> list[str]:
            arguments = prepare(where, write(where / "a.txt", "a\0"))
            arguments[{"SRC": 1, "-o": 3, "--tokenizer": 5}[option]] = str(where / name)
            return arguments

        return make

    cases |= {
        "JSONL of a terabyte": (
            huge_line,
            r"/a\.jsonl:1: the line is longer than 16_777_216 bytes",
        ),
        "a text of a terabyte": (
            huge_text,
            r"/a\.txt: one document has 1_099_511_627_776 bytes, but at most [\d_]+ are read into",
        ),
        "a name of no UTF-8": (inside(SURROGATE, b"a\0"), r"/in/caf\S+: byte 0 at offset 1"),
        "a name of two lines": (inside("a\nb", b"a\0"), r"/in/a\\nb: byte 0 at offset 1"),
        "a suffix of no UTF-8": (
            inside("a.json\udce9", b"a\0"),
            r"/in/a\.json\S+: byte 0 at offset 1",
        ),
        "links, a device and a pipe": (links, r"/in: no files found; give a path that holds text$"),
        "a folder with a text that links to itself": (
            link_to_itself_inside,
            r"/in/b\.txt: is a link that leads nowhere; restore the file that it names, or remove",
        ),
        "a text that links to itself": (
            link_to_itself,
            r"/a\.txt does not exist; give a text file",
        ),
        "a source of a NUL byte": (
            named("SRC", "a\0b"),
            r"^SRC .*a\\u0000b: no file can have such a name",
        ),
        "a folder of a NUL byte": (
            named("-o", "a\0b"),
            r"^-o .*a\\u0000b: no file can have such a name",
        ),
        "a tokenizer of a NUL byte": (
            named("--tokenizer", "a\0b"),
            r"^--tokenizer .*: no file can have such a name",
        ),
        "a source of half a pair": (
            named("SRC", "a\ud800"),
            r"^SRC .*: no file can have such a name",
        ),
        "a folder of half a pair": (
            named("-o", "a\ud800"),
            r"^-o .*: no file can have such a name",
        ),
        "a source of no UTF-8": (
            named("SRC", SURROGATE),
            r"/caf\S+ does not exist; give a text file",
        ),
        "a source of two lines": (named("SRC", "a\nb"), r"/a\\nb does not exist; give a text file"),
        "a folder of 300 letters": (
            named("-o", "x" * 300),
            r"x{300} cannot be written: File name too long",
        ),
        "a field of two lines": (
            lines(b'{"a": 1}', "--field", "a\nb"),
            r'/a\.jsonl:1: must be a JSON object such as \{"a\\nb": "\.\.\."\}',
        ),
    }
    return cases


def _tokenizers() -> Rows:
    refused = r"^--tokenizer .*/t\.json: "
    panics = refused + "it panics: "
    died = (
        r"(its process ended with status -6 .*: it takes too much memory|it takes too much memory)"
    )
    word = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    at_text = r"^.*/a\.txt or soon after: --tokenizer .*/t\.json: "
    no_rules = {"type": "BPE", "vocab": {}, "merges": []}
    deep_rules = {"version": "1.0", "model": no_rules, "normalizer": "HERE"}
    rule = '{"type": "Sequence", "normalizers": ['
    models: dict[str, Any] = {
        "token ids of 2^40": word | {"vocab": {"a": 2**40}},
        "token ids below 0": word | {"vocab": {"a": -1}},
        "no model": None,
        "another model": {"type": "Pickle"},
        "unigrams of nothing": {"type": "Unigram", "unk_id": 0, "vocab": []},
        "unigrams without unknown": {"type": "Unigram", "unk_id": 99, "vocab": [["a", -1.0]]},
        "merges of nothing": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]},
    }
    patterns = {
        "a pattern of brackets": "(" * 50_000 + ")" * 50_000,
        "a pattern that calls itself": r"(?<r>\g<r>|a)",
        "no pattern": "(",
    }
    files = {
        "nothing": b"",
        "brackets": b"[" * 100_000,
        "braces": b'{"a":' * 100_000,
        "deep rules": json.dumps(deep_rules).replace('"HERE"}', rule * 9_999).encode(),
        "bytes": bytes(range(256)) * 9,
        "no UTF-8": b'{"version": "\xff"}',
        "half a pair": rb'{"version": "\ud800"}',
        "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    }
    makes = {name: tokenizer({"model": model}) for name, model in models.items()}
    makes |= {name: tokenizer(split(pattern)) for name, pattern in patterns.items()}
    makes |= {f"tokenizer.json of {name}": tokenizer(content) for name, content in files.items()}
    return _alike(refused + "Cannot instantiate Tokenizer from buffer", makes) | {
        "charsmap out of bounds": (tokenizer(charsmap(b"\4\0\0\0\1\2\3\4abc")), panics),
        "charsmap of garbage": (
            tokenizer(charsmap(b"\xff" * 64)),
            refused + "(it panics|its process ended|it takes)",
        ),
        "chunks of nothing": (
            tokenizer({"pre_tokenizer": {"type": "FixedLength", "length": 0}}),
            panics,
        ),
        "a pattern that does not end": (
            tokenizer(split("(x+x+)+y"), b"x" * 100),
            at_text + "it panics: Onig",
        ),
        "another one": (
            tokenizer(split("^(a|a?)+$"), b"a" * 60 + b"!"),
            at_text + "it panics: Onig",
        ),
        "all memory by six rules": (
            tokenizer({"normalizer": {"type": "Sequence", "normalizers": [times(100)] * 6}}),
            refused + died,
        ),
        "all memory by one rule": (
            tokenizer({"normalizer": times(1_000_000, "x")}, b"x" * 999),
            at_text + died,
        ),
        "token ids of 2^32": (
            tokenizer({"model": word | {"vocab": {"a": 2**32 - 1, "</s>": 1}}}),
            refused + "it has token ids",
        ),
        "no end of document": (tokenizer({"model": word}), refused + "it has no "),
        "an empty vocabulary": (tokenizer({"model": word | {"vocab": {}}}), refused + "it has no "),
        "a text of no UTF-8": (
            tokenizer({}, b"a\xffb"),
            r"/a\.txt: byte 0xff at offset 1 is not UTF-8",
        ),
        "a text beyond memory": (
            tokenizer({}, b"a" * ((16 << 20) + 1)),
            r"/a\.txt: one document has 16_777_217 bytes",
        ),
        "tokenizer.json of a terabyte": (
            lambda where: prepare(
                where, write(where / "a.txt", "a"), tokenizer=sparse(where / "t.json", 1 << 40)
            ),
            refused + "is larger than 67,108,864 bytes",
        ),
    }


# Tables.


def parquet(make: Callable[[Path], object]) -> Make:
    def source(where: Path) -> list[str]:
        make(where / "a.parquet")
        return prepare(where, where / "a.parquet")

    return source


def dataset(state: bytes, make: Callable[[Path], object] = lambda path: None) -> Make:
    """A folder that looks like one of datasets, with a state.json, and ``make`` a.arrow in it."""

    def source(where: Path) -> list[str]:
        (where / "set").mkdir()
        write(where / "set" / "state.json", state)
        write(where / "set" / "dataset_info.json", "{}")
        make(where / "set" / "a.arrow")
        return prepare(where, where / "set")

    return source


def _tables() -> Rows:
    unreadable = r"/a\.parquet: cannot be read: .*; copy it again, or move it away"
    cases: Rows = {
        f"Parquet of {name}": (parquet(lambda path, text=text: write(path, text)), unreadable)
        for name, text in (
            ("nothing", b""),
            ("a magic number", b"PAR1"),
            ("two of them", b"PAR1" * 2),
            ("a long footer", b"PAR1" + b"x" * 99 + b"\xff\xff\xff\x7fPAR1"),
            ("a footer of lists", b"PAR1" + b"\x19" * 9_999 + b"\x0f\x27\0\0PAR1"),
        )
    }
    cases |= {
        "Parquet of a terabyte": (parquet(lambda path: sparse(path, 1 << 40)), unreadable),
        "Parquet of a pipe": (parquet(pipe), "cannot be read: is a named pipe, not a plain"),
    }
    no_file = "its state.json names .*, which is no file of the folder"
    entry = '{"_data_files": [{"filename": "%s"}]}'
    states: dict[str, tuple[str, Callable[[Path], object], str]] = {
        "a path out of it": (entry % "../../outside/secret.txt", lambda path: None, no_file),
        "a whole path": (entry % "/etc/passwd", lambda path: None, no_file),
        "a pipe": (entry % "a.arrow", pipe, no_file),
        "brackets": ("[" * 100_000, lambda path: None, "/set: cannot be read: "),
        "no files": ("{}", lambda path: None, "/set: cannot be read: "),
    }
    cases |= {
        f"a dataset of {name}": (dataset(state.encode(), make), reason)
        for name, (state, make, reason) in states.items()
    }
    return cases


CASES = [
    _refused(name, make, message)
    for rows in (_values, _texts, _files, _tokens, _sources, _tokenizers, _tables)
    for name, (make, message) in rows().items()
]
