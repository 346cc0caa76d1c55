"""Mixture of experts: a router sends each token to a few of many feed-forward layers.

Shazeer et al. 2017 (arXiv 1701.06538). No token is dropped and no capacity is set: every expert
computes exactly the tokens that were routed to it.

Shapes are in the names: N tokens of a micro-batch (B x T), C model width, E experts, K experts of
a token, F width of an expert, M = N x K rows, one for each token and each of its experts.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.models.contract import SequenceInfo
from composer3d.models.layers.ffn import FeedForward
from composer3d.models.to_device import copy_to_device_of

# Added to a sum of scores before it divides, as DeepSeek-V3 does: all of them may be 0 in float32.
_SMALLEST_SUM = 1e-20

# grouped_mm reads rows in units of this many bytes.
_ROW_BYTES = 16


class RouterStatistics:
    """What a router has seen of this rank's tokens since the step began.

    Forward adds to it, not backward: where all that comes before a router is frozen, no gradient
    passes the router.

    Attributes:
        sums: float64 (E + 3): the tokens of each expert, then the balance loss and the z-loss, both
            times their coefficients and divided by the tokens of the step, then the entropy of the
            routing probabilities, in nats, summed over tokens. None: no forward since the reset.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def add(self, sums: Tensor) -> None:
        """Add what one micro-batch has seen. ``sums`` must not be changed afterwards."""
        self.sums = sums if self.sums is None else self.sums + sums

    def reset(self) -> None:
        """Forget everything: a new step begins."""
        self.sums = None


class Routing(NamedTuple):
    """Where the tokens of a micro-batch go.

    Attributes:
        experts_NK: int64: the experts of each token, in the order of ``topk``.
        weights_NK: float32 or wider: the weights of their outputs.
        tokens_E: int64: the number of rows that go to each expert.
        sums: what ``Router.count`` is still to add to the statistics, which a compiled graph cannot
            do. None: it is added, or nothing is to be.
    """

    experts_NK: Tensor
    weights_NK: Tensor
    tokens_E: Tensor
    sums: Tensor | None = None


