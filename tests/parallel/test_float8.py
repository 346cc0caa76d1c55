"""Products in float8: their numbers, and what they refuse.

``layouts.txt`` proves that layouts with them are exact.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType

from composer3d.facts.errors import DeviceError, PlanError
from composer3d.models import fit
from composer3d.models.contract import SequenceInfo, ShardingPlan
from composer3d.models.layers.moe import Experts, Groups, Router
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.plan import sharding_plan as moe_sharding_plan
from composer3d.models.moe.shape import PRESETS
from composer3d.parallel import checkpointing, compile, float8
from composer3d.parallel.pipeline import zero_bubble
from composer3d.recipe.schema import MemoryTable, MeshTable, PrecisionTable
from composer3d.verify.float8 import use_float8
from tests.parallel.test_checkpointing import OperatorCounter

CPU = torch.device("cpu")
SHAPE = ModelShape(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, ffn=48, vocab=32, rope_theta=100.0)
IN_FLOAT8 = PrecisionTable(compute="bfloat16", matmul="float8")


class Matrices(NamedTuple):
    """The operands of a linear layer: N tokens, K inputs, M outputs."""

    x_NK: Tensor
    weight_MK: Tensor
    grad_NM: Tensor


def make_matrices(dtype: torch.dtype) -> Matrices:
    """Make random matrices that bfloat16 can hold, with rows and numbers of very different size."""
    random = torch.Generator().manual_seed(0)

    def make(rows: int, columns: int) -> Tensor:
        sizes = torch.logspace(-6, 3, rows)[:, None]
        matrix = torch.randn(rows, columns, generator=random) ** 5 * sizes
        return matrix.to(torch.bfloat16).to(dtype)

    return Matrices(make(24, 64), make(48, 64), make(24, 48))


def run_layer(layer: nn.Module, matrices: Matrices) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of a layer, and the gradients of its input and of its weight."""
    x = matrices.x_NK.clone().unflatten(0, (2, -1)).requires_grad_()
    out = layer(x)
    out.backward(matrices.grad_NM.unflatten(0, (2, -1)))
    weight = layer.weight
    assert isinstance(weight, Tensor)
    assert x.grad is not None
    assert weight.grad is not None
    return out.detach().flatten(0, 1), x.grad.flatten(0, 1), weight.grad


def make_linear(weight_MK: Tensor) -> nn.Linear:
    linear = nn.Linear(weight_MK.shape[1], weight_MK.shape[0], bias=False)
    linear.weight = nn.Parameter(weight_MK.clone())
    return linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_scale_is_the_largest_power_of_two_that_fits(dtype: torch.dtype) -> None:
    halves = [448.0 * 2.0**exponent for exponent in (-30, -1, 0, 1, 40)]
    largest = torch.tensor([*halves, *(1.01 * value for value in halves), 3e-5, 1.0], dtype=dtype)
    x = largest[:, None] * torch.tensor([[0.25, -1.0, 0.0]], dtype=dtype)
    rounded = float8.round_rows(x)
    scaled = largest.to(torch.float64) * rounded.scale[:, 0].to(torch.float64)
    assert ((scaled <= 448) & (scaled > 224)).all()
    assert (torch.frexp(rounded.scale).mantissa == 0.5).all()
    # The largest numbers keep all bits that e4m3 has.
    wide = rounded.values.to(torch.float64) / rounded.scale
    assert ((wide - x.to(torch.float64)).abs() <= 2.0**-4 * x.to(torch.float64).abs()).all()


def test_rows_of_zeros_stay_zero_and_what_is_not_finite_shows() -> None:
    x = torch.zeros(3, 16)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    rounded = float8.round_rows(x)
    assert torch.equal(rounded.values[0].float(), torch.zeros(16))
    assert rounded.scale[0].isfinite().all()
    out = float8.output_product(x.to(torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16))
    assert torch.equal(out[0].float(), torch.zeros(16))
    assert out[1:].isnan().all()


