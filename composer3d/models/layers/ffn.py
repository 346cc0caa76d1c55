"""Feed-forward layers."""

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """SwiGLU without biases (Shazeer 2020, arXiv 2002.05202): ``w2(silu(w1(x)) * w3(x))``.

    Input and output are (B, T, C), where C is ``dim``.
    """

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn, bias=False)  # gate
        self.w2 = nn.Linear(ffn, dim, bias=False)  # down
        self.w3 = nn.Linear(dim, ffn, bias=False)  # up

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTC)) * self.w3(x_BTC))
