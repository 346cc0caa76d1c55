"""Changed recipes: each is refused with lines that name the place, or its parts agree.

An accepted recipe is judged by ``recipe_oracle``. Its printed form, resolved again, must give the
same values, and each value must have the origin that is printed beside it.
"""

import json
import os
import random
import re
import shutil
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from tools.prove.fuzz.child import Case, WrongError, command
from tools.prove.fuzz.mutate import flip
from tools.prove.fuzz.recipe_oracle import ALL_TABLES, AXES, Number, problems_of, values_given
from tools.prove.paths import ROOT

_CPU_S = 2.0
_FOLDER = ROOT / "recipes"

# Texts of values, as they may stand in a recipe.
_ODD_TEXTS = (
    *("0", "-0", "-1", "1", "2", "3", "7", "16", "256", "1_000", "0x10", "0o17", "0b11", "+5"),
    *("65536", "16777216", "2147483648", "9223372036854775807", "9223372036854775808"),
    *("-9223372036854775808", "-9223372036854775809", "1" * 30, "9" * 5000, "0" * 20 + "1"),
    *("0.0", "-0.0", "0.5", "1.0", "8.0", "1e-320", "5e-324", "1e30", "1e308", "1e309", "-1e309"),
    *("nan", "-nan", "inf", "+inf", "-inf", "1e", ".5", "5.", "1.0e+2", "0.1" + "0" * 3000 + "1"),
    *("true", "false", "True", "yes", "null", "None"),
    *('""', "''", '"none"', '"auto"', '"x"', '"4"', '"true"', '"../x"', '"/etc/passwd"', '"."'),
    *(r'"a\u0000b"', r'"a\nb"', r'"\u001b[2J"', r'"\ud800"', r'"\U0010ffff"', '"\u202e"', '"é"'),
    *('"full in the first 2 stages"', f'"full in the first {"9" * 5000} stages"'),
    *('"every 2 blocks"', '"every \u0662 blocks"', f'"every {"9" * 5000} blocks"'),
    *('"every 0 blocks"', '"every 10001 blocks"', '"every 02 blocks"', '"every -1 blocks"'),
    *('"moe"', '"llama"', '"llama3-8b"', '"debug-moe"', '"os:system"', '"no_such.module:NAME"'),
    *('"recipes"', '"/dev/zero"', '"/dev/stdin"', '"/proc/self/mem"', f'"{"x" * 5000}"'),
    *("[]", "[[]]", "[1]", "[1, 1]", "[0.9, 0.95]", "[0.9, 1.0]", "[0.9, nan]", "[2, 2]", "[1.0]"),
    *("[0]", "[-1, 5]", '["a"]', "[true]", "{}", "{ x = 1 }", "{ x = { y = [] } }", "[1, 'a']"),
    *("1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", '"""a\nb"""', "'''x'''", "[\n1,\n]"),
    *("[" * 17 + "]" * 17, "[" * 300 + "]" * 300, "[" * 3000),
)
_ODD_LINES = (
    *("[mesh]", "[[mesh]]", "[model.x]", "[mesh.tp]", "[x]", "[]", "[a.b.c]", "mesh = 1"),
    *("mesh.tp = 2", "model.dim.x = 1", '"mesh".tp = 2', "mesh . tp = 2", "x = 1", "= 1", "tp ="),
    *('base = "x.toml"', 'base = "none.toml"', "base = 5", 'base = "/etc/passwd"', 'base = "."'),
    *('base = "pipe.toml"', 'base = "other.toml"', 'base = "../base/recipe.toml"'),
    *("# \x07 bell", "# \x00", "\x0c", "\u2028", "\ufeff", "\r", "a = 1 b = 2", "#" * 3000),
    *("mesh = { tp = 2 }", "run = { name = 'x' }", '"" = 1', "'a b' = 1", '"\\u0000" = 1'),
    *("-1 = 1", "1.5 = 2", "true = false", "é = 1", "[é]", "k" * 5000 + " = 1", "[" + "k." * 40),
)


@cache
def _texts() -> dict[str, str]:
    """The recipes of the repository by name."""
    return {path.name: path.read_text() for path in sorted(_FOLDER.glob("*.toml"))}


