"""Files of Phi-3 and Phi-4, in which one tensor joins projections: read, written, and refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from composer3d.checkpoint.manifest import TensorSpec
from composer3d.convert.convert import convert
from composer3d.convert.formats import Source, open_source
from composer3d.convert.targets import write
from composer3d.facts.errors import CheckpointError
from composer3d.models.contract import SequenceInfo
from composer3d.models.phi3.shape import Phi3Shape
from composer3d.models.phi3.table import table
from composer3d.models.registry import architecture
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from tests.convert.test_export import run_recipe
from tests.convert.test_start import Loaded, load_and_compare, read_weights
from tests.models.moe.transformers_models import SMALL, transformers

# Queries have 4 x 16 rows, keys and values 2 x 16 each; the gate and the up projection 96 each.
_ROWS = {
    "attn.wq": ("self_attn.qkv_proj", 0, 64),
    "attn.wk": ("self_attn.qkv_proj", 64, 96),
    "attn.wv": ("self_attn.qkv_proj", 96, 128),
    "attn.wo": ("self_attn.o_proj", 0, 64),
    "ffn.w1": ("mlp.gate_up_proj", 0, 96),
    "ffn.w3": ("mlp.gate_up_proj", 96, 192),
    "ffn.w2": ("mlp.down_proj", 0, 64),
    "attn_norm": ("input_layernorm", 0, 64),
    "ffn_norm": ("post_attention_layernorm", 0, 64),
}
_AROUND = {
    "first.embed.weight": "model.embed_tokens.weight",
    "last.norm.weight": "model.norm.weight",
    "last.head.weight": "lm_head.weight",
}


def make_folder(folder: Path, **settings: Any) -> Path:
    """Save a random Phi-3 with transformers, in files of at most 100 kB."""
    torch.manual_seed(1)
    config = transformers.Phi3Config(
        **SMALL | {"sliding_window": 7, "pad_token_id": None} | settings
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def cut_by_hand(in_files: dict[str, Tensor], layers: int = 3) -> dict[str, Tensor]:
    """Return our parameters as parts of the tensors in files, by the table above."""
    found = {ours: in_files[theirs] for ours, theirs in _AROUND.items()}
    for layer in range(layers):
        for ours, (theirs, begin, end) in _ROWS.items():
            whole = in_files[f"model.layers.{layer}.{theirs}.weight"]
            found[f"blocks.{layer}.{ours}.weight"] = whole[begin:end]
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("between", ["dcp", "torch"])
def test_every_bit_comes_back_under_its_name(tmp_path: Path, between: str) -> None:
    hf = make_folder(tmp_path / "hf")
    in_files = read_weights(hf)
    assert len(list(hf.glob("*.safetensors"))) > 2
    convert(hf, tmp_path / "a", between)
    source = open_source(tmp_path / "a")
    ours = {name: source.read(f"model.{name}") for name in cut_by_hand(in_files)}
    assert same(ours, cut_by_hand(in_files))
    assert len(source.specs()) == len(ours)

    report = convert(tmp_path / "a", tmp_path / "b", "hf", logits=True, shard=100_000)
    assert report["logits"]["bitwise"]
    assert same(read_weights(tmp_path / "b"), in_files)
    before, after = (
        json.loads((tmp_path / folder / "model.safetensors.index.json").read_text())
        for folder in ("hf", "b")
    )
    assert after["weight_map"].keys() == before["weight_map"].keys()
    assert after["metadata"]["total_size"] == before["metadata"]["total_size"]
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config["architectures"] == ["Phi3ForCausalLM"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="float32")
    assert same(dict(again.state_dict()), in_files)


def test_another_dtype_is_written_into_the_parts(tmp_path: Path) -> None:
    hf = make_folder(tmp_path / "hf")
    convert(hf, tmp_path / "b", "hf", dtype="bfloat16")
    expected = {name: tensor.bfloat16() for name, tensor in read_weights(hf).items()}
    assert same(read_weights(tmp_path / "b"), expected)


def test_parts_of_one_tensor_need_one_dtype(tmp_path: Path) -> None:
    shape = Phi3Shape(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn=48, vocab=67)
    source = Source(format="dcp", path=tmp_path)
    source.shape, source.architecture = shape, "phi3"
    specs = {
        f"model.{name}": TensorSpec(size, "bfloat16" if name.endswith("wv.weight") else "float32")
        for name, size in table(shape).shapes().items()
    }
    with pytest.raises(CheckpointError, match=r"attn\.wv\.weight in bfloat16 is a part of .*dtype"):
        write("hf", tmp_path, source, specs, iter(()), 1 << 30)


QKV, GATE_UP = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.2.mlp.gate_up_proj.weight"


def _resized(name: str, *size: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.ones(size)})


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "rows of keys are missing": (_resized(QKV, 96, 64), rf"'{QKV}' as \(96, 64\), .* \(128, 64\)"),
    "too many rows": (_resized(QKV, 192, 64), r"as \(192, 64\)"),
    "transposed": (_resized(GATE_UP, 64, 192), r"as \(64, 192\), .* \(192, 64\)"),
    "a vector": (_resized(GATE_UP, 192 * 64), r"as \(12288,\)"),
    "none": (lambda tensors: tensors.pop(QKV), rf"has no '{QKV}' \(128, 64\)"),
    "integers": (
        lambda tensors: tensors.update({QKV: torch.ones(128, 64, dtype=torch.int8)}),
        "in int8",
    ),
    "parts by themselves": (
        lambda tensors: tensors.update({QKV.replace("qkv", "q"): torch.ones(64, 64)}),
        "q_proj.weight', which its model does not have",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_tensors_are_refused(tmp_path: Path, case: str) -> None:
    change, message = CHANGES[case]
    hf = make_folder(tmp_path / "hf")
    tensors = read_weights(hf)
    for file in (*hf.glob("*.safetensors"), hf / "model.safetensors.index.json"):
        file.unlink()
    change(tensors)
    save_file(tensors, hf / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        convert(hf, tmp_path / "b", "dcp")


def write_recipe(folder: Path, hf: Path, tables: str = "") -> None:
    (folder / "x.toml").write_text(
        f'[run]\nname = "x"\nsteps = 3\ndevice = "cpu"\n[model]\narchitecture = "phi3"\n'
        f'hf = "{hf}"\n[data]\nseq_len = 24\nglobal_batch = 8\n{tables}'
    )


def load_on_rank(folder: str, sets: list[str]) -> Loaded:
    recipe = load(f"{folder}/x.toml", sets, check_files=False).recipe
    return load_and_compare(f"{folder}/hf", recipe, cut_by_hand(read_weights(Path(folder) / "hf")))


@pytest.mark.parametrize(
    "sets",
    [
        ["mesh.tp=4"],  # more ranks than key-value heads
        ["mesh.dp_shard=2", "mesh.tp=2"],
        ["mesh.dp_shard=4"],
        ["mesh.pp=2", "mesh.dp_shard=2"],
    ],
    ids=" ".join,
)
def test_every_rank_reads_its_rows_and_no_more(pool: Pool, tmp_path: Path, sets: list[str]) -> None:
    hf = make_folder(tmp_path / "hf", vocab_size=260)
    write_recipe(tmp_path, hf)
    results = pool.run(load_on_rank, {"folder": str(tmp_path), "sets": sets}, world_size=4)
    assert [result.wrong for result in results] == [[]] * 4
    assert all(result.bytes_read == result.bytes_held > 0 for result in results)


def test_a_trained_model_goes_back_to_transformers(pool: Pool, tmp_path: Path) -> None:
    hf = make_folder(tmp_path / "hf", vocab_size=256)
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 40)
    data = f'source = "text"\npath = "{tmp_path}/text.txt"\n'
    write_recipe(tmp_path, hf, f"{data}[mesh]\ntp = 2\n[metrics]\ntensorboard = false\n")
    task = {"path": str(tmp_path / "x.toml"), "out": str(tmp_path)}
    pool.run(run_recipe, task, world_size=2)

    convert(tmp_path / "x", tmp_path / "out", "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="float32", attn_implementation="eager"
    )
    before, after = read_weights(hf), read_weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)

    source = open_source(tmp_path / "x")
    ours = architecture("phi3").build(source.shape, device="cpu")
    tokens_BT = torch.tensor([list(b"def f(x): return")])
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(source.read(f"model.{name}"))
        logits = ours.logits(tokens_BT, SequenceInfo(torch.arange(tokens_BT.shape[1])[None]))
        expected = theirs(tokens_BT).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_hostile_config_does_not_make_tensors_fit(tmp_path: Path) -> None:
    """Sizes of another model, with which the rows of the tensors would still be enough."""
    hf = make_folder(tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text())
    for changes in ({"num_key_value_heads": 1}, {"head_dim": 8}, {"intermediate_size": 95}):
        (hf / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=r"but its model needs \("):
            convert(hf, tmp_path / "b", "dcp")
