"""The cache of keys and values, or of latents, and the functions that read and fill it.

Shapes are in the names: B rows of a call, T new tokens of each row, H query heads, K key-value
heads, D head width, R width of a latent, S slots of a row.

The cache reaches the modules that attend through ``seq``: generation calls the model with a
``CachedSequence``. So the forward pass is the one of training, and no model knows of the cache.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from composer3d.facts.errors import DeviceError
from composer3d.models.contract import SequenceInfo
from composer3d.models.layers.attention import bias_of, sdpa
from composer3d.parallel.context import kernels
from composer3d.planner.memory import GIB

# The most queries whose scores are in memory at a time, of all heads and in float32.
_MASKED_QUERIES = 128


class KeyValueCache:
    """What all modules of a model that attend keep of up to ``rows`` sequences.

    A module keeps keys and values, or one latent from which it computes both.

    The memory of a module is allocated when it is first called, because its output decides the
    number of heads: under tensor parallelism, this rank's share. It is allocated once.

    A module with a sliding window keeps only the last positions, in a ring: position p is in slot
    p % S, where S is the window and the longest call together.

    Args:
        rows: the number of sequences that are in memory at the same time.
        longest: the number of positions of the longest sequence.
        longest_call: the largest T of a call.
    """

    def __init__(self, rows: int, *, longest: int, longest_call: int) -> None:
        self.rows, self.longest, self.longest_call = rows, longest, longest_call
        self._layers: dict[object, tuple[Tensor, ...]] = {}

    def slots(self, window: int) -> int:
        """Return the number of slots of each row in a module with this window; 0: no window."""
        if window == 0:
            return self.longest
        # A call writes its T keys before its first query reads, so that query's whole window must
        # remain: window - 1 positions before the T new ones.
        return min(self.longest, window - 1 + self.longest_call)

    def of_module(self, module: object, new: Sequence[Tensor], window: int) -> tuple[Tensor, ...]:
        """Return what a module keeps, for each tensor of ``new`` one (rows, K, S, D).

        Args:
            module: what distinguishes the module from the others.
            new: what it is to keep of a call, each (B, K, T, D): they decide the sizes, the dtype
                and the device.
            window: its sliding window.

        Raises:
            DeviceError: there is not enough memory.
        """
        if module not in self._layers:
            slots = self.slots(window)
            sizes = [(self.rows, x.shape[1], slots, x.shape[3]) for x in new]
            try:
                # Zeros: a slot that is not filled yet has weight 0, and 0 times NaN would be NaN.
                self._layers[module] = tuple(
                    x.new_zeros(size) for x, size in zip(new, sizes, strict=True)
                )
            except RuntimeError:
                gib = sum(map(prod, sizes)) * new[0].itemsize / GIB
                raise DeviceError(
                    f"there is no memory for the keys and values of {self.rows} sequences of up to "
                    f"{self.longest:,} tokens, {gib:,.1f} GiB in each layer; lower --batch, "
                    "--max-tokens or the length of the prompts, or use --dtype bfloat16"
                ) from None
        return self._layers[module]

    def move_row(self, source: int, target: int) -> None:
        """Copy the row ``source`` over the row ``target``."""
        for layer in self._layers.values():
            for tensor in layer:
                tensor[target] = tensor[source]

    @property
    def bytes(self) -> int:
        """The memory of all modules that were called."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)


