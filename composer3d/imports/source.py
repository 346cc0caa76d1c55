"""Read a file of another program: find out which one, and list its words. Nothing is executed."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from composer3d.imports import deepspeed
from composer3d.imports.literal import Entry, dicts_of
from composer3d.imports.shell import Command, read_script
from composer3d.imports.translation import Setting, canonical, setting
from composer3d.imports.words import DEEPSPEED, MEGATRON, find_word, index_of
from composer3d.recipe.values import one_line
from composer3d.spec.bounds import check_values
from composer3d.spec.errors import RecipeError
from composer3d.spec.files import parse_json, read_plain
from composer3d.spec.toml import parse_toml

MOST_BYTES = 256 << 10
_MOST_SETTINGS = 5000

_SHELLS = (".sh", ".bash", ".slurm", ".sbatch", ".txt", ".args", "")
_LAUNCHERS = {"num_gpus": "nproc_per_node", "num_nodes": "nnodes"}
_SBATCH = re.compile(r"^#SBATCH\s+--?(\S+?)[= ]\s*(\d{1,9})", re.MULTILINE)
_SBATCH_WORDS = {
    "nodes": "nnodes",
    "N": "nnodes",
    "gpus-per-node": "nproc_per_node",
    "ntasks-per-node": "nproc_per_node",
}
_PROGRAM = re.compile(r"\.py$")
_TORCHTITAN_PYTHON = re.compile(r"\btorchtitan\b|\b(?:Trainer|JobConfig)(?:\.Config)?\(")
_MEGATRON, _DEEPSPEED = index_of(MEGATRON), index_of(DEEPSPEED)
_NO_WORDS = (
    "has no words of Megatron-LM, DeepSpeed, torchtitan or nanotron; import reads a shell script "
    "or a Python dict with arguments of Megatron-LM, a DeepSpeed JSON, a torchtitan TOML and a "
    "nanotron YAML"
)


@dataclass
class Source:
    """What a file says.

    Attributes:
        program: a key of ``words.WORDS``.
        settings: its words with their values, by word.
        contradictions: words that stand twice, and variables that depend on a condition.
        lost: a line for each word of another program in the file, which has no equal.
    """

    program: str
    settings: dict[str, Setting]
    contradictions: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def read(path: str) -> Source:
    """Read the file ``path``.

    Raises:
        RecipeError: the file cannot be read, is too large, or is none of the known kinds.
    """
    name = one_line(path)
    try:
        text = read_plain(path, limit=MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name}: the text must be UTF-8 ({error.reason})") from None
    except OSError as error:
        raise RecipeError(f"{name}: {error.strerror}") from None
    except ValueError as error:
        raise RecipeError(f"{name}: no file has such a name ({error})") from None
    text = text.replace("\r\n", "\n")
    ending = os.path.splitext(path)[1].lower()
    if ending == ".json" or (ending in _SHELLS and text.lstrip().startswith("{")):
        return _read_dict_or_json(text, name, is_json=ending == ".json")
    if ending == ".toml":
        return _read_toml(text, name)
    if ending in (".yaml", ".yml"):
        return _read_yaml(text, name)
    if ending == ".py":
        return _read_python(text, name)
    if ending not in _SHELLS:
        raise RecipeError(
            f"{name}: the ending {one_line(ending)} is unknown; use .sh, .py, .json, .toml or .yaml"
        )
    if re.search(r"^\s*\w+\s*(?::\s*\w+\s*)?=\s*(?:dict\(|\{)", text, re.MULTILINE):
        return _read_python(text, name)
    return _read_shell(text, name)


# --- JSON and Python ---


def _read_dict_or_json(text: str, name: str, *, is_json: bool) -> Source:
    try:
        tree = parse_json(text, object_pairs_hook=_Pairs)
    except ValueError as error:
        if not is_json:
            return _read_python(text, name)
        raise RecipeError(f"{name}: not JSON: {one_line(str(error))}") from None
    if not isinstance(tree, _Pairs):
        raise RecipeError(f"{name}: must be a JSON object, {{...}}")
    return _from_entries(list(_entries_of(tree, ())), name, has_lines=False)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object, in which a key may stand twice."""


