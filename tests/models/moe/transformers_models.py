"""Random tiny models with experts, made by transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer3d.models.locations import Location

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
}
# The experts of Qwen are half as wide as the model: packed gates and up projections are square
# matrices then, so that no shape shows whether they are transposed.
_QWEN: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "head_dim": 32,
}
_QWEN_2 = {**_QWEN, "shared_expert_intermediate_size": 48}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "mixtral, windows": (
        "Mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    ),
    "qwen 2": ("Qwen2Moe", _QWEN_2),
    "qwen 2, some dense, windows": (
        "Qwen2Moe",
        {
            **_QWEN_2,
            "num_hidden_layers": 4,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention"] * 4,
        },
    ),
    "qwen 2, windows in every second layer": (
        "Qwen2Moe",
        {
            **_QWEN_2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen 3": ("Qwen3Moe", {**_QWEN, "norm_topk_prob": True}),
    "qwen 3, some dense, windows": (
        "Qwen3Moe",
        {
            **_QWEN,
            "num_hidden_layers": 5,
            "mlp_only_layers": [0, 1],
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        },
    ),
}


def make_folder(
    folder: Path,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    is_packed: bool = False,
    **settings: Any,
) -> Path:
    """Save a random model of the table with transformers.

    Args:
        folder: the folder to make.
        name: of the model.
        dtype: of the weights.
        is_packed: whether one tensor has the experts of a layer, as in memory.
        settings: further keys of its config.json.
    """
    torch.manual_seed(1)
    family, settings_of_model = MODELS[name]
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**SMALL | settings_of_model | settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # Norms start as ones, so that a test would not see two of them swapped.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder, save_original_format=not is_packed)
    return folder


def load_folder(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a saved model with transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


class _WideTorch:
    """torch, in which float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_float64(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Let transformers compute in float64 where it computes in float32, whatever the model is in.

    Those places are norms, positions, the softmax of attention and of the router, and the losses.

    Args:
        monkeypatch: undoes it.
        family: the model_type, such as "mixtral".
    """
    family = family.removesuffix("_text")
    module = f"transformers.models.{family}.modeling_{family}"
    for name in (module, "transformers.modeling_rope_utils"):
        monkeypatch.setattr(f"{name}.torch", _WideTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def take(location: Location, tensors: dict[str, Tensor]) -> Tensor:
    """Return one of our tensors from those of a file."""
    if location.is_stack:
        return torch.stack([tensors[name] for name in location.names])
    (name,) = location.names
    if location.is_transposed:
        return tensors[name].mT
    if location.rows is None:
        return tensors[name]
    begin, end = location.rows
    return tensors[name].narrow(location.row_dim, begin, end - begin)