def make(base: Path, draw: random.Random) -> Case:
    """Change one of our recipes, or its overrides, and check it."""
    texts = _texts()
    name = draw.choice(list(texts))
    text = texts[name]
    for other, content in texts.items():
        Path(other).write_text(content)
    for path in _FOLDER.glob("*.csv"):
        Path("recipes").mkdir(exist_ok=True)
        shutil.copy(path, "recipes")
    Path("other.toml").write_text('base = "x.toml"\n')
    os.mkfifo("pipe.toml")

    sets: list[str] = []
    gpus: int | None = None
    changes = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        way = draw.choice(_WAYS)
        if way is _overrides:
            sets += _overrides(draw)
            changes.append(f"--set {sets[-1][:60]}")
        else:
            text, change = way(text, draw)
            changes.append(change)
    changed = text.encode(errors="surrogatepass")
    if draw.random() < 0.07:
        changed = flip(changed, draw)
        changes.append("bytes")
    Path("x.toml").write_bytes(changed)
    chance = draw.random()
    if chance < 0.45:
        gpus = _processes_of(name)
    elif chance < 0.9:
        sets.insert(0, "run.device=cpu")  # this machine may have no GPU
    else:
        gpus = draw.choice((1, 2, 3, 4, 6, 8, 16, 64, 512, 1024, 16384, 16 << 20))
    arguments = ["check", "x.toml"]
    for each in sets:
        arguments += ["--set", each]
    if gpus is not None:
        arguments += ["--gpus", str(gpus)]
    return Case(f"{name}: {'; '.join(changes)}", lambda: _act(arguments, sets, gpus), cpu_s=_CPU_S)


def _processes_of(name: str) -> int:
    """The number in the name of a recipe: the processes of its mesh."""
    numbers = [int(part) for part in name.removesuffix(".toml").split("-") if part.isdecimal()]
    return numbers[0] if numbers else 8


# Ways to change a text. Each returns the text and what was changed.


def _lines_with_values(lines: list[str]) -> list[int]:
    return [
        number for number, line in enumerate(lines) if re.match(r"\s*[\w.]+\s*=", line)
    ] or list(range(len(lines)))


def _other_value(text: str, draw: random.Random) -> tuple[str, str]:
    """Put an odd value in place of one."""
    lines = text.splitlines()
    number = draw.choice(_lines_with_values(lines))
    key = lines[number].partition("=")[0].rstrip()
    lines[number] = f"{key} = {draw.choice(_ODD_TEXTS)}"
    return "\n".join(lines) + "\n", lines[number][:80]


def _another_key(text: str, draw: random.Random) -> tuple[str, str]:
    """Give a key that the recipe lacks, a value out of its range, at its edge, or a fair one."""
    table = draw.choice(list(ALL_TABLES))
    name = draw.choice(list(ALL_TABLES[table]))
    value = _value_for(ALL_TABLES[table][name], draw)
    return _set(text, table, name, value), f"{table}.{name} = {value[:60]}"


def _fair_key(text: str, draw: random.Random) -> tuple[str, str]:
    """Give a key a value in its range, which may still not fit the other keys."""
    table = draw.choice([name for name in ALL_TABLES if name != "model" or draw.random() < 0.3])
    name = draw.choice(list(ALL_TABLES[table]))
    allowed = ALL_TABLES[table][name]
    if isinstance(allowed, Number):
        number = allowed.least + draw.choice((0, 1, 2, 3, 7, 15)) * (
            0.01 if allowed.is_float else 1
        )
        value = repr(min(float(number), allowed.most) if allowed.is_float else int(number))
    elif isinstance(allowed, tuple):
        value = json.dumps(draw.choice(allowed))
    elif allowed is bool:
        value = draw.choice(("true", "false"))
    else:
        value = draw.choice(
            ('"x"', '"runs"', "[1, 2]", "[0.5, 0.75]", '"full"', '"every 3 blocks"')
        )
    return _set(text, table, name, value), f"{table}.{name} = {value}"


def _value_for(allowed: Any, draw: random.Random) -> str:
    if isinstance(allowed, tuple) and draw.random() < 0.8:
        return json.dumps(draw.choice(allowed))
    if allowed is bool and draw.random() < 0.8:
        return draw.choice(("true", "false"))
    if isinstance(allowed, Number) and draw.random() < 0.8:
        least, most = allowed.least, allowed.most
        numbers: list[float] = [least, most, least - 1, most + 1, 2 * most, least + 1]
        if allowed.is_float:
            numbers += [least / 2, most * 1.0000001, least + (most - least) * draw.random()]
            numbers += [0.01, 0.1, 0.5, 1.5, 3.0, 5.0, 30.0]
            return repr(float(draw.choice(numbers)))
        numbers += [1, 2, 3, 4, 5, 8, 12, 16, 32, 64, draw.randrange(int(least), int(most))]
        return str(int(draw.choice(numbers)))
    return draw.choice(_ODD_TEXTS)


