"""The verdict on a layout: what every rank measured of its shards, put together and held against the bounds.

A tensor is known by its boxes: where a rank's part begins in the whole, and its shape. Ranks that hold the same box
must agree, so that of these the worst counts.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, NamedTuple

from composer3d.recipe.schema import AXES, Recipe

_EXACT = {"float64": 1e-9, "float32": 1e-5}
# A tensor's error is relative to its norm, or to this part of the norm of all where that is more: float32 rounds 2^29
# times as coarsely.
_LEAST = {"float64": 1e-12, "float32": 1e-12 * 2**29}
# A gradient may differ by this many times what float32 alone was seen to differ by, but not by more than _MOST: beyond
# that, a wrong one could hide in it.
_NOISE, _MOST = 8, 1e-3
_ROUNDING = 2.0**-52
# Of numbers in float32. A loss is a mean over tokens, and a norm after clipping is what clipping sets it to: few
# roundings. A norm has those of all gradients.
_NUMBERS = {"loss": 1e-6, "norm": 1e-5, "clipped": 5e-7}
_SCALARS = {"loss": "loss", "norm": "gradient norm", "clipped": "gradient norm after clipping"}
# Verdict's name of each kind. Of one step the first kind that is off is blamed: a wrong norm spoils weights.
_BLAMED = {
    "gradient": "max_grad",
    "loss": "loss",
    "norm": "grad_norm",
    "clipped": "grad_norm",
    "weight": "max_weight",
}


@dataclass(kw_only=True)
class Verdict:
    """What ``verify --json`` prints of one layout. Errors are relative; None where one is not finite or not known."""

    passed: bool
    world_size: int
    layout: str
    dtype: str
    loss_rel_err: float | None = None
    grad_norm_rel_err: float | None = None
    max_grad_rel_err: float | None = None
    max_weight_rel_err: float | None = None
    worst_parameter: str | None = None
    refused: bool = False
    error: str | None = None


class Piece(NamedTuple):
    """One rank's part ``a`` of a tensor after ``step``, held against the same box ``b`` of the reference."""

    step: int
    kind: str  # "gradient" or "weight"
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    diff: float  # ||a - b||^2
    square: float  # ||b||^2
    dot: float  # a . b
    problem: str | None = None  # what is wrong where there is nothing to measure


class Known(NamedTuple):
    """What the judge knows of the one-process run, which computes in float64.

    ``noise``: with float32, by step, how far from each gradient float32 alone came (``verify_rounding.noise``).
    ``norms``: by kind and step, each tensor's norm. ``shapes``: of each parameter. ``clips``: by step, whether it
    clipped.
    """

    noise: list[dict[str, float]]
    norms: dict[str, list[dict[str, float]]]
    shapes: dict[str, list[int]]
    clips: list[bool]


class Tensor(NamedTuple):
    """A whole tensor as the ranks hold it."""

    step: int
    kind: str
    name: str
    error: float
    allowed: float
    pieces: list[tuple[int, Piece]]  # with their ranks, the worst first
    boxes: list[Piece]  # the worst piece of each box
    problem: str | None


class Found(NamedTuple):
    """One comparison: of a tensor, or of a number as one rank has it."""

    step: int
    kind: str
    error: float
    allowed: float

    @property
    def off(self) -> bool:
        return not self.error <= self.allowed  # what is not a number is off


def judge(verdict: Verdict, ranks: list[dict[str, Any]], small: Recipe, known: Known) -> Verdict:
    """Fill in ``verdict`` from what ``verify_worker.run_composed`` returned on each rank."""
    tensors = _put_together(ranks, known, verdict.dtype)
    found = [Found(t.step, t.kind, t.error, t.allowed) for t in tensors]
    steps = len(known.norms["weight"])
    for (kind, count), rank in product(
        {"loss": steps + 1, "norm": steps, "clipped": steps}.items(), ranks
    ):
        # What a rank has not compared is off.
        errors = [*rank[kind], *[math.inf] * (count - len(rank[kind]))]
        for step, error in enumerate(errors):
            found.append(
                Found(step, kind, error, _allowed_number(kind, step, known, verdict.dtype))
            )
    for name in dict.fromkeys(_BLAMED.values()):
        every = [each.error for each in found if _BLAMED[each.kind] == name]
        setattr(
            verdict,
            f"{name}_rel_err",
            max(every, default=0.0) if all(map(math.isfinite, every)) else None,
        )
    verdict.worst_parameter = max(tensors, key=lambda t: t.error / t.allowed).name
    off = [each for each in found if each.off]
    verdict.passed = not off
    if verdict.passed:
        verdict.error = next((rank["rates"] for rank in ranks if rank["rates"]), None)
        verdict.passed = verdict.error is None
        return verdict
    step, kind, error, _ = min(
        off, key=lambda each: (each.step, [*_BLAMED].index(each.kind), -each.error)
    )
    if kind in _SCALARS:
        what = "validation loss" if step == steps else f"{_SCALARS[kind]} at step {step + 1}"
        right = (
            "every gradient and weight"
            if {each.kind for each in off} <= {*_SCALARS}
            else "every gradient so far"
        )
        verdict.error = f"{what} is off by {error:.1e}, while {right} is right"
        return verdict
    alike = [t for t in tensors if (t.step, t.kind) == (step, kind)]
    beyond = [t for t in alike if not t.error <= t.allowed]
    blamed = max(beyond, key=lambda t: t.error)
    verdict.worst_parameter = blamed.name
    which = _which([t.name for t in beyond], {t.name for t in alike})
    findings = (_headline(blamed, ranks), _factor(blamed, small), _where(beyond, ranks), which)
    verdict.error = "; ".join(filter(None, findings))
    return verdict


