"""A Llama whose steps take as long on a busy machine as on an idle one: they begin at a pace.

A recipe names it: ``[model] architecture = "tools.prove.kills.paced:ARCHITECTURE"``.
"""

import time
from dataclasses import replace

from torch import Tensor

from composer3d.models.contract import SequenceInfo
from composer3d.models.llama.architecture import ARCHITECTURE as LLAMA
from composer3d.models.llama.model import First, Llama

PACE_S = 0.1  # from one micro-batch to the next, if the work of both takes no longer


class PacedFirst(First):
    """The embedding, of any shape, which waits until its time has come."""

    due_s = 0.0

    def forward(self, tokens_BT: Tensor, seq: SequenceInfo) -> Tensor:
        time.sleep(max(0.0, self.due_s - time.monotonic()))
        self.due_s = time.monotonic() + PACE_S
        return super().forward(tokens_BT, seq)


class Paced(Llama):
    """A Llama with such an embedding."""

    first_class = PacedFirst


ARCHITECTURE = replace(LLAMA, model="tools.prove.kills.paced:Paced")
