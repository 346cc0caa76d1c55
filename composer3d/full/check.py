"""``verify --full``: the structure of the full-size job, checked without computing a number.

The shrunk proof finds wrong values, on the claim that the job differs from it only in sizes. This
module checks that claim, with the real code on tensors without data:

1. predicates: facts that decide how a step runs are the same in job and proofs (``predicates``);
2. groups: every group has the ranks that a formula on coordinates gives, over the whole world; and
   each rank has the coordinates, and takes the samples, that counting gives it;
3. collectives: each pipeline rank of the full-size job makes as many calls over each group, and
   sends as many bytes, as ``planner.traffic`` says;
4. messages: each micro-batch's activations and gradients are sent once and received once, in the
   same order and size on both sides;
5. gradients: each is never scaled, and summed once over exactly the ranks that see other tokens;
   over these it is also partial, by the types of the values it was computed from;
6. seams: activations and their gradients vary over no other axes than the residual stream, and what
   ranks divide by is the same on all (``varying``); a stage runs its blocks in order;
7. peers: ranks at other coordinates call the same collectives in the same order.

Checks 3 to 6 run the full-size model, on the first rank of each distinct pipeline rank. A step has
only as many micro-batches as are needed to show every kind of action of the job's step. Two further
runs use a small model on the full-size mesh, and steps of as few micro-batches:

- For check 7, three pipeline ranks run: each on its first, middle and last rank on the other axes.
- For messages, the first rank of every pipeline rank runs, with one block a stage. The middle
  pipeline rank also runs all micro-batches of the job, and its collectives are compared again. Both
  pipeline ranks do so if there are two; and all, if each has more than three stages.

This module does not import torch; worker processes do.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from composer3d.dryrun.replay import TapedStage, keys
from composer3d.dryrun.report import StageReport
from composer3d.dryrun.run import (
    STAGES_THAT_REPLAY,
    rank_actions,
    report_all,
    run_each,
)
from composer3d.facts.schedules import micro_batch_requirement
from composer3d.full import expected, messages, places
from composer3d.full.places import SAME, names
from composer3d.full.predicates import PREDICATES, LostPredicate, differences
from composer3d.planner.trained import has_frozen
from composer3d.recipe.rules import violations
from composer3d.recipe.schema import Recipe
from composer3d.recipe.stages import n_stages_of
from composer3d.recipe.values import variant
from composer3d.runtime.launch import Pool
from composer3d.verify.shrink import shrink_to, without_float8

if TYPE_CHECKING:  # witnesses import torch
    from composer3d.full.paths import GradientPath
    from composer3d.full.witness import CollectiveCall, Witness

    # The ranks of a group, as distances from the first one, and the call.
    Call = tuple[tuple[int, ...], CollectiveCall]

# A function that plants a fault in a process.
Plant = Callable[[], None] | None

# The most ranks whose groups are formed, one rank after the other.
_MOST_RANKS = 24
# The most findings of one check that are shown.
_MOST_FINDINGS = 8

CHECKS = ("predicates", "groups", "collectives", "messages", "gradients", "seams", "peers")


@dataclass(frozen=True)
class Finding:
    """A problem in words, and the check that found it."""

    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass
class Structure:
    """What the checks of a job found.

    Attributes:
        world_size: ranks of the job.
        micro_batches: those of the job's step.
        micro_batches_run: those of the steps that the full-size model has run.
        findings: what is wrong.
        left_out: predicates that are known to differ in every proof, with the reason.
        unchecked: what could not be checked, and why.
        counts: how many things each check has compared.
        seconds: the time that the checks took.
    """

    world_size: int
    micro_batches: int
    micro_batches_run: int = 0
    findings: list[Finding] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether no check found a problem."""
        return not self.findings

    def add(self, check: str, texts: Iterable[str], compared: int) -> None:
        """Add the first few findings of a check, and the number of things that it compared."""
        found = list(dict.fromkeys(texts))
        if len(found) > _MOST_FINDINGS:
            found[_MOST_FINDINGS:] = [f"and {len(found) - _MOST_FINDINGS} more"]
        self.findings += [Finding(check, text) for text in found]
        self.counts[check] = self.counts.get(check, 0) + compared


