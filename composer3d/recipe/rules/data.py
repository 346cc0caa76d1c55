"""Rules about data, the first weights, the optimizer's schedule, and validation."""

from collections.abc import Iterator
from typing import NamedTuple

from composer3d.facts.remote import is_url, is_valid_url
from composer3d.recipe.rules.rule import (
    Breach,
    Rule,
    breach,
    must_be_above,
    must_be_at_most,
    only_used_with,
    remove,
    rule,
)
from composer3d.recipe.schema import DataTable, Recipe
from composer3d.recipe.values import FIELDS, as_short_toml

# What data.path and validation.path must name, for each source that reads them.
PATHS = {
    "text": "a text file or a folder of them",
    "jsonl": "a .jsonl file or a folder of them",
    "tokens": "a folder that composer3d prepare made",
}

# The learning rate schedules that have a decay.
_DECAYING = ("cosine", "linear", "wsd")


@rule("model.vocab", "data.source")
def vocabulary_holds_bytes(recipe: Recipe) -> Iterator[str]:
    """The vocabulary must hold all bytes, which are the tokens of a text.

    ``resolve`` checks token files, whose manifest gives the size of their vocabulary.
    """
    if recipe.model.vocab < 256 and recipe.data.source != "tokens":
        yield "<model.vocab> must be at least 256: the tokens of the data are bytes"


@rule("data.path", "data.source", "data.sources")
def data_is_named_once(recipe: Recipe) -> Iterator[str]:
    """Sources that read files need data.path or data.sources, and not both."""
    data = recipe.data
    if data.source not in PATHS:
        return
    if data.path is None and data.sources is None:
        yield f"<data.source> needs data.path: {PATHS[data.source]}"
    if data.path is not None and data.sources is not None:
        yield "<data.path> and data.sources both name the training data; remove one"


@rule("validation.every", "data.source", "validation.path")
def validation_has_a_path(recipe: Recipe) -> Iterator[str]:
    """Validation needs files of its own if the data are read from files."""
    validation, source = recipe.validation, recipe.data.source
    if source in PATHS and validation.every and validation.path is None:
        yield (
            "<validation.every> with <data.source> needs validation.path, the held-out data: "
            f"{PATHS[source]}; set it, or use validation.every = 0"
        )


_OF_STORE = (
    'is in an object store, and only data.source = "tokens" is read from there; copy it to a disk, '
    "or prepare it"
)


def _is_text_of_store(path: str | None, data: DataTable) -> bool:
    return path is not None and is_url(path) and data.source != "tokens"


@rule("data.path", "data.source")
def path_of_store_has_tokens(recipe: Recipe) -> Iterator[str]:
    """Only token files are read from an object store."""
    if _is_text_of_store(recipe.data.path, recipe.data):
        yield f"<data.path> {_OF_STORE}"


@rule("data.sources", "data.source")
def sources_of_store_have_tokens(recipe: Recipe) -> Iterator[str]:
    """Only token files are read from an object store."""
    for source in recipe.data.sources or ():
        if _is_text_of_store(source.path, recipe.data):
            yield f"data.sources: path = {as_short_toml(source.path)} {_OF_STORE}"


@rule("validation.path", "data.source")
def held_out_of_store_has_tokens(recipe: Recipe) -> Iterator[str]:
    """Only token files are read from an object store."""
    if _is_text_of_store(recipe.validation.path, recipe.data):
        yield f"<validation.path> {_OF_STORE}"


@rule("data.cache_gib", "data.cache_dir")
def bound_has_copies(recipe: Recipe) -> Iterator[Breach]:
    """The bound of copies is not used if there are none."""
    default = FIELDS["data.cache_gib"].default
    if recipe.data.cache_dir is None and recipe.data.cache_gib != default:
        yield breach(
            "<data.cache_gib> is not used without data.cache_dir",
            remove("data.cache_gib", "remove it"),
            "set data.cache_dir",
        )


