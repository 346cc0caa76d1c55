"""``composer3d generate``: go on with prompts, in one process or over the ranks of tp."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from composer3d.commands import job, tp
from composer3d.commands.arguments import (
    argument,
    device_option,
    json_option,
    model_dtype_option,
    number,
    own_recipe_option,
    positive,
    whole,
)
from composer3d.commands.sources import local_source
from composer3d.facts.errors import UserError
from composer3d.facts.text import one_line, printable, printable_lines
from composer3d.generate.prompts import Prompt, read_prompts
from composer3d.models import hub
from composer3d.recipe.draft import ParsedRecipe
from composer3d.recipe.resolve import Resolved
from composer3d.runtime import environment

if TYPE_CHECKING:
    from composer3d.generate.generator import Completion
    from composer3d.generate.session import Request, Result, Session

# Ranks may take minutes to import torch and to read their weights.
_TIMEOUT_S = 600.0

_SHOWN_CHARACTERS = 60  # of a prompt above its completion

EXAMPLES = (
    'composer3d generate runs/quickstart --prompt "def main("',
    "composer3d generate llama-hf --prompts prompts.txt --temperature 0.8 --top-p 0.95",
)


def _temperature(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1000, got {one_line(text)}")
    return value


def _probability(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {one_line(text)}")
    return value


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    as_json: bool = json_option()
    src: str = argument(metavar="SRC", help="a checkpoint, as SRC of convert")
    prompt: Sequence[str] = argument(
        "--prompt", metavar="TEXT", action="append", default=[], help="may be repeated"
    )
    prompts: str | None = argument(
        "--prompts",
        metavar="FILE",
        help='a prompt on each line; in a .jsonl, {"prompt": "..."} or {"prompt": [1, 2]}, tokens',
    )
    max_tokens: int = argument(
        "--max-tokens",
        metavar="N",
        type=positive,
        default=64,
        help="the most tokens after a prompt; default: %(default)s",
    )
    # Without a default, so that 0 counts as given: scripts set it beside a fixed seed.
    temperature: float | None = argument(
        "--temperature",
        metavar="X",
        type=_temperature,
        help="divides the logits; 0, the default, always takes the most likely token",
    )
    top_k: int = argument(
        "--top-k",
        needs=("--temperature",),
        metavar="K",
        type=whole,
        default=0,
        help="choose among the K most likely tokens; 0, the default: among all",
    )
    top_p: float = argument(
        "--top-p",
        needs=("--temperature",),
        metavar="P",
        type=_probability,
        default=1.0,
        help="of these, choose among the most likely ones that together have this share of their "
        "probability; default: 1",
    )
    seed: int = argument(
        "--seed",
        needs=("--temperature",),
        metavar="N",
        type=whole,
        default=0,
        help="of random choices; default: 0",
    )
    batch: int = argument(
        "--batch",
        metavar="N",
        type=positive,
        default=8,
        help="prompts that go on together; default: %(default)s",
    )
    tokenizer: str | None = argument(
        "--tokenizer",
        metavar="FILE|bytes",
        help="a tokenizer.json; or bytes, which makes each byte a token; default: that of SRC",
    )
    no_special_tokens: bool = argument(
        "--no-special-tokens",
        without=("--chat",),
        action="store_true",
        help="take prompts without the tokens that the tokenizer adds, such as <s>",
    )
    chat: bool = argument(
        "--chat",
        action="store_true",
        help="take each prompt as a message of a user, which the tokenizer's chat template renders",
    )
    dtype: str | None = model_dtype_option()
    device: str = device_option()
    recipe: str | None = own_recipe_option()
    tp: int | None = argument(
        "--tp",
        metavar="N",
        type=positive,
        help="processes that share each layer; default: 1, or all under torchrun",
    )
    out: str | None = argument(
        "--out", metavar="FILE.jsonl", help="make FILE.jsonl, with a line for each prompt"
    )


def run(options: Options) -> int:
    """Generate, and print the text that follows each prompt.

    Returns:
        The exit status: 0 done, 1 a rank failed.

    Raises:
        UserError: the checkpoint, the tokenizer, a prompt or the layout cannot be used.
    """
    read = read_prompts(options.prompt, options.prompts)
    if options.chat and any(prompt.text is None for prompt in read):
        raise UserError("--chat renders text, but a prompt is given as tokens; give text")
    if options.out is not None and os.path.lexists(options.out) and environment.rank() == 0:
        raise UserError(f"--out {one_line(options.out)}: the file exists; name another one")

    with local_source(options.src) as src:
        return _generate_from(options, src, read)


def _generate_from(options: Options, src: Path, prompts: Sequence[Prompt]) -> int:
    """Generate from a checkpoint on a disk: see ``run``."""
    # Imported here because these modules import torch.
    from composer3d.generate.sampling import Sampling
    from composer3d.generate.session import Request, generate_here, open_session
    from composer3d.runtime.process_group import pick_device

    request = Request(
        src=str(src),
        recipe=job.own_recipe(options.recipe),
        prompts=tuple(prompts),
        max_tokens=options.max_tokens,
        sampling=Sampling(
            temperature=options.temperature or 0.0,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        ),
        batch=options.batch,
        dtype=options.dtype,
        tokenizer=options.tokenizer and str(hub.tokenizer_file(options.tokenizer)),
        adds_special_tokens=not options.no_special_tokens,
        is_chat=options.chat,
    )
    if environment.is_rank() or (options.tp or 1) > 1:
        return tp.run_ranks(
            "generate",
            generate_rank,
            {"request": request, "out": options.out, "as_json": options.as_json},
            src=request.src,
            own=request.recipe,
            tp=options.tp or environment.world_size(),
            device=options.device,
        )

    with open_session(request) as session, _Report(session, options.out, options.as_json) as report:
        chosen: Any = options.device
        result = generate_here(session, pick_device(chosen), **report.callbacks)
        report.finish(result)
    return 0


def generate_rank(
    document: ParsedRecipe, request: "Request", out: str | None, as_json: bool
) -> int:
    """Generate as one rank of tp, and return its exit status. Rank 0 prints."""
    function = partial(_generate, request=request, out=out, as_json=as_json)
    return tp.run_rank(document, function, as_json=as_json)


def _generate(
    resolved: Resolved, rank: int, *, request: "Request", out: str | None, as_json: bool
) -> int:
    # Imported here because these modules import torch.
    from composer3d.generate.session import generate_on_ranks, open_session

    joined = job.join(
        resolved, rank, timeout_s=_TIMEOUT_S, advice=lambda: "start the command again"
    )
    with (
        open_session(request) as session,
        joined as world,
        ExitStack() as cleanup,
    ):
        if rank > 0:
            generate_on_ranks(session, resolved.recipe, world.device)
            return 0
        report = cleanup.enter_context(_Report(session, out, as_json))
        report.finish(generate_on_ranks(session, resolved.recipe, world.device, **report.callbacks))
    return 0


class _Report:
    """Prints completions: as they come if there is one prompt and a terminal, else at the end.

    ``out`` gets the line of a prompt as soon as it is done.
    """

    def __init__(self, session: "Session", out: str | None, as_json: bool) -> None:
        self._session, self._out, self._as_json = session, out, as_json
        self._file: TextIO | None = None
        self._stream: Any = None
        is_alone = len(session.prompts) == 1 and not as_json
        if session.tokenizer is not None and is_alone and sys.stdout.isatty():
            from composer3d.data.prompt_tokenizer import TextStream

            self._stream = TextStream(session.tokenizer)

    def __enter__(self) -> "_Report":
        for note in [*self._session.checkpoint.source.notes, *self._session.notes]:
            print(printable(note), file=sys.stderr)
        if self._out is not None:
            try:
                self._file = open(self._out, "x", encoding="utf-8")
            except OSError as error:
                raise UserError(
                    f"--out {one_line(self._out)}: cannot be written ({error.strerror}); name "
                    "another file"
                ) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            is_empty = self._file.tell() == 0
            self._file.close()
            if kind is not None and is_empty and self._out is not None:
                # So that the same command can be run again.
                os.unlink(self._out)

    @property
    def callbacks(self) -> dict[str, Callable[..., None]]:
        """The callbacks of ``Generator.generate``."""
        return {"on_token": self._on_token, "on_done": self._on_done}

    def _on_token(self, number: int, token: int) -> None:
        if self._stream is not None:
            # The stream exists on a terminal only.
            print(printable_lines(self._stream.add(token)), end="", flush=True)

    def _on_done(self, number: int, completion: "Completion") -> None:
        if self._file is not None:
            line = {"number": number, **self._as_values(number, completion)}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def _as_values(self, number: int, completion: "Completion") -> dict[str, Any]:
        prompt, tokens = self._session.request.prompts[number], self._session.prompts[number]
        return {
            "prompt": prompt.text,
            "prompt_tokens": tokens,
            "tokens": completion.tokens,
            "text": self._session.text_of(completion.tokens),
            "stopped": completion.stopped,
        }

    def finish(self, result: "Result") -> None:
        """Print what was not printed yet, and on stderr how fast it was."""
        if self._stream is not None:
            print(printable_lines(self._stream.finish()), flush=True)
        elif not self._as_json:
            for number, completion in enumerate(result.completions):
                self._print(number, completion)
        speed = result.new_tokens / max(result.seconds, 1e-9)
        stops = [completion.stopped for completion in result.completions]
        if self._as_json:
            answer = {
                "ok": True,
                "source": str(self._session.checkpoint.source.path),
                "completions": [
                    self._as_values(number, completion)
                    for number, completion in enumerate(result.completions)
                ],
                "new_tokens": result.new_tokens,
                "seconds": result.seconds,
                "tokens_per_s": speed,
            }
            print(json.dumps(answer))
            return
        counts = ", ".join(f"{stops.count(stop)} {stop}" for stop in dict.fromkeys(stops))
        print(
            f"{result.new_tokens} tokens in {result.seconds:.1f} s, {speed:.1f} tokens/s; "
            f"stopped by: {counts}",
            file=sys.stderr,
        )

    def _print(self, number: int, completion: "Completion") -> None:
        text = self._session.text_of(completion.tokens)
        shown = " ".join(map(str, completion.tokens)) if text is None else text
        if len(self._session.prompts) > 1:
            prompt: Prompt = self._session.request.prompts[number]
            begin = (prompt.text or "")[:_SHOWN_CHARACTERS]
            print(f"--- {prompt.place}{': ' if begin else ''}{one_line(begin) if begin else ''}")
        # A file or another program gets the text as it is. On a terminal, a stranger's tokenizer
        # could change the window, or what it shows.
        print(printable_lines(shown) if sys.stdout.isatty() else shown)