def check_structure(
    pool: Pool,
    full: Recipe,
    small_recipes: Sequence[Recipe],
    *,
    plant: Plant = None,
) -> Structure:
    """Check the structure of a job, and that ``small_recipes`` agree with it on all predicates.

    Args:
        pool: starts the processes.
        full: the whole recipe.
        small_recipes: the recipes that were proven in its place.
        plant: plants a fault in every process, to test the checks.

    Raises:
        UserError: the recipe cannot be composed.
        WorkerError: a worker failed for another reason.
    """
    begin = time.monotonic()
    structure = Structure(full.world_size, full.micro_batches)
    lost: list[LostPredicate] = differences(full, small_recipes)
    structure.left_out = [f"{one}: {one.left_out}" for one in lost if one.left_out]
    if not places.digits(full.mesh):
        structure.unchecked.append(
            f"over which axes values vary: mesh.ep = {full.mesh.ep} cuts ranks of tp or cp apart"
        )
    texts = [str(one) for one in lost if not one.left_out]
    structure.add("predicates", texts, len(PREDICATES))
    for check in (_check_job, _check_groups, _check_peers):
        if plant is None or structure.passed:
            check(pool, full, structure, plant)
    structure.seconds = time.monotonic() - begin
    return structure


def _check_groups(pool: Pool, full: Recipe, structure: Structure, plant: Plant) -> None:
    ranks = places.some_ranks(full.mesh, _MOST_RANKS)
    arguments = {"recipe": full, "ranks": ranks, "plant": plant}
    (found,) = run_each(pool, "composer3d.full.witness:wrong_groups", [arguments])
    structure.add("groups", found, len(ranks))


# --- the full-size job ---


def _check_job(pool: Pool, full: Recipe, structure: Structure, plant: Plant) -> None:
    """Check what the first rank of each pipeline rank sends and sums, with the whole model."""
    seen: dict[int, Witness] = {}
    stage_ranks = full.world_size // full.mesh.pp
    full = _with_every_action(full)

    def tape(pp_ranks: Sequence[int]) -> Iterator[TapedStage]:
        jobs = [(full, pp_rank, pp_rank * stage_ranks) for pp_rank in pp_ranks]
        for witness in _witnesses(pool, jobs, plant):
            seen[witness.taped.stage] = witness
            yield witness.taped

    reported = report_all(pool, full, tape)
    for _, witness in sorted(seen.items()):
        texts = _wrong_gradients(full, witness)
        structure.add("gradients", texts, sum(map(bool, witness.gradients.values())))
        structure.add("seams", witness.unmet, witness.seams)
        structure.add("groups", _wrong_group_of_axis(full, witness), 0)
    structure.micro_batches_run = max(map(_micro_batches_run, seen.values()))
    # ``_check_peers`` counts them, as it sees both ends of each.
    structure.add("messages", messages.wrong_messages(full, seen), 0)
    leaves_some_out = has_frozen(full)
    if leaves_some_out:
        structure.unchecked.append(
            "that there are no fewer collectives than predicted, and that all that arrives is "
            "read: backward does not reach frozen layers (optim.train)"
        )
    for report, ran in reported:
        texts = _wrong_traffic(full, report, seen[ran], leaves_some_out)
        compared = [len(comm) for axis, comm in report.comm.items() if axis != "pp"]
        structure.add("collectives", texts, sum(compared))


def _with_every_action(full: Recipe) -> Recipe:
    """Return the job with the fewest micro-batches whose step has every kind of its actions.

    Kinds of actions are those that ``replay.Key`` tells apart: the first forward of a stage, a
    forward after a backward, and so on. A pipeline rank repeats them, so more micro-batches show
    nothing new.
    """
    pp, schedule = full.mesh.pp, full.parallel.schedule
    if pp == 1 or schedule == "csv":
        # Without a pipeline, a dry run itself leaves micro-batches out. A file fixes their number.
        return full
    wanted = [set(keys(rank_actions(full, pp_rank))) for pp_rank in range(pp)]
    for number in range(1, full.micro_batches):
        if micro_batch_requirement(schedule, number, pp, "") is None:
            fewer = full.with_micro_batches(number)
            found = [set(keys(rank_actions(fewer, pp_rank))) for pp_rank in range(pp)]
            if all(map(set.issubset, wanted, found)):
                return fewer
    return full


def _wrong_group_of_axis(full: Recipe, witness: "Witness") -> Iterator[str]:
    for axis, numbers in witness.groups_of.items():
        if axis not in places.GROUPS or axis == "pp":
            continue
        for ranks in (witness.groups[number] for number in numbers):
            if ranks != places.members(axis, witness.rank, full.mesh):
                yield f"rank {witness.rank} sends over {axis} to ranks {places.some(ranks)}"


