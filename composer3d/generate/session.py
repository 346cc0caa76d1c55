"""What ``composer3d generate`` does: from a checkpoint and prompts to completions."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from composer3d.convert.formats import Source
from composer3d.convert.start import read_shards
from composer3d.data.chat_settings import TEMPLATE, make_chat_settings, require_jinja
from composer3d.data.prompt_tokenizer import (
    PromptTokenizer,
    make_prompt_tokenizer,
    open_prompt_tokenizer,
)
from composer3d.data.special_tokens import BY_NAME, BY_NUMBER, TOKENIZER_CONFIG, own_ends
from composer3d.data.tokenizer import OTHER_TOKENIZERS, ChatSettings, repeated_beginnings
from composer3d.facts.errors import DataError
from composer3d.facts.text import one_line
from composer3d.generate.generator import Completion, Generator
from composer3d.generate.load import Checkpoint, carried_json, load_model, open_checkpoint
from composer3d.generate.prompts import Prompt
from composer3d.generate.sampling import Sampling
from composer3d.parallel import compose_for_generation
from composer3d.recipe.schema import Recipe
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import check_same, on_all

_TOKENIZER = "tokenizer.json"


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
        """The dtype of the model: float16 becomes float32, as CPUs are slow with float16."""
        name = self.request.dtype or self.checkpoint.dtype
        dtype: torch.dtype = getattr(torch, "float32" if name == "float16" else name)
        return dtype

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
    tokenizer = _open_tokenizer(request, checkpoint)
    with closing(tokenizer or PromptTokenizer()):
        prompts = _encode(request, tokenizer)
        _check(request.prompts, prompts, checkpoint)
        end_tokens = checkpoint.end_tokens
        if not end_tokens and tokenizer is not None and tokenizer.end is not None:
            end_tokens = (tokenizer.end,)
        yield Session(request, checkpoint, tokenizer, prompts, end_tokens)


def _open_tokenizer(request: Request, checkpoint: Checkpoint) -> PromptTokenizer | None:
    adds = request.adds_special_tokens and not request.is_chat
    if request.tokenizer is not None:
        return open_prompt_tokenizer(
            request.tokenizer, adds_special_tokens=adds, has_chat=request.is_chat
        )
    source = checkpoint.source
    content = source.carried.get(_TOKENIZER)
    if content is not None:
        name = f"{_TOKENIZER} of {source.path}"
        names = (*BY_NAME, *BY_NUMBER)
        ends = own_ends({file: carried_json(source, file) for file in names})
        chat = _carried_chat_settings(source) if request.is_chat else None
        return make_prompt_tokenizer(name, content, ends=ends, adds_special_tokens=adds, chat=chat)
    if all(prompt.tokens is not None for prompt in request.prompts):
        return None
    others = [name for name in OTHER_TOKENIZERS if name in source.carried]
    reason = f"; its {others[0]} is of a kind that is not read" if others else ""
    raise DataError(
        f"{source.path} has no {_TOKENIZER}{reason}: give the model's with --tokenizer FILE, or "
        "--tokenizer bytes if it was trained on bytes"
    )


def _carried_chat_settings(source: Source) -> ChatSettings:
    """Return the chat template that came with a model. Raises DataError if there is none."""
    require_jinja("--chat")
    settings = make_chat_settings(
        source.carried.get(TEMPLATE),
        source.carried.get(TOKENIZER_CONFIG),
        template_file=source.path / TEMPLATE,
        folder=source.path,
    )
    if settings is None:
        raise DataError(
            f"--chat: {one_line(source.path)} has no chat template, neither {TEMPLATE} nor in "
            f"{TOKENIZER_CONFIG}; leave --chat out, or give a folder that has one by --tokenizer"
        )
    return settings


def _encode(request: Request, tokenizer: PromptTokenizer | None) -> list[list[int]]:
    prompts = request.prompts
    texts = [prompt.text for prompt in prompts if prompt.text is not None]
    if request.is_chat and tokenizer is not None:
        texts = [tokenizer.ask(text) for text in texts]
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
    model = load_model(session.checkpoint, dtype=session.dtype, device=device)
    generator = Generator(
        model,
        session.checkpoint.plan,
        device=device,
        end_tokens=session.end_tokens,
        longest=session.checkpoint.longest,
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
    mesh = Mesh.build(recipe.mesh, device)
    checkpoint = session.checkpoint
    # As in ``evaluate.evaluate``.
    check_same("SRC", {"folder": checkpoint.source.path.name})
    plan = checkpoint.plan
    model = checkpoint.architecture.build(checkpoint.shape, dtype=session.dtype, device="meta")
    stage = compose_for_generation(model, plan, mesh)
    parameters = dict(stage.named_parameters())
    on_all("the weights", lambda: read_shards(checkpoint.source, parameters))
    generator = Generator(
        stage,
        plan,
        device=device,
        end_tokens=session.end_tokens,
        longest=checkpoint.longest,
        tp_group=None if mesh.tp is None else mesh.tp.get_group(),
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
