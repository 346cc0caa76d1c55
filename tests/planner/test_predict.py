"""Recipes as setups, and whole predictions."""

from dataclasses import asdict, replace

import pytest

from composer3d.facts.errors import DeviceError
from composer3d.models import counts
from composer3d.models.moe.shape import PRESETS, ExpertsShape
from composer3d.planner.compute import block_work, head_work
from composer3d.planner.constants import SHIPPED
from composer3d.planner.predict import (
    mfu,
    model_flops_per_token,
    of_recipe,
    predict,
    sizes_of,
)
from composer3d.planner.setup import Setup
from composer3d.planner.time import predict_time
from composer3d.recipe.resolve import load
from tests.planner.setups import device, recipe_of, setup_on
from tools.prove.paths import ROOT

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))


def setup_for(preset: str, tp: int = 1) -> Setup:
    """An H100 setup of a preset on one node."""
    sets = (f"model.preset={preset}", f"mesh.tp={tp}", f"mesh.dp_shard={8 // tp}")
    return setup_on("H100", "llama3-8b-8-fsdp", *sets)


@pytest.mark.parametrize("name", [name for name in RECIPES if "debug" not in name])
def test_every_recipe_is_a_setup_with_its_parameters_and_ranks(name: str) -> None:
    recipe = recipe_of(name, world_size=8 if name.startswith("quickstart") else None)
    sizes = sizes_of(recipe)
    count = counts.parameters(recipe.parameters)
    # Norms and biases are not counted here; they are less than 0.1 % of a real model.
    assert sizes.parameters == pytest.approx(count, rel=5e-3)
    setup = of_recipe(recipe, device("H200"))
    assert setup.layout.world_size == recipe.world_size
    assert setup.step_tokens == recipe.data.global_batch * recipe.data.seq_len
    prediction = predict(setup)
    assert prediction.tokens_s > 0
    assert len(prediction.memory) == recipe.mesh.pp
    assert prediction.peak_gib > 0


@pytest.mark.parametrize("preset", ["gshard-like-top2", "deepseek-v3-gqa", "mixtral-8x7b"])
def test_sizes_know_which_blocks_have_experts(preset: str) -> None:
    base = recipe_of("mixtral-8x7b-64-4d")
    model = replace(base.model, **asdict(PRESETS[preset]))
    sizes = sizes_of(replace(base, model=model))
    found = [sizes.has_experts(layer) for layer in range(model.n_layers)]
    assert found == [model.has_experts(layer) for layer in range(model.n_layers)]


@pytest.mark.parametrize(
    "sets",
    [
        "model.n_layers=4 model.moe_every=2",
        "model.n_layers=5 model.mtp_layers=2 model.moe_every=3",
        "model.n_layers=9 model.moe_every=2 model.dense_layers=4",
        "model.n_layers=4 model.dense_layers=3",
    ],
)
def test_depths_of_multi_token_prediction_have_experts(sets: str) -> None:
    of_glm = ("model.architecture=glm", "model.preset=debug-glm", "model.mtp_layers=1")
    recipe = recipe_of("quickstart-moe", *of_glm, *sets.split())
    sizes, shape = sizes_of(recipe), recipe.model
    assert isinstance(shape, ExpertsShape)
    blocks = range(shape.all_layers)
    assert [*map(sizes.has_experts, blocks)] == [*map(shape.has_experts, blocks)]


def test_sizes_know_the_window_of_each_block() -> None:
    sets = ("model.n_layers=7", "model.window=64", "model.full_every=3")
    sizes = sizes_of(recipe_of("llama3-8b-8-fsdp", *sets))
    assert sizes.windows == (64, 64, 0, 64, 64, 0, 64)
    assert [sizes.window_of(block) for block in range(7)] == [*sizes.windows]
    assert sizes_of(recipe_of("llama3-8b-8-fsdp")).windows == ()


def test_mfu_of_a_8b_model_on_a_node_of_h100_is_plausible() -> None:
    setup = setup_for("llama3-8b")
    recipe = recipe_of("llama3-8b-8-fsdp")
    model, seq_len = recipe.model, recipe.data.seq_len
    flops = counts.flops_per_token(recipe.parameters, model, seq_len, causal=False)
    assert flops > model_flops_per_token(recipe)
    prediction = predict(setup)
    found = mfu(setup, flops, prediction.tokens_s)
    assert found is not None
    assert 0.3 < found < 0.65