def _allowed_number(kind: str, step: int, known: Known, dtype: str) -> float:
    """The bound of a number's error. A norm that nothing clipped is no rounder after clipping than it was before."""
    if dtype == "float64":
        return _EXACT[dtype]
    return _NUMBERS["norm" if kind == "clipped" and not known.clips[step] else kind]


def _put_together(ranks: list[dict[str, Any]], known: Known, dtype: str) -> list[Tensor]:
    held: dict[tuple[int, str, str], list[tuple[int, Piece]]] = defaultdict(list)
    for rank, measured in enumerate(ranks):
        for piece in measured["pieces"]:
            number = piece.diff if math.isfinite(piece.diff) else math.inf
            held[piece.step, piece.kind, piece.name].append((rank, piece._replace(diff=number)))
    tensors = []
    for kind, steps in known.norms.items():
        for step, norms in enumerate(steps):
            for name in norms | dict.fromkeys(
                name for s, k, name in held if (s, k) == (step, kind)
            ):
                pieces = sorted(held[step, kind, name], key=lambda held: -held[1].diff)
                boxes: dict[Any, Piece] = {}
                for _, piece in pieces:
                    boxes.setdefault((piece.offset, piece.shape), piece)
                problem = next((piece.problem for _, piece in pieces if piece.problem), None)
                if problem is None and name in known.shapes:
                    problem = _uncovered(name, known.shapes[name], sorted(boxes))
                problem = problem or _not_held(name, {rank for rank, _ in pieces}, ranks)
                size = _size(norms.get(name, 0.0), math.hypot(*norms.values()), dtype)
                error = math.sqrt(sum(box.diff for box in boxes.values())) / size
                error = math.inf if problem else error
                noise = (
                    known.noise[step].get(name, 0.0) / size
                    if dtype == "float32" and kind == "gradient"
                    else 0.0
                )
                allowed = _allowed(kind, dtype, noise)
                tensors.append(
                    Tensor(step, kind, name, error, allowed, pieces, list(boxes.values()), problem)
                )
    return tensors


def _size(norm: float, of_all: float, dtype: str) -> float:
    """What the error of a tensor is relative to, by its norm and that of all."""
    if norm <= _ROUNDING * of_all and dtype == "float64":
        # It is zero but for rounding, as is the gradient of a query that sees one key: a rounding of all is allowed.
        return max(_ROUNDING * of_all / _EXACT[dtype], 1e-300)
    return max(norm, _LEAST[dtype] * of_all, 1e-300)


def _allowed(kind: str, dtype: str, noise: float) -> float:
    """The bound of a tensor's error. Of a weight in float32 ``Replay`` has taken off what rounding explains."""
    if kind == "weight":
        return _EXACT["float64"]
    return min(max(_EXACT[dtype], _NOISE * noise), _MOST)


