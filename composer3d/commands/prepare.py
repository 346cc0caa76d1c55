"""``composer3d prepare``: make token files from text."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from composer3d.commands.arguments import (
    argument,
    json_option,
    number,
    positive,
)
from composer3d.commands.sources import local_target
from composer3d.facts.errors import DataError
from composer3d.facts.ranges import MOST_VOCAB
from composer3d.facts.remote import RemotePath, is_url
from composer3d.facts.text import one_line
from composer3d.facts.token_manifest import MANIFEST, TOKENIZER
from composer3d.models import hub

_LEAST_VOCAB = 257

EXAMPLES = (
    "composer3d prepare corpus/ -o data/train --tokenizer tokenizer.json",
    "composer3d prepare chats.jsonl -o data/chats --tokenizer llama-hf --kind chat",
    "composer3d prepare wiki.parquet -o data/wiki --train-tokenizer 32000",
)


def _vocabulary(text: str) -> int:
    number = positive(text)
    if not _LEAST_VOCAB <= number <= MOST_VOCAB:
        raise argparse.ArgumentTypeError(
            f"must be from {_LEAST_VOCAB} (the bytes, and the end of a document) to "
            f"{MOST_VOCAB:,}, got {number}"
        )
    return number


def _share(text: str) -> float:
    value = number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {value:g}")
    return value


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    as_json: bool = json_option()
    sources: Sequence[str] = argument(
        metavar="SRC",
        nargs="+",
        help="a text file, or a folder of them: each file is a document; or a .jsonl or .parquet "
        "file, or a folder of one of them, or a folder that save_to_disk of datasets made: each "
        "line or row is a document. Text beside the others is refused. Files of text and JSONL may "
        "end in .gz or .zst. Hidden files and links to folders are skipped",
    )
    out: str = argument(
        "-o",
        "--out",
        metavar="DIR",
        required=True,
        help="folder to make, or its URL in an object store; it must not exist",
    )
    tokenizer: str | None = argument(
        "--tokenizer",
        one_of="tokenizers",
        metavar="FILE|DIR|bytes",
        help="a tokenizer.json, or a Hugging Face folder that has one; or bytes, which makes "
        "each byte a token",
    )
    train_tokenizer: int | None = argument(
        "--train-tokenizer",
        one_of="tokenizers",
        metavar="N",
        type=_vocabulary,
        help="train a byte-level BPE of N tokens on the sources, write DIR/tokenizer.json and "
        "DIR/tokenizer_config.json, and prepare with it",
    )
    kind: str = argument(
        "--kind",
        choices=("text", "answers", "chat"),
        default="text",
        help="text: all tokens are learned; answers: lines of JSONL with a prompt and an answer, "
        "which alone is learned; chat: conversations, of which the turns of the assistant are "
        "learned. Lines of ShareGPT and Alpaca are read too; default: %(default)s",
    )
    prompt_field: str | None = argument(
        "--prompt-field",
        metavar="KEY",
        help="with --kind answers: key of the prompt; default: prompt",
    )
    answer_field: str | None = argument(
        "--answer-field",
        metavar="KEY",
        help="with --kind answers: key of the answer, such as completion; default: answer",
    )
    chat_template: str | None = argument(
        "--chat-template",
        metavar="FILE|NAME",
        help="with --kind chat: the chat template, or the name of one of the tokenizer's; default: "
        "those of the tokenizer, in chat_template.jinja or tokenizer_config.json beside it",
    )
    eod: str | None = argument(
        "--eod",
        metavar="TOKEN",
        help="token after each document; default: the eos_token that files beside the tokenizer "
        "name, or a usual one; <|endoftext|> of one that is trained",
    )
    field: str | None = argument(
        "--field",
        metavar="KEY",
        help="key of the text in a line of JSONL, or its column in a table; default: text. With "
        "this option, a file of any other name is read as JSONL. With --kind chat: key of the "
        "messages; default: messages",
    )
    processes: int | None = argument(
        "--processes",
        metavar="N",
        type=positive,
        help="processes that tokenize; the output does not depend on it; default: one a core",
    )
    split: float | None = argument(
        "--split",
        metavar="SHARE",
        type=_share,
        help="make DIR/train and DIR/validation, with this share of the documents in the latter, "
        "such as 0.01; the text of a document decides, so that equal documents stay together",
    )
    shard_tokens: int = argument(
        "--shard-tokens",
        metavar="N",
        type=positive,
        default=100_000_000,
        help="a shard ends with the document that reaches N tokens; an interrupted prepare goes on "
        "after its last shard, unless DIR is a URL; default: %(default)s",
    )
    max_expansion: int = argument(
        "--max-expansion",
        metavar="N",
        type=positive,
        default=100,
        help="refuse a compressed file or a table that holds more than N bytes of text for each of "
        "its bytes, and over 64 MiB of text; default: %(default)s",
    )


def run(options: Options) -> int:
    """Write token files, and print their numbers of documents and tokens.

    ``data.prepare.prepare`` and ``local_target`` raise the other errors. Returns the exit status 0.

    Raises:
        DataError: an option does not belong to this ``kind``, or a source is in an object store.
    """
    # Imported here because these modules import torch.
    from composer3d.data.examples import Answers, Chat, Examples
    from composer3d.data.prepare import prepare

    for source in filter(is_url, options.sources):
        raise DataError(f"{source}: prepare reads text from a disk only; copy it there first")
    for option, value, its_kind in (
        ("--prompt-field", options.prompt_field, Answers.kind),
        ("--answer-field", options.answer_field, Answers.kind),
        ("--chat-template", options.chat_template, Chat.kind),
    ):
        if value is not None and options.kind != its_kind:
            raise DataError(
                f"{option} is only used with --kind {its_kind}, and this is --kind {options.kind}; "
                f"remove it, or give --kind {its_kind}"
            )
    if options.train_tokenizer is not None and options.kind != "text":
        raise DataError(
            f"--train-tokenizer is not used with --kind {options.kind}, because examples are "
            "learned with the tokenizer of a trained model; give --tokenizer"
        )
    examples: Examples | None = None
    if options.kind == Answers.kind:
        if options.field is not None:
            raise DataError(
                "--field is not used with --kind answers; give --prompt-field and --answer-field"
            )
        examples = Answers(
            options.prompt_field or Answers.prompt, options.answer_field or Answers.answer
        )
    elif options.kind == Chat.kind:
        examples = Chat(options.field or Chat.messages, options.chat_template)
    begin = time.monotonic()
    with local_target(options.out, MANIFEST) as out:
        written = prepare(
            options.sources,
            str(out),
            tokenizer=options.tokenizer and str(hub.folder(options.tokenizer, hub.TOKENIZER)),
            train_tokenizer=options.train_tokenizer,
            eod=options.eod,
            field=options.field if examples is None else None,
            processes=options.processes,
            shard_tokens=options.shard_tokens,
            split=options.split,
            examples=examples,
            max_expansion=options.max_expansion,
            keeps_unfinished=not is_url(options.out),
        )
    seconds = time.monotonic() - begin
    megabytes = (written["source_bytes"] - written["resumed_bytes"]) / 1e6
    if is_url(options.out) and options.train_tokenizer is not None:
        written["trained_tokenizer"] = str(RemotePath(options.out) / TOKENIZER)
    shown = one_line(options.out)
    print(
        f"{shown}: {written['documents']:,} documents, {written['tokens']:,} tokens of "
        f"{written['vocab']:,} ({written['dtype']}), {megabytes:,.1f} MB in {seconds:.1f} s "
        f"({megabytes / seconds:.1f} MB/s)"
    )
    if "learned" in written:
        share = written["learned"] / written["tokens"]
        print(f"{shown}: {written['learned']:,} tokens are learned ({share:.1%})")
    for name, count in written.get("splits", {}).items():
        print(f"{shown}/{name}: {count['documents']:,} documents, {count['tokens']:,} tokens")
    if options.train_tokenizer is not None:
        trained = one_line(written["trained_tokenizer"])
        print(f"{trained}: trained on this text, {written['vocab']:,} tokens")
    if options.as_json:
        print(json.dumps({"ok": True, "out": options.out, **written, "seconds": seconds}))
    return 0
