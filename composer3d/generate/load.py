"""Open the checkpoint that generation and evaluation read, and load its weights into a model."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer3d.convert.formats import OwnModel, Source, open_source
from composer3d.facts.files import parse_json
from composer3d.models import fit
from composer3d.models.contract import Decoder, ShardingPlan
from composer3d.models.layers.moe import Router
from composer3d.models.registry import OURS, Architecture, architecture, resolve
from composer3d.models.shape import DecoderShape
from composer3d.recipe.schema import Recipe

_NAME = "model."
_ALIGNMENT = 64  # bytes, as in torch's own allocations


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose model can run.

    Attributes:
        source: its files.
        own: the user's own model, if it is one.
        longest: the number of tokens of the longest sequence that the model supports, or None if
            the files do not say.
        end_tokens: the tokens that end a text; empty if the files do not say.
    """

    source: Source
    own: OwnModel | None
    longest: int | None
    end_tokens: tuple[int, ...]

    @property
    def architecture(self) -> Architecture:
        """The architecture of the model: one of ours, or the user's own."""
        return architecture(self.source.architecture)

    @property
    def shape(self) -> DecoderShape:
        """The sizes of the model, without what only training computes."""
        return self.source.shape.without_mtp

    @property
    def plan(self) -> ShardingPlan:
        """The sharding plan of the architecture for this shape."""
        plan: ShardingPlan = resolve(self.architecture.plan)(self.shape)
        return plan

    @property
    def dtype(self) -> str:
        """The name of the dtype of the model's weights, as that of its first parameter."""
        specs = self.source.specs()
        return next(spec.dtype for name, spec in specs.items() if name.startswith(_NAME))


def open_checkpoint(path: Path, recipe: Recipe | None = None) -> Checkpoint:
    """Open a checkpoint of any format.

    Args:
        path: as for ``convert.formats.open_source``.
        recipe: the recipe of its run, if its model is of a user's own architecture. The user gave
            it to the command by name, so its module was imported.

    Raises:
        CheckpointError: the checkpoint cannot be used.
    """
    own = None
    if recipe is not None and recipe.model.architecture not in OURS:
        own = _own_model(recipe)
    source = open_source(path, own)
    config = carried_json(source, "config.json")
    generation = carried_json(source, "generation_config.json")
    longest = config.get("max_position_embeddings")
    if own is not None and recipe is not None:
        # Such a checkpoint carries no config.json. The run has trained no longer sequence.
        longest = recipe.data.seq_len
    if source.shape.most_tokens is not None:
        longest = source.shape.most_tokens
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    end_tokens = ends if isinstance(ends, list) else [ends]
    return Checkpoint(
        source=source,
        own=own,
        longest=longest if type(longest) is int and longest > 0 else None,
        end_tokens=tuple(
            token for token in end_tokens if type(token) is int and 0 <= token < source.shape.vocab
        ),
    )


def _own_model(recipe: Recipe) -> OwnModel:
    """Describe the model of a recipe with a user's own architecture."""
    chosen = architecture(recipe.model.architecture)
    shape = chosen.shape(
        **{entry.name: getattr(recipe.model, entry.name) for entry in fields(chosen.shape)}
    )
    parameters = dict(chosen.build(shape, dtype=torch.float32, device="meta").named_parameters())
    return OwnModel(
        recipe.model.architecture,
        shape,
        {name: tuple(parameter.shape) for name, parameter in parameters.items()},
        frozenset(name for name, parameter in parameters.items() if parameter.requires_grad),
    )


def carried_json(source: Source, name: str) -> Mapping[str, Any]:
    """Return the JSON object in a file that came with the model; an empty one if it has none."""
    try:
        value = parse_json(source.carried.get(name, b"{}"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def build_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Decoder:
    """Build the whole model on the meta device, with its weights in ``dtype``.

    The biases by which routers choose experts have at least float32, as in transformers. Training
    moves them in steps of ``model.bias_rate``, which can be less than bfloat16 resolves.
    """
    model: Decoder = checkpoint.architecture.build(checkpoint.shape, dtype=dtype, device="meta")
    wide = torch.promote_types(dtype, torch.float32)
    for module in model.modules():
        if isinstance(module, Router) and module.bias is not None:
            module.bias = nn.Parameter(module.bias.to(wide), requires_grad=False)
    return model


@torch.no_grad()
def load_model(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Load the whole model into this process, with its weights in ``dtype`` on ``device``.

    Raises CheckpointError if a tensor cannot be read.
    """
    model = build_model(checkpoint, dtype)
    fit.check(model, checkpoint.plan)
    _allocate(model, device)
    for name, parameter in model.named_parameters():
        parameter.copy_(checkpoint.source.read(f"{_NAME}{name}"))
    return model


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Replace the parameters on the meta device by parts of one allocation; ties stay.

    ``to_empty`` makes an allocation for each parameter. On a CPU, products then read their weights
    more slowly: in ``bench generate``, a model of 200M parameters is 6% slower.
    """
    places, size = [], 0
    for parameter in model.parameters():
        places.append((parameter, size))
        size += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(size, dtype=torch.uint8, device=device)

    allocated = {
        id(parameter): nn.Parameter(
            memory[begin : begin + parameter.nbytes].view(parameter.dtype).view(parameter.shape),
            requires_grad=parameter.requires_grad,
        )
        for parameter, begin in places
    }
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        module, _, attribute = name.rpartition(".")
        model.get_submodule(module).register_parameter(attribute, allocated[id(parameter)])