def _entries_of(tree: Any, path: tuple[str, ...]) -> Iterator[Entry]:
    """Yield the leaves of nested objects."""
    pairs: Iterable[tuple[Any, Any]] = tree if isinstance(tree, _Pairs) else tree.items()
    for key, value in pairs:
        if isinstance(value, _Pairs | dict):
            yield from _entries_of(value, (*path, str(key)))
        else:
            yield Entry((*path, str(key)), _plain(value), 0)


def _plain(value: Any) -> Any:
    """Return a value whose lists hold plain values; objects inside of lists are not read."""
    if isinstance(value, list):
        return [
            one if isinstance(one, str | int | float | bool) else type(one).__name__
            for one in value[:100]
        ]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(type(value).__name__)


def _read_python(text: str, name: str) -> Source:
    if _TORCHTITAN_PYTHON.search(text):
        raise RecipeError(
            f"{name}: a Python configuration of torchtitan is a program, which import does not "
            "run; write its values as a TOML file of torchtitan 0.2, [model] [training] "
            "[parallelism] and so on, and import that"
        )
    return _from_entries(dicts_of(text, name), name, has_lines=True)


def _from_entries(entries: list[Entry], name: str, *, has_lines: bool) -> Source:
    """Tell the words of DeepSpeed from those of Megatron-LM by the dict that they stand in."""
    # The innermost dict that holds a marker of DeepSpeed.
    roots = {entry.path[: _depth(entry.path)] for entry in entries if _depth(entry.path) >= 0}
    megatron, ds = [], []
    for entry in entries[: _MOST_SETTINGS + 1]:
        place = f"{name}:{entry.line}" if has_lines else name
        depth = max((len(root) for root in roots if entry.path[: len(root)] == root), default=-1)
        word = ".".join(entry.path[max(0, depth) :])
        if depth >= 0 and not _is_megatron(word, entry.path[-1]):
            ds.append(setting(_bounded(word), entry.value, place))
        else:
            megatron.append(setting(_bounded(entry.path[-1]), entry.value, place))
    _limit(len(megatron) + len(ds), name)
    return _together(megatron, ds, [], name)


def _depth(path: tuple[str, ...]) -> int:
    """Return at which depth a path has a key that only DeepSpeed has, or -1."""
    for depth, key in enumerate(path):
        if key in deepspeed.MARKERS:
            return depth
    return -1


def _is_megatron(word: str, key: str) -> bool:
    """Return whether a key beside those of DeepSpeed is an argument of Megatron-LM."""
    return find_word(_DEEPSPEED, word) is None and key in _MEGATRON


def _bounded(word: str) -> str:
    return one_line(word[:200])


def _limit(count: int, name: str) -> None:
    if count > _MOST_SETTINGS:
        raise RecipeError(f"{name}: more than {_MOST_SETTINGS:,} values; no configuration has them")


def _together(
    megatron: list[Setting], ds: list[Setting], contradictions: list[str], name: str
) -> Source:
    """Make one source of words of Megatron-LM and of DeepSpeed."""
    megatron = [one._replace(name=one.name.replace("-", "_")) for one in megatron]
    if not any(one.name in _MEGATRON for one in megatron):
        if not ds:
            raise RecipeError(f"{name}: {_NO_WORDS}")
        return Source("DeepSpeed", canonical("DeepSpeed", ds, contradictions), contradictions)
    lost = []
    for one in ds:
        as_megatron = deepspeed.as_megatron(one)
        if as_megatron is not None:
            if one.value != "auto":
                megatron.append(as_megatron)
            continue
        word = find_word(_DEEPSPEED, one.name)
        if word is None or "*" not in word.fits:
            note = word.note if word else "not a word that this import knows"
            lost.append(f"{one.shown}: {note}; the arguments of Megatron-LM count")
    settings = canonical("Megatron-LM", megatron, contradictions)
    return Source("Megatron-LM", settings, contradictions, lost)


# --- TOML and YAML ---


def _read_toml(text: str, name: str) -> Source:
    try:
        tree = parse_toml(text)
    except ValueError as error:
        raise RecipeError(f"{name}: not TOML: {one_line(str(error))}") from None
    if "mesh" in tree or "base" in tree or "run" in tree:
        raise RecipeError(f"{name}: is a recipe of composer3d already; use composer3d check")
    if "parallelism" not in tree and "training" not in tree and "model" not in tree:
        raise RecipeError(f"{name}: {_NO_WORDS}")
    return _from_tree(tree, name, "torchtitan")