class CachedSequence(SequenceInfo):
    """The T next tokens of consecutive rows of a cache.

    Args:
        cache: the cache.
        first_row: the row of the cache to which the first row of the call belongs.
        starts_B: for each row of the call, the number of positions that are in the cache already.
        length: T.
        device: the device of the model.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        first_row: int,
        starts_B: Sequence[int],
        length: int,
        device: torch.device,
    ) -> None:
        starts_B1 = torch.tensor(starts_B, device=device)[:, None]
        super().__init__(starts_B1 + torch.arange(length, device=device))
        self.cache = cache
        self.rows = slice(first_row, first_row + len(starts_B))
        self.starts_B = starts_B
        self.length = length

    def view(self, window: int, dtype: torch.dtype) -> "_View":
        """Return what queries of a module with this window see; all such modules share it."""
        key = (_View, window, dtype)
        if key not in self.shared:
            self.shared[key] = self._make_view(window, dtype)
        return self.shared[key]

    def _make_view(self, window: int, dtype: torch.dtype) -> "_View":
        slots = self.cache.slots(window)
        first, last = min(self.starts_B), max(self.starts_B) + self.length - 1
        are_equal = min(self.starts_B) == max(self.starts_B)
        has_wrapped = last >= slots
        begin, end = 0, slots
        if not has_wrapped:
            begin, end = max(0, first + 1 - window) if window else 0, last + 1

        is_contiguous = are_equal and first % slots + self.length <= slots
        write = slice(first % slots, first % slots + self.length) if is_contiguous else None
        if not has_wrapped and are_equal:
            if self.length == 1:
                return _View(write, begin, end, None, is_causal=False)
            if first == 0 and not 0 < window < self.length:
                return _View(write, begin, end, None, is_causal=True)

        # The position in each slot after this call: the last one of the row that belongs there. It
        # is negative if the slot is still empty.
        query_B1T1 = self.positions_BT[:, None, :, None]
        last_B111 = query_B1T1[:, :, -1:]
        slot_S = torch.arange(begin, end, device=query_B1T1.device)
        held_B11S = last_B111 - (last_B111 - slot_S) % slots
        mask_B1TS = (held_B11S >= 0) & (held_B11S <= query_B1T1)
        if window:
            mask_B1TS &= held_B11S > query_B1T1 - window
        return _View(write, begin, end, bias_of(mask_B1TS, dtype), is_causal=False)


class _View(NamedTuple):
    """Where a call writes its keys, and which slots its queries see.

    Attributes:
        write: the slots of the T new positions, if they are the same consecutive ones in all rows.
        begin, end: the slots that any query of the call may see.
        bias: is added to the scores; None: none is needed.
        is_causal: as in ``sdpa``.
    """

    write: slice | None
    begin: int
    end: int
    bias: Tensor | None
    is_causal: bool


class AttendCached:
    """The function ``attend`` of one module: write new keys and values, and attend to all.

    Its arguments are those of ``attend_sdpa``, with a ``CachedSequence`` as ``seq``.
    """

    def __call__(
        self,
        q_BHTD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        *,
        seq: CachedSequence,
        window: int,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        k_BKSD, v_BKSD = _remember(self, (k_BKTD, v_BKTD), seq, window)
        return attend_remembered(q_BHTD, k_BKSD, v_BKSD, seq=seq, window=window, sinks_H=sinks_H)


class RememberLatents:
    """The function ``remember`` of one module: write new latents, and return all that it sees.

    With it, the module's ``attend`` is ``attend_remembered``.
    """

    def __call__(self, latents_BTR: Tensor, *, seq: CachedSequence) -> Tensor:
        (latents_B1SR,) = _remember(self, (latents_BTR[:, None],), seq, window=0)
        return latents_B1SR[:, 0]


def attend_remembered(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    seq: CachedSequence,
    window: int,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend to the keys and values of all slots that a call sees."""
    view = seq.view(window, q_BHTD.dtype)
    if sinks_H is None:
        return sdpa(q_BHTD, k_BKSD, v_BKSD, view.bias, is_causal=view.is_causal)
    if view.bias is None:
        return _attend_with_sinks(q_BHTD, k_BKSD, v_BKSD, sinks_H, is_causal=view.is_causal)
    # With a mask, a GPU builds all scores of a call: so a call has few queries.
    parts = zip(
        q_BHTD.split(_MASKED_QUERIES, 2), (view.bias == 0).split(_MASKED_QUERIES, 2), strict=True
    )
    outs = [_attend_with_sinks(q, k_BKSD, v_BKSD, sinks_H, mask=mask) for q, mask in parts]
    return torch.cat(outs, 2)


def _attend_with_sinks(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    sinks_H: Tensor,
    *,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    out_BHTD, lse_BHT = kernels.attend_block(
        q_BHTD.contiguous(), k_BKSD, v_BKSD, causal=is_causal, mask=mask
    )
    return kernels.add_sinks(out_BHTD, lse_BHT, sinks_H)[0].to(q_BHTD.dtype)


def _remember(
    module: object, new: Sequence[Tensor], seq: CachedSequence, window: int
) -> list[Tensor]:
    """Write what a module is to keep, each (B, K, T, D), and return the slots that it sees."""
    view = seq.view(window, new[0].dtype)
    seen = []
    for whole, x_BKTD in zip(seq.cache.of_module(module, new, window), new, strict=True):
        rows_BKSD = whole[seq.rows]
        if view.write is not None:
            rows_BKSD[:, :, view.write] = x_BKTD
        else:
            slot_BT = seq.positions_BT % whole.shape[2]
            row_B1 = torch.arange(slot_BT.shape[0], device=slot_BT.device)[:, None]
            # An index before and after a slice puts its dims first: (B, T, K, D).
            rows_BKSD[row_B1, :, slot_BT] = x_BKTD.transpose(1, 2)
        seen.append(rows_BKSD[:, :, view.begin : view.end])
    return seen