def _set(text: str, table: str, name: str, value: str) -> str:
    """Set a key in the text: in place, in its table, or in a table of its own."""
    lines = text.splitlines()
    header = next((n for n, line in enumerate(lines) if line.strip() == f"[{table}]"), None)
    if header is None:
        return f"{text}\n[{table}]\n{name} = {value}\n"
    for number in range(header + 1, len(lines)):
        if lines[number].startswith("["):
            break
        if re.match(rf"{name}\s*=", lines[number]):
            lines[number] = f"{name} = {value}"
            return "\n".join(lines) + "\n"
    lines.insert(header + 1, f"{name} = {value}")
    return "\n".join(lines) + "\n"


def _two_keys(text: str, draw: random.Random) -> tuple[str, str]:
    """Change two sizes that depend on each other."""
    shown = []
    for _ in range(2):
        table, name = draw.choice(
            (
                *(("mesh", axis) for axis in (*AXES, "ep")),
                *(("data", name) for name in ("seq_len", "global_batch", "micro_batch")),
                *(("model", name) for name in ("n_heads", "n_kv_heads", "dim", "ffn", "n_layers")),
                *(("parallel", name) for name in ("virtual_stages", "schedule", "zero")),
            )
        )
        value = str(draw.choice((1, 2, 3, 4, 6, 8, 12, 16, 64, 256)))
        if name == "schedule":
            value = json.dumps(draw.choice(ALL_TABLES[table][name]))
        elif name == "zero":
            value = str(draw.randrange(4))
        text = _set(text, table, name, value)
        shown.append(f"{table}.{name} = {value}")
    return text, ", ".join(shown)


def _value_of_another(text: str, draw: random.Random) -> tuple[str, str]:
    """Give a key the value of another key."""
    lines = text.splitlines()
    found = _lines_with_values(lines)
    target, source = draw.choice(found), draw.choice(found)
    value = lines[source].partition("=")[2]
    lines[target] = f"{lines[target].partition('=')[0]}={value}"
    return "\n".join(lines) + "\n", lines[target][:80]


def _lines(text: str, draw: random.Random) -> tuple[str, str]:
    """Drop, repeat, move or swap lines."""
    lines = text.splitlines()
    here, there = draw.randrange(len(lines)), draw.randrange(len(lines))
    way = draw.choice(("drop", "repeat", "move", "swap", "swap tables"))
    if way == "drop":
        del lines[here]
    elif way == "repeat":
        lines.insert(there, lines[here])
    elif way == "move":
        lines.insert(there, lines.pop(here))
    elif way == "swap":
        lines[here], lines[there] = lines[there], lines[here]
    else:
        headers = [number for number, line in enumerate(lines) if line.startswith("[")]
        if len(headers) > 1:
            here, there = draw.sample(headers, 2)
            lines[here], lines[there] = lines[there], lines[here]
    return "\n".join(lines) + "\n", f"{way} line {here + 1}"


def _odd_line(text: str, draw: random.Random) -> tuple[str, str]:
    lines = text.splitlines()
    at, line = draw.randrange(len(lines) + 1), draw.choice(_ODD_LINES)
    lines.insert(at, line)
    return draw.choice(("\n", "\n", "\n", "\r\n", "\r")).join(lines) + "\n", f"line {line[:60]!r}"


def _letters(text: str, draw: random.Random) -> tuple[str, str]:
    """Change letters: a misspelt key, a broken quote, a control character."""
    at = draw.randrange(len(text))
    letter = draw.choice("\"'[]{}=#.,\\\n\t\0\x1b\x7f\u202e\u2028\ud800éaZ_-0 ")
    way = draw.choice(("insert", "drop", "replace", "swap"))
    if way == "insert":
        changed = text[:at] + letter * draw.choice((1, 1, 1, 50, 5000)) + text[at:]
    elif way == "drop":
        changed = text[:at] + text[at + draw.choice((1, 1, 2, 40)) :]
    elif way == "replace":
        changed = text[:at] + letter + text[at + 1 :]
    else:
        changed = text[:at] + text[at : at + 2][::-1] + text[at + 2 :]
    return changed, f"{way} {letter!r} at {at}"