class Router(nn.Module):
    """Choose ``per_token`` of ``experts`` experts for each token.

    Scores are computed in float32 or wider, whatever the dtype of the stream is: in bfloat16 many
    of them are equal (Zoph et al. 2022, arXiv 2202.08906, section 3.3).

    Args:
        dim: width C of the residual stream.
        experts, per_token: E and K.
        scores: "softmax" over all experts (Mixtral, Qwen 3), or "sigmoid" (DeepSeek-V3).
        renormalise: divide the weights of a token's experts by their sum.
        scale: factor of the weights, after that.
        groups, groups_per_token: only experts of the best groups of consecutive experts are chosen.
            Other experts count as worse than any.
        group_best: how good a group is: the sum of its "two" best scores (DeepSeek-V3), or the best
            "one" (DeepSeek-V2).
        has_logit_bias: add a bias to the logits, which is trained (gpt-oss).
        has_bias: add a bias to the scores for the choice, not for the weights. It gets no gradient.
        bias_rate: how far it moves in a step (see ``bias_move``).
        balance_loss: coefficient of the balance loss (see ``_balance_loss``).
        z_loss: coefficient of the mean of logsumexp(logits)^2 (arXiv 2202.08906).

    Attributes:
        weight: (E, C).
        logit_bias: (E), or None.
        bias: (E), or None.
        statistics: of the current step.
        sequence_ranks, sum_over_sequence, own_documents: the seams of parallelisms that cut
            sequences: the number of ranks that hold parts of the same sequences; a function that
            sums a tensor over them; and a function that takes the documents of whole sequences and
            returns those of the tokens that this rank routes.
    """

    def __init__(
        self,
        *,
        dim: int,
        experts: int,
        per_token: int,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        renormalise: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        groups_per_token: int = 1,
        group_best: Literal["two", "one"] = "two",
        has_logit_bias: bool = False,
        has_bias: bool = False,
        bias_rate: float = 0.0,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.experts, self.per_token = experts, per_token
        self.scores, self.renormalise, self.scale = scores, renormalise, scale
        self.groups, self.groups_per_token = groups, groups_per_token
        self.group_best = group_best
        self.bias_rate, self.balance_loss, self.z_loss = bias_rate, balance_loss, z_loss
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.logit_bias = nn.Parameter(torch.empty(experts)) if has_logit_bias else None
        self.bias = nn.Parameter(torch.empty(experts), requires_grad=False) if has_bias else None
        self.statistics = RouterStatistics()
        self.sequence_ranks = 1
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _identity
        self.own_documents: Callable[[Tensor], Tensor] = _identity

    def forward(self, x_BTC: Tensor, seq: SequenceInfo) -> Routing:
        wide = torch.promote_types(x_BTC.dtype, torch.float32)
        x_NC = x_BTC.flatten(0, 1)
        bias = None if self.logit_bias is None else self.logit_bias.to(wide)
        logits_NE = F.linear(x_NC.to(wide), self.weight.to(wide), bias)
        if self.scores == "softmax":
            scores_NE = probabilities_NE = logits_NE.softmax(-1)
        else:
            scores_NE = logits_NE.sigmoid()
            probabilities_NE = scores_NE / (scores_NE.sum(-1, keepdim=True) + _SMALLEST_SUM)

        experts_NK = self._choose(scores_NE.detach())
        weights_NK = scores_NE.gather(1, experts_NK)
        if self.renormalise:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + _SMALLEST_SUM)
        weights_NK = weights_NK * self.scale

        tokens_E = _count(experts_NK.flatten(), self.experts)
        routing = Routing(experts_NK, weights_NK, tokens_E)
        if self.training and torch.is_grad_enabled():
            routing = self._account(routing, logits_NE, probabilities_NE, x_BTC.shape[0], seq)
        return routing

    def prepare(self, x_BTC: Tensor, seq: SequenceInfo) -> None:
        """Fill ``seq.shared`` for a forward of ``x_BTC`` in a compiled graph, which cannot.

        ``parallel.compile`` calls it before each graph of a block that has this router. Only the
        shape of ``x_BTC`` is read, so the residual stream serves.
        """
        if self.balance_loss and self.training and torch.is_grad_enabled():
            rows, length, _ = x_BTC.shape
            self._sequences(rows * length, rows, seq)

    def count(self, sums: Tensor, seq: SequenceInfo) -> None:
        """Add ``Routing.sums`` to the statistics. No collective.

        A checkpointed block runs again in backward, with the same ``seq``: it counts once.
        """
        if not self._is_counted(seq):
            seq.kept[self.statistics, "counted"] = True
            self.statistics.add(sums)

    def bias_move(self, tokens_E: Tensor) -> Tensor:
        """What to add to the bias after a step, to favour the experts that got few tokens.

        Each bias moves by ``bias_rate``, up or down (Wang et al. 2024, arXiv 2408.15664).

        Args:
            tokens_E: the tokens of each expert in the whole step, over all ranks.
        """
        return self.bias_rate * (tokens_E.mean() - tokens_E).sign()

    def _choose(self, scores_NE: Tensor) -> Tensor:
        """The experts of each token: those of the largest scores, with the bias added."""
        if self.bias is not None:
            scores_NE = scores_NE + self.bias.to(scores_NE)
        if self.groups > 1:
            by_group_NGe = scores_NE.unflatten(1, (self.groups, -1))
            best = min(2 if self.group_best == "two" else 1, by_group_NGe.shape[-1])
            group_scores_NG = by_group_NGe.topk(best, dim=-1).values.sum(-1)
            groups_NG = group_scores_NG.topk(self.groups_per_token, dim=-1).indices
            is_out_NG = torch.ones_like(by_group_NGe[..., 0], dtype=torch.bool)
            is_out_NG.scatter_(1, groups_NG, False)
            scores_NE = by_group_NGe.masked_fill(is_out_NG[..., None], -torch.inf).flatten(1)
        return scores_NE.topk(self.per_token, dim=-1).indices

    def _is_counted(self, seq: SequenceInfo) -> bool:
        # With tp, ``self`` is a copy that is made in each call. All have the same statistics.
        return (self.statistics, "counted") in seq.kept

    def _account(
        self,
        routing: Routing,
        logits_NE: Tensor,
        probabilities_NE: Tensor,
        rows: int,
        seq: SequenceInfo,
    ) -> Routing:
        """Add to the statistics; return the routing with weights whose backward adds the losses'
        gradients.
        """
        weights_NK, compiles = routing.weights_NK, torch.compiler.is_compiling()
        balance = z = logits_NE.new_zeros(())
        if self.balance_loss:
            balance = self.balance_loss * self._balance_loss(
                probabilities_NE, routing.experts_NK, rows, seq
            )
        if self.z_loss:
            z = self.z_loss * logits_NE.logsumexp(-1).square().sum() / seq.step_tokens
        if self.balance_loss or self.z_loss:
            weights_NK = _WithLoss.apply(weights_NK, balance + z)

        sums = None
        if compiles or not self._is_counted(seq):
            with torch.no_grad():
                entropy = torch.special.entr(probabilities_NE).sum()
                losses = torch.stack((balance, z, entropy)).double()
                sums = torch.cat((routing.tokens_E.double(), losses))
        if sums is not None and not compiles:
            self.count(sums, seq)
            sums = None
        return routing._replace(weights_NK=weights_NK, sums=sums)

    def _balance_loss(
        self, probabilities_NE: Tensor, experts_NK: Tensor, rows: int, seq: SequenceInfo
    ) -> Tensor:
        """This rank's share of the balance loss of each sequence, the mean over all tokens.

        The loss of a sequence is E x the sum over experts of f_e x P_e, where f_e is the part of
        its rows that go to expert e, and P_e the mean of its tokens' probabilities: 1 if all
        experts get the same (Fedus et al. 2021, arXiv 2101.03961; for each sequence, as in
        DeepSeek-V3, arXiv 2412.19437, equations 17 to 20). With packed documents, a sequence is a
        document. A sequence is never cut by micro-batches or data parallelism, so the loss does not
        depend on the layout: a loss of a micro-batch or of a rank would, as f x P is not linear.

        Sequences count by their tokens. The loss is a sum over tokens, divided by the tokens of the
        whole step, so that all ranks and micro-batches add up to the mean.
        """
        sequence_N, lengths_S = self._sequences(experts_NK.shape[0], rows, seq)
        n_sequences, n_experts = len(lengths_S), self.experts
        cells = (sequence_N[:, None] * n_experts + experts_NK).flatten()
        tokens_SE = self.sum_over_sequence(_count(cells, n_sequences * n_experts))
        tokens_SE = tokens_SE.view(n_sequences, n_experts)
        rows_S1 = lengths_S[:, None] * self.per_token
        share_SE = tokens_SE.to(probabilities_NE.dtype) / rows_S1
        share_NE = share_SE[sequence_N]
        return n_experts * (share_NE * probabilities_NE).sum() / seq.step_tokens

    def _sequences(self, tokens: int, rows: int, seq: SequenceInfo) -> tuple[Tensor, Tensor]:
        """The number of each token's sequence (N), and the length of each sequence (S), in tokens.

        All routers of a micro-batch share them. There is no collective here: a checkpointed block
        finds them when it runs again, and would skip one that it had called the first time.
        """
        key = (Router, "sequences")
        if key not in seq.shared:
            device = seq.positions_BT.device
            # The host knows documents, and has them there already; all else is computed in place.
            where = device if seq.documents_BT is None else torch.device("cpu")
            row_B1 = torch.arange(rows, device=where)[:, None]
            if seq.documents_BT is None:
                sequence_BT = row_B1.expand(rows, tokens // rows)
                length = tokens // rows * self.sequence_ranks
                lengths_S = torch.full((rows,), length, device=where)
            else:
                documents_BT = seq.documents_BT.to(where)
                # A power of 16: a compiled graph holds for one number, and torch makes few graphs.
                bits = max(1, int(documents_BT.max()).bit_length())
                most = 1 << (bits + -bits % 4)
                sequence_BT = self.own_documents(documents_BT) + row_B1 * most
                lengths_S = _count((documents_BT + row_B1 * most).flatten(), rows * most)
            # A row with fewer documents than another has some without a token.
            lengths_S = lengths_S.clamp(min=1)
            sequence_N = sequence_BT.flatten()
            if where != device:
                sequence_N = copy_to_device_of(seq.positions_BT, sequence_N)
                lengths_S = copy_to_device_of(seq.positions_BT, lengths_S)
            seq.shared[key] = (sequence_N, lengths_S)
        return seq.shared[key]


class _WithLoss(torch.autograd.Function):
    """Return the weights. Backward adds a loss to the job's.

    The gradient of the job's loss with respect to a loss that is added to it is 1: nothing divides
    gradients later, neither by ranks nor by micro-batches. So a loss can be added where it is
    computed, on any stage of a pipeline.
    """

    @staticmethod
    def forward(ctx: Any, weights_NK: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)


class Exchanged(NamedTuple):
    """The rows of this rank's experts.

    Attributes:
        rows_MC: in the order of the experts; M is the number of rows on this rank.
        tokens_E: int64: the rows of each expert of this rank.
        send_back: returns the outputs of these rows, in the order of the rows before the exchange.
    """

    rows_MC: Tensor
    tokens_E: Tensor
    send_back: Callable[[Tensor], Tensor]


# exchange(tokens_E, seq): it starts what needs nothing but the rows of each expert, and returns a
# function of the rows (M, C) in the order of all experts.
ExchangeRows = Callable[[Tensor], Exchanged]
Exchange = Callable[[Tensor, SequenceInfo], ExchangeRows]


def _keep_rows(tokens_E: Tensor, seq: SequenceInfo) -> ExchangeRows:
    """The default of the seam ``exchange``: this rank holds all experts."""
    return lambda rows_MC: Exchanged(rows_MC, tokens_E, _identity)


class Groups:
    """Where the rows of each expert are: rows are in the order of their experts.

    Args:
        tokens_E: int64: the rows of each expert.
    """

    def __init__(self, tokens_E: Tensor) -> None:
        self.tokens_E = tokens_E

    @cached_property
    def ends_E(self) -> Tensor:
        """int32: the number of the row that follows the last one of each expert."""
        return self.tokens_E.cumsum(0, dtype=torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """The rows of each expert, on the host. This waits for the device."""
        return self.tokens_E.tolist()

    def pairs(self, rows_MK: Tensor, weight_EJK: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of each expert, and its matrix."""
        # ``unbind``: the backward of an index would fill a tensor of all experts with zeros each.
        return zip(rows_MK.split(self.sizes), weight_EJK.unbind(), strict=True)


# product(rows (M, K), weight (E, J, K), groups) -> (M, J): the rows of each expert times its
# matrix, transposed.
GroupedProduct = Callable[[Tensor, Tensor, Groups], Tensor]


def grouped_product(rows_MK: Tensor, weight_EJK: Tensor, groups: Groups) -> Tensor:
    """The default of the seam ``product``: a product in the dtype of the operands."""
    if _has_grouped_kernel(rows_MK.element_size(), *weight_EJK.shape[1:]):
        return F.grouped_mm(rows_MK, weight_EJK.mT, offs=groups.ends_E)
    return torch.cat([F.linear(x, weight) for x, weight in groups.pairs(rows_MK, weight_EJK)])


def add_row_bias(rows_MJ: Tensor, bias_EJ: Tensor, groups: Groups) -> Tensor:
    """Add to each row the bias of its expert. An expert without rows gets a gradient of zeros."""
    return _AddRowBias.apply(rows_MJ, bias_EJ, groups)


class _AddRowBias(torch.autograd.Function):
    """Backward sums the rows of each expert: that of an index would add in any order on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows_MJ: Tensor, bias_EJ: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        expert_M = torch.repeat_interleave(groups.tokens_E, output_size=len(rows_MJ))
        return rows_MJ + bias_EJ[expert_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_MJ,) = grads
        return grad_MJ, _sum_of_rows(grad_MJ, ctx.groups), None


def _sum_of_rows(rows_MJ: Tensor, groups: Groups) -> Tensor:
    """Sum the rows of each expert: (E, J)."""
    if _has_grouped_kernel(rows_MJ.element_size(), rows_MJ.shape[1]):
        columns = _ROW_BYTES // rows_MJ.element_size()  # the fewest that the kernel takes
        ones_MK = rows_MJ.new_ones(len(rows_MJ), columns)
        return F.grouped_mm(rows_MJ.mT, ones_MK, offs=groups.ends_E)[..., 0]
    return torch.stack([rows.sum(0) for rows in rows_MJ.split(groups.sizes)])


def _has_grouped_kernel(element_size: int, *widths: int) -> bool:
    """Whether ``grouped_mm`` takes elements and rows so long; float64 always takes the loop."""
    return element_size < 8 and all(width * element_size % _ROW_BYTES == 0 for width in widths)


class Experts(nn.Module):
    """E feed-forward layers (SwiGLU without biases) as three tensors: ``experts(rows, exchange)``.

    Attributes:
        w1, w3: (E, F, C), the gate and up projections. A rank may hold some of the experts.
        w2: (E, C, F), the down projection.
        exchange, own_part: the seams of expert parallelism. ``own_part`` returns this rank's part
            of a parameter.
        product: the seam of float8: how rows and matrices are multiplied.
    """

    def __init__(self, experts: int, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, ffn, dim))
        self.w2 = nn.Parameter(torch.empty(experts, dim, ffn))
        self.w3 = nn.Parameter(torch.empty(experts, ffn, dim))
        self.exchange: Exchange = _keep_rows
        self.own_part: Callable[[Tensor], Tensor] = _identity
        self.product: GroupedProduct = grouped_product

    def forward(self, rows_MC: Tensor, exchange: ExchangeRows) -> Tensor:
        """Compute rows (M, C), which are in the order of their experts; returns (M, C).

        ``exchange`` is what the seam of this name has returned.
        """
        own = {name: self.own_part(value) for name, value in self.named_parameters(recurse=False)}
        exchanged = exchange(rows_MC)
        groups = Groups(exchanged.tokens_E)
        return exchanged.send_back(self.compute(exchanged.rows_MC, groups, **own))

    def compute(
        self, rows_MC: Tensor, groups: Groups, *, w1: Tensor, w2: Tensor, w3: Tensor
    ) -> Tensor:
        """Compute the rows of this rank's experts with its parts of the parameters, by name."""
        return expert_ffn(rows_MC, groups, w1, w2, w3, product=self.product)


def expert_ffn(
    rows_MC: Tensor,
    groups: Groups,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    *,
    product: GroupedProduct = grouped_product,
) -> Tensor:
    """Compute ``w2[e](silu(w1[e](x)) * w3[e](x))`` for the rows of each expert e.

    An expert without rows gets a gradient of zeros, not None: the optimizer must decay it and
    update its moments as on every other layout.
    """
    gate_MF = F.silu(product(rows_MC, w1, groups))
    return product(gate_MF * product(rows_MC, w3, groups), w2, groups)


class MoE(nn.Module):
    """A feed-forward layer of experts: ``moe(x_BTC, seq) -> (B, T, C)``.

    Args:
        router: chooses the experts of each token.
        experts: compute them.
        shared: a feed-forward layer that every token passes as well, or None.
        shared_gate: returns a logit (B, T, 1) of each token, whose sigmoid is the weight of the
            shared layer's output; None: the weight is 1.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: FeedForward | None,
        shared_gate: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def forward(self, x_BTC: Tensor, seq: SequenceInfo) -> Tensor:
        routing = self.router(x_BTC, seq)
        return self.combine(x_BTC, self.compute(x_BTC, routing, seq), routing.weights_NK)

    def compute(self, x_BTC: Tensor, routing: Routing, seq: SequenceInfo) -> Tensor:
        """Send the tokens through their experts; return the outputs (N, K, C).

        The shapes inside depend on the routing, so this is never part of a compiled graph.
        """
        if routing.sums is not None:
            self.router.count(routing.sums, seq)
        per_token = routing.experts_NK.shape[1]
        # Numbers of rows go to other ranks and to the host while the rows are put in order.
        exchange = self.experts.exchange(routing.tokens_E, seq)
        # Row m of the experts' order is row order_M[m] of the tokens' order (N x K).
        order_M = routing.experts_NK.flatten().argsort(stable=True)
        place_M = inverse_of(order_M)

        rows_MC = _rows_of_tokens(x_BTC.flatten(0, 1), order_M, place_M, per_token)
        out_MC = self.experts(rows_MC, exchange)
        return permute_rows(out_MC, place_M, order_M).unflatten(0, (-1, per_token))

    def combine(self, x_BTC: Tensor, out_NKC: Tensor, weights_NK: Tensor) -> Tensor:
        """Add up the outputs of each token's experts, and that of the shared expert."""
        out_BTC = weighted_sum(out_NKC, weights_NK).to(x_BTC.dtype).view_as(x_BTC)
        if self.shared is None:
            return out_BTC
        shared_BTC = self.shared(x_BTC)
        if self.shared_gate is not None:
            # tp has summed the outputs by now: each rank weighs the tokens that it routes.
            shared_BTC = shared_BTC * self.shared_gate(x_BTC).sigmoid()
        return out_BTC + shared_BTC


def weighted_sum(out_NKC: Tensor, weights_NK: Tensor) -> Tensor:
    """Sum the outputs of each token's experts, times their weights: (N, C), in the weights' dtype.

    The sum is in float32 or wider, and in the order of K on every layout.
    """
    if torch.compiler.is_compiling():
        return (out_NKC * weights_NK[..., None]).sum(1)  # one kernel, which keeps no product
    zeros_NC = _SumOperands.apply(out_NKC, weights_NK)
    return _WeightedSum.apply(zeros_NC, out_NKC.detach(), weights_NK.detach())


class _SumOperands(torch.autograd.Function):
    """Save the operands of a sum before it is computed; return zeros of its shape.

    Recomputation ends with the last tensor that backward reads: so it leaves the sum out, which is
    the last of a block. The zeros are one number in memory; the sum's gradient arrives as theirs.
    """

    @staticmethod
    def forward(ctx: Any, out_NKC: Tensor, weights_NK: Tensor) -> Tensor:
        ctx.save_for_backward(out_NKC, weights_NK)
        return weights_NK.new_zeros(()).expand(out_NKC[:, 0].shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        out_NKC, weights_NK = ctx.saved_tensors
        (grad_NC,) = grads
        needs_out, needs_weights = ctx.needs_input_grad
        grad_out_NKC = torch.empty_like(out_NKC) if needs_out else None
        grad_weights_NK = torch.empty_like(weights_NK) if needs_weights else None
        for k in range(out_NKC.shape[1]):
            if grad_out_NKC is not None:
                torch.mul(grad_NC, weights_NK[:, k, None], out=grad_out_NKC[:, k])
            if grad_weights_NK is not None:
                torch.sum(grad_NC * out_NKC[:, k], 1, out=grad_weights_NK[:, k])
        return grad_out_NKC, grad_weights_NK


class _WeightedSum(torch.autograd.Function):
    """Compute the sum in place of the zeros of ``_SumOperands``, and pass its gradient there.

    One expert of each token after the other: products of all would be float32 (N, K, C).
    """

    @staticmethod
    def forward(ctx: Any, zeros_NC: Tensor, out_NKC: Tensor, weights_NK: Tensor) -> Tensor:
        sum_NC = weights_NK.new_zeros(zeros_NC.shape)
        for out_NC, weight_N in zip(out_NKC.unbind(1), weights_NK.unbind(1), strict=True):
            sum_NC.addcmul_(out_NC, weight_N[:, None])
        return sum_NC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def permute_rows(x_MC: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
    """Row m of the result is row ``order_M[m]``. Backward reads rows too, where torch's adds."""
    return _PermuteRows.apply(x_MC, order_M, inverse_M, 1)


def _rows_of_tokens(x_NC: Tensor, order_M: Tensor, inverse_M: Tensor, per_token: int) -> Tensor:
    """Repeat each token ``per_token`` times and permute the rows; backward sums in fixed order."""
    return _PermuteRows.apply(x_NC, order_M, inverse_M, per_token)


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, order_M: Tensor, inverse_M: Tensor, repeats: int) -> Tensor:
        ctx.save_for_backward(inverse_M)
        ctx.repeats = repeats
        return x_NC[order_M if repeats == 1 else order_M // repeats]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_M,) = ctx.saved_tensors
        grad_MC = grads[0][inverse_M]
        if ctx.repeats > 1:
            grad_MC = grad_MC.unflatten(0, (-1, ctx.repeats)).sum(1)
        return grad_MC, None, None, None


def _count(index: Tensor, size: int) -> Tensor:
    """How often each number below ``size`` occurs. ``bincount`` would wait for the device."""
    return index.new_zeros(size).scatter_add_(0, index, torch.ones_like(index))


def _identity(x: Tensor) -> Tensor:
    return x
