"""The adapter to lm-eval: its model API (version 0.4.13) on a checkpoint's model.

This file imports lm_eval, so it is imported only after ``tasks.require_lm_eval``.

The rules by which a text becomes tokens, is cut and is scored are those of lm-eval's own adapter to
transformers, so that the figures are the same.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from composer3d.data.prompt_tokenizer import PromptTokenizer
from composer3d.facts.errors import DataError
from composer3d.facts.text import one_line
from composer3d.generate.crew import Crew
from composer3d.generate.sampling import Sampling
from composer3d.generate.scores import Passage
from composer3d.runtime.progress import Progress

# The answers to a question share its tokens, so the last texts are kept.
_KEPT_TEXTS = 1024

# What a task may ask of generation. Other settings would be ignored, and the figures be wrong.
_SETTINGS = frozenset({"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"})

_SHOWN_CHARACTERS = 60


class _Generation(NamedTuple):
    """How a request goes on. Requests that are equal in it run together."""

    stops: tuple[str, ...]
    max_tokens: int
    sampling: Sampling


class HarnessModel(TemplateLM):
    """A model of lm-eval, for ``lm_eval.simple_evaluate(model=...)``.

    ``composer3d.lm_eval_model`` makes one, and the command ``eval --tasks`` uses it.

    Args:
        crew: computes.
        tokenizer: of the model. It adds no special tokens by itself.
        vocab: the number of tokens that the model has.
        longest: the most tokens of a sequence. A longer text loses its beginning.
        adds_special_tokens: whether texts get the special tokens that the tokenizer adds, such as
            ``<s>``, unless they begin with that already.
    """

    def __init__(
        self,
        crew: Crew,
        tokenizer: PromptTokenizer,
        *,
        vocab: int,
        longest: int,
        adds_special_tokens: bool,
    ) -> None:
        super().__init__()
        self._crew, self._text_tokenizer = crew, tokenizer
        self._vocab, self._longest = vocab, longest
        self._adds_special_tokens = adds_special_tokens
        self._encode = lru_cache(_KEPT_TEXTS)(self._encode_anew)
        self._begin_text = self._name_of(self._begin)
        self._end_text = self._name_of(tokenizer.end)

    @property
    def _begin(self) -> int | None:
        """The token before a text that has no context, if there is one."""
        tokenizer = self._text_tokenizer
        return tokenizer.end if tokenizer.begin is None else tokenizer.begin

    def _name_of(self, token: int | None) -> str | None:
        """Return the text of a special token, None if there is none."""
        if token is None:
            return None
        return self._text_tokenizer.decode([token], skips_special=False) or None

    # --- what lm-eval asks about the model ---

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text.

        Raises DataError if the tokenizer names none.
        """
        return self._required(self._text_tokenizer.end)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: the first one, or else the last one.

        Raises DataError if the tokenizer names neither.
        """
        return self._required(self._begin)

    def _required(self, token: int | None) -> int:
        if token is None:
            raise DataError(
                f"{self._text_tokenizer.name} names no token that begins or ends a text, which a "
                "text without context needs before it; give the tokenizer's folder by --tokenizer"
            )
        return token

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence."""
        return self._longest

    @property
    def max_gen_toks(self) -> int:
        """The most new tokens, where a task does not say."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer, by which lm-eval's cache tells chat templates apart."""
        return self._text_tokenizer.name

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render messages with the chat template, and after them what stands before an answer.

        Raises:
            DataError: there is no template, it fails, or the answer has begun already.
        """
        if not add_generation_prompt:
            raise DataError(
                "--chat: a task begins the answer itself (gen_prefix), which is not supported; "
                "leave --chat out, or the task"
            )
        return self._text_tokenizer.ask(chat_history)

    # --- text to tokens ---

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text.

        Args:
            string: the text.
            add_special_tokens: whether it gets special tokens; None: as the model is set, but none
                if it begins with the token that begins a text.

        Raises:
            DataError: the tokenizer fails, or has a token that the model does not have.
        """
        if add_special_tokens is None:
            has_begin = self._begin_text is not None and string.startswith(self._begin_text)
            add_special_tokens = self._adds_special_tokens and not has_begin
        return list(self._encode(string, add_special_tokens))

    def _encode_anew(self, text: str, adds_special_tokens: bool) -> tuple[int, ...]:
        tokens = self._text_tokenizer.encode_as_is(text, adds_special_tokens=adds_special_tokens)
        largest = max(tokens, default=0)
        if largest >= self._vocab:
            raise DataError(
                f"token {largest} is beyond the model's vocabulary of {self._vocab}; give the "
                "model's own tokenizer"
            )
        return tuple(tokens)

    # --- log-likelihoods ---

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Score the continuation of each context; see ``TemplateLM.loglikelihood``."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        passages = [self._passage(*request) for request in requests]
        with Progress("log-likelihoods", len(passages), "passages") as progress:
            scores = self._crew.score(passages, on_done=progress.advance)
        found = [(score.log_likelihood, score.is_greedy) for score in scores]
        for request, answer in zip(requests, found, strict=True):
            # Windows of a whole text have none.
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return found

    def _passage(self, texts: Any, context: list[int], continuation: list[int]) -> Passage:
        """Return a context and its continuation, without the beginning that is too long.

        The model reads all tokens but the last, so there may be one more than the longest sequence
        has.
        """
        if not 1 <= len(continuation) <= self._longest:
            shown = "" if texts is None else f" {one_line(texts[1], _SHOWN_CHARACTERS)!r}"
            raise DataError(
                f"the continuation{shown} has {len(continuation)} tokens; from 1 to "
                f"{self._longest}, the longest sequence, can be scored"
            )
        tokens = (*context, *continuation)[-(self._longest + 1) :]
        return Passage(tokens, len(continuation))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Score whole texts, each token once; a long text in windows of the longest sequence.

        Args:
            requests: each with one text.
            disable_tqdm: is not used.

        Returns:
            The log-likelihood of each text.
        """
        windows: list[tuple[Any, list[int], list[int]]] = []
        texts_of: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for pair in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._longest,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(pair)))
                texts_of.append(number)

        sums = [0.0] * len(requests)
        for number, (value, _) in zip(texts_of, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    # --- generation ---

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Go on with each context up to a text that ends it.

        A request that comes several times, because its task asks for several samples, gets another
        seed each time.

        Args:
            requests: each with a context and the settings of its task.
            disable_tqdm: is not used.

        Returns:
            The text after each context, without the text that ends it.

        Raises:
            DataError: a task has settings that are not supported, or leaves no room for a context.
        """
        groups: dict[_Generation, list[int]] = {}
        repeats: Counter[tuple[str, _Generation]] = Counter()
        for number, request in enumerate(requests):
            text, settings = request.args
            generation = self._generation_of(settings)
            seed = repeats[text, generation]
            repeats[text, generation] += 1
            if generation.sampling.temperature > 0:
                sampling = Sampling(**{**vars(generation.sampling), "seed": seed})
                generation = generation._replace(sampling=sampling)
            groups.setdefault(generation, []).append(number)

        texts = [""] * len(requests)
        with Progress("generation", len(requests), "prompts") as progress:
            for generation, numbers in groups.items():
                contexts = [requests[number].args[0] for number in numbers]
                found = self._generate(contexts, generation, progress)
                for number, text in zip(numbers, found, strict=True):
                    texts[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    def _generation_of(self, settings: Mapping[str, Any]) -> _Generation:
        """Read the settings of a task, with lm-eval's defaults."""
        if not isinstance(settings, Mapping):
            raise DataError(f"the settings of generation are {one_line(settings)}, no table")
        known = normalize_gen_kwargs(dict(settings), self.max_gen_toks)
        if others := sorted(set(known) - _SETTINGS):
            raise DataError(
                f"a task sets {', '.join(map(one_line, others))} for generation, which is not "
                f"supported; {', '.join(sorted(_SETTINGS))} are"
            )
        temperature = float(known.get("temperature", 0.0)) if known["do_sample"] else 0.0
        if known["do_sample"] and temperature <= 0:
            raise DataError(
                "a task sets do_sample without a temperature above 0 for generation; give it one"
            )
        stops = handle_stop_sequences(known["until"], eos=self._end_text)
        max_tokens = known["max_gen_toks"]
        if not 0 < max_tokens < self._longest:
            raise DataError(
                f"a task asks for up to {max_tokens} new tokens, and a sequence may have "
                f"{self._longest}, of which some must be the context; lower max_gen_toks of the "
                "task"
            )
        return _Generation(
            tuple(stop for stop in stops if stop),
            max_tokens,
            Sampling(
                temperature=temperature,
                top_k=int(known.get("top_k") or 0),
                top_p=float(known.get("top_p") or 1.0),
            ),
        )

    def _generate(
        self, contexts: Sequence[str], generation: _Generation, progress: Progress
    ) -> list[str]:
        room = self._longest - generation.max_tokens
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        if not all(prompts):
            raise DataError("a task has a context without a token to go on with")
        completions = self._crew.generate(
            prompts,
            max_tokens=generation.max_tokens,
            sampling=generation.sampling,
            wants_stop=lambda _, tokens: self._has_stop(tokens, generation.stops),
            on_done=lambda _, __: progress.advance(),
        )
        texts = [self._text_tokenizer.decode(completion.tokens) for completion in completions]
        return [
            postprocess_generated_text(text, list(generation.stops), think_end_token=None)
            for text in texts
        ]

    def _has_stop(self, tokens: Sequence[int], stops: Sequence[str]) -> bool:
        """Return whether the last of some tokens completes a text that ends generation.

        A token has one byte of text at least, so the last tokens are enough. There are two more, as
        a tokenizer may drop a space before the first one, or half a character.
        """
        most = max((len(stop.encode()) for stop in stops), default=0) + 2
        text = self._text_tokenizer.decode(tokens[-most:], skips_special=False)
        return any(stop in text for stop in stops)
