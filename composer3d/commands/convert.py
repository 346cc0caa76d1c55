"""``composer3d convert``: write a checkpoint in another format."""

import json
from dataclasses import dataclass
from typing import Literal

from composer3d.checkpoint import manifest as manifests
from composer3d.commands.arguments import argument, json_option
from composer3d.commands.sources import local_source, local_target
from composer3d.facts.errors import CheckpointError
from composer3d.facts.remote import is_url, place_of
from composer3d.facts.text import printable

# The file of each format that its readers open first. A file of torch is one file.
_OPENED_FIRST = {"hf": "config.json", "meta": "params.json", "dcp": manifests.FILE, "torch": None}

EXAMPLES = (
    "composer3d convert runs/quickstart quickstart-hf --to hf",
    "composer3d convert hf://meta-llama/Llama-3.2-1B llama-dcp --to dcp --logits",
    "composer3d convert runs/quickstart s3://my-bucket/quickstart-hf --to hf",
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    as_json: bool = json_option()
    src: str = argument(
        metavar="SRC",
        help="a checkpoint: a folder in Hugging Face or Meta format or of a run, or a torch file; "
        "or hf://ORGANISATION/NAME[@REVISION], loaded from the Hugging Face Hub; or the URL of one "
        "in an object store",
    )
    dst: str = argument(
        metavar="DST",
        help="file or folder to make, or its URL in an object store; it must not exist",
    )
    to: Literal["hf", "meta", "torch", "dcp"] = argument(
        "--to",
        choices=("hf", "meta", "torch", "dcp"),
        required=True,
        help="format of DST; torch makes one file, the others a folder",
    )
    dtype: str | None = argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="dtype of the weights; default: as in SRC",
    )
    weights_only: bool = argument(
        "--weights-only", action="store_true", help="leave out the state of the optimizer"
    )
    logits: bool = argument(
        "--logits", action="store_true", help="also run the models of SRC and DST, and compare them"
    )


def run(options: Options) -> int:
    """Convert a checkpoint, and print a report.

    ``convert.convert.convert`` and ``local_target`` raise the other errors. Returns the exit status
    0.

    Raises:
        CheckpointError: DST is within SRC in an object store.
    """
    # Imported here because this module imports torch.
    from composer3d.convert.convert import convert

    if is_url(options.src) and options.dst.startswith(options.src.rstrip("/") + "/"):
        raise CheckpointError(f"{options.dst} lies in {options.src}; give a DST outside of it")
    # The copy of SRC goes before DST is uploaded.
    with (
        local_target(options.dst, _OPENED_FIRST[options.to]) as dst,
        local_source(options.src) as src,
    ):
        report = convert(
            src,
            dst,
            options.to,
            dtype=options.dtype,
            weights_only=options.weights_only,
            logits=options.logits,
        )
    report["target"] = str(place_of(options.dst))
    if options.as_json:
        print(json.dumps({"ok": True, **report}))
        return 0

    print(
        f"{printable(report['target'])}: {report['tensors']} tensors, {report['bytes']:,} bytes, "
        f"in {report['seconds']:.1f} s"
    )
    print("proven: each tensor was read once and written once, and the copy reads back the same")
    logits = report.get("logits")
    if logits is not None:
        if logits["bitwise"]:
            print("logits: bitwise equal")
        else:
            print(f"logits: relative error {logits['relative_error']:.3g}")
    for note in report["notes"]:
        print(printable(note))
    return 0
