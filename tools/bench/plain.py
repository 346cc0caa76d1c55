"""A hand-written training loop of a Llama on one device, to compare composer3d with.

It imports nothing of composer3d. ``python plain.py JSON`` trains on random tokens and writes a line
of metrics.jsonl after each step, with the keys of composer3d's own file. JSON has the fields of
``Setup``.
"""

import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer that casts its float32 weight to the dtype of the input, such as bfloat16."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.RMSNorm):
    """RMSNorm that casts its weight to the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rotate(x_bthd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x_bthd.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Block(nn.Module):
    """A pre-norm block: attention and a SwiGLU feed-forward layer."""

    def __init__(
        self, *, dim: int, n_heads: int, n_kv_heads: int, ffn: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        kv_dim = n_kv_heads * self.head_dim
        self.attn_norm = Norm(dim, eps=norm_eps)
        self.wq = Linear(dim, dim)
        self.wk = Linear(dim, kv_dim)
        self.wv = Linear(dim, kv_dim)
        self.wo = Linear(dim, dim)
        self.ffn_norm = Norm(dim, eps=norm_eps)
        self.w1 = Linear(dim, ffn)
        self.w2 = Linear(ffn, dim)
        self.w3 = Linear(dim, ffn)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.attn_norm(h)
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if q.is_cuda and q.dtype == torch.float32:
            # No fused kernel for float32 takes grouped heads.
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        h = h + self.wo(out.transpose(1, 2).flatten(2))
        x = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(x)) * self.w3(x))


class Llama(nn.Module):
    """``model(tokens, labels) -> mean loss``; both are (B, T).

    Parameters are registered in the order in which forward uses them.
    """

    def __init__(
        self,
        *,
        seq_len: int,
        n_layers: int,
        vocab: int,
        rope_theta: float,
        compute: torch.dtype,
        **block: Any,
    ) -> None:
        super().__init__()
        dim, eps = block["dim"], block["norm_eps"]
        self.compute = compute
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(**block) for _ in range(n_layers))
        self.norm = Norm(dim, eps=eps)
        self.head = Linear(dim, vocab)
        half = dim // block["n_heads"] // 2
        angle = torch.outer(
            torch.arange(seq_len).float(), rope_theta ** (-torch.arange(half).float() / half)
        )
        self.register_buffer("cos", angle.cos()[:, None].to(compute))
        self.register_buffer("sin", angle.sin()[:, None].to(compute))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(tokens).to(self.compute)
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        logits = self.head(self.norm(h)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(kw_only=True)
class Setup:
    """The model and the run.

    Attributes:
        shape: dim, n_layers, n_heads, n_kv_heads, ffn, vocab, rope_theta and norm_eps.
        compute: dtype of forward and backward; parameters and optimizer are float32.
        out: the file for the metrics.
    """

    shape: dict[str, Any]
    seq_len: int
    global_batch: int
    micro_batch: int
    steps: int
    device: str
    compute: str
    out: str


def train(setup: Setup) -> None:
    """Train for ``setup.steps`` steps."""
    device = torch.device(setup.device)
    torch.manual_seed(0)
    with device:
        model = Llama(seq_len=setup.seq_len, compute=getattr(torch, setup.compute), **setup.shape)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    # Bytes, as in the texts that composer3d trains on.
    data = torch.randint(256, (1_000_000,))
    with Path(setup.out).open("w") as out:
        for step in range(1, setup.steps + 1):
            began_s = time.perf_counter()
            starts = torch.randint(len(data) - setup.seq_len, (setup.global_batch,)).tolist()
            rows = torch.stack([data[start : start + setup.seq_len + 1] for start in starts])
            rows = rows.to(device)
            optimizer.zero_grad(set_to_none=True)
            total = torch.zeros((), device=device)
            for micro in rows.split(setup.micro_batch):
                loss = model(micro[:, :-1], micro[:, 1:]) * (len(micro) / setup.global_batch)
                loss.backward()
                total += loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            # ``item`` waits until a GPU has finished the step, so the time is read after it.
            loss, grad_norm = total.item(), norm.item()
            step_s = time.perf_counter() - began_s
            line = {
                "step": step,
                "loss": loss,
                "grad_norm": grad_norm,
                "step_s": step_s,
                "tokens_per_s": setup.global_batch * setup.seq_len / step_s,
                "memory_gib": peak_gib(device),
            }
            out.write(json.dumps(line) + "\n")
            out.flush()


def peak_gib(device: torch.device) -> float:
    """The peak memory: what torch allocated on a GPU, else the resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    train(Setup(**json.loads(sys.argv[1])))