def test_kernels_differ_from_the_emulation_by_their_roundings_alone() -> None:
    """The operands are the same float8 numbers: sums are in float32, and rounded to bfloat16."""
    narrow, wide = make_matrices(torch.bfloat16), make_matrices(torch.float64)
    layer = float8.Float8Linear(make_linear(narrow.weight_MK))
    emulated = float8.Float8Linear(make_linear(wide.weight_MK))
    found, exact = run_layer(layer, narrow), run_layer(emulated, wide)

    def widen(matrix: float8.Rounded) -> Tensor:
        return (matrix.values.to(torch.float64) / matrix.scale).abs()

    x, weight, grad = wide
    absolute_sums = (
        widen(float8.round_rows(x)) @ widen(float8.round_rows(weight)).T,
        widen(float8.round_rows(grad)) @ widen(float8.round_whole(weight)),
        grad.abs().T @ x.abs(),
    )
    for actual, expected, absolute in zip(found, exact, absolute_sums, strict=True):
        # A sum of n products in float32 has n roundings (Higham 2002, Accuracy and Stability of
        # Numerical Algorithms, section 3.1), and n is 64 at most.
        summed = 64 * 2.0**-24 / (1 - 64 * 2.0**-24) * absolute
        bound = summed + 2.0**-8 * (expected.abs() + summed)
        assert ((actual.to(torch.float64) - expected).abs() <= bound).all()
    # Rounding to float8 does change the two products.
    assert ((exact[0] - x @ weight.T).abs() > 1e-3 * (x @ weight.T).abs()).any()
    assert ((exact[1] - grad @ weight).abs() > 1e-3 * (grad @ weight).abs()).any()
    assert torch.equal(exact[2], grad.T @ x)


@pytest.mark.filterwarnings("default")  # torchao's own
def test_the_numbers_are_those_of_torchao() -> None:
    reason = "`pip install --no-deps torchao` runs this comparison"
    pytest.importorskip("torchao", minversion="0.18", reason=reason)
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    matrices = make_matrices(torch.bfloat16)
    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    theirs = Float8Linear.from_float(make_linear(matrices.weight_MK), config)
    ours = float8.Float8Linear(make_linear(matrices.weight_MK))
    for actual, expected in zip(
        run_layer(ours, matrices), run_layer(theirs, matrices), strict=True
    ):
        assert torch.equal(actual, expected)


def test_the_reference_of_verify_has_the_same_numbers() -> None:
    matrices = make_matrices(torch.float64)
    layer = float8.Float8Linear(make_linear(matrices.weight_MK))
    reference = nn.ModuleDict({"a": make_linear(matrices.weight_MK)})
    rounding = use_float8(reference, ShardingPlan(tensor={"a": "row"}, init={}, float8=("a",)), 1)
    found = zip(run_layer(layer, matrices), run_layer(reference["a"], matrices), strict=True)
    for actual, expected in found:
        torch.testing.assert_close(actual, expected, rtol=1e-14, atol=0)
    assert 0 <= rounding.closest < 1


def test_numbers_near_a_change_of_their_rounding_are_reported() -> None:
    """Between 256 and 448, e4m3 has the multiples of 32."""
    reference = nn.ModuleDict({"a": make_linear(torch.ones(16, 16, dtype=torch.float64))})
    plan = ShardingPlan(tensor={"a": "row"}, init={}, float8=("a",))
    rounding = use_float8(reference, plan, 1)
    x = torch.full((1, 16), 448.0, dtype=torch.float64)
    for number, distance in ((320.0, 16.0), (310.0, 6.0), (304.0, 0.0), (304.0 + 1e-7, 0.0)):
        x[0, 1] = number
        rounding.closest = float("inf")
        reference["a"](x)
        # float32 cannot tell 304 from 304 + 1.5e-5.
        assert rounding.closest == pytest.approx(distance / 448, abs=4e-8)
    x[0, 1] = 304.0 + 2.0**-16
    rounding.closest = float("inf")
    reference["a"](x)
    assert rounding.closest == 0


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    x, weight, grad = make_matrices(torch.bfloat16)
    whole = float8.output_product(x, weight), float8.input_gradient(grad, weight)
    for rows in (slice(0, 8), slice(8, 24)):
        assert torch.equal(float8.output_product(x[rows], weight), whole[0][rows])
        assert torch.equal(float8.input_gradient(grad[rows], weight), whole[1][rows])


# --- experts ---

ROWS_OF_EXPERTS = [5, 0, 19]


