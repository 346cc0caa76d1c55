"""Judge a layout: combine the errors that all ranks measured on their shards, and check the bounds.

The box of a shard is its offset in the whole tensor, and its shape. Several ranks can hold the same
box, such as data-parallel replicas. The worst error of a box counts, because all of them must be
right.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal, NamedTuple

from composer3d.facts.text import one_line, printable
from composer3d.recipe.schema import AXES, Recipe

# Bounds. All errors are relative.

EXACT = {"float64": 1e-9, "float32": 1e-5}
# The error of a tensor is relative to its norm, or to this fraction of the norm of all tensors,
# whichever is larger. Rounding in float32 is 2^29 times as coarse as in float64.
_SMALLEST_NORM = {"float64": 1e-12, "float32": 1e-12 * 2**29}
# Rounding explains this multiple of the noise that one process measures (``rounding.Noise``). In
# float32 the noise of every tensor is above the bound, so the multiple has to be small.
_NOISE_MULTIPLE = {"float64": 32, "float32": 8}
# But it explains no more than this share of the number itself, or, in float64, this share of the
# norm of all gradients: a wrong number could hide below a larger bound.
_LARGEST_NOISE_BOUND, _LARGEST_NOISE_OF_ALL = 1e-3, 1e-6
# Twice the rounding of one number, relative to it.
_ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23}
# Bounds of scalars in float32. The loss and the clipped norm have few roundings: the loss is a mean
# over tokens, and clipping sets its norm. The norm before it has the roundings of all gradients.
_SCALAR_BOUNDS = {"loss": 1e-6, "norm": 1e-5, "clipped": 5e-7}

_SCALAR_NAMES = {
    "loss": "loss",
    "norm": "gradient norm",
    "clipped": "gradient norm after clipping",
}
# The first of these kinds that fails in a step is blamed, because a fault in one kind spreads to
# later ones: a wrong norm makes the weights wrong.
_BLAME_ORDER = ("gradient", "loss", "norm", "clipped", "weight")


# What ``Verdict.float32`` adds to the dtype in the line of a verdict.
_ADDITIONS = {"exact": ", and float32", "undecided": "; float32 undecided"}


@dataclass(kw_only=True)
class Verdict:
    """The result of a proof of one layout, which ``verify --json`` prints.

    The four relative errors are None if they are not finite or not known.

    Attributes:
        passed: whether all errors are within their bounds.
        world_size: the number of processes of the small recipe; 0 if there is no small recipe.
        layout: the layout in words.
        dtype: the dtype of the composed job: "float64" or "float32".
        float32: whether one small recipe was exact in float32 too, after all were in float64:
            "exact", or "undecided" if rounding in float32 is too coarse for an answer. None: there
            was no such run. If it is wrong, the verdict is that of the run itself, in float32.
        loss_rel_err: the largest relative error of a loss.
        grad_norm_rel_err: the largest relative error of a gradient norm, before or after clipping.
        max_grad_rel_err: the largest relative error of a gradient.
        max_weight_rel_err: the largest relative error of a weight after a step.
        worst_parameter: the parameter that is closest to its bound or farthest beyond it. If
            ``error`` describes a parameter, it is this one.
        refused: whether loading, shrinking or running the recipe raised a UserError.
        timed_out: whether the time for the run was over before it had an answer.
        undecided: whether gradients and their norm alone differ, and rounding moves them by more
            than any bound excuses.
        error: why the layout is refused or wrong; None if it passed.
    """

    passed: bool
    world_size: int
    layout: str
    dtype: str
    float32: Literal["exact", "undecided"] | None = None
    loss_rel_err: float | None = None
    grad_norm_rel_err: float | None = None
    max_grad_rel_err: float | None = None
    max_weight_rel_err: float | None = None
    worst_parameter: str | None = None
    refused: bool = False
    timed_out: bool = False
    undecided: bool = False
    error: str | None = None

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self, layout: str = "") -> str:
        """Return what ``composer3d verify`` prints: the layout and its largest relative errors.

        A second line says what is wrong.

        Args:
            layout: stands in place of ``Verdict.layout``; "": it does not.
        """
        line = f"{self._outcome} {one_line(layout or self.layout)}"
        if not (self.refused or self.timed_out or self.undecided):
            errors = {
                "loss": self.loss_rel_err,
                "norm": self.grad_norm_rel_err,
                "grad": self.max_grad_rel_err,
                "weight": self.max_weight_rel_err,
            }
            numbers = [
                f"  {name} {'-' if error is None else f'{error:.0e}'}"
                for name, error in errors.items()
            ]
            line += f"  ({self._dtypes}){''.join(numbers)}"
        return f"{line}\n        {printable(self.error)}" if self.error else line

    @property
    def _dtypes(self) -> str:
        if self.float32 is None:
            return self.dtype
        return f"{self.dtype}{_ADDITIONS[self.float32]}"

    @property
    def _outcome(self) -> str:
        if self.refused:
            return "refused"
        if self.timed_out:
            return "NO TIME"
        if self.undecided:
            return "UNSURE "
        return "exact  " if self.passed else "WRONG  "


class ShardError(NamedTuple):
    """The difference between one rank's shard ``a`` and the same box ``b`` of the reference.

    Attributes:
        step: the step, counted from 0, in which the shard is compared.
        kind: "gradient" or "weight".
        name: the name of the parameter.
        offset: the offset of the shard in the whole tensor, one number per dim.
        shape: the shape of the shard.
        diff_sq: ||a - b||^2. Of a weight it is only what rounding does not explain: ``b`` is the
            optimizer's step from this rank's own gradients, and ``a`` is moved towards it.
        norm_sq: ||b||^2.
        dot: the dot product of a and b.
        problem: why the two cannot be compared, or None. It is a phrase such as "is missing", which
            follows the name of the tensor.
        whole_diff_sq: ||a - b||^2 of the shards themselves. None: it is ``diff_sq``.
    """

    step: int
    kind: str
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    diff_sq: float
    norm_sq: float
    dot: float
    problem: str | None = None
    whole_diff_sq: float | None = None

    @classmethod
    def of_problem(cls, step: int, kind: str, name: str, problem: str) -> "ShardError":
        """Make the error of a shard that cannot be compared with the reference."""
        return cls(step, kind, name, (), (0,), math.inf, 0.0, 0.0, problem)


@dataclass(kw_only=True)
class RankErrors:
    """All differences from the reference that one rank measured.

    Attributes:
        identity: the rank in words.
        coords: the rank's coordinate on each axis of the mesh.
        loss: the relative error of the loss of each step, and then of the validation loss.
        norm: the relative error of the gradient norm in each step.
        clipped: the relative error of the gradient norm after clipping, in each step.
        shards: the error of each gradient and weight that the rank holds, in each step.
        wrong_learning_rate: describes a learning rate that breaks its rule; None if there is none.
        wrong_reduction: describes a gradient that breaks the rule of ``precision.reduce``; None if
            there is none.
        wrong_load: describes what a router counted wrong (``routing.find_wrong_load``), or None.
        wrong_bad_step: describes what a step changed whose loss was not finite, or None.
    """

    identity: str
    coords: Mapping[str, int]
    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    shards: list[ShardError] = field(default_factory=list)
    wrong_learning_rate: str | None = None
    wrong_reduction: str | None = None
    wrong_load: str | None = None
    wrong_bad_step: str | None = None

    @property
    def broken_rule(self) -> str | None:
        """The first of the descriptions of what is wrong, or None."""
        return (
            self.wrong_learning_rate
            or self.wrong_reduction
            or self.wrong_load
            or self.wrong_bad_step
        )


class ReferenceStats(NamedTuple):
    """Statistics of the one-process run, which computes in float64.

    Attributes:
        noise: for each step, how far rounding alone moves each gradient, by name
            (``rounding.measure_noise``).
        norms_of_all: for each step, the norm of the gradients of all parameters, also of those
            that do not train.
        norms: for the kinds "gradient" and "weight", and for each step, the norm of each tensor by
            name.
        shapes: the shape of each parameter by name.
        clips: for each step, whether it clipped the gradients.
        closest_scores: the smallest difference of two scores between which a router chose in any
            step. None: there is no router.
        closest_rounding: the smallest distance of a number from a change of its rounding to float8
            (``float8.Rounding``). None: nothing is rounded.
    """

    noise: list[dict[str, float]]
    norms_of_all: list[float]
    norms: dict[str, list[dict[str, float]]]
    shapes: dict[str, list[int]]
    clips: list[bool]
    closest_scores: float | None = None
    closest_rounding: float | None = None


class _TensorError(NamedTuple):
    """The error of a whole tensor, combined from the shards of all ranks.

    Attributes:
        step: the step, counted from 0.
        kind: "gradient" or "weight".
        name: the name of the parameter.
        error: the relative error; infinite if there is a problem.
        bound: the largest allowed error.
        noise: how far rounding alone moves the tensor, relative as ``error``.
        shards: the rank and the error of each shard, the worst shard first.
        boxes: the worst shard of each box.
        problem: why the tensor is wrong whatever its values are, such as missing elements, or None.
    """

    step: int
    kind: str
    name: str
    error: float
    bound: float
    noise: float
    shards: list[tuple[int, ShardError]]
    boxes: list[ShardError]
    problem: str | None


class _ScalarError(NamedTuple):
    """The error of a loss or a norm on one rank.

    Attributes:
        step: the step, counted from 0. The validation loss has the number of steps.
        kind: "loss", "norm" or "clipped".
        error: the relative error.
        bound: the largest allowed error.
    """

    step: int
    kind: str
    error: float
    bound: float


def judge(
    verdict: Verdict, ranks: Sequence[RankErrors], small: Recipe, stats: ReferenceStats
) -> Verdict:
    """Compare the errors of all ranks with their bounds, fill in ``verdict`` and return it.

    Args:
        verdict: the verdict to fill in. Its ``dtype`` selects the bounds.
        ranks: the result of ``worker.run_composed`` on each rank, by rank.
        small: the recipe that the ranks ran.
        stats: the statistics of the one-process run.
    """
    steps = len(stats.norms["weight"])
    tensors = _combine_shards(ranks, stats, verdict.dtype)
    scalars = _check_scalars(ranks, stats, verdict.dtype)

    verdict.loss_rel_err = _largest_error(scalars, "loss")
    verdict.grad_norm_rel_err = _largest_error(scalars, "norm", "clipped")
    verdict.max_grad_rel_err = _largest_error(tensors, "gradient")
    verdict.max_weight_rel_err = _largest_error(tensors, "weight")
    verdict.worst_parameter = max(tensors, key=lambda tensor: tensor.error / tensor.bound).name

    errors: list[_TensorError | _ScalarError] = [*tensors, *scalars]
    # With ``not <=``, an error of NaN is wrong.
    differing = [error for error in errors if not error.error <= error.bound]
    wrong = [
        error for error in differing if not _may_be_rounding(error, small, stats, verdict.dtype)
    ]
    if not wrong:
        verdict.error = next(filter(None, (rank.broken_rule for rank in ranks)), None)
        if verdict.error is None and differing:
            verdict.undecided = True
            verdict.error = _describe_noise(stats, verdict.dtype)
        verdict.passed = verdict.error is None
        return verdict

    verdict.passed = False
    blamed = min(
        wrong, key=lambda error: (error.step, _BLAME_ORDER.index(error.kind), -error.error)
    )
    if isinstance(blamed, _ScalarError):
        only_scalars = all(isinstance(error, _ScalarError) for error in wrong)
        verdict.error = _describe_scalar(blamed, steps, only_scalars)
        return verdict

    compared = [
        tensor for tensor in tensors if (tensor.step, tensor.kind) == (blamed.step, blamed.kind)
    ]
    wrong_tensors = [tensor for tensor in compared if tensor in wrong]
    worst = max(wrong_tensors, key=lambda tensor: tensor.error)
    verdict.worst_parameter = worst.name
    findings = (
        _describe_tensor(worst, ranks),
        _describe_factor(worst, small),
        _describe_ranks(wrong_tensors, ranks),
        _describe_parameters(
            [tensor.name for tensor in wrong_tensors], {tensor.name for tensor in compared}
        ),
    )
    verdict.error = "; ".join(filter(None, findings))
    return verdict


# Errors and their bounds.


def _largest_error(errors: Sequence[_TensorError | _ScalarError], *kinds: str) -> float | None:
    """Return the largest error of these kinds: 0 if there is none, None if one is not finite."""
    values = [error.error for error in errors if error.kind in kinds]
    if not all(map(math.isfinite, values)):
        return None
    return max(values, default=0.0)


def _check_scalars(
    ranks: Sequence[RankErrors], stats: ReferenceStats, dtype: str
) -> list[_ScalarError]:
    """Return the error of each loss and norm on each rank; infinite if the rank reported none."""
    steps = len(stats.norms["weight"])
    scalars = []
    for rank in ranks:
        for kind, errors, count in (
            # The validation loss follows the losses of the steps.
            ("loss", rank.loss, steps + 1),
            ("norm", rank.norm, steps),
            ("clipped", rank.clipped, steps),
        ):
            missing = [math.inf] * (count - len(errors))
            for step, error in enumerate([*errors, *missing]):
                clips = kind == "clipped" and stats.clips[step]
                bound = _scalar_bound(kind, dtype, clips=clips)
                scalars.append(_ScalarError(step, kind, error, bound))
    return scalars


def _scalar_bound(kind: str, dtype: str, *, clips: bool) -> float:
    if dtype == "float64":
        return EXACT[dtype]
    if kind == "clipped" and not clips:
        # Clipping changed nothing, so this norm has the same roundings as the norm before it.
        kind = "norm"
    return _SCALAR_BOUNDS[kind]


def scalar_scale(
    kind: str, dtype: str, value: float, *, noise: float, whole: float | None = None
) -> float:
    """Return the number by which the error of a loss or a norm is divided.

    Args:
        kind: "loss" or "norm".
        dtype: the dtype of the proof.
        value: the loss or norm of one process; if it is 0, the error is absolute. The loss of a
            batch without labels is 0, for example.
        noise: how far rounding alone moves it.
        whole: the norm of the gradients of all parameters, of which a norm is a part. A loss is
            no part of anything; it is measured in nats.
    """
    bound = _scalar_bound(kind, dtype, clips=False)
    explained = min(
        _NOISE_MULTIPLE[dtype] * noise,
        _share_of_all(dtype) * (max(1.0, value) if whole is None else whole),
    )
    return max(abs(value), explained / bound) or 1.0


def _combine_shards(
    ranks: Sequence[RankErrors], stats: ReferenceStats, dtype: str
) -> list[_TensorError]:
    """Combine the shards of all ranks into the error of each tensor after each step."""
    shards: dict[tuple[int, str, str], list[tuple[int, ShardError]]] = defaultdict(list)
    for rank, measured in enumerate(ranks):
        for shard in measured.shards:
            # NaN would break the sorting of the shards.
            diff_sq = shard.diff_sq if math.isfinite(shard.diff_sq) else math.inf
            key = (shard.step, shard.kind, shard.name)
            shards[key].append((rank, shard._replace(diff_sq=diff_sq)))

    tensors = []
    for kind, norms_by_step in stats.norms.items():
        for step, norms in enumerate(norms_by_step):
            norm_of_all = math.hypot(*norms.values())
            noise: Mapping[str, float] = {}
            if kind == "gradient":
                norm_of_all = max(norm_of_all, stats.norms_of_all[step])
                noise = stats.noise[step]
            # The names of the reference in its order, then the names that only ranks have.
            names = dict.fromkeys(norms)
            names |= dict.fromkeys(
                name
                for shard_step, shard_kind, name in shards
                if (shard_step, shard_kind) == (step, kind)
            )
            for name in names:
                norm = norms.get(name, 0.0)
                own_noise = _noise_of_tensor(norm, noise.get(name, 0.0), norm_of_all, dtype)
                scale = _error_scale(norm, own_noise, norm_of_all, dtype)
                bound = _tensor_bound(kind, dtype, own_noise / scale)
                held = shards.get((step, kind, name), [])
                tensors.append(
                    _combine_tensor(
                        *(step, kind, name),
                        held,
                        ranks,
                        stats,
                        scale=scale,
                        bound=bound,
                        noise=own_noise / scale,
                    )
                )
    return tensors


def _combine_tensor(
    step: int,
    kind: str,
    name: str,
    shards: list[tuple[int, ShardError]],
    ranks: Sequence[RankErrors],
    stats: ReferenceStats,
    *,
    scale: float,
    bound: float,
    noise: float,
) -> _TensorError:
    """Combine the shards of one tensor. The error of the tensor is relative to ``scale``."""
    shards = sorted(shards, key=lambda rank_shard: -rank_shard[1].diff_sq)
    worst_of_box: dict[tuple[tuple[int, ...], tuple[int, ...]], ShardError] = {}
    for _, shard in shards:
        worst_of_box.setdefault((shard.offset, shard.shape), shard)

    problem = next((shard.problem for _, shard in shards if shard.problem), None)
    if problem is None and name in stats.shapes:
        problem = _find_uncovered(name, stats.shapes[name], sorted(worst_of_box))
    if problem is None:
        problem = _find_wrong_holders(name, {rank for rank, _ in shards}, ranks)

    boxes = list(worst_of_box.values())
    error = math.sqrt(sum(box.diff_sq for box in boxes)) / scale
    # A weight that is right as it is, on every rank, needs no other explanation.
    whole_sq_of_box: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = defaultdict(float)
    for _, shard in shards:
        whole_sq = shard.diff_sq if shard.whole_diff_sq is None else shard.whole_diff_sq
        whole_sq = whole_sq if math.isfinite(whole_sq) else math.inf
        place = (shard.offset, shard.shape)
        whole_sq_of_box[place] = max(whole_sq_of_box[place], whole_sq)
    whole_error = math.sqrt(sum(whole_sq_of_box.values())) / scale
    if whole_error <= bound:
        error = whole_error
    if problem is not None:
        error = math.inf
    return _TensorError(step, kind, name, error, bound, noise, shards, boxes, problem)


def _noise_of_tensor(norm: float, noise: float, norm_of_all: float, dtype: str) -> float:
    """Return how far rounding moves a tensor: what was measured, or more if the tensor is zero.

    A tensor is zero up to rounding if it is the gradient of queries that see only one key, for
    example. Then one process may find zero itself, where a layout finds the rounding of its terms.
    """
    explained = _NOISE_MULTIPLE[dtype] * noise
    is_zero = norm <= explained and norm <= _share_of_all(dtype) * norm_of_all
    if not is_zero:
        return noise
    return max(noise, _ROUNDING[dtype] * norm_of_all / _NOISE_MULTIPLE[dtype])


def _share_of_all(dtype: str) -> float:
    """Return the share of the norm of all gradients up to which rounding explains an error."""
    return _LARGEST_NOISE_OF_ALL if dtype == "float64" else _LARGEST_NOISE_BOUND


def _error_scale(norm: float, noise: float, norm_of_all: float, dtype: str) -> float:
    """Return the number by which the error of a tensor is divided.

    It is the norm of the tensor, if the tensor has digits that rounding does not reach. Otherwise
    it is larger, so that the bound is the rounding of the terms that were summed up.
    """
    scale = max(norm, _SMALLEST_NORM[dtype] * norm_of_all, 1e-300)
    if dtype == "float32":
        return scale
    explained = min(
        _NOISE_MULTIPLE[dtype] * noise,
        max(_LARGEST_NOISE_BOUND * norm, _LARGEST_NOISE_OF_ALL * norm_of_all),
    )
    return max(scale, explained / EXACT[dtype])


def has_little_noise(stats: ReferenceStats, dtype: str) -> bool:
    """Return whether rounding moves the gradients of each step so little that they can be judged.

    More noise is excused by no bound. It means that the loss is a wild function of the weights,
    such as after a step of the optimizer that has divided by almost nothing.
    """
    return not any(_is_noisy(stats, step, dtype) for step in range(len(stats.noise)))


def _is_noisy(stats: ReferenceStats, step: int, dtype: str) -> bool:
    """Return whether rounding moves the gradients of a step too far for them to be judged.

    If the noise is not a number, they cannot be judged either.
    """
    share = _share_of_all(dtype)
    noise = _NOISE_MULTIPLE[dtype] * math.hypot(*stats.noise[step].values())
    return not noise <= share * stats.norms_of_all[step]


def _may_be_rounding(
    error: _TensorError | _ScalarError, small: Recipe, stats: ReferenceStats, dtype: str
) -> bool:
    """Return whether an error above its bound may be the rounding of a gradient in a noisy step.

    Nearly no layout has such a step. A gradient that is a multiple of the right one is no rounding.
    The norm has the rounding of all gradients. Losses and clipped norms have few roundings, and
    weights are judged by the rank's own gradients.
    """
    if isinstance(error, _ScalarError) and error.kind == "norm":
        noise = math.hypot(*stats.noise[error.step].values())
        norm = math.hypot(*stats.norms["gradient"][error.step].values())
        whole = stats.norms_of_all[error.step]
        scale = scalar_scale("norm", dtype, norm, noise=noise, whole=whole)
        is_explained = error.error <= _NOISE_MULTIPLE[dtype] * noise / scale
        return is_explained and _is_noisy(stats, error.step, dtype)
    if isinstance(error, _ScalarError) or error.kind != "gradient":
        return False
    return (
        _is_noisy(stats, error.step, dtype)
        and math.isfinite(error.error)
        and error.error <= _NOISE_MULTIPLE[dtype] * error.noise
        and _describe_factor(error, small) is None
    )


def _tensor_bound(kind: str, dtype: str, noise: float) -> float:
    if kind == "weight" or dtype == "float64":
        # ``OptimizerProof`` has already removed the differences of weights that rounding explains,
        # and ``_error_scale`` knows the noise in float64.
        return EXACT["float64"]
    return min(max(EXACT[dtype], _NOISE_MULTIPLE[dtype] * noise), _LARGEST_NOISE_BOUND)


def _find_uncovered(
    name: str, shape: Sequence[int], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> str | None:
    """Describe the problem if the boxes of a tensor do not cover each of its elements once.

    Args:
        name: the name of the tensor.
        shape: the shape of the whole tensor.
        boxes: the offset and the shape of each box; no two are equal.
    """
    boxes = [(offset, box_shape) for offset, box_shape in boxes if math.prod(box_shape)]
    for (a, a_shape), (b, b_shape) in combinations(boxes, 2):
        overlaps = all(
            max(a_begin, b_begin) < min(a_begin + a_size, b_begin + b_size)
            for a_begin, a_size, b_begin, b_size in zip(a, a_shape, b, b_shape, strict=True)
        )
        if overlaps:
            return (
                f"ranks hold shards of {name} that overlap: "
                f"{list(a_shape)} at {list(a)}, {list(b_shape)} at {list(b)}"
            )
    covered = sum(math.prod(box_shape) for _, box_shape in boxes)
    total = math.prod(shape)
    return None if covered == total else f"ranks hold only {covered} of {total} elements of {name}"


def _find_wrong_holders(name: str, holders: set[int], ranks: Sequence[RankErrors]) -> str | None:
    """Describe the problem if the ranks that hold a tensor are not all ranks of one pipeline stage.

    ``_find_uncovered`` does not see that a rank holds nothing if a replica holds the same shards.
    """
    stages = {ranks[rank].coords["pp"] for rank in holders}
    if len(stages) > 1:
        shown = ", ".join(map(str, sorted(stages)))
        return f"pipeline ranks {shown} hold {name}, which belongs to one stage"
    for rank, errors in enumerate(ranks):
        if errors.coords["pp"] in stages and rank not in holders:
            return f"{name} is missing on rank {rank}, while other ranks of its stage hold it"
    return None


# Descriptions of an error. Joined, they are the text of a verdict.


def _describe_scalar(scalar: _ScalarError, steps: int, only_scalars: bool) -> str:
    if scalar.step == steps:
        name = "validation loss"
    else:
        name = f"{_SCALAR_NAMES[scalar.kind]} at step {scalar.step + 1}"
    right = "every gradient and weight" if only_scalars else "every gradient so far"
    return f"{name} is off by {scalar.error:.1e}, while {right} is right"


def _describe_noise(stats: ReferenceStats, dtype: str) -> str:
    """Describe the gradient that rounding moves most in the first noisy step, and what helps."""
    step = next(step for step in range(len(stats.noise)) if _is_noisy(stats, step, dtype))
    noise = stats.noise[step]
    name = max(noise, key=lambda name: noise[name])
    norm = stats.norms["gradient"][step][name]
    moves = f"by {noise[name] / norm:.1e} of itself" if norm else f"of zero by {noise[name]:.1e}"
    wider = "use --dtype float64, or " if dtype == "float32" else ""
    return (
        f"not proven: rounding alone moves the gradient of {name} at step {step + 1} {moves}, so "
        f"no error could be told from it; {wider}change the settings of optim that make a step so "
        "large"
    )


def _describe_tensor(tensor: _TensorError, ranks: Sequence[RankErrors]) -> str:
    """Describe the error of a tensor on the rank where it is worst."""
    subject = f"{tensor.kind} of {tensor.name} at step {tensor.step + 1}"
    if not tensor.shards:
        return f"{subject}: {tensor.problem}"
    rank, shard = tensor.shards[0]
    if shard.problem:
        return f"{subject} {shard.problem} on {ranks[rank].identity}"
    if tensor.problem:
        return f"{subject}: {tensor.problem}"
    return f"{subject} is off by {tensor.error:.1e} on {ranks[rank].identity}"


def _describe_factor(tensor: _TensorError, small: Recipe) -> str | None:
    """If a tensor is a multiple of its reference, name the factor and the axes of that size."""
    diff_sq = sum(box.diff_sq for box in tensor.boxes)
    norm_sq = sum(box.norm_sq for box in tensor.boxes)
    dot = sum(box.dot for box in tensor.boxes)
    if tensor.problem or not math.isfinite(diff_sq) or norm_sq == 0:
        return None

    factor = dot / norm_sq
    # ||a - factor b||^2, as ||a||^2 = diff_sq + 2 dot - norm_sq.
    residual_sq = diff_sq + 2 * dot - norm_sq - factor * dot
    is_multiple = residual_sq <= 1e-8 * norm_sq * factor * factor
    if abs(factor - 1) < 1e-3 or abs(factor) < 1e-6 or not is_multiple:
        return None

    suspects = _axes_of_size(factor, small)
    if small.micro_batches > 1 and _is_size_or_inverse(factor, small.micro_batches):
        suspects.append("micro-batches")
    text = f"it is {factor:.4g} times the reference"
    return f"{text}, suspect {' or '.join(suspects)}" if suspects else text


def _axes_of_size(factor: float, small: Recipe) -> list[str]:
    """Return the axes whose size is ``factor`` or its inverse.

    If there are none, return the products of two axes with such a size, or else of three, and so
    on.
    """
    sizes = {axis: getattr(small.mesh, axis) for axis in (*AXES, "ep")}
    wide_axes = [axis for axis in sizes if sizes[axis] > 1]
    for count in range(1, len(wide_axes) + 1):
        products = [
            " x ".join(axes)
            for axes in combinations(wide_axes, count)
            if _is_size_or_inverse(factor, math.prod(sizes[axis] for axis in axes))
        ]
        if products:
            return products
    return []


def _is_size_or_inverse(factor: float, size: int) -> bool:
    return min(abs(factor / size - 1), abs(factor * size - 1)) < 1e-3


def _describe_ranks(tensors: Sequence[_TensorError], ranks: Sequence[RankErrors]) -> str | None:
    """Name the ranks with wrong shards, and the coordinates that these ranks share.

    Returns None if no rank or every rank is wrong.
    """
    wrong_ranks = set()
    for tensor in tensors:
        for rank, shard in tensor.shards:
            largest_diff_sq = tensor.shards[0][1].diff_sq
            if 0 < shard.diff_sq >= 1e-6 * largest_diff_sq:
                wrong_ranks.add(rank)
    if not wrong_ranks or len(wrong_ranks) == len(ranks):
        return None

    coords = [ranks[rank].coords for rank in sorted(wrong_ranks)]
    shared = [
        f"{axis}{coords[0][axis]}"
        for axis in AXES
        if len({rank.coords[axis] for rank in ranks}) > 1
        and len({rank_coords[axis] for rank_coords in coords}) == 1
    ]
    noun = "rank" if len(wrong_ranks) == 1 else "ranks"
    text = f"only on {noun} {', '.join(map(str, sorted(wrong_ranks)))}"
    return f"{text} with {' '.join(shared)}" if shared else text


def _describe_parameters(wrong: Sequence[str], compared: Iterable[str]) -> str | None:
    """Count the wrong parameters, and name them if the names fit a short text."""
    right = [name for name in compared if name not in wrong]
    if not right:
        return f"all {len(wrong)} are off" if len(wrong) > 1 else None

    if len(wrong) <= 2:
        texts = [", ".join(sorted(wrong))]
    else:
        texts = []
        for names, others, prefix in ((wrong, right, ""), (right, wrong, "all but ")):
            for family in (_parameter, _parameter_of_any_block, _model_part):
                families = {family(name) for name in names}
                if families.isdisjoint(family(name) for name in others):
                    texts.append(prefix + ", ".join(sorted(families)))

    count = f"{len(wrong)} of {len(wrong) + len(right)} are off"
    shortest = min(texts, key=len)
    return f"{count}: {shortest}" if len(shortest) <= 200 else count


def _parameter(name: str) -> str:
    return name


def _parameter_of_any_block(name: str) -> str:
    return re.sub(r"^blocks\.[^.]+\.", "blocks.*.", name)


def _model_part(name: str) -> str:
    """Return the block that has a parameter, or else its part of the model, such as ``last``."""
    return re.sub(r"^(blocks\.[^.]+|[^.]+).*", r"\1", name)
