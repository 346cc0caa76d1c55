"""The tokenizer of a checkpoint, and its model as a generator: in one process, or over tp."""

from collections.abc import Sequence

import torch

from composer3d.convert.formats import Source
from composer3d.convert.start import read_shards
from composer3d.data.chat_settings import make_chat_settings, require_jinja
from composer3d.data.prompt_tokenizer import (
    NO_TEMPLATE,
    PromptTokenizer,
    make_prompt_tokenizer,
    open_prompt_tokenizer,
)
from composer3d.data.special_tokens import (
    BY_NAME,
    BY_NUMBER,
    own_begins,
    own_ends,
)
from composer3d.data.tokenizer import OTHER_TOKENIZERS, ChatSettings
from composer3d.facts.errors import DataError
from composer3d.generate.generator import Generator
from composer3d.generate.load import Checkpoint, build_model, carried_json, load_model
from composer3d.parallel import compose_for_generation
from composer3d.recipe.schema import Recipe
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import check_same, on_all

_TOKENIZER = "tokenizer.json"


def open_tokenizer(
    checkpoint: Checkpoint, given: str | None, *, adds_special_tokens: bool, has_chat: bool
) -> PromptTokenizer | None:
    """Open the tokenizer of a checkpoint, or another one. The caller must close it.

    Args:
        checkpoint: the checkpoint.
        given: "bytes", the path of a tokenizer.json, or None for that of the checkpoint.
        adds_special_tokens: whether prompts get the special tokens that the tokenizer adds.
        has_chat: whether it is to render conversations, by its chat template.

    Returns:
        The tokenizer, or None if none is given and the checkpoint has none that can be read.

    Raises:
        DataError: the tokenizer cannot be used, or has no chat template.
    """
    if given is not None:
        return open_prompt_tokenizer(
            given, adds_special_tokens=adds_special_tokens, has_chat=has_chat
        )
    source = checkpoint.source
    content = source.carried.get(_TOKENIZER)
    if content is None:
        return None
    files = {file: carried_json(source, file) for file in (*BY_NAME, *BY_NUMBER)}
    return make_prompt_tokenizer(
        f"{_TOKENIZER} of {source.path}",
        content,
        ends=own_ends(files),
        begins=own_begins(files),
        adds_special_tokens=adds_special_tokens,
        chat=_carried_chat_settings(source) if has_chat else None,
    )


def no_tokenizer(checkpoint: Checkpoint) -> DataError:
    """Return the error that a checkpoint has no tokenizer that can be read."""
    source = checkpoint.source
    others = [name for name in OTHER_TOKENIZERS if name in source.carried]
    reason = f"; its {others[0]} is of a kind that is not read" if others else ""
    return DataError(
        f"{source.path} has no {_TOKENIZER}{reason}: give the model's with --tokenizer FILE, or "
        "--tokenizer bytes if it was trained on bytes"
    )


def _carried_chat_settings(source: Source) -> ChatSettings:
    """Return the chat templates that came with a model. Raises DataError if there are none."""
    require_jinja("--chat")
    return make_chat_settings(source.carried, source.path, place="--chat", way_out=NO_TEMPLATE)


def dtype_of(checkpoint: Checkpoint, wanted: str | None) -> torch.dtype:
    """Return the dtype in which a model runs: float16 becomes float32, as CPUs are slow with it.

    Args:
        checkpoint: the model.
        wanted: the name of the dtype that the user wants; None: that of the checkpoint.
    """
    name = wanted or checkpoint.dtype
    dtype: torch.dtype = getattr(torch, "float32" if name == "float16" else name)
    return dtype


def end_tokens_of(checkpoint: Checkpoint, tokenizer: PromptTokenizer | None) -> tuple[int, ...]:
    """Return the tokens that end a text: those of the model, or else the one of its tokenizer."""
    if not checkpoint.end_tokens and tokenizer is not None and tokenizer.end is not None:
        return (tokenizer.end,)
    return checkpoint.end_tokens


def load_generator(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, end_tokens: Sequence[int]
) -> Generator:
    """Load the whole model into this process.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    model = load_model(checkpoint, dtype=dtype, device=device)
    return Generator(
        model,
        checkpoint.plan,
        device=device,
        end_tokens=end_tokens,
        longest=checkpoint.longest,
    )


def compose_generator(
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
    dtype: torch.dtype,
    device: torch.device,
    end_tokens: Sequence[int],
) -> Generator:
    """Load this rank's part of a model that the ranks of tp share. Collective over all ranks.

    Args:
        checkpoint: the model.
        recipe: gives the mesh.
        dtype: the dtype of the weights.
        device: the device of this rank.
        end_tokens: tokens that end a text.

    Raises:
        CheckpointError: a tensor cannot be read. It is raised on all ranks.
        PlanError: as ``compose_for_generation``.
    """
    mesh = Mesh.build(recipe.mesh, device)
    # As in ``evaluate.evaluate``.
    check_same("SRC", {"folder": checkpoint.source.path.name})
    plan = checkpoint.plan
    model = build_model(checkpoint, dtype)
    stage = compose_for_generation(model, plan, mesh)
    parameters = dict(stage.named_parameters())
    on_all("the weights", lambda: read_shards(checkpoint.source, parameters))
    return Generator(
        stage,
        plan,
        device=device,
        end_tokens=end_tokens,
        longest=checkpoint.longest,
        tp_group=None if mesh.tp is None else mesh.tp.get_group(),
    )