def _wrong_traffic(
    full: Recipe, report: StageReport, witness: "Witness", leaves_some_out: bool
) -> Iterator[str]:
    """Compare a report with the planner's traffic, for each group and operation."""
    rank = report.stage * report.ranks
    shift = rank - witness.rank
    ranks_of_axis: dict[str, tuple[int, ...]] = {}
    for axis, numbers in witness.groups_of.items():
        ranks_of_axis[axis] = tuple(each + shift for each in witness.groups[min(numbers)])
    counted: dict[tuple[tuple[int, ...], str], expected.CallsAndBytes] = {}
    for axis, operations in report.comm.items():
        for name, usage in operations.items():
            if axis == "pp":
                continue
            ranks = ranks_of_axis[axis]
            if len(ranks) == full.world_size:
                ranks = places.members("world", rank, full.mesh)
            before = counted.get((ranks, name), expected.CallsAndBytes(0, 0))
            counted[ranks, name] = expected.CallsAndBytes(
                before.calls + usage.count, before.sent_bytes + usage.sent_bytes
            )
    planned = expected.traffic(full, rank)
    uneven = expected.uneven_exchange(full, rank)
    for key in sorted({*counted, *planned}, key=lambda one: (len(one[0]), one)):
        got = counted.get(key, expected.CallsAndBytes(0, 0))
        want = planned.get(key, expected.CallsAndBytes(0, 0))
        # A call's bytes are rounded to a whole number; the planner's are not, for all calls
        # together. Nor are the rows of ep: a rank sends a part of a row more or less than the mean.
        is_equal = abs(got.sent_bytes - want.sent_bytes) <= 0.5 * max(1, want.calls)
        is_equal |= key == uneven
        if leaves_some_out and got.sent_bytes <= want.sent_bytes:
            # Backward does not reach frozen layers below the first one that trains, so the
            # planner's figures are upper bounds. ``_wrong_gradients`` checks what must be reduced.
            continue
        if got.calls != want.calls or not is_equal:
            ranks, name = key
            group = places.name_of(full.mesh, rank, ranks)
            yield (
                f"pipeline rank {report.stage}: {got.calls:,} {name} of "
                f"{got.sent_bytes:,.0f} bytes over {group}, and should be "
                f"{want.calls:,} of {want.sent_bytes:,.0f}"
            )


def _wrong_gradients(full: Recipe, witness: "Witness") -> Iterator[str]:
    wanted = expected.gradients(full, witness.rank)
    micro_batches = _micro_batches_run(witness)
    for name in sorted({*wanted, *witness.gradients}):
        if name not in wanted or name not in witness.gradients:
            yield f"{name} is {'missing on' if name in wanted else 'also on'} rank {witness.rank}"
            continue
        ranks, path = wanted[name], witness.gradients[name]
        if (ranks is None) != (path is None):
            words = "has a gradient, and is frozen" if ranks is None else "has no gradient"
            yield f"{name} {words}"
        elif ranks is not None and path is not None:
            problem = _problem_of_path(full, witness.rank, ranks, path)
            if not problem and path.additions != micro_batches:
                problem = (
                    f"it has what backward added {path.additions} times, and there are "
                    f"{micro_batches} micro-batches"
                )
            if problem:
                yield f"the gradient of {name}: {problem}"


def _micro_batches_run(witness: "Witness") -> int:
    return 1 + max(action.micro_batch for action in witness.taped.tape.actions)


def _problem_of_path(full: Recipe, rank: int, ranks: tuple[int, ...], path: "GradientPath") -> str:
    if path.problem:
        return str(path.problem)
    if any(not one.is_done for one in path.sums):
        return "it was exchanged between ranks and not added"
    if path.factor != 1:
        return f"it is multiplied by {path.factor:g}"
    over = [one.ranks for one in path.sums if len(one.ranks) > 1]
    inside = all(set(one) <= set(ranks) for one in over)
    apart = all(
        set(one) & set(other) == {rank} for place, one in enumerate(over) for other in over[:place]
    )
    shown = ", then ".join(places.name_of(full.mesh, rank, one) for one in over) or "nothing"
    if not (inside and apart and prod(map(len, over)) == len(ranks)):
        wanted = places.name_of(full.mesh, rank, ranks)
        return f"it is summed over {shown}, and should be over {wanted}"
    digits = places.digits(full.mesh)
    summed = SAME.union(*(places.digits_of(one, digits) for one in over))
    if digits and summed != path.partial_over:
        return f"it is summed over {shown}, and is partial over {names(path.partial_over)}"
    return ""