class ExpertMatrices(NamedTuple):
    """The operands of the products of experts: M rows, E experts, K inputs, J outputs."""

    rows_MK: Tensor
    weight_EJK: Tensor
    grad_MJ: Tensor


def make_expert_matrices(dtype: torch.dtype) -> ExpertMatrices:
    x_NK, weight_MK, grad_NM = make_matrices(dtype)
    # Experts of very different size: one scale for all of them would be another one.
    return ExpertMatrices(
        x_NK, torch.stack([weight_MK, weight_MK.flip(0), weight_MK / 64]), grad_NM
    )


def multiply_experts(matrices: ExpertMatrices) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of all rows, and the gradients of the rows and of the matrices."""
    rows, weight = (x.clone().requires_grad_() for x in matrices[:2])
    out = float8.product(rows, weight, Groups(torch.tensor(ROWS_OF_EXPERTS)))
    return (out.detach(), *torch.autograd.grad(out, (rows, weight), matrices.grad_MJ))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_expert_multiplies_as_a_layer_of_its_own(dtype: torch.dtype) -> None:
    matrices = make_expert_matrices(dtype)
    out_MJ, rows_grad_MK, weight_grad_EJK = multiply_experts(matrices)
    first = 0
    for expert, size in enumerate(ROWS_OF_EXPERTS):
        own = slice(first, first + size)
        first += size
        if not size:
            # Zeros, and not None.
            assert torch.equal(weight_grad_EJK[expert], torch.zeros_like(weight_grad_EJK[expert]))
            continue
        x, grad = matrices.rows_MK[own].requires_grad_(), matrices.grad_MJ[own]
        layer = float8.Float8Linear(make_linear(matrices.weight_EJK[expert]))
        out = layer(x)
        expected = (out.detach(), *torch.autograd.grad(out, (x, layer.weight), grad))
        found = (out_MJ[own], rows_grad_MK[own], weight_grad_EJK[expert])
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def scaled_grouped_mm_by_definition(
    rows: Tensor,
    matrices: Tensor,
    rows_scale: Tensor,
    rows_kind: ScalingType,
    scale: Tensor,
    kind: ScalingType,
    *,
    offs: Tensor,
    output_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """What the kernel of a GPU computes from these operands, summed in float64."""
    assert rows_kind == kind == ScalingType.RowWise
    assert (rows.dtype, matrices.dtype, offs.dtype) == (
        torch.float8_e4m3fn,
        torch.float8_e4m3fn,
        torch.int32,
    )
    assert rows.is_contiguous()
    assert matrices.mT.is_contiguous()  # it takes columns
    assert (rows_scale.shape, scale.shape) == (rows.shape[:1], matrices[:, 0].shape)
    assert rows_scale.is_contiguous()
    assert scale.is_contiguous()
    ends = offs.tolist()
    parts = []
    for begin, end, matrix, scale_J in zip([0, *ends], ends, matrices, scale, strict=False):
        product = rows[begin:end].double() @ matrix.double()
        parts.append(product * rows_scale[begin:end, None].double() * scale_J.double())
    return torch.cat(parts).to(output_dtype)


def test_a_dry_run_of_experts_needs_no_kernel() -> None:
    """One operator has the shapes of a product, whatever the number of experts."""
    matrices = make_expert_matrices(torch.bfloat16)
    with FakeTensorMode() as mode, OperatorCounter() as counter:
        rows, weight, grad = (mode.from_tensor(x) for x in matrices)
        rows.requires_grad_()
        weight.requires_grad_()
        groups = Groups(mode.from_tensor(torch.tensor(ROWS_OF_EXPERTS)))
        out = float8.product(rows, weight, groups)
        gradients = torch.autograd.grad(out, (rows, weight), grad)
    assert out.shape == grad.shape
    assert [x.shape for x in gradients] == [rows.shape, weight.shape]
    assert counter.counts["_scaled_mm_v2"] == 0
    assert counter.counts["grouped_float8_output"] == 1
    assert counter.counts["grouped_float8_input_gradient"] == 1


@pytest.mark.parametrize("major", [8, 9, 10])
def test_the_kernel_for_all_experts_is_that_of_hopper(
    major: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For other GPUs, torch has none: it would end the run in its first step, or hurt the GPU."""

    class Rows(NamedTuple):
        is_cuda: bool = True
        dtype: torch.dtype = torch.bfloat16
        device: str = "cuda"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert float8._has_grouped_kernel(Rows()) == (major == 9)  # type: ignore[arg-type]
    assert not float8._has_grouped_kernel(Rows(dtype=torch.float64))  # type: ignore[arg-type]


