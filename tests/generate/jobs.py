"""Tasks of workers, and small checkpoints and token files."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from composer3d import cli
from composer3d.checkpoint.manifest import Manifest, TensorSpec, model_of
from composer3d.convert.formats import Source, dtype_name
from composer3d.convert.targets import write
from composer3d.models.contract import Decoder, SequenceInfo
from composer3d.models.registry import import_architecture
from composer3d.models.shape import DecoderShape

# The families of transformers that composer3d has, and settings of small models of them.
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def _layers(count: int, every: int) -> dict[str, Any]:
    """Windows in all of ``count`` layers but every so many."""
    kinds = {True: "full_attention", False: "sliding_attention"}
    layer_types = [kinds[layer % every == every - 1] for layer in range(count)]
    return {"num_hidden_layers": count, "layer_types": layer_types}


_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 64,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen 3": ("Qwen3", {"head_dim": 32}),
    "llama, linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "qwen 2, yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral, window 7": ("Mistral", {"sliding_window": 7}),
    "qwen 3, windows in two of three layers": (
        "Qwen3",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 5, **_layers(5, 3)},
    ),
    "smollm 3, windows in every second layer": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": 7, **_layers(4, 2)},
    ),
    "olmo 3, yarn": (
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 6,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "qwen 2 moe": (
        "Qwen2Moe",
        {
            **_EXPERTS,
            "head_dim": 16,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [0],
        },
    ),
    "qwen 3 moe": ("Qwen3Moe", _EXPERTS),
    "olmo 2": ("Olmo2", {}),
    "gemma 3": ("Gemma3Text", {"num_hidden_layers": 7, "sliding_window": 6, "head_dim": 32}),
    "phi 3, window 7": ("Phi3", {"sliding_window": 7}),
    "deepseek 2": (
        "DeepseekV2",
        {**_LATENTS, "q_lora_rank": None, "routed_scaling_factor": 1.5, "rope_parameters": _YARN},
    ),
    "deepseek 3": ("DeepseekV3", {**_LATENTS, "q_lora_rank": 40, "n_group": 4, "topk_group": 2}),
    "glm 4.5": (
        "Glm4Moe",
        {
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "head_dim": 24,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "swiglu_limit": 0.5,
        },
    ),
    "granite 3": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
}


def run_command(arguments: list[str]) -> tuple[int, str, str]:
    """Run a command as this rank; return its status and what it printed."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = cli.main(arguments)
    return status, out.getvalue(), errors.getvalue()


def answer_of(printed: str) -> dict[str, Any]:
    """Return the JSON object in the last line."""
    answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return answer


def random_model(name: str, shape: DecoderShape, dtype: torch.dtype = torch.float32) -> Decoder:
    """Build a model with weights that are the same in every call."""
    model: Decoder = import_architecture(name).build(shape, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = parameter.dim() == 1
            values = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(values + is_norm)
    return model


def make_checkpoint(
    folder: Path,
    name: str,
    shape: DecoderShape,
    *,
    recipe: str = "",
    assets: dict[str, Any] | None = None,
) -> Path:
    """Make a checkpoint of ``random_model``, as training does."""
    source = Source(format="dcp", path=folder)
    source.architecture = name
    source.manifest = Manifest(step=5, model=model_of(shape, "float32", name), recipe=recipe)
    state = {
        f"model.{parameter}": tensor.detach()
        for parameter, tensor in random_model(name, shape).named_parameters()
    }
    specs = {
        parameter: TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))
        for parameter, tensor in state.items()
    }
    source.carried = {
        file: json.dumps(content).encode() if isinstance(content, dict) else content
        for file, content in (assets or {}).items()
    }
    folder.mkdir()
    write("dcp", folder, source, specs, iter(state.items()), 0)
    return folder


@torch.no_grad()
def greedy(model: Decoder, prompt: list[int], new_tokens: int, head: torch.Tensor) -> list[int]:
    """Generate without a cache: run the model on the whole sequence for each token."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        seq = SequenceInfo(torch.arange(len(tokens))[None])
        h_BTC = model.hidden(torch.tensor([tokens]), seq)
        logits_V = model.last.norm(h_BTC[0, -1]) @ head.T
        tokens.append(int(logits_V.argmax()))
    return tokens[len(prompt) :]


def greedy_of_transformers(
    name: str, folder: Path, prompts: list[list[int]], new_tokens: int
) -> list[list[int]]:
    """Save a random model of MODELS to ``folder``; return the tokens that it gives by transformers.

    The test is skipped if there is no transformers.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(15)
    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**_SMALL | settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)

    found = []
    for prompt in prompts:
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
        found.append(whole[0, len(prompt) :].tolist())
    return found