def _uncovered(
    name: str, shape: Sequence[int], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> str | None:
    """What is wrong where boxes, each given once, do not hold every element of a tensor once."""
    boxes = [box for box in boxes if math.prod(box[1])]
    for (a, a_size), (b, b_size) in combinations(boxes, 2):
        if all(
            max(x, y) < min(x + m, y + n) for x, m, y, n in zip(a, a_size, b, b_size, strict=True)
        ):
            return f"ranks hold parts of {name} that overlap: {list(a_size)} at {list(a)}, {list(b_size)} at {list(b)}"
    count, whole = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    return None if count == whole else f"ranks hold only {count} of {whole} elements of {name}"


def _not_held(name: str, holders: set[int], ranks: list[dict[str, Any]]) -> str | None:
    """What is wrong where not all ranks of one stage, and they alone, hold a tensor, though replicas may hide it."""
    stages = {ranks[rank]["at"]["pp"] for rank in holders}
    if len(stages) > 1:
        return f"pipeline ranks {', '.join(map(str, sorted(stages)))} hold {name}, which is one stage's"
    lacking = [
        rank
        for rank, each in enumerate(ranks)
        if each["at"]["pp"] in stages and rank not in holders
    ]
    return (
        f"{name} is missing on rank {lacking[0]}, while others of its stage hold it"
        if lacking
        else None
    )


def _headline(tensor: Tensor, ranks: list[dict[str, Any]]) -> str:
    what = f"{tensor.kind} of {tensor.name} at step {tensor.step + 1}"
    if not tensor.pieces or (tensor.problem and not tensor.pieces[0][1].problem):
        return f"{what}: {tensor.problem}"
    rank, piece = tensor.pieces[0]
    amount = f" {piece.problem}" if piece.problem else f" is off by {tensor.error:.1e}"
    return f"{what}{amount} on {ranks[rank]['identity']}"


def _factor(tensor: Tensor, small: Recipe) -> str | None:
    """Name what has the size of the factor between a tensor and its reference, where the whole fits one factor."""
    diff, square, dot = (
        sum(getattr(piece, field) for piece in tensor.boxes) for field in ("diff", "square", "dot")
    )
    if tensor.problem or not math.isfinite(diff) or square == 0:
        return None
    scale = dot / square
    rest = (
        diff + 2 * dot - square - scale * dot
    )  # ||a - scale b||^2, as ||a||^2 = diff + 2 dot - ||b||^2
    if abs(scale - 1) < 1e-3 or abs(scale) < 1e-6 or rest > 1e-8 * square * scale * scale:
        return None
    sizes = {axis: size for axis in AXES if (size := getattr(small.mesh, axis)) > 1}
    products = [
        [
            " x ".join(axes)
            for axes in combinations(sizes, n)
            if _fits(scale, math.prod(sizes[a] for a in axes))
        ]
        for n in range(1, len(sizes) + 1)
    ]
    suspects = next(filter(None, products), [])
    if small.micro_batches > 1 and _fits(scale, small.micro_batches):
        suspects.append("micro-batches")
    return f"it is {scale:.4g} times the reference" + (
        f", suspect {' or '.join(suspects)}" if suspects else ""
    )


def _fits(scale: float, size: int) -> bool:
    return min(abs(scale / size - 1), abs(scale * size - 1)) < 1e-3


def _where(tensors: list[Tensor], ranks: list[dict[str, Any]]) -> str | None:
    """Which ranks are off, where not all are, and what their coordinates have in common."""
    off = {
        rank
        for t in tensors
        for rank, piece in t.pieces
        if 0 < piece.diff >= 1e-6 * t.pieces[0][1].diff
    }
    if not off or len(off) == len(ranks):
        return None
    places = [ranks[rank]["at"] for rank in sorted(off)]
    varying = [axis for axis in AXES if len({rank["at"][axis] for rank in ranks}) > 1]
    common = {axis: places[0][axis] for axis in varying if len({at[axis] for at in places}) == 1}
    with_ = " with " + " ".join(f"{axis}{at}" for axis, at in common.items()) if common else ""
    return f"only on rank{'s' * (len(off) > 1)} {', '.join(map(str, sorted(off)))}{with_}"


_FAMILIES: tuple[Callable[[str], str], ...] = (
    str,
    lambda name: re.sub(r"^blocks\.[^.]+\.", "blocks.*.", name),  # in any block
    lambda name: re.sub(
        r"^(blocks\.[^.]+|[^.]+).*", r"\1", name
    ),  # a block, or another part of the model
)


def _which(off: list[str], names: Iterable[str]) -> str | None:
    """How many parameters are off and, where that can be said shortly, which."""
    rest = [name for name in names if name not in off]
    if not rest:
        return f"all {len(off)} are off" if len(off) > 1 else None
    texts = [", ".join(sorted(off))] if len(off) <= 2 else []
    for group, others, prefix in ((off, rest, ""), (rest, off, "all but ")) if not texts else ():
        for family in _FAMILIES:
            families = {family(name) for name in group}
            if families.isdisjoint(family(name) for name in others):
                texts.append(prefix + ", ".join(sorted(families)))
    text = min(texts, key=len)
    return f"{len(off)} of {len(off) + len(rest)} are off" + (
        f": {text}" if len(text) <= 200 else ""
    )