# --- a small model on the full-size mesh ---


def _check_peers(pool: Pool, full: Recipe, structure: Structure, plant: Plant) -> None:
    """Check that ranks of a group make the same calls, and that every message is received."""
    runs = _runs_of_small_models(full, structure)
    found = _run_all(pool, runs, plant)
    for kind, run in runs.items():
        for witness in chain.from_iterable(found[kind].values()):
            texts = _wrong_gradients(run.recipe, witness)
            structure.add("gradients", texts, 0)  # ``_check_job`` counts those of the whole model
            structure.add("seams", witness.unmet, witness.seams)
            structure.add("groups", _wrong_group_of_axis(run.recipe, witness), 0)
            structure.add("collectives", _wrong_reductions(run.recipe, witness), 0)
            structure.add("messages", messages.unmet_in_ring(run.recipe, witness), 0)
        if kind == _PEERS and _MESSAGES in runs:
            continue  # only some of its pipeline ranks have run
        first = {pp_rank: witnesses[0] for pp_rank, witnesses in found[kind].items()}
        # Each counts once, by the longest step of which both ends of all messages were seen.
        is_whole = len(first) == full.mesh.pp
        compared = sum(1 for _ in expected.messages(run.recipe)) if is_whole else 0
        more = max(0, compared - structure.counts.get("messages", 0))
        structure.add("messages", messages.wrong_messages(run.recipe, first), more)
    for one, *others in found[_PEERS].values():
        for other in others:
            structure.add("peers", _unlike(one, other, full.mesh.tp), len(one.calls))
    if _WHOLE_STEP in runs:
        whole = runs[_WHOLE_STEP].recipe
        for pp_rank, (witness,) in found[_WHOLE_STEP].items():
            report = witness.taped.report(pp_rank, rank_actions(whole, pp_rank))
            assert report is not None  # it has run all of its own actions
            texts = _wrong_traffic(whole, report, witness, has_frozen(whole))
            # ``_check_job`` counts them, of the full-size model.
            structure.add("collectives", texts, 0)


# What the steps of small models are for.
_PEERS, _MESSAGES, _WHOLE_STEP = "peers", "messages", "all micro-batches"


class _Run(NamedTuple):
    """A step of some pipeline ranks of a small model.

    Attributes:
        recipe: the recipe of the small model.
        pp_ranks: the pipeline ranks.
        corners: the ranks of each of them, as ``places.corner`` numbers them.
    """

    recipe: Recipe
    pp_ranks: Sequence[int]
    corners: tuple[int, ...] = (0,)


