"""Train a tokenizer on documents, for ``composer3d prepare --train-tokenizer``.

The training runs in a process of its own (``tokenizer_worker``), which can be killed: the
tokenizers library does not return to Python before it has finished, not even at Ctrl-C.
"""

import contextlib
import json
import select
from collections.abc import Iterable
from typing import IO

from composer3d.data.documents import Document, is_drawn
from composer3d.data.tables import read_frame
from composer3d.data.tokenizer import check_text, end_worker, pack, send_frame, start_worker
from composer3d.facts.errors import DataError
from composer3d.runtime.progress import Progress

# Bytes of text to train on, about. Memory is in proportion to the number of different words in it.
_SAMPLE_BYTES = 512 << 20
_BATCH_BYTES = 1 << 20
_NOTICE_S = 1.0  # the time between two notices that the training goes on

END = "<|endoftext|>"
CONFIG = "tokenizer_config.json"


def train_tokenizer(
    documents: Iterable[Document],
    *,
    size: int,
    end: str,
    source_bytes: int,
    processes: int,
) -> bytes:
    """Train a byte-level BPE on documents, and return its tokenizer.json.

    If the source is larger than 512 MiB, a part of the documents is taken. Whether a
    document is taken depends on its text and on ``source_bytes``, so that equal sources give equal
    bytes.

    Args:
        documents: the documents, each in UTF-8.
        size: the number of tokens, at least 257: the end of a document, and the 256 bytes.
        end: the name of the token that ends a document. It becomes token 0.
        source_bytes: the size of the files that hold the documents.
        processes: the threads of the training. The result does not depend on them.

    Raises:
        DataError: the documents give fewer than ``size`` tokens; ordinary text could become
            ``end``; a document is not UTF-8 or too long; or the training takes too much memory.
    """
    share = min(1.0, _SAMPLE_BYTES / max(source_bytes, 1))
    process = start_worker(threads=processes)
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # the answer, or its absence, says why
            send_frame(requests, json.dumps({"train": {"size": size, "end": end}}).encode())
            _send_documents(requests, documents, share, source_bytes)
            send_frame(requests, b".")
            requests.flush()
        answer = _wait(answers)
    finally:
        end_worker(process)
    if not answer:
        raise DataError(
            f"--train-tokenizer {size}: its process has ended; it may take too much memory; train "
            "on a part of the text, and give the result to --tokenizer"
        )
    if answer[:1] != b"+":
        raise DataError(f"--train-tokenizer {size}: {answer[1:].decode(errors='replace')}")
    return answer[1:]


def make_config(end: str) -> bytes:
    """Return the tokenizer_config.json of a trained tokenizer, which transformers reads."""
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def _send_documents(
    requests: IO[bytes], documents: Iterable[Document], share: float, source_bytes: int
) -> None:
    """Send a share of the documents to the process."""
    batch: list[bytes] = []
    batch_bytes = 0
    with Progress("read text for the tokenizer", source_bytes, "B") as progress:
        for document in documents:
            progress.advance(document.size)
            if share < 1 and not is_drawn(document.text, share, b"sample"):
                continue
            check_text(document)
            batch.append(document.text)
            batch_bytes += len(document.text)
            if batch_bytes >= _BATCH_BYTES:
                send_frame(requests, pack(batch))
                batch, batch_bytes = [], 0
    if batch:
        send_frame(requests, pack(batch))


def _wait(answers: IO[bytes]) -> bytes:
    """Return the answer, which is empty if the process has ended without one."""
    with Progress("train the tokenizer", 0, "s") as progress:
        while not select.select([answers], [], [], _NOTICE_S)[0]:
            progress.advance()
    return read_frame(answers)
