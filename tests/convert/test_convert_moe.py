"""Models with experts in all formats: each expert keeps every bit, its number and its name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer3d.checkpoint import manifest as manifests
from composer3d.cli import main
from composer3d.convert.convert import convert
from composer3d.convert.formats import open_source
from composer3d.convert.inspect import inspect
from composer3d.facts.errors import CheckpointError, UserError
from composer3d.generate.load import load_model, open_checkpoint
from composer3d.models.moe.shape import MoeShape
from tests.convert.changes import refusal, rewrite_json, rewrite_safetensors
from tests.convert.sample_checkpoints import (
    DEEPSEEK,
    MIXTRAL,
    QWEN_3,
    hf_tensors,
    make_dcp,
    make_hf,
    same,
    tensors,
    weights,
)


def test_an_expert_keeps_its_number_and_its_projections(tmp_path: Path) -> None:
    """Expert e of layer l has the values l + e / 100 in its gate, + 10 in up and + 20 in down."""
    make_hf(tmp_path / "hf", MIXTRAL)
    offsets = {"w1": 0, "w3": 10, "w2": 20}

    def fill(held: dict[str, Tensor]) -> None:
        for layer in range(MIXTRAL.n_layers):
            for expert in range(MIXTRAL.experts):
                for projection, offset in offsets.items():
                    place = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
                    held[f"{place}.{projection}.weight"].fill_(layer + expert / 100 + offset)

    rewrite_safetensors(tmp_path / "hf/model.safetensors", fill)
    convert(tmp_path / "hf", tmp_path / "b", "torch")
    held = torch.load(tmp_path / "b", weights_only=True)["model"]
    for layer in range(MIXTRAL.n_layers):
        for projection, offset in offsets.items():
            found = held[f"blocks.{layer}.moe.experts.{projection}"]
            for expert, values in enumerate(found):
                assert torch.equal(values, torch.full_like(values, layer + expert / 100 + offset))


def test_large_models_are_cut_into_files_also_between_experts(tmp_path: Path) -> None:
    make_dcp(tmp_path / "a", MIXTRAL)
    one = 4 * MIXTRAL.dim * MIXTRAL.ffn  # bytes of a projection of one expert
    convert(tmp_path / "a", tmp_path / "b", "hf", shard=2 * one)
    index = json.loads((tmp_path / "b/model.safetensors.index.json").read_text())
    parts = {file.name: load_file(file) for file in (tmp_path / "b").glob("*.safetensors")}
    numbers = range(1, len(parts) + 1)
    assert sorted(parts) == [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in numbers]
    held = [tensor for part in parts.values() for tensor in part.values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in held)
    assert index["weight_map"] == {name: file for file, part in parts.items() for name in part}
    # The embedding and the head are larger than an expert, but not than two.
    assert max(sum(tensor.nbytes for tensor in part.values()) for part in parts.values()) <= 2 * one
    place = "model.layers.0.block_sparse_moe.experts"
    files = {index["weight_map"][f"{place}.{expert}.w1.weight"] for expert in range(4)}
    assert len(files) > 1
    convert(tmp_path / "b", tmp_path / "c", "dcp", weights_only=True)
    expected = {f"model.{name}": tensor for name, tensor in weights(MIXTRAL).items()}
    assert same(tensors(tmp_path / "c"), expected)


def test_layers_may_have_different_forms(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf", MIXTRAL, packed=[1])
    convert(tmp_path / "hf", tmp_path / "b", "torch")
    assert same(torch.load(tmp_path / "b", weights_only=True)["model"], weights(MIXTRAL))


def test_a_layer_may_have_many_experts(tmp_path: Path) -> None:
    """The limit on the number of tensors depends on the number of experts."""
    shape = replace(MIXTRAL, experts=40, ffn=8)
    make_hf(tmp_path / "hf", shape)
    convert(tmp_path / "hf", tmp_path / "b", "torch")
    assert same(torch.load(tmp_path / "b", weights_only=True)["model"], weights(shape))


def test_meta_has_no_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_hf(tmp_path / "a", MIXTRAL)
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "meta"]) == 2
    line = 'Meta\'s format has no models of the architecture "moe"; convert to hf, torch or dcp\n'
    assert capsys.readouterr().err == line
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_router_that_transformers_does_not_have_stays_in_our_formats(tmp_path: Path) -> None:
    make_dcp(tmp_path / "a", DEEPSEEK)
    line = "Hugging Face's mixtral has no router = sigmoid; convert to torch or dcp"
    assert line in refusal(tmp_path / "a", tmp_path / "b", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_biases_of_routers_do_not_become_narrower(tmp_path: Path) -> None:
    """But where a run goes on, which has all parameters in one dtype."""
    make_dcp(tmp_path / "a", DEEPSEEK)
    convert(tmp_path / "a", tmp_path / "b", "dcp", dtype="bfloat16", weights_only=True)
    convert(tmp_path / "a", tmp_path / "c", "dcp", dtype="bfloat16")
    convert(tmp_path / "b", tmp_path / "d", "dcp", dtype="float64")
    bias, weight = "model.blocks.1.moe.router.bias", "model.blocks.1.moe.router.weight"
    exact = tensors(tmp_path / "a")[bias]
    for copy, dtypes in {
        "b": ("bfloat16", "float32"),
        "c": ("bfloat16", "bfloat16"),
        "d": ("float64", "float64"),
    }.items():
        found = tensors(tmp_path / copy)
        assert [found[name].dtype for name in (weight, bias)] == [
            getattr(torch, name) for name in dtypes
        ]
        assert torch.equal(found[bias], exact.to(found[bias].dtype))

    checkpoint = open_checkpoint(tmp_path / "b")
    model = load_model(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"))
    parameters = dict(model.named_parameters())
    assert torch.equal(parameters[bias.removeprefix("model.")], exact)
    assert parameters[weight.removeprefix("model.")].dtype == torch.bfloat16


def test_coefficients_of_training_are_left_out_with_a_note(tmp_path: Path) -> None:
    make_dcp(tmp_path / "a", replace(MIXTRAL, balance_loss=0.02, expert_ffn=MIXTRAL.ffn))
    notes = convert(tmp_path / "a", tmp_path / "b", "hf")["notes"]
    assert "left out: model.balance_loss = 0.02 (config.json cannot hold it)" in notes
    assert open_source(tmp_path / "b").shape == replace(MIXTRAL, head_dim=None)
    convert(tmp_path / "a", tmp_path / "c", "torch")
    assert open_source(tmp_path / "c").shape.balance_loss == 0.02


def test_the_proof_compares_the_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors do not show how many experts a token uses."""
    make_dcp(tmp_path / "a", MIXTRAL)
    make_config = open_source(tmp_path / "a").huggingface.make_config

    def wrong(shape: MoeShape, *arguments: Any) -> dict[str, Any]:
        config: dict[str, Any] = make_config(shape, *arguments)
        return config | {"num_experts_per_tok": 1}

    monkeypatch.setattr("composer3d.models.moe.huggingface.make_config", wrong)
    with pytest.raises(CheckpointError, match="the copy differs from the source in the model's sh"):
        convert(tmp_path / "a", tmp_path / "b", "hf")


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_hf(tmp_path / "a", QWEN_3)
    assert main(["inspect", str(tmp_path / "a")]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["architecture"] == "moe"
    assert {"experts=6", "experts_per_token=3", "expert_ffn=16"} <= set(lines["model"].split())
    count = sum(tensor.numel() for tensor in weights(QWEN_3).values())
    assert lines["parameters"] == f"{count:,}"
    assert lines["tensors"].startswith(f"{len(hf_tensors(QWEN_3, weights(QWEN_3)))} (")
    make_dcp(tmp_path / "b", DEEPSEEK)
    report = inspect(tmp_path / "b")
    assert (report["architecture"], report["whole"]) == ("moe", True)
    assert report["model"]["router_bias"] is True


def test_a_checkpoint_of_before_a_field_came_is_whole(tmp_path: Path) -> None:
    folder = make_dcp(tmp_path / "a", QWEN_3)
    manifest = manifests.read(folder)
    later = ("rope_scaling", "rope_beta_fast", "full_every", "shared_gate", "group_best")
    model = {key: manifest.model[key] for key in manifest.model if key[6:] not in later}
    assert len(model) == len(manifest.model) - len(later)
    manifests.write(folder, replace(manifest, model=model))
    report = inspect(folder)
    assert report["whole"]
    assert report["model"]["rope_scaling"] == "llama3"


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
OTHER = EXPERT.replace("experts.3", "experts.0")
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
Held = dict[str, Tensor]


def missing(name: str, shape: str) -> str:
    return f"a has no '{name}' {shape}, which its model needs; copy it again"


def unknown(name: str) -> str:
    return f"a holds '{name}', which its model does not have; remove or rename it"


def misshapen(name: str, shape: str, needed: str) -> str:
    return f"a holds '{name}' as {shape}, but its model needs {needed}"


def two_dtypes(dtype: str) -> str:
    place = f"a holds '{EXPERT}' in {dtype} and '{OTHER}' in float32"
    return f"{place}; the experts of a layer must have one dtype"


ONE_TOO_MANY = EXPERT.replace("3", "4")
# A change of the tensors of Mixtral, as published or packed, and the lines that refuse it.
PUBLISHED: dict[str, tuple[Callable[[Held], object], list[str]]] = {
    "missing": (lambda held: held.pop(EXPERT), [missing(EXPERT, "(32, 48)")]),
    "one too many": (
        lambda held: held.update({ONE_TOO_MANY: torch.ones(32, 48)}),
        [unknown(ONE_TOO_MANY)],
    ),
    "misshapen": (
        lambda held: held.update({EXPERT: torch.ones(48, 32)}),
        [misshapen(EXPERT, "(48, 32)", "(32, 48)")],
    ),
    "quantized": (
        lambda held: held.update({EXPERT: torch.ones(32, 48, dtype=torch.int8)}),
        [
            two_dtypes("int8"),
            f"a holds '{EXPERT}' in int8; it must be one of float32, bfloat16, float16, float64, "
            "and not quantized",
        ],
    ),
}
PACKED: dict[str, tuple[Callable[[Held], object], list[str]]] = {
    "misshapen, packed": (
        lambda held: held.update({GATE_UP: held[GATE_UP].mT.contiguous()}),
        [misshapen(GATE_UP, "(4, 32, 96)", "(4, 96, 32)")],
    ),
    "both forms": (
        lambda held: held.update({EXPERT: torch.ones(32, 48)}),
        [unknown(EXPERT)],
    ),
}


@pytest.mark.parametrize("case", [*PUBLISHED, *PACKED])
def test_wrong_experts_are_named(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, lines = {**PUBLISHED, **PACKED}[case]
    packed = range(MIXTRAL.n_layers) if case in PACKED else ()
    monkeypatch.chdir(tmp_path)
    make_hf(Path("a"), MIXTRAL, packed=packed)
    rewrite_safetensors(Path("a/model.safetensors"), damage)
    assert refusal(Path("a"), Path("b"), "torch") == lines
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert inspect(Path("a"))["problems"] == lines


def test_a_config_with_endless_experts_is_refused_at_once(tmp_path: Path) -> None:
    """Its names alone would take gigabytes."""
    make_hf(tmp_path / "a", MIXTRAL)
    layers = {f"model.layers.{layer}.x": torch.ones(1) for layer in range(200)}
    held = load_file(tmp_path / "a/model.safetensors")
    save_file(held | layers, tmp_path / "a/model.safetensors")
    endless = {"num_local_experts": 65_536, "num_hidden_layers": 200}
    rewrite_json(tmp_path / "a/config.json", lambda config: config.update(endless))
    assert refusal(tmp_path / "a", tmp_path / "b", "dcp") == [
        f"{tmp_path / 'a'}: there are 24 tensors of experts, but the model of config.json has "
        "39,321,600; copy the missing files"
    ]


MANIFESTS: dict[str, tuple[dict[str, Any], str]] = {
    "router": ({"model.router": "x"}, 'model.router = "x" must be "softmax" or "sigmoid"'),
    "experts of a token": (
        {"model.experts_per_token": 9},
        "model.experts_per_token = 9 must be at most the experts of experts = 4",
    ),
    "a module": (
        {"model.architecture": "os:environ"},
        'has a model of the architecture "os:environ": composer3d converts and inspects its own',
    ),
}


@pytest.mark.parametrize(("changes", "line"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_with_wrong_values_is_refused(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    make_dcp(tmp_path / "a", MIXTRAL)
    manifest = manifests.read(tmp_path / "a")
    manifests.write(tmp_path / "a", replace(manifest, model=manifest.model | changes))
    assert any(line in problem for problem in inspect(tmp_path / "a")["problems"])
    with pytest.raises(CheckpointError):
        convert(tmp_path / "a", tmp_path / "b", "torch")


def test_a_manifest_with_fields_of_another_architecture_is_refused(tmp_path: Path) -> None:
    make_dcp(tmp_path / "a", MIXTRAL)
    manifest = manifests.read(tmp_path / "a")
    model = manifest.model | {"model.architecture": "llama"}
    manifests.write(tmp_path / "a", replace(manifest, model=model))
    with pytest.raises(UserError, match=r"'model.balance_loss' = 0.0 \(and 16 more\), which this"):
        convert(tmp_path / "a", tmp_path / "b", "torch")