def test_the_kernel_for_all_experts_gets_the_operands_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU has one kernel for all experts, which this machine has not."""
    exact = multiply_experts(make_expert_matrices(torch.float64))
    monkeypatch.setattr(float8, "_has_grouped_kernel", lambda rows_MK: True)
    monkeypatch.setattr(float8, "scaled_grouped_mm", scaled_grouped_mm_by_definition)
    found = multiply_experts(make_expert_matrices(torch.bfloat16))
    # Outputs and gradients of rows are rounded once.
    assert torch.equal(found[0], exact[0].to(torch.bfloat16))
    assert torch.equal(found[1], exact[1].to(torch.bfloat16))
    torch.testing.assert_close(found[2], exact[2].to(torch.bfloat16))


def test_experts_of_blocks_multiply_in_float8_and_others_are_refused() -> None:
    shape = PRESETS["debug-moe"]
    model, plan = MoeLlama(shape), moe_sharding_plan(shape)
    assert plan.multiplies_in_float8("blocks.0.moe.experts")
    model.last.extra = Experts(2, 4, 4)
    with pytest.raises(PlanError) as refused:
        fit.check(model, replace(plan, float8=(*plan.float8, "last.extra")))
    assert any("'last.extra', which is neither Experts in" in line for line in refused.value.lines)
    del model.last.extra
    float8.apply(model.blocks, plan, IN_FLOAT8)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts
    assert all(module.product is float8.product for module in experts)
    assert type(model.blocks["0"].moe.router) is Router  # type: ignore[union-attr]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weight_gradients_can_be_put_off(dtype: torch.dtype, bias: bool) -> None:
    matrices = make_matrices(dtype)
    layers = []
    for _ in range(2):
        linear = nn.Linear(64, 48, bias=bias, dtype=dtype)
        linear.weight = nn.Parameter(matrices.weight_MK.clone())
        if bias:
            nn.init.constant_(linear.bias, 0.5)
        layers.append(float8.Float8Linear(linear))
    deferring = nn.ModuleDict({"a": layers[0]})
    take_work = zero_bubble.defer_weight_grads(deferring, deferring)
    plain = run_layer(layers[1], matrices)

    x = matrices.x_NK.clone().unflatten(0, (2, -1)).requires_grad_()
    out = deferring["a"](x)
    out.backward(matrices.grad_NM.unflatten(0, (2, -1)))
    assert layers[0].weight.grad is None
    take_work()()
    assert torch.equal(out.flatten(0, 1), plain[0])
    assert x.grad is not None
    assert torch.equal(x.grad.flatten(0, 1), plain[1])
    for name, parameter in layers[1].named_parameters():
        assert torch.equal(deferring["a"].get_parameter(name).grad, parameter.grad)


@pytest.mark.filterwarnings("default")  # torch's own, when it traces an autograd function
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_compiled_layers_have_the_same_bits(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        compile.check_toolchain(CPU)
    except DeviceError as error:
        pytest.skip(error.lines[0])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # No pool of processes, and no test program that tries the vector instructions.
    inductor = {"compile_threads": 1, "cpp.vec_isa_ok": True}
    matrices = make_matrices(dtype)
    eager, compiled = (float8.Float8Linear(make_linear(matrices.weight_MK)) for _ in range(2))
    compiled.compile(fullgraph=True, dynamic=False, options=inductor)
    for actual, expected in zip(
        run_layer(compiled, matrices), run_layer(eager, matrices), strict=True
    ):
        assert torch.equal(actual, expected)


def make_model(dtype: torch.dtype) -> Llama:
    model = Llama(SHAPE, dtype=dtype, device="cpu")
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=random)
    float8.apply(model.blocks, sharding_plan(SHAPE), IN_FLOAT8)
    return model


def run_blocks(mode: str, *, defers: bool) -> tuple[OperatorCounter, Tensor]:
    """Run the blocks of a model; return its operators, and the gradient of its first weight."""
    model = make_model(torch.bfloat16)
    take_work = zero_bubble.defer_weight_grads(model, model.blocks) if defers else None
    plan = sharding_plan(SHAPE)
    checkpointing.apply(model.blocks, plan, MemoryTable(activation_checkpoint=mode))
    tokens = torch.arange(16).view(2, 8)
    seq = SequenceInfo(torch.arange(8).expand_as(tokens))
    h = model.first(tokens, seq).detach().requires_grad_()
    with OperatorCounter() as counter:
        for block in model.blocks.values():
            h = block(h, seq)
        h.float().pow(2).sum().backward()
        if take_work is not None:
            take_work()()
    gradient = model.get_parameter("blocks.0.attn.wq.weight").grad
    assert gradient is not None
    return counter, gradient


@pytest.mark.parametrize("defers", [False, True])
def test_checkpointing_keeps_products_and_leaves_the_last_one_out(defers: bool) -> None:
    found = {mode: run_blocks(mode, defers=defers) for mode in ("none", "selective", "full")}
    products = {mode: counter.counts for mode, (counter, _) in found.items()}
    # A block has seven products in float8, as many gradients of inputs, and of weights.
    assert products["none"]["_scaled_mm_v2"] == 2 * 2 * 7
    assert products["none"]["mm"] == 2 * 7
    assert products["selective"]["_scaled_mm_v2"] == products["none"]["_scaled_mm_v2"]
    assert products["full"]["_scaled_mm_v2"] == products["none"]["_scaled_mm_v2"] + 2 * 6
    for counter, gradient in found.values():
        assert counter.counts["mm"] == 2 * 7
        assert torch.equal(gradient, found["none"][1])


def test_only_the_layers_of_the_plan_are_replaced() -> None:
    model = make_model(torch.bfloat16)
    names = {name for name, module in model.named_modules() if type(module) is not nn.Linear}
    replaced = {
        name for name, module in model.named_modules() if isinstance(module, float8.Float8Linear)
    }
    layers = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "ffn.w1", "ffn.w2", "ffn.w3")
    assert replaced == {f"blocks.{block}.{name}" for block in range(2) for name in layers}
    assert "last.head" in names
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in Llama(SHAPE).named_parameters()
    ]

    plain = Llama(SHAPE)
    float8.apply(plain.blocks, sharding_plan(SHAPE), PrecisionTable(compute="bfloat16"))
    assert not any(isinstance(module, float8.Float8Linear) for module in plain.modules())


def check(tp: int = 1, device: torch.device = CPU, **changes: Any) -> None:
    model = Llama(SHAPE)
    plan = replace(sharding_plan(SHAPE), **changes)
    fit.check(model, plan)
    float8.check(model, plan, MeshTable(tp=tp, dp_shard=1), IN_FLOAT8, device)


def test_sizes_that_kernels_do_not_take_are_refused() -> None:
    check()
    with pytest.raises(PlanError) as refused:
        check(tp=2)
    # One key-value head is on both ranks. The rows of gate and up, and the columns of down.
    assert len(refused.value.lines) == 2 * 3
    assert refused.value.lines[0] == (
        "'blocks.0.ffn.w1' has a weight of 24 x 32 on each rank of mesh.tp = 2, but products in "
        "float8 need multiples of 16; change the sizes of the model or mesh.tp, or use "
        'precision.matmul = "compute"'
    )
    assert "'blocks.0.ffn.w2' has a weight of 32 x 24" in refused.value.lines[1]


def test_a_plan_without_layers_for_float8_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan's float8 names no module"):
        check(float8=())


@pytest.mark.parametrize("name", ["first.embed", "blocks.*.attn_norm", "blocks.0.attn"])
def test_a_plan_that_names_other_modules_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=r"neither Experts in blocks nor a torch\.nn\.Linear"):
        check(float8=(name,))


def test_a_glob_for_float8_that_matches_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match=r"the plan's float8 glob 'blocks\.x' matches no module"):
        check(float8=("blocks.x",))


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check(device=cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(DeviceError) as refused:
        check(device=cuda)
    assert str(refused.value) == (
        'precision.matmul = "float8" needs a GPU of compute capability 8.9 or newer, and NVIDIA '
        'A100-SXM4-80GB has 8.0; use precision.matmul = "compute"'
    )
