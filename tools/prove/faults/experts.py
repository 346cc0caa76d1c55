"""Faults in experts: routing, the exchange of tokens, balance, and the gradients of experts.

Three were shipped by other trainers and are named by their issues.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer3d.models.contract import SequenceInfo
from composer3d.models.layers import moe
from composer3d.parallel import grad_norm
from composer3d.parallel.data import fsdp
from composer3d.parallel.expert import api, balance, dispatch
from composer3d.parallel.tensor import styles
from composer3d.runtime.mesh import Mesh
from composer3d.training import step as train_step
from tools.prove.faults.clipping import change_clipping, scale_gradients
from tools.prove.faults.places import EP, Place, found_by, harms
from tools.prove.faults.plant import fault_by, fault_of, instead_of
from tools.prove.paths import MOE_RECIPE

_SIGMOID = f"{EP} model.router=sigmoid model.router_bias=true"
_GROUPS = f"{_SIGMOID} model.expert_groups=4 model.groups_per_token=2 model.router_scale=2.5"


def _harms(*layouts: str, message: str = r" is off by .*") -> Place:
    """Plant the decorated fault in layouts of a model with experts."""
    return harms(*layouts, message=message, recipe=MOE_RECIPE)


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return ``x``; its gradient is multiplied by ``factor``."""
    return x * factor + (x * (1 - factor)).detach()


@_harms(EP, message=r"experts\..* 2 times the reference, suspect .*ep")
@fault_of(api, api.part_of_this_rank)
def multiply_expert_gradients_by_ep(right: Any, parameter: Tensor) -> Tensor:
    """Gradients of experts are multiplied by ep (PyTorch issue 160285)."""
    part = right(parameter)
    return _scale_gradient(part, parameter.shape[0] / part.shape[0])


@_harms("mesh.dp_shard=4 mesh.ep=2", message=r"experts\.")
@fault_of(fsdp, fsdp.apply)
def divide_expert_gradients_by_efsdp(
    right: Any, stage: nn.Module, plan: Any, meshes: Any, *arguments: Any
) -> None:
    """FSDP averages the gradients of experts over the ranks that shard them."""
    right(stage, plan, meshes, *arguments)
    for unit in fsdp.units(stage):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            if any(parameter.sharded_param.ndim == 3 for parameter in group.fsdp_params):
                group.gradient_divide_factor = float(meshes.experts.size())


@_harms("mesh.dp_replicate=2 mesh.dp_shard=2 mesh.ep=2", message=r"experts\.")
@fault_of(fsdp, fsdp.meshes_of)
def reduce_experts_over_the_shards_only(right: Any, mesh: Mesh, *arguments: Any) -> Any:
    """Gradients of experts are not summed over the replicas (dp_replicate)."""
    return right(mesh, *arguments)._replace(experts=mesh.sparse["efsdp"])


@_harms("mesh.tp=2", message=r"router\.weight")
@fault_of(styles, styles._style)
def drop_reduction_of_routers(right: Any, style: Any, *arguments: Any) -> Any:
    """The gradients of routers are not summed over tp (torchtitan issue 4054)."""
    local = right(style, *arguments)
    if style == "router":
        local.sums_gradients = False
    return local