def _many(text: str, draw: random.Random) -> tuple[str, str]:
    """Repeat something very often."""
    piece = draw.choice(
        ("k = 1\n", "[t]\n", "a.", "[", "{a=", '"', "'''\n", "# c\n", "\n", "x = [", "[[a]]\n")
    )
    count = draw.choice((100, 5000, 200_000, 300_000)) // len(piece)
    place = draw.choice((0, len(text)))
    return text[:place] + piece * count + text[place:], f"{piece!r} x {count}"


def _overrides(draw: random.Random) -> list[str]:
    table = draw.choice(list(ALL_TABLES))
    name = draw.choice(list(ALL_TABLES[table]))
    value = _value_for(ALL_TABLES[table][name], draw).replace("\0", "").strip() or "1"
    form = draw.choice(("{}={}",) * 6 + (" {} = {} ", "{}={}\nmesh.tp=2", "{}={} # x", "{}=={}"))
    text = form.format(f"{table}.{name}", value)
    return [text if draw.random() < 0.9 else flip_text(text, draw)]


def flip_text(text: str, draw: random.Random) -> str:
    """Change a character of an argument, which cannot hold a NUL byte."""
    at = draw.randrange(len(text))
    return text[:at] + draw.choice("=.\"' \t\n\x1b\udcffé[{#") + text[at + 1 :]


_WAYS: tuple[Any, ...] = (
    *((_fair_key,) * 9),
    *(_other_value, _other_value, _another_key, _another_key, _another_key, _two_keys, _two_keys),
    *(_two_keys, _value_of_another, _lines, _odd_line, _letters, _letters, _overrides, _overrides),
    _many,
)


# The judgement.

_PLACE = re.compile(r"(--set |[\w./-]+\.toml(:(\d+))?: )")


def _act(arguments: list[str], sets: list[str], gpus: int | None) -> str:
    ran = command(*arguments, "--json")
    if ran.status == 2:
        for line in ran.errors:
            _check_place(line)
        return "refused"

    found = json.loads(ran.output.splitlines()[-1])
    recipe, origins = found["recipe"], found["origins"]
    try:
        given = values_given(Path("x.toml"), sets)
    except (ValueError, OSError) as error:
        raise WrongError(f"it was accepted, but Python's tomllib refuses it: {error}") from None
    problems = problems_of(recipe, given, gpus)
    world = 1
    for axis in AXES:
        world *= recipe["mesh"][axis]
    if found["world_size"] != world:
        problems.append(f"the world has {found['world_size']} processes, and the mesh {world}")
    problems += _wrong_origins(origins, given)
    if problems:
        raise WrongError("; ".join(problems[:5]))

    printed = command(*arguments, statuses=(0,)).output
    Path("printed.toml").write_text(printed, encoding="utf-8")
    tomllib.loads(printed)
    same_world = arguments[arguments.index("--gpus") :] if gpus is not None else []
    again = command("check", "printed.toml", "--json", *same_world, statuses=(0,))
    other = json.loads(again.output.splitlines()[-1])["recipe"]
    if repr(other) != repr(recipe):
        raise WrongError("the printed recipe, resolved again, has other values")
    return "accepted, and its parts agree"


def _check_place(line: str) -> None:
    """Require that an error names its place, and that its line exists."""
    match = _PLACE.match(line)
    if match is None:
        # These are errors about arguments.
        if line.startswith(("composer3d: ", "composer3d check: error", "usage: ")):
            return
        raise WrongError(f"an error names no place: {line!r:.300}")
    if match[3] is not None:
        path = Path(match[0].split(".toml")[0] + ".toml")
        if path.is_file() and int(match[3]) > path.read_bytes().count(b"\n") + 1:
            raise WrongError(f"an error names a line that {path} does not have: {line!r:.300}")


def _wrong_origins(origins: dict[str, str], given: dict[str, Any]) -> list[str]:
    """Return the keys whose origin is a line that does not have their name."""
    problems = []
    for key in given:
        match = re.fullmatch(r"([\w./-]+\.toml):(\d+)", origins.get(key, ""))
        if match is None:
            if not origins.get(key, "").startswith("--set") and key != "mesh.dp_shard":
                problems.append(f"{key} was given, but its origin is {origins.get(key)!r}")
            continue
        # A line ends where TOML says, and nowhere else.
        lines = Path(match[1]).read_bytes().decode("utf-8-sig").split("\n")
        line = lines[int(match[2]) - 1]
        name = key.split(".")[1]
        if name not in line and not any(mark in line for mark in "\"'{[.\\"):
            problems.append(f"{key} does not stand in line {match[2]}: {line[:60]!r}")
    return problems