def _read_yaml(text: str, name: str) -> Source:
    try:
        import yaml
    except ImportError:
        raise RecipeError(
            f"{name}: YAML needs the package pyyaml; install it with pip install composer3d[import]"
        ) from None

    class Loader(yaml.SafeLoader):
        """Builds plain values only. Aliases are refused: they can repeat a text without end."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise yaml.YAMLError("aliases (*name) are not read")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [str(key.value) for key, _ in node.value]
            twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
            if twice is not None and len(keys) < 1000:
                raise yaml.YAMLError(f"the key {twice} stands twice")
            return super().construct_mapping(node, deep)

    try:
        tree = yaml.load(text, Loader)
        check_values(tree)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        reason = one_line(" ".join(str(error).split())[:300]) or "it nests too deep"
        raise RecipeError(f"{name}: cannot be read as YAML: {reason}") from None
    except (AttributeError, LookupError, TypeError):
        # PyYAML does not check the text after a tag, as in ``!!int ""``.
        raise RecipeError(
            f"{name}: cannot be read as YAML: a value does not fit its tag (!!...)"
        ) from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{name}: {_NO_WORDS}")
    if not {"parallelism", "tokens"} & tree.keys():
        return _from_entries(list(_entries_of(tree, ())), name, has_lines=False)
    return _from_tree(tree, name, "nanotron")


def _from_tree(tree: dict[str, Any], name: str, program: str) -> Source:
    entries = list(_entries_of(tree, ()))
    _limit(len(entries), name)
    contradictions: list[str] = []
    found = [setting(_bounded(".".join(one.path)), one.value, name) for one in entries]
    return Source(program, canonical(program, found, contradictions), contradictions)


# --- shell ---


def _read_shell(text: str, name: str) -> Source:
    script = read_script(text, name)
    best = max(script.commands, key=_known_options, default=None)
    if best is None or not _known_options(best):
        # Only variables: people paste the part of a script with the arguments.
        words = [
            word
            for values in script.variables.values()
            for value in values
            for word in value.split()
        ]
        best = Command(1, words)
    megatron = list(_options(best, name))
    if not {"nnodes", "nproc_per_node"} & {one.name for one in megatron}:
        for match in _SBATCH.finditer(text):
            word = _SBATCH_WORDS.get(match[1])
            if word is not None:
                line = text.count("\n", 0, match.start()) + 1
                option = f"#SBATCH --{match[1]}"
                megatron.append(setting(word, match[2], f"{name}:{line}", option=option))
    ds: list[Setting] = []
    for line, document in script.documents:
        try:
            tree = parse_json(document, object_pairs_hook=_Pairs)
        except ValueError:
            continue
        if isinstance(tree, _Pairs):
            ds += [
                setting(_bounded(".".join(one.path)), one.value, f"{name}:{line}")
                for one in _entries_of(tree, ())
            ]
    _limit(len(megatron) + len(ds), name)
    source = _together(megatron, ds, [], name)
    source.contradictions += script.undecided[:50]
    return source


def _known_options(command: Command) -> int:
    return sum(_as_word(word) in _MEGATRON for word in command.words if word.startswith("--"))


def _as_word(option: str) -> str:
    return option[2:].partition("=")[0].replace("-", "_")


def _options(command: Command, name: str) -> Iterator[Setting]:
    """Yield the options of a command, those of its launcher as well."""
    words = command.words
    place = f"{name}:{command.line}"
    has_program = any(_PROGRAM.search(word) for word in words)
    before_program = has_program
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if _PROGRAM.search(word):
            before_program = False
        if not word.startswith("--") or len(word) < 3:
            continue
        option, equals, value = word.partition("=")
        values = [value] if equals else []
        while not equals and position < len(words) and not words[position].startswith("--"):
            if before_program and (values or _PROGRAM.search(words[position])):
                break  # the launcher's options have one value
            values.append(words[position])
            position += 1
        spelled = _as_word(word)
        if before_program:
            spelled = _LAUNCHERS.get(spelled, spelled)
        shown = values if values else True
        yield setting(
            _bounded(spelled),
            True if shown is True else " ".join(values),
            place,
            option=one_line(option[:200]),
        )