@_harms("mesh.tp=2 mesh.ep=2", message="gradient norm .* is off")
@fault_of(grad_norm, grad_norm.local_grad_norm_sq)
def norm_leaves_out_experts(right: Any, parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """The gradient norm leaves out experts with ep and tp (Megatron-LM issue 5916)."""
    return right([p for p in parameters if p.ndim < 3], mesh)


@_harms(EP, message="gradient norm .* is off")
@fault_of(grad_norm, grad_norm.local_grad_norm_sq)
def norm_counts_experts_on_every_rank(
    right: Any, parameters: Iterable[nn.Parameter], mesh: Mesh
) -> Tensor:
    """The gradient norm counts experts as if every rank held all of them."""
    parameters = list(parameters)
    experts = [p for p in parameters if p.ndim == 3]
    return right(parameters, mesh) + right(experts, mesh) * (mesh.sizes.ep - 1)


@_harms("mesh.dp_shard=4 mesh.ep=2", message="after clipping .* is off")
@fault_by(change_clipping)
def clip_by_the_norm_of_own_ep_group(
    parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float
) -> None:
    """Clipping differs between ep groups (NeMo Automodel issue 3816)."""
    parameters = list(parameters)
    scale_gradients([p for p in parameters if p.ndim < 3], norm=norm, max_norm=max_norm)
    own = norm * (1 + 0.1 * (dist.get_rank() // 2))
    scale_gradients([p for p in parameters if p.ndim == 3], norm=own, max_norm=max_norm)


def _change_exchange(change: Callable[[moe.Exchanged], moe.Exchanged]) -> None:
    @instead_of(api, api.exchange_over)
    def wrong(right: Any, group: dist.ProcessGroup) -> moe.Exchange:
        exchange = right(group)
        return lambda tokens_E, seq: lambda rows_MC: change(exchange(tokens_E, seq)(rows_MC))


@_harms(EP)
def read_ranks_as_experts() -> None:
    """Rows that arrive by rank are computed as if they were in the order of experts."""
    dispatch.permute_rows = lambda rows, order, place: rows


@_harms(EP)
def mix_up_the_splits() -> None:
    """The numbers of rows of two experts of a rank are mixed up."""
    _change_exchange(lambda out: out._replace(tokens_E=out.tokens_E.flip(0)))


# torch compares the shapes of what is computed again.
@_harms(f"{EP} memory.activation_checkpoint=full", message="different metadata")
@fault_of(dispatch._Rows, dispatch._Rows.by_rank)
def mix_up_the_rows_of_a_layer_that_runs_again(right: Any, self: dispatch._Rows) -> list[list[int]]:
    """A checkpointed layer that runs again has mixed up the numbers of rows of its experts."""
    if self._by_rank is not None:
        ranks = len(self._by_rank[0])
        self.arriving_E = self.arriving_E.unflatten(0, (ranks, -1)).flip(1).flatten()
    return cast(list[list[int]], right(self))


@_harms(EP)
def return_tokens_in_another_order() -> None:
    """The outputs of experts come back in the order of the ranks that computed them, reversed."""
    _change_exchange(
        lambda out: out._replace(send_back=lambda rows, back=out.send_back: back(rows).flip(0))
    )


@_harms(EP, message="is missing on rank")
@fault_of(dispatch, dispatch.exchange_rows)
def keep_gradients_of_sent_tokens(
    right: Any, rows: Tensor, sent: list[int], arriving: list[int], name: str
) -> Tensor:
    """Backward does not send the gradients of rows to the ranks that they came from."""
    return right(rows.detach().requires_grad_(), sent, arriving, name)


@_harms(EP)
@fault_of(moe, moe.expert_ffn)
def read_rows_that_nobody_wrote(right: Any, *arguments: Any, **seam: Any) -> Tensor:
    """The memory of received rows is longer than what arrives, and its tail is not written."""
    out = right(*arguments, **seam)
    out[-1:] = torch.nan
    return out


@_harms(EP, message=r"weight of .*experts\.")
@fault_of(train_step, train_step.update)
def skip_experts_without_tokens(right: Any, stages: Any, *arguments: Any, **keywords: Any) -> Any:
    """The optimizer does not decay an expert that got no token in the step."""
    before = {p: p.detach().clone() for p in stages.parameters() if p.ndim == 3}
    result = right(stages, *arguments, **keywords)
    for parameter, values in before.items():
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        is_starved = grad.flatten(1).norm(dim=1) == 0
        local, old = (
            x.to_local() if isinstance(x, DTensor) else x for x in (parameter.detach(), values)
        )
        local[is_starved] = old[is_starved]
    return result


@_harms(EP)
@fault_of(moe.Router, moe.Router.forward)
def detach_the_weights_of_experts(right: Any, self: moe.Router, *arguments: Any) -> moe.Routing:
    """The weights of the combined outputs are detached, so routers learn from the losses alone."""
    routing = right(self, *arguments)
    return routing._replace(weights_NK=routing.weights_NK.detach() + 0 * routing.weights_NK)


def _change_router(**changes: Any) -> None:
    """Change attributes of every router that is built; each change is a function of the old one."""

    @instead_of(moe.Router, moe.Router.__init__)
    def wrong(right: Any, self: moe.Router, **arguments: Any) -> None:
        right(self, **arguments)
        for name, change in changes.items():
            setattr(self, name, change(getattr(self, name)))


@_harms(EP)
def forget_to_renormalise() -> None:
    """The weights of a token's experts are not divided by their sum."""
    _change_router(renormalise=lambda value: not value)


@_harms(_GROUPS)
def forget_the_scale() -> None:
    """The weights are not multiplied by the factor of the router."""
    _change_router(scale=lambda value: 1.0)


@_harms(_GROUPS)
def choose_other_groups() -> None:
    """A token chooses one group fewer than it should."""
    _change_router(groups_per_token=lambda value: value - 1)


@_harms(_SIGMOID)
@fault_of(moe.Router, moe.Router.forward)
def let_the_bias_into_the_weights(right: Any, self: moe.Router, *arguments: Any) -> moe.Routing:
    """The router's bias changes the weights of experts, not only which are chosen."""
    routing = right(self, *arguments)
    if self.bias is None:
        return routing
    return routing._replace(weights_NK=routing.weights_NK + self.bias[routing.experts_NK])


@_harms(EP)
@fault_of(moe, moe.expert_ffn)
def swap_gate_and_up(
    right: Any,
    rows_MC: Tensor,
    groups: moe.Groups,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    **seam: Any,
) -> Tensor:
    """The gate and up projections of experts are swapped."""
    return right(rows_MC, groups, w3, w2, w1, **seam)


@_harms(EP)
def permute_the_experts() -> None:
    """A rank of ep computes with its experts in reverse order."""
    right = api.part_of_this_rank
    api.part_of_this_rank = lambda parameter: right(parameter).flip(0)


def _change_loss(change: Callable[[Tensor], Tensor]) -> None:
    """Change the gradient of the losses that routers add."""

    def wrong(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], change(torch.ones_like(loss))

    moe._WithLoss.backward = staticmethod(wrong)


@_harms(EP)
def detach_the_losses() -> None:
    """The losses of routers have no gradient (NeMo Automodel issue 1408)."""
    _change_loss(torch.zeros_like)


@_harms(EP)
def scale_the_losses_by_ranks() -> None:
    """The losses of routers are multiplied by the number of ranks."""
    _change_loss(lambda one: one * dist.get_world_size())


@_harms(EP)
@fault_of(SequenceInfo, SequenceInfo.__init__)
def divide_losses_by_own_tokens(
    right: Any,
    self: SequenceInfo,
    positions: Tensor,
    documents: Any = None,
    step_tokens: Any = None,
) -> None:
    """The losses of routers are means over a micro-batch, not over the tokens of the step."""
    right(self, positions, documents, positions.numel())


@_harms("mesh.pp=2")
def lose_losses_of_early_stages() -> None:
    """Only the last pipeline stage adds the losses of routers."""
    right = moe._WithLoss.forward

    def wrong(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        is_last = dist.get_rank() == dist.get_world_size() - 1
        return right(ctx, weights, loss) if is_last else weights.view_as(weights)

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.saved_tensors:
            return grads[0], None
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)

    moe._WithLoss.forward = staticmethod(wrong)
    moe._WithLoss.backward = staticmethod(backward)


@_harms("mesh.cp=2", "mesh.tp=2")
@fault_of(api, api._show_whole_sequences)
def count_own_part_of_the_sequence(right: Any, router: moe.Router, *arguments: Any) -> None:
    """The balance loss counts the experts of this rank's part of a sequence, not of the whole."""
    right(router, *arguments)
    router.sum_over_sequence = lambda counts: counts * router.sequence_ranks


@_harms(f"{EP} data.packing=documents")
@fault_of(moe.Router, moe.Router._sequences)
def merge_documents_in_the_balance_loss(
    right: Any, self: moe.Router, tokens: int, rows: int, seq: SequenceInfo
) -> Any:
    """Packed documents are one sequence for the balance loss."""
    merged = SequenceInfo(seq.positions_BT, None, seq.step_tokens)
    return right(self, tokens, rows, merged)


@_harms("mesh.tp=2 data.packing=documents")
def shift_documents_over_tp() -> None:
    """A tp rank takes the documents of another rank's tokens for its balance loss."""
    right = api._own_documents
    api._own_documents = lambda documents, **arguments: right(documents.roll(8, 1), **arguments)


@_harms(_SIGMOID, message=r"router\.bias")
@_harms(EP, message="tokens of expert")
@fault_of(balance.Balance, balance.Balance.collect)
def move_biases_by_own_counts(_: Any, self: balance.Balance) -> None:
    """Each rank moves its copy of the biases by the tokens that it has routed itself."""
    for name, router in self._routers.items():
        sums = router.statistics.sums
        self._sums[name] = torch.cat((sums, torch.zeros_like(sums[:2])))


@_harms(_SIGMOID, message=r"router\.bias")
@fault_of(balance.Balance, balance.Balance.move_biases)
def move_biases_twice(right: Any, self: balance.Balance, is_good: Tensor) -> None:
    """Biases are moved in every micro-batch (torchtitan issue 1304)."""
    right(self, is_good)
    right(self, is_good)


@_harms(_SIGMOID, message=r"router\.bias")
def keep_biases_in_bfloat16() -> None:
    """Biases are held in bfloat16, which cannot hold 0.5 + 0.001 (Megatron-LM issue 1482)."""
    right = moe.Router.bias_move
    moe.Router.bias_move = lambda self, tokens: right(self, tokens).bfloat16().float()


@_harms(_SIGMOID, message=r"router\.bias")
def move_biases_the_other_way() -> None:
    """Experts with many tokens are favoured."""
    right = moe.Router.bias_move
    moe.Router.bias_move = lambda self, tokens: -right(self, tokens)


@_harms(_SIGMOID, message=r"router\.bias")
def count_validation_in_the_balance() -> None:
    """Routers count the tokens of a validation, and a step begins with these counts."""

    @instead_of(moe.Router, moe.Router.forward)
    def wrong(right: Any, self: moe.Router, x_BTC: Tensor, seq: SequenceInfo) -> moe.Routing:
        routing = right(self, x_BTC, seq)
        if not self.training:
            skewed = F.pad(routing.tokens_E.double() * torch.arange(self.experts), (0, 3))
            self.statistics.add(skewed * 100)
        return routing

    balance.Balance.reset = lambda self: None


@_harms(f"{_SIGMOID} memory.activation_checkpoint=full", message=r"router\.bias")
def count_recomputed_tokens() -> None:
    """Forward counts the tokens of experts, so a checkpointed block counts some of them twice."""
    calls = [0]

    @instead_of(moe.Router, moe.Router.forward)
    def wrong(right: Any, self: moe.Router, x_BTC: Tensor, seq: SequenceInfo) -> moe.Routing:
        routing = right(self, x_BTC, seq)
        calls[0] += 1
        if self.training and calls[0] % 3 == 0:
            first = torch.arange(self.experts) < self.experts // 2
            self.statistics.add(F.pad(routing.tokens_E * first * 10.0, (0, 3)).double())
        return routing


@_harms("memory.activation_checkpoint=full", message="tokens of expert")
@fault_of(moe.Router, moe.Router._account)
def count_every_call(right: Any, self: moe.Router, *arguments: Any) -> moe.Routing:
    """A router counts its tokens again when its block is recomputed (ours, with tp)."""
    seq: SequenceInfo = arguments[-1]
    seq.kept.pop((self.statistics, "counted"), None)
    return right(self, *arguments)


def _trace_alone() -> None:
    """Run the graphs of compiled blocks as they are traced, which is a fault of nothing."""
    torch.compile = partial(torch.compile, backend="aot_eager")


@_harms(f"{EP} compile.enabled=true", message="tokens of expert")
def forget_what_graphs_count() -> None:
    """What a router counts in a compiled graph is not added to its statistics."""
    _trace_alone()
    moe.Router.count = lambda self, sums, seq: None


@_harms("compile.enabled=true memory.activation_checkpoint=full", message="tokens of expert")
def count_recomputed_graphs() -> None:
    """What a router counts in a compiled graph is added again when its block is recomputed."""
    _trace_alone()
    moe.Router.count = lambda self, sums, seq: self.statistics.add(sums)


@_harms(f"{EP} compile.enabled=true data.packing=documents")
def share_the_first_documents_with_graphs() -> None:
    """Compiled routers take the documents of the first micro-batch for the balance loss of all."""
    _trace_alone()
    firsts: list[dict[Any, Any]] = []

    @instead_of(moe.Router, moe.Router.prepare)
    def wrong(right: Any, self: moe.Router, x_BTC: Tensor, seq: SequenceInfo) -> None:
        right(self, x_BTC, seq)
        firsts.append(seq.shared)
        key = (moe.Router, "sequences")
        if key in seq.shared:
            seq.shared[key] = firsts[0][key]


@_harms(f"{EP} memory.activation_checkpoint=full", message=".")
@fault_of(moe.Router, moe.Router._choose)
def route_again_in_recomputation(right: Any, self: moe.Router, scores_NE: Tensor) -> Tensor:
    """A checkpointed block that runs again sends tokens to other experts (Automodel issue 2635)."""
    experts_NK = right(self, scores_NE)
    again = torch._C._current_graph_task_id() != -1
    return (experts_NK + 1) % self.experts if again else experts_NK


@found_by("model", r"^gradient of first\.embed\.weight of the with sigmoid experts model")
@fault_of(moe.Router, moe.Router._account)
def forget_to_divide_shares(
    right: Any,
    self: moe.Router,
    routing: moe.Routing,
    logits_NE: Tensor,
    shares_NE: Tensor,
    *others: Any,
) -> moe.Routing:
    """The balance loss takes sigmoid scores as shares, without dividing them by their sum."""
    if self.scores == "sigmoid":
        shares_NE = logits_NE.sigmoid()
    return right(self, routing, logits_NE, shares_NE, *others)


@_harms(EP, message=".")
def choose_by_another_rank() -> None:
    """Rows go to the next rank of ep, whose experts are others."""

    @instead_of(dispatch, dispatch.exchange_counts)
    def counts(right: Any, tokens_E: Tensor, name: str) -> Tensor:
        return right(tokens_E.roll(len(tokens_E) // 2), name)

    @instead_of(dispatch, dispatch.exchange_rows)
    def rows(
        right: Any, rows_MC: Tensor, sent: list[int], arriving: list[int], name: str
    ) -> Tensor:
        return right(rows_MC, sent[::-1], arriving, name)


@_harms(f"{EP} model.shared_ffn=48")
@fault_of(moe.MoE, moe.MoE.combine)
def leave_out_the_shared_expert(
    right: Any, self: moe.MoE, x_BTC: Tensor, *arguments: Any
) -> Tensor:
    """The output of the shared expert is not added."""
    out = right(self, x_BTC, *arguments)
    return out if self.shared is None else out - self.shared(x_BTC).detach()


@_harms("mesh.dp_shard=2 mesh.tp=2")
@fault_of(fsdp, fsdp.meshes_of)
def shard_experts_over_dense_ranks(right: Any, mesh: Mesh, *arguments: Any) -> Any:
    """Experts are sharded and reduced over the ranks of dense parameters, not over efsdp."""
    meshes = right(mesh, *arguments)
    dense: DeviceMesh = mesh.device_mesh["fsdp"]
    return meshes._replace(experts=dense)
