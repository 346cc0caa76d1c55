"""What ``composer3d generate`` does: from a checkpoint and prompts to completions."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from composer3d.data.prompt_tokenizer import PromptTokenizer
from composer3d.data.tokenizer import repeated_beginnings
from composer3d.facts.errors import DataError
from composer3d.generate.generator import Completion, Generator
from composer3d.generate.load import Checkpoint, open_checkpoint
from composer3d.generate.model import (
    compose_generator,
    dtype_of,
    end_tokens_of,
    load_generator,
    no_tokenizer,
    open_tokenizer,
)
from composer3d.generate.prompts import Prompt
from composer3d.generate.sampling import Sampling
from composer3d.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for.

    Attributes:
        src: the checkpoint.
        recipe: the recipe of its run, for an architecture of the user's own.
        prompts: the prompts.
        max_tokens: the most tokens that follow a prompt.
        sampling: how tokens are chosen.
        batch: the most prompts that go on together.
        dtype: the name of the dtype of the model; None: that of the checkpoint.
        tokenizer: "bytes", the path of a tokenizer.json, or None for that of the checkpoint.
        adds_special_tokens: whether prompts get the special tokens that the tokenizer adds.
        is_chat: whether a prompt in text is a message of a user, which the chat template of the
            tokenizer renders. The template then gives the special tokens.
    """

    src: str
    recipe: Recipe | None
    prompts: tuple[Prompt, ...]
    max_tokens: int
    sampling: Sampling
    batch: int
    dtype: str | None
    tokenizer: str | None
    adds_special_tokens: bool
    is_chat: bool = False


class Session(NamedTuple):
    """A request whose files are open, and whose prompts the model can go on with.

    Attributes:
        request: the request.
        checkpoint: its checkpoint.
        tokenizer: None if all prompts are given as tokens and there is no tokenizer.
        prompts: the tokens of each prompt.
        end_tokens: the tokens that end a text.
    """

    request: Request
    checkpoint: Checkpoint
    tokenizer: PromptTokenizer | None
    prompts: list[list[int]]
    end_tokens: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return dtype_of(self.checkpoint, self.request.dtype)

    @property
    def notes(self) -> list[str]:
        """What the user should know of the prompts."""
        repeated = 0 if self.tokenizer is None else self.tokenizer.repeated
        return [f"note: {repeated_beginnings(repeated, 'prompts')}"] if repeated else []

    def text_of(self, tokens: Sequence[int]) -> str | None:
        """Return the text of tokens, or None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(tokens)


@contextmanager
def open_session(request: Request) -> Iterator[Session]:
    """Open the checkpoint and the tokenizer of a request, and check its prompts.

    Raises:
        CheckpointError: as ``open_checkpoint``.
        DataError: there is no tokenizer, it fails, or a prompt is empty, too long for the model, or
            has a token that the model does not have. The error has a line for each prompt.
    """
    checkpoint = open_checkpoint(Path(request.src), request.recipe)
    tokenizer = open_tokenizer(
        checkpoint,
        request.tokenizer,
        adds_special_tokens=request.adds_special_tokens and not request.is_chat,
        has_chat=request.is_chat,
    )
    if tokenizer is None and any(prompt.tokens is None for prompt in request.prompts):
        raise no_tokenizer(checkpoint)
    with closing(tokenizer or PromptTokenizer()):
        prompts = _encode(request, tokenizer)
        _check(request.prompts, prompts, checkpoint)
        yield Session(request, checkpoint, tokenizer, prompts, end_tokens_of(checkpoint, tokenizer))


def _encode(request: Request, tokenizer: PromptTokenizer | None) -> list[list[int]]:
    prompts = request.prompts
    texts = [prompt.text for prompt in prompts if prompt.text is not None]
    if request.is_chat and tokenizer is not None:
        texts = [tokenizer.ask([{"role": "user", "content": text}]) for text in texts]
    encoded = iter(tokenizer.encode(texts) if tokenizer is not None and texts else [])
    return [next(encoded) if prompt.tokens is None else list(prompt.tokens) for prompt in prompts]


def _check(prompts: Sequence[Prompt], encoded: Sequence[list[int]], checkpoint: Checkpoint) -> None:
    problems = []
    vocab, longest = checkpoint.shape.vocab, checkpoint.longest
    for prompt, tokens in zip(prompts, encoded, strict=True):
        largest = max(tokens, default=0)
        if not tokens:
            problems.append(f"{prompt.place}: the prompt has no tokens; give some text")
        elif largest >= vocab:
            problems.append(
                f"{prompt.place}: token {largest} is beyond the model's vocabulary of {vocab}; "
                "give the model's own tokenizer"
            )
        elif longest is not None and len(tokens) >= longest:
            problems.append(
                f"{prompt.place}: the prompt has {len(tokens)} tokens, and the longest sequence of "
                f"the model has {longest}, of which at least one must follow; shorten the prompt"
            )
    if problems:
        raise DataError(problems)


class Result(NamedTuple):
    """The completions of all prompts.

    Attributes:
        completions: in the order of the prompts.
        seconds: from the first call of the model to the last, without loading.
    """

    completions: list[Completion]
    seconds: float

    @property
    def new_tokens(self) -> int:
        """The number of tokens in all completions."""
        return sum(len(completion.tokens) for completion in self.completions)


def generate_here(
    session: Session, device: torch.device, **callbacks: Callable[..., Any]
) -> Result:
    """Generate in this process alone.

    Args:
        session: the request.
        device: the device of the model.
        callbacks: ``on_token`` and ``on_done`` of ``Generator.generate``.

    Raises:
        CheckpointError: a tensor cannot be read, or a logit is not finite.
    """
    generator = load_generator(
        session.checkpoint, dtype=session.dtype, device=device, end_tokens=session.end_tokens
    )
    return _run(session, generator, callbacks)


def generate_on_ranks(
    session: Session, recipe: Recipe, device: torch.device, **callbacks: Callable[..., Any]
) -> Result:
    """Generate as one rank of tp. All ranks return the same. Collective over the default group.

    Args:
        session: the request.
        recipe: gives the mesh.
        device: the device of this rank.
        callbacks: as in ``generate_here``.

    Raises:
        CheckpointError: as in ``generate_here``, on all ranks.
        PlanError: as ``compose_for_generation``.
    """
    generator = compose_generator(
        session.checkpoint,
        recipe,
        dtype=session.dtype,
        device=device,
        end_tokens=session.end_tokens,
    )
    return _run(session, generator, callbacks)


def _run(session: Session, generator: Generator, callbacks: dict[str, Any]) -> Result:
    request = session.request
    started_s = time.perf_counter()
    completions = generator.generate(
        session.prompts,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        batch=request.batch,
        **callbacks,
    )
    return Result(completions, time.perf_counter() - started_s)
