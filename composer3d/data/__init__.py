"""Real text as tokens, and batches of it in an order that no layout changes."""

from composer3d.data.corpus import END_OF_DOCUMENT, VOCAB_SIZE, Corpus
from composer3d.data.loader import Batch, Loader, sample_order
from composer3d.data.sources import open_corpus

__all__ = ["END_OF_DOCUMENT", "VOCAB_SIZE", "Batch", "Corpus", "Loader", "open_corpus", "sample_order"]
