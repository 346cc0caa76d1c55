"""The seam of context parallelism in latent attention, where ranks send latents."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

# attend(q_BHTD, latents_BTR, weight, *, seq) -> out_BHTD: attention to keys and values that are
# made from latents. ``parallel.context.latents.latent_ring_attention`` describes the tensors.
AttendLatents = Callable[..., Tensor]


@runtime_checkable
class AttendsToLatents(Protocol):
    """A module that attends, and makes keys and values of all heads from a latent of each token.

    Attributes:
        shape: that of the whole model, whose ``sends_latents`` is asked.
    """

    shape: Any

    def send_latents(self, attend: AttendLatents) -> None:
        """Let ``attend`` make keys and values, from latents and the weight that projects them up.

        It replaces a linear layer: call it before anything else replaces, wraps or cuts it.
        """