def test_a_405b_model_does_not_fit_a_node() -> None:
    assert predict(setup_for("llama3-8b")).fits
    assert not predict(setup_for("llama3-405b")).fits


def test_float8_makes_two_of_three_products_of_blocks_faster() -> None:
    in_float8 = setup_on("H100", "llama3-8b-8-float8")
    in_bfloat16 = setup_for("llama3-8b")
    fast, slow = (
        block_work(setup, SHIPPED, has_experts=False, window=0)
        for setup in (in_float8, in_bfloat16)
    )
    assert fast.weight_s == slow.weight_s
    # The rates of products are 1403 and 795 TFLOP/s. Attention and norms are not faster, and the
    # operands are rounded.
    assert 0.6 < fast.forward_s / slow.forward_s < 0.95
    assert 0.6 < fast.input_s / slow.input_s < 0.95
    # The peak of MFU is that of bfloat16, as in training.
    assert mfu(in_float8, 1e9, 1e3) == mfu(in_bfloat16, 1e9, 1e3)


def test_float8_has_no_prediction_on_a_gpu_without_it() -> None:
    setup = setup_on("A100", "llama3-8b-8-float8")
    with pytest.raises(DeviceError, match="A100-40GB has no peak for fp8"):
        predict(setup)


def test_attention_is_as_fast_as_its_kernels() -> None:
    def step_s(kernel: str, *sets: str) -> float:
        kernel_set = f"parallel.attention_kernel={kernel}"
        return predict_time(setup_on("H100", "llama3-8b-8-fsdp", kernel_set, *sets)).step_s

    # On Hopper, torch has a kernel that is as fast, but it takes no windows and no documents, and
    # its backward does not repeat the same bits.
    assert step_s("torch") == step_s("flash3") == step_s("flash4")
    for sets in ("data.packing=documents", "run.deterministic=true"):
        assert step_s("flash3", sets) < 0.98 * step_s("torch", sets)
    half = "model.window=4096"
    assert step_s("flash3", half) < step_s("torch", half)


@pytest.mark.parametrize(
    ("gpu", "sets", "kernel"),
    [
        ("H100", ("mesh.cp=2",), "flash3"),
        ("B200", (), "flash3"),
        # On Blackwell, blocks run FlashAttention 2.
        ("B200", ("mesh.cp=2",), "flash2"),
        ("B200", ("mesh.cp=2", "parallel.cp_method=ulysses"), "flash3"),
        ("H100", ("precision.compute=float32",), "flash2"),
        ("A100", (), "flash2"),
    ],
)
def test_cudnn_is_priced_where_it_runs(gpu: str, sets: tuple[str, ...], kernel: str) -> None:
    setup = setup_on(gpu, "llama3-8b-8-fsdp", *sets)
    assert setup.software.attention == kernel
    assert setup.software.attention_of_windows == "flash2"


def test_attention_with_sinks_is_priced_as_blocks() -> None:
    model = ("model.architecture=gpt_oss", "model.preset=gpt-oss-20b", "data.packing=none")
    kernels = []
    for gpu in ("H100", "B200"):
        recipe = load(str(ROOT / "tools/gpu/models.toml"), model, check_files=False).recipe
        kernels.append(of_recipe(recipe, device(gpu)).software.attention)
    assert kernels == ["flash3", "flash2"]


def test_a_compiled_loss_takes_less_time() -> None:
    """It never writes all logits in float32. Over tp it is not compiled."""

    def setup(*sets: str) -> Setup:
        return setup_on("H100", "llama3-8b-8-fsdp", *sets)

    compiled, eager = (setup(f"compile.enabled={each}") for each in ("true", "false"))
    loss_s = [head_work(each, SHIPPED).forward_s for each in (compiled, eager)]
    assert loss_s[0] < 0.9 * loss_s[1]
    assert not setup("compile.enabled=true", "mesh.tp=2", "mesh.dp_shard=4").software.fuses_loss


def test_async_tp_hides_collectives_of_forward_only() -> None:
    def visible_s(async_tp: str) -> float:
        setup = setup_on(
            *("H100", "llama3-8b-8-fsdp"),
            "mesh.tp=2",
            "mesh.dp_shard=4",
            "memory.activation_checkpoint=none",
            "compile.enabled=true",
            f"parallel.async_tp={async_tp}",
        )
        return predict_time(setup).exposed_s["tp"]

    # Forward and backward send as much. The embedding and the head are not fused.
    assert visible_s("true") / visible_s("false") == pytest.approx(
        (1 + SHIPPED.tp_exposed) / 2, rel=0.05
    )
