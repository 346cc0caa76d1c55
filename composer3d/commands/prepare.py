"""``composer3d prepare``: make token files from text."""

import json
import time
from collections.abc import Sequence

from composer3d.data.prepare import prepare
from composer3d.recipe.values import one_line


def run(
    *,
    sources: Sequence[str],
    out: str,
    tokenizer: str | None,
    train_tokenizer: int | None,
    eod: str | None,
    field: str | None,
    processes: int | None,
    shard_tokens: int,
    split: float | None,
    as_json: bool,
) -> int:
    """Write token files, and print their numbers of documents and tokens.

    The arguments are those of ``data.prepare.prepare``, which raises the errors. ``as_json`` also
    prints a JSON object, as the last line. Returns the exit status 0.
    """
    begin = time.monotonic()
    written = prepare(
        sources,
        out,
        tokenizer=tokenizer,
        train_tokenizer=train_tokenizer,
        eod=eod,
        field=field,
        processes=processes,
        shard_tokens=shard_tokens,
        split=split,
    )
    seconds = time.monotonic() - begin
    megabytes = (written["source_bytes"] - written["resumed_bytes"]) / 1e6
    print(
        f"{one_line(out)}: {written['documents']:,} documents, {written['tokens']:,} tokens of "
        f"{written['vocab']:,} ({written['dtype']}), {megabytes:,.1f} MB in {seconds:.1f} s "
        f"({megabytes / seconds:.1f} MB/s)"
    )
    for name, count in written.get("splits", {}).items():
        print(
            f"{one_line(out)}/{name}: {count['documents']:,} documents, {count['tokens']:,} tokens"
        )
    if train_tokenizer is not None:
        trained = one_line(written["trained_tokenizer"])
        print(f"{trained}: trained on this text, {written['vocab']:,} tokens")
    if as_json:
        print(json.dumps({"ok": True, "out": out, **written, "seconds": seconds}))
    return 0
