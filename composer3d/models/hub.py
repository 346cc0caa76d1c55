"""Checkpoints and tokenizers by their name on a Hugging Face Hub: ``hf://ORG/NAME[@REVISION]``.

The library ``huggingface_hub`` loads the files into its own cache, and reads its own environment
variables: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and so on. What it loads is as hostile as
any other folder, and is checked by who reads it. No torch here.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from composer3d.facts.bars import share_bars_by_threads
from composer3d.facts.errors import CheckpointError
from composer3d.facts.model_files import (
    CARRIED_NAMES,
    CHAT_TEMPLATES,
    TOKENIZER_NAMES,
)
from composer3d.facts.text import one_line

_PREFIX = "hf://"
_WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_PLACE = re.compile(rf"{_PREFIX}({_WORD}/{_WORD})(?:@({_WORD}(?:/{_WORD})*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")

# Which files to load. All but these templates are at the top of a repository.
_CHAT_TEMPLATES = f"{CHAT_TEMPLATES}/*.jinja"
CONFIG = ("config.json",)
# With those that say which token ends a text.
TOKENIZER = (
    *TOKENIZER_NAMES,
    *CONFIG,
    "generation_config.json",
    _CHAT_TEMPLATES,
)
_TENSORS = ("*.safetensors", "*.safetensors.index.json")
WEIGHTS = (*CARRIED_NAMES, _CHAT_TEMPLATES, *_TENSORS)


class _Place(NamedTuple):
    repository: str
    revision: str | None

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{_PREFIX}{self.repository}" + (f"@{self.revision}" if self.revision else "")


class _NoBar(tqdm):
    """A bar that is not shown."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{**keywords, "disable": True})


def is_place(text: str) -> bool:
    """Return whether a text is meant as a name on the Hub."""
    return text.startswith(_PREFIX)


def pinned(text: str, kept: str | None = None) -> str:
    """Return a name with the commit that its revision is now, or was when it was last loaded.

    Loads config.json, unless ``kept`` has the commit.

    Args:
        text: the name.
        kept: the name, with its commit, by which a run has started; None: it has not. It decides
            if it is of the same repository, and ``text`` names no commit itself.

    Raises:
        CheckpointError: as ``folder``.
    """
    place = _place_of(text)
    if kept is not None and is_commit_of(kept, text):
        return kept
    return str(place._replace(revision=folder(text, CONFIG).name))


def is_commit_of(pinned_text: str, text: str) -> bool:
    """Return whether a name has a commit of the repository that another one without commit names.

    A text that is no name on the Hub is neither.
    """
    earlier, place = _PLACE.fullmatch(pinned_text), _PLACE.fullmatch(text)
    if earlier is None or place is None:
        return False
    return (
        _Place(*earlier.groups()).is_pinned
        and not _Place(*place.groups()).is_pinned
        and earlier[1] == place[1]
    )


def folder(text: str, files: tuple[str, ...] = WEIGHTS, *, shows_progress: bool = False) -> Path:
    """Return the folder of a checkpoint: of a name on the Hub, once its files have been loaded.

    Args:
        text: a path, which is returned as it is, or a name on the Hub.
        files: which files to load.
        shows_progress: whether to print how far loading is.

    Raises:
        CheckpointError: the name is malformed, there is no such repository or revision, it cannot
            be loaded, or ``huggingface_hub`` is not installed.
    """
    if not is_place(text):
        return Path(text)
    place = _place_of(text)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{place} needs huggingface_hub: pip install composer3d[hub], or load the files "
            "yourself and name their folder"
        ) from error
    share_bars_by_threads()
    try:
        # Without a connection, the library takes what it has, if that is all of the revision.
        snapshot = snapshot_download(
            place.repository,
            revision=place.revision,
            allow_patterns=list(files),
            # In patterns, * stands for / too.
            ignore_patterns=[f"*/{name}" for name in _TENSORS],
            tqdm_class=None if shows_progress else _NoBar,
        )
    except Exception as error:
        # The library's errors have several bases, and those of its connections have others.
        reason = one_line(str(error).strip().splitlines()[0] if str(error).strip() else "")
        raise CheckpointError(f"{place}: {type(error).__name__}: {reason}") from error
    found = Path(str(snapshot))
    if not _COMMIT.fullmatch(found.name):
        raise CheckpointError(f"{place}: huggingface_hub has no commit for {found}")
    return found


def tokenizer_file(text: str) -> Path:
    """Return the tokenizer.json of a name on the Hub; another text is returned as it is.

    Raises:
        CheckpointError: as ``folder``.
    """
    return folder(text, TOKENIZER) / TOKENIZER[0] if is_place(text) else Path(text)


def _place_of(text: str) -> _Place:
    match = _PLACE.fullmatch(text)
    if match is None:
        raise CheckpointError(
            f"{one_line(text)} is no name on the Hub; write hf://ORGANISATION/NAME, or "
            "hf://ORGANISATION/NAME@REVISION"
        )
    return _Place(match[1], match[2])
