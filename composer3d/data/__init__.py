"""Turn text into tokens, and serve batches in an order that does not depend on the layout."""

from composer3d.data.ahead import BatchesAhead
from composer3d.data.blend import Blend
from composer3d.data.loader import Batch, Loader
from composer3d.data.order import sample_order
from composer3d.data.sources import open_corpus
from composer3d.data.tokens import Corpus

__all__ = ["Batch", "BatchesAhead", "Blend", "Corpus", "Loader", "open_corpus", "sample_order"]
