"""Generate tokens after prompts, many prompts at a time, with a cache of keys and values.

Prompts of the same length are read together, in one call or in consecutive parts. Then the prompts
of a batch go on together, one token a call. A prompt that is done leaves its place to the next one.
Nothing is padded, and a sequence never sees another one.

Shapes: B sequences, T tokens, N positions, C model width, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.facts.errors import CheckpointError, PlanError
from composer3d.generate.cache import (
    AttendCached,
    CachedSequence,
    KeyValueCache,
    RememberLatents,
    attend_remembered,
)
from composer3d.generate.sampling import Sampler, Sampling
from composer3d.models.contract import Parts, ShardingPlan
from composer3d.parallel.tensor.collectives import gather_columns

# A longer prompt is read in parts of this many tokens, which bounds the memory of its activations
# and of the mask of a window.
PREFILL_TOKENS = 2048

Stop = Literal["end", "wanted", "max_tokens", "longest"]

# wants_stop(prompt, tokens): whether these tokens are all that is to follow a prompt.
WantsStop = Callable[[int, Sequence[int]], bool]


class Completion(NamedTuple):
    """What follows a prompt.

    Attributes:
        tokens: the new tokens, with the end-of-text token if that was one.
        stopped: why there are no more: "end", an end-of-text token; "wanted", ``wants_stop`` of
            ``Generator.generate``; "max_tokens", enough tokens; "longest", the longest sequence of
            the model.
    """

    tokens: list[int]
    stopped: Stop


@dataclass
class _Sequence:
    """A prompt and what follows it.

    Attributes:
        prompt: its number.
        sampler: chooses its tokens.
        room: the number of tokens that may still follow.
        seen: the number of its tokens that are in the cache.
        tokens: the tokens that follow the prompt.
    """

    prompt: int
    sampler: Sampler
    room: int
    seen: int = 0
    tokens: list[int] = field(default_factory=list)


class Generator:
    """Generates tokens with one model.

    Args:
        model: the whole model, or the only stage of a composed one. It is changed: its modules get
            other functions in their seams ``attend``, ``remember`` and ``cross_entropy``, so it
            cannot be trained afterwards.
        plan: its sharding plan.
        device: the device of its parameters.
        end_tokens: tokens that end a text.
        longest: the number of tokens of the longest sequence that the model supports; None: no
            limit is known.
        tp_group: the ranks that hold the parts of each layer; None: this process holds the model.

    Raises:
        PlanError: the model has no head that gives logits.
    """

    def __init__(
        self,
        model: Parts,
        plan: ShardingPlan,
        *,
        device: torch.device,
        end_tokens: Sequence[int] = (),
        longest: int | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model, self._device, self._tp_group = model, device, tp_group
        self._end_tokens, self._longest = frozenset(end_tokens), longest
        self._logits_NV: Tensor | None = None
        for part in (model.first, model.blocks, model.last):
            part.eval()
            for module in part.modules():
                if hasattr(module, "remember"):
                    module.remember, module.attend = RememberLatents(), attend_remembered
                elif hasattr(module, "attend"):
                    module.attend = AttendCached()
        self._replace_loss(plan)

    def _replace_loss(self, plan: ShardingPlan) -> None:
        """Put a function that keeps the logits into the head's seam ``cross_entropy``."""
        heads = [
            module
            for name, module in self._model.last.named_modules(prefix="last")
            if plan.style_of(name) == "head" and hasattr(module, "cross_entropy")
        ]
        if len(heads) != 1:
            raise PlanError(
                f"{type(self._model.last).__name__} has {len(heads)} modules of style "
                '"head" with the seam `cross_entropy`, which gives generation the logits; give it '
                "one, as composer3d.models.layers.head.Head is"
            )
        (head,) = heads
        vocab = head.weight.shape[0]

        def keep_logits(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
            if self._tp_group is not None:
                logits_NV = gather_columns(logits_NV, vocab, self._tp_group)
            self._logits_NV = logits_NV
            return logits_NV.new_zeros(())

        head.cross_entropy = keep_logits

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        batch: int = 8,
        prefill_tokens: int = PREFILL_TOKENS,
        wants_stop: WantsStop | None = None,
        on_token: Callable[[int, int], None] | None = None,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Generate the tokens that follow each prompt.

        The tokens of a prompt do not depend on the other prompts, nor on ``batch``, but for one
        thing: a product of several rows may be rounded otherwise than that of one. Where the
        logits of two tokens are equal up to this rounding, another of them may be chosen. With
        ``batch=1``, each prompt has the bits that it has alone.

        Args:
            prompts: the tokens of each prompt.
            max_tokens: the most tokens that follow a prompt.
            sampling: how tokens are chosen; by default the most likely one.
            batch: the most prompts that go on together.
            prefill_tokens: the most tokens of prompts in a call, over all rows. A longer prompt is
                read in parts.
            wants_stop: is called with the number of a prompt and all tokens that follow it so far,
                and says whether they are enough. With a ``tp_group``, the first rank's answer
                counts for all.
            on_token: is called with the number of a prompt and its next token.
            on_done: is called with the number of a prompt and its completion, when it is done.

        Returns:
            The completion of each prompt. With a ``tp_group`` they are the same on all ranks.

        Collectives, with a ``tp_group``: those of tensor parallelism in forward, one all-gather of
        the logits and one broadcast of the chosen tokens for each call of the model.

        Raises:
            CheckpointError: a logit is not finite.
            ValueError: a prompt is empty, or has no room below the longest sequence.
        """
        sampling = sampling or Sampling()
        waiting: deque[_Sequence] = deque()
        for number, prompt in enumerate(prompts):
            room = max_tokens
            if self._longest is not None:
                room = min(room, self._longest - len(prompt))
            if not prompt or room < 1:
                raise ValueError(f"prompt {number} has {len(prompt)} tokens")
            waiting.append(_Sequence(number, Sampler(sampling, prompt), room))
        longest = max((len(prompts[one.prompt]) + one.room for one in waiting), default=1)
        # ``longest_call`` does not depend on the prompts: otherwise the order of the keys in a
        # ring, and so the rounding, would depend on the other prompts.
        cache = KeyValueCache(
            min(batch, len(prompts)), longest=longest, longest_call=prefill_tokens
        )

        completions: list[Completion | None] = [None] * len(prompts)

        def add(one: _Sequence, token: int, is_enough: bool) -> bool:
            """Add a token to a sequence, and return whether the sequence is done."""
            one.tokens.append(token)
            if on_token is not None:
                on_token(one.prompt, token)
            stopped: Stop
            if token in self._end_tokens:
                stopped = "end"
            elif is_enough:
                stopped = "wanted"
            elif len(one.tokens) < one.room:
                return False
            else:
                stopped = "max_tokens" if one.room == max_tokens else "longest"
            completion = Completion(one.tokens, stopped)
            completions[one.prompt] = completion
            if on_done is not None:
                on_done(one.prompt, completion)
            return True

        # The rows of the cache from 0 on, without gaps.
        running: list[_Sequence] = []

        def add_from(first: int, logits_BV: Tensor) -> None:
            """Add a token to the sequences from row ``first`` on; close the gaps of those done."""
            chosen = self._choose(logits_BV, running[first:], sampling, wants_stop)
            are_done = [add(one, *pair) for one, pair in zip(running[first:], chosen, strict=True)]
            for row in reversed([first + row for row, is_done in enumerate(are_done) if is_done]):
                final = len(running) - 1
                if row < final:
                    cache.move_row(final, row)
                    running[row] = running[final]
                running.pop()

        while waiting or running:
            while waiting and len(running) < cache.rows:
                first = len(running)
                length = len(prompts[waiting[0].prompt])
                most = min(cache.rows - first, max(1, prefill_tokens // length))
                while waiting and most and len(prompts[waiting[0].prompt]) == length:
                    running.append(waiting.popleft())
                    most -= 1
                add_from(first, self._read_prompts(cache, first, running[first:], prompts))
            if running:
                add_from(0, self._next_logits(cache, running))
        return [completion for completion in completions if completion is not None]

    def _read_prompts(
        self,
        cache: KeyValueCache,
        first_row: int,
        sequences: Sequence[_Sequence],
        prompts: Sequence[Sequence[int]],
    ) -> Tensor:
        """Put prompts of one length into rows of the cache; return the logits (B, V) after them."""
        prompts_BT = torch.tensor([list(prompts[one.prompt]) for one in sequences])
        logits_BV = None
        for part_BT in prompts_BT.split(cache.longest_call, dim=1):
            starts_B, length = [one.seen for one in sequences], part_BT.shape[1]
            seq = CachedSequence(cache, first_row, starts_B, length, self._device)
            for one in sequences:
                one.seen += length
            logits_BV = self._run(part_BT, seq, sequences[0].seen == prompts_BT.shape[1])
        assert logits_BV is not None
        return logits_BV

    def _next_logits(self, cache: KeyValueCache, running: Sequence[_Sequence]) -> Tensor:
        """Put the last token of each sequence into the cache, and return the next logits (B, V)."""
        starts_B = [one.seen for one in running]
        seq = CachedSequence(cache, 0, starts_B, 1, self._device)
        for one in running:
            one.seen += 1
        logits_BV = self._run(torch.tensor([one.tokens[-1:] for one in running]), seq, True)
        assert logits_BV is not None
        return logits_BV

    def _run(self, tokens_BT: Tensor, seq: CachedSequence, needs_logits: bool) -> Tensor | None:
        """Run the model, and return the logits (B, V) after the last token of each row."""
        h_BTC = self.hidden(tokens_BT, seq)
        return self.logits(h_BTC[:, -1:], seq) if needs_logits else None

    def hidden(self, tokens_BT: Tensor, seq: CachedSequence) -> Tensor:
        """Read tokens (B, T) into the cache of ``seq``.

        Returns:
            The residual stream after the last block (B, T, C), the same on all ranks of tp.

        Collectives, with a ``tp_group``: those of tensor parallelism in forward.
        """
        return self._model.hidden(tokens_BT.to(self._device), seq)

    def logits(self, h_BTC: Tensor, seq: CachedSequence) -> Tensor:
        """Compute the logits after some positions of what ``hidden`` has returned.

        Args:
            h_BTC: the residual stream of N = B x T positions.
            seq: the argument of ``hidden``.

        Returns:
            The logits (N, V), the same on all ranks of tp.

        Collectives, with a ``tp_group``: one all-gather of the logits.
        """
        labels_BT = torch.zeros(h_BTC.shape[:2], dtype=torch.int64, device=self._device)
        self._model.last(h_BTC, seq, labels_BT)
        logits_NV, self._logits_NV = self._logits_NV, None
        assert logits_NV is not None  # the seam ``cross_entropy`` has kept them
        return logits_NV

    def _choose(
        self,
        logits_BV: Tensor,
        sequences: Sequence[_Sequence],
        sampling: Sampling,
        wants_stop: WantsStop | None,
    ) -> list[tuple[int, bool]]:
        """Choose the next token of each sequence, and whether the sequence has enough with it."""
        most_B, tokens_B = logits_BV.max(dim=-1)
        is_random = sampling.temperature > 0
        # The largest is NaN if any is.
        require_finite(logits_BV if is_random else most_B)
        if is_random:
            rows = zip(sequences, logits_BV.cpu(), strict=True)
            chosen = [one.sampler.choose(logits_V) for one, logits_V in rows]
            tokens_B = torch.tensor(chosen, device=self._device)
        enough_B = torch.zeros_like(tokens_B)
        if wants_stop is not None:
            pairs = zip(sequences, tokens_B.tolist(), strict=True)
            are_enough = [wants_stop(one.prompt, [*one.tokens, token]) for one, token in pairs]
            enough_B = torch.tensor(are_enough, dtype=torch.int64, device=self._device)
        both_2B = torch.stack((tokens_B, enough_B))
        if self._tp_group is not None:
            # All ranks have computed the same. If their kernels ever differed in a bit, they would
            # wait for each other's collectives of different sequences.
            source = dist.get_global_rank(self._tp_group, 0)
            dist.broadcast(both_2B, src=source, group=self._tp_group)
        tokens, enough = both_2B.tolist()
        return list(zip(tokens, map(bool, enough), strict=True))


def require_finite(values: Tensor) -> None:
    """Raise CheckpointError if a logit, or what was computed from logits, is not finite."""
    if not values.isfinite().all():
        raise CheckpointError(
            "the model gives a logit that is not finite; its weights are damaged, or --dtype "
            "cannot hold its numbers: use float32"
        )
