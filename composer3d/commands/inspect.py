"""``composer3d inspect``: report what a checkpoint or token files contain, and if all is whole."""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer3d.commands.arguments import argument, json_option
from composer3d.commands.sources import local_source
from composer3d.facts.errors import DataError, UserError
from composer3d.facts.remote import RemotePath, is_url
from composer3d.facts.text import printable
from composer3d.facts.token_manifest import MANIFEST, read_manifest
from composer3d.models import hub

_BAR = 30  # characters of the longest bar of a histogram

EXAMPLES = (
    "composer3d inspect runs/quickstart",
    "composer3d inspect data/train --json",
)


_SAMPLES = 3  # documents that are shown if nobody says how many


def _samples(text: str) -> int:
    if len(text) > 4 or not text.isdecimal() or int(text) > 1000:
        raise argparse.ArgumentTypeError("must be a whole number from 0 to 1000")
    return int(text)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    as_json: bool = json_option()
    path: str = argument(metavar="PATH", help="a checkpoint, as SRC of convert, or token files")
    tensors: bool = argument("--tensors", action="store_true", help="list each tensor")
    samples: int = argument(
        "--samples",
        metavar="N",
        type=_samples,
        default=_SAMPLES,
        help="documents of token files to show as text; default: %(default)s; 0: none",
    )
    full: bool = argument(
        "--full",
        action="store_true",
        help="read all token files, and compare them with their digests; without it, only their "
        "sizes are checked. A checkpoint is always read whole",
    )


def _refuse_options_of_others(options: Options, *, has_tokens: bool) -> None:
    """Refuse options that say nothing of what is at PATH.

    Raises:
        UserError: with a line for each of them.
    """
    of_tokens = {"--samples": options.samples != _SAMPLES, "--full": options.full}
    of_checkpoint = {"--tensors": options.tensors}
    given, found = (of_checkpoint, "token files") if has_tokens else (of_tokens, "a checkpoint")
    lines = [
        f"composer3d inspect: {name} has no effect on {found}; leave it out"
        for name, is_given in given.items()
        if is_given
    ]
    if lines:
        raise UserError(lines)


def run(options: Options) -> int:
    """Print a report on a checkpoint, or on a folder of token files.

    Returns:
        The exit status: 0 if it is complete, 1 if it is not.

    Raises:
        CheckpointError: there is no checkpoint at all.
        DataError: the manifest of token files cannot be used.
        UserError: a later version of composer3d wrote the checkpoint.
    """
    has_tokens = _find_tokens(options.path)
    if has_tokens is not None:
        _refuse_options_of_others(options, has_tokens=has_tokens)
    if has_tokens:
        return _inspect_tokens(
            options.path, full=options.full, samples=options.samples, as_json=options.as_json
        )
    with local_source(options.path) as path:
        return _inspect(options, path)


def _find_tokens(text: str) -> bool | None:
    """Return whether there are token files at a URL, which are read where they are.

    Returns:
        False for a checkpoint, which must be copied, such as that of a name on the Hub. None if
        PATH is on a disk, or if ``local_source`` will say what is wrong.
    """
    if hub.is_place(text):
        return False
    if not is_url(text):
        return None
    try:
        place = RemotePath(text)
        if (place / MANIFEST).exists():
            return True
        return False if place.exists() else None
    except (ValueError, OSError):
        return None