@rule("checkpoint.init", "model.hf")
def weights_come_from_one_place(recipe: Recipe) -> Iterator[str]:
    """At most one of checkpoint.init and model.hf gives the first weights."""
    if recipe.checkpoint.init is not None and recipe.model.hf is not None:
        yield "<checkpoint.init> and <model.hf> both give the first weights; remove one"


@rule("run.name", "checkpoint.folder")
def name_fits_into_a_url(recipe: Recipe) -> Iterator[str]:
    """Checkpoints in an object store stand in a folder of the run's name."""
    folder = recipe.checkpoint.folder
    if folder is not None and not is_valid_url(f"{folder}/{recipe.run.name}"):
        yield (
            "<run.name> cannot stand in the URL of <checkpoint.folder>; use letters, digits and "
            ". _ - = + , ~ only"
        )


@rule("run.sync", "checkpoint.folder")
def files_go_beside_checkpoints(recipe: Recipe) -> Iterator[Breach]:
    """The files of a run are kept in an object store only with its checkpoints.

    Without them, a run that goes on from another disk would begin anew and drop its metrics.
    """
    if recipe.run.sync and recipe.checkpoint.folder is None:
        yield breach(
            "<run.sync> needs checkpoint.folder, where the files of the run are kept",
            remove("run.sync", "remove it"),
            "set checkpoint.folder",
        )


class _End(NamedTuple):
    """The end of the decay of the learning rate."""

    key: str
    step: int


@rule("optim.decay_steps", "optim.warmup", "optim.decay", "run.steps", "optim.schedule")
def wsd_decay_fits(recipe: Recipe) -> Iterator[str]:
    """The decay of wsd must start after the warmup and end at optim.decay.

    If optim.decay is absent, it must end at run.steps.
    """
    optim = recipe.optim
    if optim.schedule != "wsd" or optim.decay_steps is None:
        return
    if optim.decay is None:
        end = _End("run.steps", recipe.run.steps)
        is_warmup_at_fault = end.step < optim.warmup
    else:
        end = _End("optim.decay", optim.decay)
        is_warmup_at_fault = end.step <= optim.warmup
    room = end.step - optim.warmup
    # Another rule reports a warmup that ends too late.
    if not is_warmup_at_fault and optim.decay_steps > room:
        way_out = f"use at most {room}" if room else "use a smaller optim.warmup"
        yield f"<optim.decay_steps> after <optim.warmup> would end after <{end.key}>; {way_out}"


_OF_MUON = (
    "optim.matrices",
    "optim.matrix_lr",
    "optim.lr_scale",
    "optim.momentum",
    "optim.nesterov",
    "optim.newton_schulz",
    "optim.newton_schulz_steps",
    "optim.newton_schulz_dtype",
)


RULES: tuple[Rule, ...] = (
    vocabulary_holds_bytes,
    only_used_with("data.path", "data.source", list(PATHS)),
    only_used_with("data.sources", "data.source", list(PATHS)),
    data_is_named_once,
    path_of_store_has_tokens,
    sources_of_store_have_tokens,
    held_out_of_store_has_tokens,
    only_used_with("data.cache_dir", "data.source", ["tokens"]),
    bound_has_copies,
    files_go_beside_checkpoints,
    validation_has_a_path,
    only_used_with("data.field", "data.source", ["jsonl"]),
    only_used_with("validation.path", "data.source", list(PATHS)),
    only_used_with("checkpoint.init", "checkpoint.resume", ["auto", "none"]),
    weights_come_from_one_place,
    name_fits_into_a_url,
    must_be_at_most("optim.warmup", "run.steps"),
    must_be_above("optim.decay", "optim.warmup", ": the decay starts after the warmup"),
    only_used_with(
        "optim.decay", "optim.schedule", _DECAYING, "remove it, or use a schedule that decays"
    ),
    only_used_with("optim.min_lr", "optim.schedule", _DECAYING, "use 0, or a schedule that decays"),
    only_used_with("optim.decay_steps", "optim.schedule", ["wsd"]),
    wsd_decay_fits,
    *(only_used_with(key, "optim.name", ["muon"]) for key in _OF_MUON),
    must_be_at_most("optim.min_lr", "optim.lr"),
)
