"""Faults of multi-token prediction: its tokens, its labels, its counts and its shared embedding."""

from typing import Any

import torch
from torch import Tensor, nn

from composer3d.data import Batch, loader
from composer3d.data.loader import tokens_ahead
from composer3d.models.deepseek.prediction import PredictingLast, PredictionBlock
from composer3d.parallel.pipeline.ties import Ties
from composer3d.parallel.stages import Stages
from tools.prove.faults.places import OFF, PACKED, Place, found_by, harms
from tools.prove.faults.plant import fault_by, fault_of
from tools.prove.faults.values import change_step

_PREDICTION = (
    "model.architecture=deepseek model.preset=debug-deepseek model.n_kv_heads=8 model.mtp_layers=2"
)
_OFF_BY_HAND = "multi-token prediction is off"


def _harms(*layouts: str, message: str = OFF) -> Place:
    """Plant the decorated fault in layouts of a model with two depths."""
    return harms(*(f"{_PREDICTION} {layout}".strip() for layout in layouts), message=message)


@_harms("mesh.dp_shard=2")
def divide_depths_by_the_main_count() -> None:
    """The loss of each depth is divided by the number of valid labels of the next token."""
    change_step(valid=lambda own, arguments: arguments["valid"][:1].expand_as(arguments["valid"]))


@_harms("mesh.dp_shard=2")
def divide_depths_by_own_counts() -> None:
    """Each rank divides the losses of depths by its own numbers of valid labels."""

    def own_counts(own: Stages, arguments: Any) -> Tensor:
        counts = (arguments["ahead"][:, 1] >= 0).sum((0, 2)) * own.mesh.batch_ranks
        return torch.cat((arguments["valid"][:1], counts.clamp(min=1)))

    change_step(valid=own_counts)


@_harms("mesh.tp=2")
def predict_one_token_further() -> None:
    """Each depth predicts the token after its own."""

    def labels_further(own: Stages, arguments: Any) -> Tensor:
        ahead = arguments["ahead"].clone()
        ahead[:, 1] = ahead[:, 1].roll(-1, -1)
        return ahead

    change_step(ahead=labels_further)


@_harms("mesh.dp_shard=2")
def read_the_token_that_is_there() -> None:
    """Each depth reads the embedding of the token at its own position."""

    def tokens_here(own: Stages, arguments: Any) -> Tensor:
        ahead = arguments["ahead"].clone()
        ahead[:, 0] = arguments["tokens"][:, None]
        return ahead

    change_step(ahead=tokens_here)


@_harms("mesh.cp=2", "mesh.cp=2 parallel.cp_balance=contiguous")
def shift_after_the_cut() -> None:
    """cp: tokens and labels are shifted within the part of the sequence that a rank holds."""

    def shifted(own: Stages, arguments: Any) -> Tensor:
        part = Batch(arguments["tokens"], arguments["labels"], arguments["positions"])
        return tokens_ahead(part, arguments["ahead"].shape[2])

    change_step(ahead=shifted)


@_harms(f"mesh.dp_shard=2 {PACKED}")
@fault_of(loader, loader.tokens_ahead)
def predict_the_next_document(right: Any, batch: Batch, depths: int) -> Tensor:
    """Depths predict tokens of the document after that of their position."""
    return right(batch._replace(documents_BT=None), depths)


@_harms("mesh.pp=2", message=r"first\.embed\.weight")
@fault_of(Ties, Ties.add_gradients)
def keep_the_gradient_of_the_embedding(right: Any, self: Ties) -> None:
    """pp: the gradient that depths give to the embedding stays on the last stage."""
    for _, copy in self._pairs:
        if copy is not None:
            copy.grad = None


@_harms("mesh.pp=2", message="step [23]")
@fault_of(Ties, Ties.refresh)
def read_the_first_embedding(right: Any, self: Ties) -> None:
    """pp: depths read the embedding of the first step for ever."""
    if not hasattr(self, "has_refreshed"):
        self.has_refreshed = True  # type: ignore[attr-defined]
        right(self)


def _change_last(change: Any) -> None:
    """Call ``change`` with each ``PredictingLast`` when it is built."""
    right = PredictingLast.__init__

    def init(self: PredictingLast, *arguments: Any) -> None:
        right(self, *arguments)
        change(self)

    PredictingLast.__init__ = init  # type: ignore[method-assign]


class _Nothing(nn.Module):
    """A norm that does nothing. It has the weight of one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@found_by("prediction", _OFF_BY_HAND)
@fault_by(_change_last)
def forget_the_norm_of_a_depth(last: PredictingLast) -> None:
    """The head reads a depth without a norm."""
    last.mtp_norm = nn.ModuleList(_Nothing(norm.weight) for norm in last.mtp_norm)  # type: ignore[arg-type]


@found_by("prediction", _OFF_BY_HAND)
@fault_by(_change_last)
def add_the_losses_of_depths(last: PredictingLast) -> None:
    """The losses of depths are added up, and not averaged."""
    last.coefficient *= len(last.mtp_norm)


@found_by("prediction", _OFF_BY_HAND)
@fault_of(PredictionBlock, PredictionBlock.merge)
def merge_in_the_order_of_the_report(
    right: Any, self: PredictionBlock, h_BTC: Tensor, next_BTC: Tensor
) -> Tensor:
    """The projection reads the hidden state first, and then the embedding."""
    both = self.hidden_norm(h_BTC), self.embed_norm(next_BTC)
    return self.project(torch.cat(both, dim=-1))


@found_by("prediction", _OFF_BY_HAND)
@fault_of(PredictingLast, PredictingLast.forward)
def let_all_depths_read_the_main_model(
    right: Any, self: PredictingLast, h_BTC: Tensor, seq: Any, labels_BT: Tensor, *further: Any
) -> Tensor:
    """Each depth reads the hidden state of the main model, and not that of the depth before."""
    if not further:
        return right(self, h_BTC, seq, labels_BT)
    ahead_B2KT, blocks = further
    main_BTC = self.norm(h_BTC)
    losses = [self.head(main_BTC, labels_BT)]
    for depth, (block, norm) in enumerate(zip(blocks, self.mtp_norm, strict=True)):
        tokens_BT, labels_BT = ahead_B2KT[:, :, depth].unbind(1)
        h_BTC = norm(block(main_BTC, seq, self.embed(tokens_BT)))
        losses.append(self.coefficient * self.head(h_BTC, labels_BT))
    return torch.stack(losses)