def _inspect(options: Options, path: Path) -> int:
    """Print a report on what is on a disk: see ``run``."""
    if os.path.exists(path / MANIFEST):  # unlike Path.exists, False for any odd name
        _refuse_options_of_others(options, has_tokens=True)
        return _inspect_tokens(
            path, full=options.full, samples=options.samples, as_json=options.as_json
        )
    # Imported here because these modules import torch.
    from composer3d.convert.formats import detect_format
    from composer3d.convert.inspect import inspect

    # All that is no checkpoint is refused first, and the checkpoint is read last: it may be large.
    detect_format(path)
    _refuse_options_of_others(options, has_tokens=False)
    report = inspect(path)
    status = 0 if report["whole"] else 1
    if options.as_json:
        if not options.tensors:
            del report["tensors"]
        print(json.dumps(report))
        return status

    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in report["dtypes"].items())
    parameters = report["parameters"]
    rows = {
        "format": report["format"],
        "step": report["step"],
        "layout": _pairs(report["layout"]),
        "architecture": report["architecture"],
        "model": _pairs(report["model"]),
        "parameters": f"{parameters:,}" if parameters else None,
        "tensors": f"{report['count']} ({dtypes}), {report['bytes']:,} bytes",
        "carried": ", ".join(report["carried"]),
        "whole": "yes" if report["whole"] else "no",
    }
    for name, value in rows.items():
        if value not in (None, ""):
            print(printable(f"{name:<13}{value}"))
    for line in (*report["problems"], *report["notes"]):
        print(printable(line))
    if options.tensors:
        for name, (shape, dtype) in report["tensors"].items():
            print(f"  {printable(name)} {shape} {dtype}")
    return status


def _inspect_tokens(folder: Path | str, *, full: bool, samples: int, as_json: bool) -> int:
    """Print a report on token files. With ``full``, every byte is compared with its digest."""
    # Imported here because these modules import numpy.
    from composer3d.data.examine import Sample, as_report, decode_samples, measure_lengths
    from composer3d.data.tokens import find_damage

    manifest = read_manifest(folder)
    problems = find_damage(manifest, full=full)
    notes: list[str] = []
    lengths: dict[str, Any] | None = None
    texts: list[Sample] = []
    try:
        lengths = as_report(measure_lengths(manifest), manifest)
    except DataError as error:
        problems = problems or list(error.lines)
    try:
        if samples and not problems:
            texts = decode_samples(manifest, samples)
    except DataError as error:
        # A tokenizer that fails does not mean that the tokens are damaged.
        notes += [f"documents cannot be shown: {line}" for line in error.lines]
    report = {
        "path": str(folder),
        "format": "tokens",
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "learned": manifest.learned,
        "shards": len(manifest.shards),
        "dtype": manifest.dtype,
        "vocab": manifest.vocab,
        "tokenizer": manifest.tokenizer_name,
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "verified": "digests" if full else "sizes",
        "whole": not problems,
        "problems": problems,
        "notes": notes,
        "lengths": lengths,
        "samples": [sample._asdict() for sample in texts],
    }
    if as_json:
        print(json.dumps(report))
        return 1 if problems else 0
    for name in ("format", "tokens", "documents", "shards", "dtype", "vocab", "tokenizer", "bytes"):
        value = report[name]
        shown = f"{value:,}" if isinstance(value, int) else value
        print(printable(f"{name:<13}{shown}"))
        if name == "tokens" and manifest.learned is not None:
            share = manifest.learned / manifest.tokens
            print(f"{'learned':<13}{manifest.learned:,} tokens ({share:.1%}); « » in documents")
    how = "every digest is right" if full else "every size is right; --full compares the digests"
    print(f"{'whole':<13}{'no' if problems else f'yes: {how}'}")
    for line in (*problems, *notes):
        print(printable(line))
    if lengths is not None:
        print(
            f"{'lengths':<13}mean {lengths['mean']:,.1f} tokens, shortest "
            f"{lengths['shortest']:,}, longest {lengths['longest']:,}; documents by tokens:"
        )
        _print_histogram(lengths["histogram"])
    for sample in texts:
        learned = "" if sample.learned is None else f", {sample.learned:,} learned"
        line = f"document {sample.document:,}, {sample.tokens:,} tokens{learned}: {sample.text}"
        print(printable(line))
    return 1 if problems else 0


def _print_histogram(entries: list[dict[str, int]]) -> None:
    """Print a line with a bar for each entry, from the first that has documents."""
    most = max(entry["documents"] for entry in entries)
    first = next(number for number, entry in enumerate(entries) if entry["documents"])
    for entry in entries[first:]:
        bar = "#" * -(-_BAR * entry["documents"] // most)
        print(
            f"{entry['from']:>19,} to {entry['to']:<13,} {entry['documents']:>13,} {bar}".rstrip()
        )


def _pairs(values: dict[str, Any] | None) -> str:
    return " ".join(f"{name}={value}" for name, value in (values or {}).items())
