"""What training reads: one array of tokens."""

from dataclasses import dataclass

import numpy as np

END_OF_DOCUMENT = 0  # of tokens that are bytes; token files name their own
VOCAB_SIZE = 256


@dataclass(frozen=True, eq=False)
class Corpus:
    """All tokens of one split; each document is followed by one end-of-document token, which stands nowhere else."""

    tokens: np.ndarray  # 1-D, read-only: uint8 in memory, or little-endian uint16 or uint32 in a memory-mapped file
    end_of_document: int
    digest: str  # hexadecimal, of the tokens; two corpora with one digest hold the same tokens
    n_documents: int
    name: str  # says in messages which corpus this is
