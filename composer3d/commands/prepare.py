"""``composer3d prepare``: make token files from text."""

import json
import time

from composer3d.data.prepare import prepare
from composer3d.recipe.values import one_line


def run(
    *, source: str, out: str, tokenizer: str, eod: str | None, field: str | None, as_json: bool
) -> int:
    """Write token files, and print their numbers of documents and tokens.

    The arguments are those of ``data.prepare.prepare``, which raises the errors. ``as_json`` also
    prints a JSON object, as the last line. Returns the exit status 0.
    """
    begin = time.monotonic()
    written = prepare(source, out, tokenizer=tokenizer, eod=eod, field=field)
    seconds = time.monotonic() - begin
    megabytes = written["source_bytes"] / 1e6
    print(
        f"{one_line(out)}: {written['documents']:,} documents, {written['tokens']:,} tokens of "
        f"{written['vocab']:,} ({written['dtype']}), {megabytes:,.1f} MB in {seconds:.1f} s "
        f"({megabytes / seconds:.1f} MB/s)"
    )
    if as_json:
        print(json.dumps({"ok": True, "out": out, **written, "seconds": seconds}))
    return 0