def _runs_of_small_models(full: Recipe, structure: Structure) -> dict[str, _Run]:
    """Return the steps of small models, by what they are for."""
    small = _small_job(full)
    pp = full.mesh.pp
    chosen = sorted({0, pp // 2, pp - 1})
    runs = {_PEERS: _Run(small, chosen, (0, 2, -1))}
    # What stages send each other does not depend on their blocks.
    thin = _with_one_block_a_stage(small)
    if pp > len(chosen):
        runs[_MESSAGES] = _Run(thin, range(pp))
    whole = thin.with_micro_batches(full.micro_batches)
    if pp == 1 or whole.micro_batches <= thin.micro_batches:
        return runs
    for violation in violations(whole):
        structure.unchecked.append(
            f"the messages of all {whole.micro_batches:,} micro-batches on a small model: "
            f"{violation.reason(whole)}"
        )
        return runs
    # A rank between two others sends and receives of both kinds. With many stages on a rank, what
    # it gathers depends on the whole order of its actions.
    pp_ranks: Sequence[int] = (0, 1) if pp == 2 else (pp // 2,)
    if whole.parallel.stages_per_rank > STAGES_THAT_REPLAY:
        pp_ranks = range(pp)
    runs[_WHOLE_STEP] = _Run(whole, pp_ranks)
    return runs


def _run_all(
    pool: Pool, runs: Mapping[str, _Run], plant: Plant
) -> "dict[str, dict[int, list[Witness]]]":
    """Return what each run's ranks did, by pipeline rank."""
    jobs = [
        (kind, (run.recipe, pp_rank, rank))
        for kind, run in runs.items()
        for pp_rank in run.pp_ranks
        for rank in dict.fromkeys(
            places.corner(run.recipe.mesh, pp_rank, number) for number in run.corners
        )
    ]
    found: dict[str, dict[int, list[Witness]]] = {kind: {} for kind in runs}
    witnesses = _witnesses(pool, [job for _, job in jobs], plant)
    for (kind, (_, pp_rank, _)), witness in zip(jobs, witnesses, strict=True):
        found[kind].setdefault(pp_rank, []).append(witness)
    return found


def _small_job(full: Recipe) -> Recipe:
    """Return a small model on the full-size mesh, whose step has every kind of action of the job's.

    In float8, kernels do not take its sizes. Its ranks are only compared with each other.
    """
    small = without_float8(shrink_to(full, full.mesh))
    return _with_every_action(small.with_micro_batches(full.micro_batches))


def _with_one_block_a_stage(small: Recipe) -> Recipe:
    """Return the recipe with one block on each stage, if its rules allow that; else itself."""
    values = {"model.n_layers": n_stages_of(small), "parallel.stages": None}
    thin = variant(small, values)
    return small if violations(thin) else thin


def _unlike(one: "Witness", other: "Witness", tp: int) -> Iterator[str]:
    """Yield where the calls of two ranks of one pipeline rank differ first.

    Ranks of tp may hold uneven shards. So ranks at different places of tp must agree only on the
    sizes of calls over tp.
    """
    is_same_place = one.rank % tp == other.rank % tp
    for number, (own, of_other) in enumerate(
        zip(_calls(one), _calls(other), strict=False), start=1
    ):
        has_size = is_same_place or 1 in own[0]
        if own != of_other and (has_size or _without_size(own) != _without_size(of_other)):
            yield (
                f"call {number} of rank {one.rank} is {_call_text(own)}, "
                f"and that of rank {other.rank} is {_call_text(of_other)}"
            )
            return
    if len(one.calls) != len(other.calls):
        yield (
            f"rank {one.rank} calls {len(one.calls):,} collectives, and rank {other.rank} "
            f"{len(other.calls):,}"
        )


def _wrong_reductions(small: Recipe, witness: "Witness") -> Iterator[str]:
    """Yield the collectives that do not sum, except the maxima of logits."""
    over_tp = places.members("tp", witness.rank, small.mesh)
    counted = Counter(
        (call.reduction, call.operation, witness.groups[call.group])
        for call in witness.calls
        if call.reduction not in ("", "sum")
    )
    wanted: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    if small.mesh.tp > 1:
        number = expected.maxima(small, witness.rank) * _micro_batches_run(witness)
        wanted["maximum", "all_reduce", over_tp] = number
    for key in sorted({*counted, *wanted}):
        if counted[key] != wanted[key]:
            reduction, operation, ranks = key
            group = places.name_of(small.mesh, witness.rank, ranks)
            yield (
                f"rank {witness.rank}: {counted[key]} {operation} over {group} take the "
                f"{reduction}, and should be {wanted[key]}"
            )


def _calls(witness: "Witness") -> "list[Call]":
    """Return the calls of a rank in a form that is equal for ranks at other places.

    Groups are given as distances between ranks. Sizes of tied parameters' shards, which stages send
    each other, are left out: they may differ between places.
    """
    shapes = [tuple(each - ranks[0] for each in ranks) for ranks in witness.groups]
    found = []
    for call in witness.calls:
        is_message = call.operation in ("send", "recv")
        of_tie = (
            is_message and call.content is None and shapes[call.group][-1] >= witness.taped.ranks
        )
        elements = 0 if of_tie else call.elements
        found.append((shapes[call.group], call._replace(group=0, elements=elements)))
    return found


def _without_size(call: "Call") -> "Call":
    shape, what = call
    return shape, what._replace(elements=0)


def _call_text(call: "Call") -> str:
    shape, what = call
    return f"{what.operation} of {what.elements:,} x {what.dtype} over {len(shape):,} ranks"


def _witnesses(
    pool: Pool, jobs: Sequence[tuple[Recipe, int, int]], plant: Plant
) -> "Iterator[Witness]":
    calls = [{"job": job, "plant": plant} for job in jobs]
    return run_each(pool, "composer3d.full.witness:see", calls)
