"""``composer3d prepare``: make token files from text."""

import json
import time
from collections.abc import Sequence

from composer3d.data.examples import Answers, Chat, Examples
from composer3d.data.prepare import prepare
from composer3d.facts.errors import DataError
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
    kind: str,
    prompt_field: str | None,
    answer_field: str | None,
    chat_template: str | None,
    max_expansion: int,
    as_json: bool,
) -> int:
    """Write token files, and print their numbers of documents and tokens.

    The arguments are those of ``data.prepare.prepare``, which raises the errors; ``kind``,
    ``prompt_field``, ``answer_field`` and ``chat_template`` describe its ``examples``. ``as_json``
    also prints a JSON object, as the last line. Returns the exit status 0.

    Raises:
        DataError: an option does not belong to this ``kind``.
    """
    for option, value, its_kind in (
        ("--prompt-field", prompt_field, Answers.kind),
        ("--answer-field", answer_field, Answers.kind),
        ("--chat-template", chat_template, Chat.kind),
    ):
        if value is not None and kind != its_kind:
            raise DataError(
                f"{option} is only used with --kind {its_kind}, and this is --kind {kind}; "
                f"remove it, or give --kind {its_kind}"
            )
    if train_tokenizer is not None and kind != "text":
        raise DataError(
            f"--train-tokenizer is not used with --kind {kind}, because examples are learned with "
            "the tokenizer of a trained model; give --tokenizer"
        )
    examples: Examples | None = None
    if kind == Answers.kind:
        if field is not None:
            raise DataError(
                "--field is not used with --kind answers; give --prompt-field and --answer-field"
            )
        examples = Answers(prompt_field or Answers.prompt, answer_field or Answers.answer)
    elif kind == Chat.kind:
        examples = Chat(field or Chat.messages, chat_template)
    begin = time.monotonic()
    written = prepare(
        sources,
        out,
        tokenizer=tokenizer,
        train_tokenizer=train_tokenizer,
        eod=eod,
        field=field if examples is None else None,
        processes=processes,
        shard_tokens=shard_tokens,
        split=split,
        examples=examples,
        max_expansion=max_expansion,
    )
    seconds = time.monotonic() - begin
    megabytes = (written["source_bytes"] - written["resumed_bytes"]) / 1e6
    print(
        f"{one_line(out)}: {written['documents']:,} documents, {written['tokens']:,} tokens of "
        f"{written['vocab']:,} ({written['dtype']}), {megabytes:,.1f} MB in {seconds:.1f} s "
        f"({megabytes / seconds:.1f} MB/s)"
    )
    if "learned" in written:
        share = written["learned"] / written["tokens"]
        print(f"{one_line(out)}: {written['learned']:,} tokens are learned ({share:.1%})")
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
