"""``composer3d convert``: write a checkpoint in another format."""

import json
from pathlib import Path
from typing import Any

from composer3d.convert.convert import convert
from composer3d.facts.text import printable


def run(src: str, dst: str, *, as_json: bool, **options: Any) -> int:
    """Convert a checkpoint, and print a report.

    ``options`` are the other arguments of ``convert.convert.convert``, which raises the errors.
    Returns the exit status 0.
    """
    report = convert(Path(src), Path(dst), **options)
    if as_json:
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
