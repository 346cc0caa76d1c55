"""Read a file of another program: find out which one, and list its words. Nothing is executed."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from composer3d.facts.bounds import check_values
from composer3d.facts.errors import RecipeError
from composer3d.facts.files import parse_json
from composer3d.facts.text import one_line
from composer3d.facts.toml import parse_toml
from composer3d.imports import torchtitan
from composer3d.imports.literal import Entry, Unread, dicts_of
from composer3d.imports.shell import Script, ShellCommand, read_script
from composer3d.imports.translation import Setting, canonical, setting
from composer3d.imports.words import BRIDGE_SECTIONS, PROGRAMS, SHARED, Program
from composer3d.recipe.draft import read_file

MOST_BYTES = 256 << 10
_MOST_JSON_BYTES = 4 << 20  # a resolved configuration of torchtitan has each layer
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
# The programs whose training scripts have names like those of Megatron-LM.
_PRETRAIN = re.compile(r"(?:^|/)pretrain_\w+\.py$")
_OUTSIDE = re.compile(r"\$(?:[@*]|\{[@*][^}]*\})")  # the arguments of the caller
_MEGATRON, _DEEPSPEED = PROGRAMS["Megatron-LM"], PROGRAMS["DeepSpeed"]
# Keys of DeepSpeed by the argument of Megatron-LM that says the same, and keys that only it has.
_AS_MEGATRON: Mapping[str, str] = _DEEPSPEED.own["as_megatron"]
_MARKERS = frozenset(_DEEPSPEED.own["markers"])
_HUGGING_FACE = ("architectures", "model_type", "transformers_version")
_DECIDING_KEYS = ("model.", "mesh.", "parallel.", "data.", "optim.", "precision.", "run.steps")
_LEAST_WORDS = 2  # that only one program has, for a file to be its own
_KINDS = (
    "import reads a shell script or a Python dict with arguments of Megatron-LM, a DeepSpeed JSON, "
    "a torchtitan TOML or JSON, and the YAML of nanotron, NeMo Automodel and Megatron-Bridge"
)


def _own_words() -> dict[str, frozenset[str]]:
    """Return by program the names that no other one has. Aliases of Megatron-LM tell nothing."""
    names = {name: set(program.index) for name, program in PROGRAMS.items()}
    mine = names | {"Megatron-LM": {word.name for word in _MEGATRON.words}}
    own = {}
    for name in PROGRAMS:
        others = SHARED.union(*(names[other] for other in names if other != name))
        own[name] = frozenset(word for word in mine[name] - others if "*" not in word)
    return own


_OWN = _own_words()


class Guess(NamedTuple):
    """A point in which one of two values would be a guess.

    Attributes:
        line: both values, and which one is used.
        words: the words that it is about; empty if it may be about any.
    """

    line: str
    words: tuple[str, ...] = ()


@dataclass
class SourceSettings:
    """What a file says.

    Attributes:
        program: a key of ``words.PROGRAMS``.
        settings: its words with their values, by word.
        contradictions: words that stand twice.
        lost: a line for each word of another program in the file, which has no equal.
        open: the points in which one of two values would be a guess, by word or variable.
        is_override: the file says only what differs from a recipe of its program.
    """

    program: str
    settings: dict[str, Setting]
    contradictions: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    open: dict[str, Guess] = field(default_factory=dict)
    is_override: bool = False


def read(path: str) -> SourceSettings:
    """Read the file ``path``.

    Raises:
        RecipeError: the file cannot be read, is too large, or is none of the known kinds.
    """
    name = one_line(path)
    limit = _MOST_JSON_BYTES if path.lower().endswith(".json") else MOST_BYTES
    try:
        text = read_file(path, limit=limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name}: the text must be UTF-8 ({error.reason})") from None
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


def _read_dict_or_json(text: str, name: str, *, is_json: bool) -> SourceSettings:
    try:
        tree = parse_json(text, object_pairs_hook=_Pairs)
    except ValueError as error:
        if not is_json:
            return _read_python(text, name)
        raise RecipeError(f"{name}: not JSON: {one_line(str(error))}") from None
    if not isinstance(tree, _Pairs):
        raise RecipeError(f"{name}: must be a JSON object, {{...}}")
    keys = {key for key, _ in tree}
    if keys.intersection(_HUGGING_FACE):
        raise RecipeError(
            f"{name}: is a config.json of Hugging Face, which has a model and no training; start "
            "from its folder with model.hf (docs/recipes.md)"
        )
    if "model_spec" in keys:
        tree = torchtitan.flattened(_as_dict(tree))
    return _from_entries(list(_entries_of(tree, ())), name, has_lines=False)


def _as_dict(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {key: _as_dict(one) for key, one in value}
    return [_as_dict(one) for one in value] if isinstance(value, list) else value


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


def _read_python(text: str, name: str) -> SourceSettings:
    if _TORCHTITAN_PYTHON.search(text):
        raise RecipeError(
            f"{name}: a Python configuration of torchtitan is a program, which import does not "
            "run; let torchtitan write its values with --debug.save_config_file FILE.json, and "
            "import that"
        )
    source = _from_entries(dicts_of(text, name), name, has_lines=True)
    _note_conditions(source)
    return source


def _note_conditions(source: SourceSettings) -> None:
    """Open a point for each word of Python text that decides, and may not count."""
    program = PROGRAMS[source.program]
    for word, one in source.settings.items():
        if one.unsure and _decides(program, word):
            line = f"{one.shown} ({one.place}) is set under a condition or in a function, which is "
            source.open.setdefault(word, Guess(f"{line}not decided: it is used", (word,)))


# --- which program ---


def _from_entries(entries: list[Entry], name: str, *, has_lines: bool) -> SourceSettings:
    """Make a source of the leaves of a tree: a JSON, TOML or YAML file, or Python dicts."""
    _limit(len(entries), name)
    # The innermost dict that holds a marker of DeepSpeed is the root of its keys.
    roots = {entry.path[: _depth(entry.path)] for entry in entries if _depth(entry.path) >= 0}
    depths = [
        max((len(root) for root in roots if entry.path[: len(root)] == root), default=-1)
        for entry in entries
    ]
    rows = [
        (entry, ".".join(entry.path), ".".join(entry.path[max(0, depth) :]), depth >= 0)
        for entry, depth in zip(entries, depths, strict=True)
    ]
    found: dict[str, set[str]] = {program: set() for program in PROGRAMS}
    for entry, path, ds_word, _ in rows:
        names = dict.fromkeys(PROGRAMS, path) | {"DeepSpeed": ds_word}
        owner = next((one for one, word in names.items() if word in _OWN[one]), "Megatron-LM")
        word = names[owner] if owner != "Megatron-LM" else _key(entry)
        if word in _OWN[owner]:
            found[owner].add(word)
    # In a JSON or YAML file, any program may have these words.
    program = _recognised(found, {_key(entry) for entry in entries} if has_lines else set(), name)

    def setting_of(word: str, entry: Entry) -> Setting:
        found = setting(_bounded(word), entry.value, f"{name}:{entry.line}" if has_lines else name)
        return found._replace(unsure=frozenset(["a condition"] if entry.is_unsure else []))

    if program != "Megatron-LM":
        is_ds = program == "DeepSpeed"
        return _single(
            program, [setting_of(ds_word if is_ds else path, one) for one, path, ds_word, _ in rows]
        )
    megatron, ds = [], []
    for entry, path, ds_word, is_below_root in rows:
        key = _key(entry)
        if is_below_root and (_DEEPSPEED.find(ds_word) or key not in _MEGATRON.index):
            ds.append(setting_of(ds_word, entry))
        else:
            megatron.append(setting_of(key if _MEGATRON.find(key) else path, entry))
    source = _together(megatron, ds)
    sections = {entry.path[0] for entry in entries if len(entry.path) > 1}
    source.is_override = "train" in sections and sections <= BRIDGE_SECTIONS
    return source


def _key(entry: Entry) -> str:
    return entry.path[-1].lstrip("-").replace("-", "_")


def _recognised(found: dict[str, set[str]], keys: set[str], name: str) -> str:
    """Return the program that a file is of, by the words in it that only one program has.

    Args:
        found: these words, by program.
        keys: the words of a script or of Python dicts, as Megatron-LM would have them.
        name: the file, for messages.

    Raises:
        RecipeError: no program has enough words in it, or two have as many.
    """
    if {"num_layers", "num_attention_heads"} <= keys:
        found["Megatron-LM"].add("num_layers with num_attention_heads")  # others rename one
    ranked = sorted(found, key=lambda program: -len(found[program]))
    first, second = (len(found[program]) for program in ranked[:2])
    is_pair = {*ranked[:2]} == {"Megatron-LM", "DeepSpeed"}
    if first < _LEAST_WORDS or (first == second and not is_pair):
        shown = [
            f"{program}: {one_line(', '.join(sorted(found[program])[:5]))}"
            for program in ranked
            if found[program]
        ]
        what = "has no words of a program that import knows"
        if shown:
            what = f"is not recognised by its words ({'; '.join(shown)}): two must be one program's"
        raise RecipeError(f"{name}: {what}; {_KINDS}")
    if is_pair and len(found["Megatron-LM"]) >= _LEAST_WORDS:
        return "Megatron-LM"
    return ranked[0]


def _depth(path: tuple[str, ...]) -> int:
    """Return at which depth a path has a key that only DeepSpeed has, or -1."""
    for depth, key in enumerate(path):
        if key in _MARKERS:
            return depth
    return -1


def _bounded(word: str) -> str:
    return one_line(word[:200])


def _limit(count: int, name: str) -> None:
    if count > _MOST_SETTINGS:
        raise RecipeError(f"{name}: more than {_MOST_SETTINGS:,} values; no configuration has them")


def _single(program: str, settings: list[Setting]) -> SourceSettings:
    """Make a source of the words of one program."""
    found, twice = canonical(program, settings)
    source = SourceSettings(program, found, [*twice.values()])
    source.open = _guesses(twice, settings)
    return source


def _guesses(twice: Mapping[str, str], settings: Iterable[Setting]) -> dict[str, Guess]:
    """Return an open point for each word that stands twice with different values.

    The last of two options counts. In a tree, or in two files, none of two values does.
    """
    options = {one.name for one in settings if one.shown.startswith("--")}
    return {word: Guess(line, (word,)) for word, line in twice.items() if word not in options}


def _together(megatron: list[Setting], ds: list[Setting]) -> SourceSettings:
    """Make one source of words of Megatron-LM and of DeepSpeed."""
    megatron = [
        one if "." in one.name else one._replace(name=one.name.replace("-", "_"))
        for one in megatron
    ]
    lost = []
    for one in ds:
        if one.name in _AS_MEGATRON:
            if one.value != "auto":
                megatron.append(one._replace(name=_AS_MEGATRON[one.name]))
            continue
        word = _DEEPSPEED.find(one.name)
        if word is None or word.decides:
            megatron.append(one)
        elif "*" not in word.fits:
            lost.append(f"{one.shown}: {word.note}; the arguments of Megatron-LM count")
    settings, twice = canonical("Megatron-LM", megatron)
    source = SourceSettings("Megatron-LM", settings, [*twice.values()], lost)
    source.open = _guesses(twice, () if ds else megatron)
    if ds and "deepspeed_config" in settings:
        del settings["deepspeed_config"]  # it has been read
    return source


# --- TOML and YAML ---


def _read_toml(text: str, name: str) -> SourceSettings:
    try:
        tree = parse_toml(text)
    except ValueError as error:
        raise RecipeError(f"{name}: not TOML: {one_line(str(error))}") from None
    if "mesh" in tree or "base" in tree or "run" in tree:
        raise RecipeError(f"{name}: is a recipe of composer3d already; use composer3d check")
    return _from_entries(list(_entries_of(tree, ())), name, has_lines=False)


def _read_yaml(text: str, name: str) -> SourceSettings:
    try:
        import yaml
    except ImportError:
        raise RecipeError(
            f"{name}: YAML needs the package pyyaml; install it with pip install composer3d[import]"
        ) from None

    class YamlLoader(yaml.SafeLoader):
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
        tree = yaml.load(text, YamlLoader)
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
        raise RecipeError(f"{name}: must be a YAML mapping, key: value; {_KINDS}")
    return _from_entries(list(_entries_of(tree, ())), name, has_lines=False)


# --- shell ---


def _read_shell(text: str, name: str) -> SourceSettings:
    script = read_script(text, name)
    command = max(script.commands, key=_known_options, default=None)
    if command is None or not _known_options(command):
        # Only variables: people paste the part of a script with the arguments.
        command = script.variables
    options = list(_options(command, name))
    if not {"nnodes", "nproc_per_node"} & {one.name for one in options}:
        options += _sbatch_options(text, name)
    ds = list(_documents(script, name))
    _limit(len(options) + len(ds), name)
    programs = [word.text for word in command.words if _PRETRAIN.search(word.text)]
    keys = {one.name for one in options}
    found: dict[str, set[str]] = {program: set() for program in PROGRAMS}
    found["Megatron-LM"] = (keys & _OWN["Megatron-LM"]) | set(programs[:1])
    found["DeepSpeed"] = {one.name for one in ds} & _OWN["DeepSpeed"]
    if _recognised(found, keys, name) == "DeepSpeed":
        source = _single("DeepSpeed", [*options, *ds])
    else:
        options += [
            setting("program", os.path.basename(word), f"{name}:{command.line}")
            for word in programs[:1]
        ]
        source = _together(options, ds)
    _note_unsure(source, script, command)
    for other in script.commands:
        if other is not command and _known_options(other) > 1:
            found_there = _together(list(_options(other, name)), [])
            _note_other_command(source, found_there, command, other)
    return source


def _sbatch_options(text: str, name: str) -> Iterator[Setting]:
    """Yield the numbers of nodes and GPUs in the comments that Slurm reads."""
    for match in _SBATCH.finditer(text):
        word = _SBATCH_WORDS.get(match[1])
        if word is not None:
            line = text.count("\n", 0, match.start()) + 1
            yield setting(word, match[2], f"{name}:{line}", option=f"#SBATCH --{match[1]}")


def _documents(script: Script, name: str) -> Iterator[Setting]:
    """Yield what the JSON in the here-documents of a script says."""
    for line, document in script.documents:
        try:
            tree = parse_json(document.text, object_pairs_hook=_Pairs)
        except ValueError:
            continue
        for one in _entries_of(tree, ()) if isinstance(tree, _Pairs) else ():
            found = setting(_bounded(".".join(one.path)), one.value, f"{name}:{line}")
            yield found._replace(unsure=document.unsure)


def _decides(program: Program, name: str) -> bool:
    """Return whether a word decides what is trained. What is not known does, here."""
    word = program.find(name)
    if word is None or word.decides:
        return True
    return (word.is_computed and not word.ours) or word.ours.startswith(_DECIDING_KEYS)


def _note_unsure(source: SourceSettings, script: Script, command: ShellCommand) -> None:
    """Open a point for each variable that is set under a condition, if what it gives decides.

    A variable decides if it is the value of a word that does, or if one of its values, used or not,
    has an option that does. A word that is not known is an open point by itself.
    """
    settings = source.settings.values()
    unsure = [one.unsure for one in command.words] + [one.unsure for one in settings]
    for name in sorted(frozenset().union(*unsure)):
        deciding = _deciding_words(source, name)
        if _gives_a_deciding_option(source, script, command, name):
            source.open[name] = Guess(script.unsure[name])
        elif deciding:
            source.open[name] = Guess(script.unsure[name], deciding)


def _deciding_words(source: SourceSettings, variable: str) -> tuple[str, ...]:
    """Return the words that decide, and whose value has this variable in it."""
    program = PROGRAMS[source.program]
    words = [one.name for one in source.settings.values() if variable in one.unsure]
    return tuple(word for word in words if program.find(word) and _decides(program, word))


def _gives_a_deciding_option(
    source: SourceSettings, script: Script, command: ShellCommand, variable: str
) -> bool:
    """Return whether a value of a variable, used or not, has an option that decides."""
    program = PROGRAMS[source.program]
    texts = [one.text for one in command.words if variable in one.unsure]
    # In a word that is neither empty nor an option, the variable is a value.
    if not any(not text or text.startswith("--") for text in texts):
        return False
    for text in (*script.others[variable], *texts):
        for option in _options_of(text):
            if _decides(program, _as_word(option)):
                return True
    return False


def _options_of(text: str) -> Iterator[str]:
    """Yield the options in a text, and what may become options: unknown words that are no value."""
    before = ""
    for word in text.split():
        if word.startswith("--") or (word.startswith("$") and not before.startswith("--")):
            yield word
        before = word


def _note_other_command(
    source: SourceSettings, there: SourceSettings, command: ShellCommand, other: ShellCommand
) -> None:
    """Open a point for each word that another command of the same script has with another value.

    If it runs the same program, this is also each word that it lacks. A program that prepares data
    lacks most of them, and trains nothing.

    Args:
        source: gets the points.
        there: the words of the other command.
        command: the command that counts.
        other: the other command.
    """
    is_alike = _programs(command) == _programs(other)
    for word, one in there.settings.items():
        mine = source.settings.get(word)
        counts = (is_alike or word in _MEGATRON.index) and _decides(_MEGATRON, word)
        if counts and (mine is None or str(mine.value) != str(one.value)):
            shown = f"{mine.shown} ({mine.place})" if mine is not None else f"no {word}"
            line = f"{one.shown} ({one.place}) in another command: {shown} is used"
            source.open.setdefault(word, Guess(line, (word,)))
    for word, mine in source.settings.items() if is_alike else ():
        is_option = mine.shown.startswith("--")
        if is_option and word not in there.settings and _decides(_MEGATRON, word):
            line = f"no {word} in another command (line {other.line}): "
            line += f"{mine.shown} ({mine.place}) is used"
            source.open.setdefault(word, Guess(line, (word,)))


def _programs(command: ShellCommand) -> set[str]:
    """Return the programs of a command, in which those that train a language model are one."""
    names = {os.path.basename(word.text) for word in command.words if _PROGRAM.search(word.text)}
    return {"pretrain" if _PRETRAIN.search(name) else name for name in names}


def _known_options(command: ShellCommand) -> int:
    words = [word.text for word in command.words if word.text.startswith("--")]
    return sum(_as_word(word) in _MEGATRON.index for word in words)


def _as_word(option: str) -> str:
    return option[2:].partition("=")[0].replace("-", "_")


def _options(command: ShellCommand, name: str) -> Iterator[Setting]:
    """Yield the options of a command, those of its launcher as well."""
    words = command.words
    place = f"{name}:{command.line}"
    before_program = any(_PROGRAM.search(word.text) for word in words)
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if _PROGRAM.search(word.text):
            before_program = False
        if not word.text.startswith("--") or len(word.text) < 3:
            is_outside = _OUTSIDE.fullmatch(word.text)
            if word.text.startswith("$") and not before_program and not is_outside:
                shown = _bounded(word.text)
                yield setting(shown, Unread("arguments"), place, option=shown)
            continue
        option, equals, value = word.text.partition("=")
        values, unsure = [value] if equals else [], word.unsure
        while not equals and position < len(words) and not words[position].text.startswith("--"):
            text = words[position].text
            is_outside = _OUTSIDE.fullmatch(text)
            if before_program and (values or _PROGRAM.search(text)):
                break  # the launcher's options have one value
            if values and text.startswith("$") and not is_outside:
                break  # more arguments, which the file does not have
            values += [] if is_outside or (not text and words[position].unsure) else [text]
            unsure |= words[position].unsure
            position += 1
        spelled = _as_word(option)
        if before_program:
            spelled = _LAUNCHERS.get(spelled, spelled)
        found = setting(
            _bounded(spelled),
            " ".join(values) if values else True,
            place,
            option=one_line(option[:200]),
        )
        yield found._replace(unsure=unsure)
