"""Import a file: the recipe as TOML, checked by the rules of recipes, and what to tell the user."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from composer3d.facts.errors import RecipeError
from composer3d.facts.text import one_line
from composer3d.imports import automodel, deepspeed, megatron, nanotron, source, torchtitan
from composer3d.imports.translation import ENTRIES, Translation, Value, point_name
from composer3d.models import hub, registry
from composer3d.recipe.draft import ParsedRecipe, parse_document
from composer3d.recipe.resolve import Resolved, broken_rules, load
from composer3d.recipe.schema import FOLDER_NAME, MODEL_KEYS, OPEN_POINTS, TABLES
from composer3d.recipe.values import as_key, as_toml, value_of

# Each sets the keys of a recipe from the settings of a file. The number of GPUs is None if it is as
# the file says.
_TRANSLATORS: dict[str, Callable[[Translation, int | None], None]] = {
    "Megatron-LM": megatron.translate,
    "DeepSpeed": deepspeed.translate,
    "torchtitan": torchtitan.translate,
    "nanotron": nanotron.translate,
    "NeMo Automodel": automodel.translate,
}
_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn", "vocab")
_STEPS = 1000  # of a run, if the file does not say
_LENGTH = 2048  # of a sequence, likewise


class Imported(NamedTuple):
    """A recipe, and how it came about.

    ``check`` accepts it, unless it is a draft: it has open points.

    Attributes:
        text: the recipe as TOML, with its open points.
        resolved: the recipe without its open points.
        made: the lists of what was taken over, assumed, lost, contradictory and open.
    """

    text: str
    resolved: Resolved
    made: Translation


def import_file(
    path: str,
    sets: Sequence[str] = (),
    *,
    gpus: int | None = None,
    model: str | None = None,
    accept: Sequence[str] = (),
) -> Imported:
    """Translate the file ``path`` into a recipe.

    Args:
        path: a script or dict of Megatron-LM, or a file of another program.
        sets: values of the recipe, each ``table.key=value``, which win over the file.
        gpus: the number of GPUs, if it is not the file's.
        model: a preset, which gives the sizes that the file does not.
        accept: the keys of open points that the user accepts.

    Raises:
        RecipeError: no recipe can be made that ``check`` accepts. A line for each reason.
    """
    found = source.read(path)
    overrides = {}
    for text in sets:
        key, _, value = (part.strip() for part in text.partition("="))
        overrides[key] = value.strip("\"'")
    model = overrides.get("model.preset", model)
    made = Translation(
        found.program,
        one_line(path),
        found.settings,
        has_defaults=model is None and not found.is_override,
        accepted=frozenset(map(point_name, accept)),
        overrides=overrides,
        model=model,
    )
    made.contradictions += found.contradictions
    made.lost += found.lost
    for key, guess in found.open.items():
        made.ask(guess.line, key=key, is_settled=_are_given(made, guess.words, gpus))
    if model is not None:
        _set_preset(made, model)
    _TRANSLATORS[found.program](made, gpus)
    made.assume_defaults()
    _complete(made, path)
    _settle(made, sets, gpus)
    made.finish()
    if made.problems:
        raise RecipeError(list(dict.fromkeys(made.problems)))
    return _checked(made, sets, gpus)


def _are_given(made: Translation, words: Sequence[str], gpus: int | None) -> bool:
    """Return whether ``--set`` or ``--gpus`` gives all that words decide."""

    def is_given(name: str) -> bool:
        word = made.known.find(name)
        keys = word.ours.split(", ") if word is not None else []
        counts_gpus = "mesh.dp_shard" in keys or name in ("nnodes", "nproc_per_node")
        return not made.overridden.isdisjoint(keys) or (counts_gpus and gpus is not None)

    return bool(words) and all(map(is_given, words))


def _set_preset(made: Translation, name: str) -> None:
    for architecture in registry.OURS:
        if name in registry.architecture(architecture).presets:
            made.values["model.architecture"] = Value(architecture, f"--model {name}")
            made.values["model.preset"] = Value(name, f"--model {name}")
            return
    presets = [one for key in registry.OURS for one in registry.architecture(key).presets]
    made.problems.append(
        f"--model {one_line(name)}: is unknown; the presets are {', '.join(presets)}"
    )


def _complete(made: Translation, path: str) -> None:
    """Add what every recipe needs and the file may lack."""
    values = made.values
    if "run.name" not in values:
        stem = re.sub(r"[^\w.-]", "-", os.path.splitext(os.path.basename(path))[0])[:60].strip(".-")
        values["run.name"] = Value(stem if FOLDER_NAME.accepts(stem) else "imported", "the file")

    preset = values["model.preset"].value if "model.preset" in values else None
    has_experts = "model.experts" in values
    moe = registry.architecture("moe").presets
    if preset in moe or has_experts or "model.expert_ffn" in values:
        values["model.architecture"] = Value("moe", "it has experts")
    if preset is not None and preset not in moe and has_experts:
        made.problems.append(
            f"{made.file}: {values['model.experts'].comment}: --model {preset} has no experts; "
            f"give a preset with them: {', '.join(moe)}"
        )
    if "model.architecture" not in values:
        for key in [key for key in values if key.startswith("model.")]:
            if key not in {f"model.{one.name}" for one in fields(TABLES["model"])}:
                made.lost.append(f"{values.pop(key).comment}: there are no experts")

    gives_model = {"model.preset", "model.hf"} & (values.keys() | made.overridden)
    missing = [
        name
        for name in _SIZES
        if f"model.{name}" not in values and f"model.{name}" not in made.overridden
    ]
    if missing and not gives_model:
        made.problems.append(
            f"{made.file}: it does not give the sizes of a model ({', '.join(missing)}); give "
            f"--model PRESET, such as --model llama3-8b, or --set model.{missing[0]}=N and so on"
        )
    least = max(_STEPS, 2 * made.value("optim.warmup", 0), made.value("optim.decay", 0))
    made.assume("run.steps", least, "the file does not say how long it trains")
    made.assume("data.seq_len", _LENGTH, "the file does not say")
    made.assume("optim.lr", 3e-4, "the file does not say")
    made.assume(
        "data.source",
        "python",
        "the sources of the standard library; for your data, composer3d prepare makes files for "
        'data.source = "tokens" and data.path',
    )


# What an import leaves out, rather than to make no recipe, where a rule refuses it.
_OPTIONAL = frozenset(key for key, entry in ENTRIES.items() if entry.metadata["optional"])


def _settle(made: Translation, sets: Sequence[str], gpus: int | None) -> None:
    """Leave out optional values that rules of recipes refuse, one at a time, as the rules say."""
    _settle_warmup(made)
    _settle_decay(made)
    while True:
        try:
            document = _document_of(made, made.values)
            recipe, broken = broken_rules(
                document, sets, world_size=gpus, hub_names=_hub_names(made)
            )
        except RecipeError:
            return  # ``_checked`` tells why
        given = _OPTIONAL & made.values.keys()
        found = ((violation, violation.change_of(given)) for violation in broken)
        refused = next(
            (
                (violation, change.key)
                for violation, change in found
                if change is not None and change.values[0] == ENTRIES[change.key].default
            ),
            None,
        )
        if refused is None:
            return
        violation, key = refused
        words, default = made.values[key].comment, ENTRIES[key].default
        instead = f"leaves out {key}" if default is None else f"has {key} = {as_toml(default)}"
        made.lost.append(f"{words}: {violation.reason(recipe)}; the recipe {instead}")
        made.drop(key)


def _settle_warmup(made: Translation) -> None:
    """End the warmup with the run: a recipe with a longer one is refused."""
    steps, warmup = made.value("run.steps", made.override("run.steps")), made.value("optim.warmup")
    if isinstance(steps, int) and isinstance(warmup, int) and warmup > steps:
        found = made.values["optim.warmup"]
        words = made.values["run.steps"].comment if "run.steps" in made.values else "--set"
        made.contradict(f"{found.comment}, but {words}: the warmup ends at step {steps}")
        made.values["optim.warmup"] = found._replace(value=steps)


def _settle_decay(made: Translation) -> None:
    """Drop a decay that would end before it begins, and steps that ``optim.decay`` says too."""
    values = made.values
    decay, warmup = made.value("optim.decay"), made.value("optim.warmup", 0)
    if isinstance(decay, int) and isinstance(warmup, int) and decay <= warmup:
        words, end = values["optim.decay"].comment, "before the first step"
        if "optim.warmup" in values:
            words, end = f"{words}, but {values['optim.warmup'].comment}", "with the warmup"
        made.contradict(f"{words}: the decay would end {end}; it ends with the run")
        del values["optim.decay"]
    if made.value("optim.schedule", "cosine") != "wsd":
        values.pop("optim.decay_steps", None)


def _hub_names(made: Translation) -> frozenset[str]:
    """Return the name on the Hub that ``--set`` gives. What the file names is not loaded."""
    name = made.overrides.get("model.hf", "")
    return frozenset((name,)) if hub.is_place(name) else frozenset()


class _Document(ParsedRecipe):
    """The recipe, in which the place of a key is the words of theirs that it comes from."""

    words: Mapping[str, str]

    def place(self, *path: str) -> str:
        return self.words.get(".".join(path), self.name)


def _document_of(made: Translation, values: Mapping[str, Value]) -> _Document:
    document = _Document(*parse_document(_to_toml(made, values), made.file))
    document.words = {key: value.comment for key, value in values.items()}
    return document


def _checked(made: Translation, sets: Sequence[str], gpus: int | None) -> Imported:
    """Load the recipe, as ``check`` does, and then its text with the values of ``--set``."""
    try:
        names = _hub_names(made)
        resolved = load(_document_of(made, made.values), sets, world_size=gpus, hub_names=names)
        values = dict(made.values)
        for text in sets:
            key = text.partition("=")[0].strip()
            values[key] = Value(value_of(resolved.recipe, key), f"--set {one_line(text)}")
            made.taken.append(f"--set {one_line(text)}")
        # The name has its commit by now.
        pinned = {str(resolved.recipe.model.hf)} if names else ()
        resolved = load(_document_of(made, values), hub_names=pinned)
    except RecipeError as error:
        begins = (made.file, "--set")
        raise RecipeError(
            [line if line.startswith(begins) else f"{made.file}: {line}" for line in error.lines]
        ) from None
    return Imported(_to_toml(made, values, made.open), resolved, made)


def _to_toml(made: Translation, values: Mapping[str, Value], points: Mapping[str, str] = {}) -> str:
    """Return the recipe as TOML, with the words of theirs beside each line, and open points."""
    name = one_line(os.path.basename(made.file))
    lines = [
        f"# Made by composer3d import from {name} ({made.program}).",
        "# Beside each value stand the words that it comes from.",
    ]
    if points:
        lines += [
            "# A draft, which no command runs. Settle each open point: set the keys that it is",
            "# about, and delete its line. Or import again, with --accept KEY for each.",
            "",
            f"[{OPEN_POINTS}]",
            *(f"{as_key(key)} = {as_toml(line)}" for key, line in points.items()),
        ]
    for table in TABLES:
        keys = [key for key in ENTRIES if key.startswith(f"{table}.") and key in values]
        if table == "model":
            keys.sort(key=lambda key: key.partition(".")[2] not in MODEL_KEYS)
        if keys:
            lines += ["", f"[{table}]"]
        for key in keys:
            value, comment = values[key]
            if value is None:
                continue
            statement = f"{key.partition('.')[2]} = {as_toml(value)}"
            lines.append(f"{statement:<30} # {one_line(comment)}")
    return "\n".join(lines) + "\n"
