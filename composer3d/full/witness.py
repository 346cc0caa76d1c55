"""Records what a rank of the job sends and sums in a step without data, in its own process.

``dryrun.stage`` runs the step, with the real code. Besides what a dry run counts, a witness records
the order of all collectives and messages, the ranks of their groups, the path of every gradient
(``paths``), and the axes over which values vary (``varying``).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, zip_longest
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.dryrun.collectives import Message, message_of, tensors_in
from composer3d.dryrun.memory import MemoryLedger
from composer3d.dryrun.replay import TapedStage
from composer3d.dryrun.stage import OperatorTraits, RankWithoutData, Recorder, tape_stage
from composer3d.facts.schedules import Action, parse_action
from composer3d.full import paths, places
from composer3d.full.places import SAME, Varying
from composer3d.full.varying import Follower, Seams, fix, of_placements, varying
from composer3d.parallel import Stages
from composer3d.parallel.context.ownership import OwnedRange, owned_ranges
from composer3d.parallel.context.tiles import NO_WINDOW, NOT_CAUSAL, starts_of
from composer3d.parallel.data import fsdp
from composer3d.parallel.pipeline.neighbours import form_routes
from composer3d.parallel.pipeline.runtime import Pipeline, place_stages
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.parallel.stages import Stage
from composer3d.planner.stages import stage_layers
from composer3d.planner.trained import has_frozen
from composer3d.recipe.schema import Recipe
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.torch_private import (
    fake_world,
    gathered_by_shard,
    group_by_name,
    messages_of_stage,
    reduction_of_argument,
)

_CONTENT = "composer3d_content"
_SEEN = "composer3d_seen"
_WEIGHT = "composer3d_weight"


class CollectiveCall(NamedTuple):
    """A call of a collective, or of one half of a message (send or recv).

    Attributes:
        operation: such as "all_gather".
        reduction: "sum", "average" or another one; "" if nothing is reduced.
        group: the index of the group's ranks in ``Witness.groups``.
        dtype: the dtype of its first tensor.
        elements: the size of the rank's part; 0 for an all-to-all, where it may differ between
            ranks. Of a sum of gradients over tp, which has shards of the rank: that of all shards.
        steps: for a message, how many places after the sender the receiver is in the group.
        content: what a message between stages carries.
    """

    operation: str
    reduction: str
    group: int
    dtype: str
    elements: int
    steps: int = 0
    content: "Content | None" = None


class Content(NamedTuple):
    """What a message between stages carries: the sender's stage, the micro-batch and the kind."""

    stage: int
    micro_batch: int
    kind: str


@dataclass(frozen=True)
class Witness:
    """What a rank did in a step.

    Attributes:
        rank: the rank.
        taped: what a dry run counts.
        calls: all collectives and messages, in order.
        groups: the ranks of each group.
        groups_of: the indices of the groups of each axis, as ``taped`` names axes.
        gradients: the path of each gradient, by parameter; None: the optimizer has no gradient.
        seams: how many activations, gradients and sums were checked.
        unmet: the checks among these that failed, in words: a value varies over too many axes, or a
            stage works on something else than the message of its micro-batch, or runs its blocks in
            another order.
    """

    rank: int
    taped: TapedStage
    calls: list[CollectiveCall]
    groups: list[tuple[int, ...]]
    groups_of: Mapping[str, set[int]]
    gradients: Mapping[str, paths.GradientPath | None]
    seams: int
    unmet: tuple[str, ...]


class Job(NamedTuple):
    """A rank of a recipe to run: its pipeline rank, and its global rank."""

    recipe: Recipe
    pp_rank: int
    rank: int


def see(job: Job, plant: Callable[[], None] | None = None) -> Witness:
    """Run a rank. ``plant`` plants a fault first."""
    if plant is not None:
        plant()
    recipe, pp_rank, rank = job
    recorder = _Watcher(recipe, MemoryLedger(offload=recipe.memory.cpu_offload))
    taped = tape_stage(recipe, pp_rank, 1.0, recorder=recorder, rank=rank)
    if not has_frozen(recipe):
        recorder.see_unread()
    return Witness(
        rank=rank,
        taped=taped,
        calls=recorder.calls,
        groups=recorder.groups,
        groups_of=recorder.groups_of,
        gradients=recorder.gradients,
        seams=recorder.seams.seen,
        unmet=tuple(recorder.seams),
    )


class _Watcher(Recorder):
    """Records the fields of ``Witness``."""

    def __init__(self, recipe: Recipe, ledger: MemoryLedger) -> None:
        super().__init__(ledger)
        self.seams = Seams()
        self._types = _Types.of(recipe)
        self._follower = Follower(self._types.digits)
        self.calls: list[CollectiveCall] = []
        self.groups: list[tuple[int, ...]] = []
        self.groups_of: dict[str, set[int]] = {}
        self.gradients: dict[str, paths.GradientPath | None] = {}
        self._numbers: dict[str, int] = {}
        self._pipeline: Pipeline | None = None
        self._action: Action | None = None
        # While gradients are summed over tp: their sizes as shards of this rank, and of all shards.
        self._shards_to_sum: tuple[int, int] | None = None
        # While the optimizer works: the parts of each weight that it has written, as the first
        # place in memory and the shape.
        self._updates: dict[str, list[tuple[int, tuple[int, ...]]]] | None = None

    def see(
        self,
        operator: Any,
        traits: OperatorTraits,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        result: Any,
    ) -> None:
        super().see(operator, traits, arguments, keywords, result)
        if not self.counts:
            return
        message = message_of(operator, arguments) if traits.is_collective else None
        if message is None:
            for changed in self._follower.follow(operator, arguments, keywords, result):
                known = vars(changed.untyped_storage())
                known.pop(_CONTENT, None)
                if self._updates is not None and _WEIGHT in known:
                    part = int(changed.storage_offset()), tuple(changed.shape)
                    self._updates[known[_WEIGHT]].append(part)
        else:
            is_functional = not traits.name.startswith("c10d::")
            self._follower.follow_message(message, is_functional, arguments, result)
            if message.group.size() > 1:
                self._see_call(message, arguments)
        paths.follow(traits.name, arguments, keywords, result)

    @contextmanager
    def watching_body(self, name: str, arguments: Sequence[Any]) -> Iterator[None]:
        first = self._follower.next_number
        yield
        if self.counts and name in _RINGS:
            # Keys that no query sees are only passed on, and the last ones that arrive not even
            # that. All other messages of a ring must be read.
            with self.ignoring():
                most = int(_hides_last_keys(arguments))
            self._follower.excuse("recv", most, since=first)

    def _see_call(self, message: Message, arguments: Sequence[Any]) -> None:
        number = self._number_of(message.group)
        self.groups_of.setdefault(self.axis(message), set()).add(number)
        reductions = [reduction_of_argument(argument) for argument in arguments]
        reduction = next((one for one in reductions if one is not None), "")
        tensors = [*tensors_in(arguments[0])]
        elements = sum(tensor.numel() for tensor in tensors)
        steps, content = 0, None
        if message.operation in ("send", "recv"):
            peer = arguments[2]
            own, size = message.group.rank(), message.group.size()
            steps = (peer - own if message.operation == "send" else own - peer) % size
            content = self._content_of(tensors[0])
        elif message.operation == "all_to_all":
            elements = 0
        elif message.operation in ("all_gather", "reduce_scatter"):
            self._expect_parts(message, arguments)
        elif self._shards_to_sum is not None and elements == self._shards_to_sum[0]:
            # FSDP shards may be smaller at another place.
            elements = self._shards_to_sum[1]
        self.calls.append(
            CollectiveCall(
                message.operation, reduction, number, str(message.dtype), elements, steps, content
            )
        )

    def _expect_parts(self, message: Message, arguments: Sequence[Any]) -> None:
        """Check that the equal parts of all ranks make up the whole of a collective."""
        made, given = (sum(x.numel() for x in tensors_in(one)) for one in arguments[:2])
        if not given:
            return  # an operator of DTensor, which allocates its own output
        whole, part = (made, given) if message.operation == "all_gather" else (given, made)
        is_whole = whole == part * message.group.size()
        self.seams.agree(f"the parts of {message.operation}", is_whole, "do not make up the whole")

    def _content_of(self, message: Tensor) -> Content | None:
        """Return what a message carries; None if it is not between pipeline stages."""
        known = vars(message.untyped_storage())
        if self._pipeline is not None and _CONTENT not in known:
            # Messages are received into buffers of the stages, which are allocated when the
            # pipeline starts, and since torch 2.15 before each receive.
            for content, tensors in messages_of_stage(self._pipeline.stages, None):
                # Each once: what has changed in the meantime must not look as received.
                new = [one for one in tensors if _SEEN not in vars(one.untyped_storage())]
                for tensor in new:
                    vars(tensor.untyped_storage())[_SEEN] = True
                    fix(tensor, self._types.stream)
                _mark_content(Content(*content), new)
        found: Content | None = known.get(_CONTENT)
        return found

    def _number_of(self, group: dist.ProcessGroup) -> int:
        name = group.group_name
        if name not in self._numbers:
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks not in self.groups:
                self.groups.append(ranks)
            self._numbers[name] = self.groups.index(ranks)
        return self._numbers[name]

    @contextmanager
    def watching(self, own: RankWithoutData) -> Iterator[None]:
        stages, types = own.stages, self._types
        for tensor in own.batch:
            if tensor is not None:
                fix(tensor, types.batch)
        layers_of = {layers.stage: layers for layers in stage_layers(own.recipe)}
        for module in stages.modules:
            _follow_gradients(module, types)
            _watch_order(module, layers_of[module.number].blocks, self.seams)
            if types.digits:
                _watch_seams(module, types, self.seams)
        if types.digits:
            self._watch_sums(own)
        self._watch_updates(own)
        self._watch_sums_of_shards(stages)
        around: AbstractContextManager[None] = nullcontext()
        if isinstance(stages.executor, Pipeline):
            around = self._watching_messages(stages.executor)
            for module in stages.modules:
                self._watch_inputs(module)
        with around:
            yield
        # Only a step whose metrics are written reads what routers have seen.
        _ = stages.router_loads

    def _watching_messages(self, pipeline: Pipeline) -> AbstractContextManager[None]:
        """Return a context in which messages between stages know what they carry."""
        self._pipeline, types = pipeline, self._types

        @contextmanager
        def label(name: str) -> Iterator[None]:
            self._action = action = parse_action(name)
            yield
            if action is not None:
                for content, tensors in messages_of_stage(pipeline.stages, action):
                    _mark_content(Content(*content), tensors)
                    for tensor in tensors if types.digits else ():
                        what = f"the {content[2]} that stage {content[0]} sends"
                        self.seams.expect(what, tensor, types.stream)

        return pipeline.around_actions(label)

    def _watch_sums_of_shards(self, stages: Stages) -> None:
        finish = stages.finish_gradients

        def finish_gradients() -> None:
            gradients = [
                parameter.grad
                for module in stages.modules
                for name, parameter in module.named_parameters()
                if name in module.partial_gradients and parameter.grad is not None
            ]
            own = sum(local_shard(gradient).numel() for gradient in gradients)
            self._shards_to_sum = own, sum(gradient.numel() for gradient in gradients)
            finish()
            self._shards_to_sum = None

        stages.finish_gradients = finish_gradients  # type: ignore[method-assign]

    def _watch_inputs(self, stage: Stage) -> None:
        """Check that a stage works on what the messages of the micro-batch carry."""

        def expect(which: int, kind: str, tensor: Tensor) -> None:
            assert self._action is not None
            wanted = Content(which, self._action.micro_batch, kind)
            found = vars(tensor.untyped_storage()).get(_CONTENT)
            what = f"the {kind} that stage {stage.number} takes for micro-batch {wanted[1]}"
            self.seams.agree(what, found == wanted, "are not those that were sent for it")

        def see_activations(_: Any, arguments: tuple[Tensor, ...]) -> None:
            expect(stage.number - 1, "activations", arguments[0])

        def see_output(_: Any, __: Any, output: Tensor) -> None:
            output.register_hook(partial(expect, stage.number + 1, "gradients"))

        if stage.first is None:
            stage.register_forward_pre_hook(see_activations)
        if stage.last is None:
            stage.register_forward_hook(see_output)

    def _watch_sums(self, own: RankWithoutData) -> None:
        """Check that all ranks divide by the same token count and the same gradient norm."""
        executor, optimizer = own.stages.executor, own.optimizer
        compute, apply = executor.forward_backward, optimizer.apply_gradients

        def forward_backward(tokens: Tensor, keywords: Any, divisor: Tensor) -> Tensor:
            self.seams.expect("the tokens that losses are divided by", divisor, SAME)
            return compute(tokens, keywords, divisor)

        def apply_gradients(*, divisor: Tensor, is_good: Tensor) -> None:
            self.seams.expect("the divisors of gradients", divisor, SAME)
            self.seams.expect("the verdicts on the step", is_good, SAME)
            apply(divisor=divisor, is_good=is_good)

        executor.forward_backward = forward_backward  # type: ignore[method-assign, assignment]
        optimizer.apply_gradients = apply_gradients  # type: ignore[method-assign]

    def _watch_updates(self, own: RankWithoutData) -> None:
        """Check that the optimizer writes each element of each weight that has a gradient once."""
        apply = own.optimizer.apply_gradients

        def apply_gradients(**scalars: Tensor) -> None:
            # Not before the step: FSDP pads uneven shards when it begins.
            weights = {
                name: local_shard(parameter)
                for name, parameter in own.stages.named_parameters()
                if parameter.requires_grad
            }
            for name, weight in weights.items():
                vars(weight.untyped_storage())[_WEIGHT] = name
            updates: dict[str, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
            self._updates = updates
            apply(**scalars)
            self._updates = None
            for name, weight in weights.items():
                parts = updates[name]
                written = sum(prod(shape) for _, shape in parts)
                is_once = written == weight.numel() and not _overlap(parts, weight)
                problem = f"writes {written:,} elements of {weight.numel():,}, or some twice"
                self.seams.agree(f"the update of {name}", is_once, problem)

        own.optimizer.apply_gradients = apply_gradients  # type: ignore[method-assign]

    def see_unread(self) -> None:
        """Report, after the step, what arrived from other ranks and was never read.

        With frozen parameters this is no fault: FSDP prefetches what backward then does not read.
        """
        for operation, number in Counter(self._follower.unread.values()).items():
            what = f"{number} results of {operation}"
            self.seams.agree(what, is_right=False, problem="are read by nothing")

    def see_read(self, number: Tensor) -> None:
        self._follower.see_read(number)
        if self.counts and self._types.digits:
            self.seams.expect("numbers that the host reads", number, SAME)

    def see_gradients(self, stages: Stages) -> None:
        for name, parameter in stages.named_parameters():
            self.gradients[name] = None
            if parameter.grad is not None:
                found = paths.paths_of(local_shard(parameter.grad))
                lost = paths.GradientPath(problem="it comes from something else than backward")
                self.gradients[name] = found.get(name, lost)


# The custom operators of ``parallel.context.ring``. Their last arguments are the same.
_RINGS = frozenset(("composer3d::ring_attention", "composer3d::ring_attention_backward"))


def _hides_last_keys(arguments: Sequence[Any]) -> bool:
    """Return whether no query of this rank sees the keys that a ring brings last.

    Args:
        arguments: of one of ``_RINGS``.
    """
    *tensors, documents, window, method, is_balanced, group_name = arguments
    # In backward, the first argument is a gradient, and the second a list of all other tensors.
    queries, keys, *_ = tensors if isinstance(tensors[1], Tensor) else tensors[1]
    # Latents that arrive all become keys (``messages.LatentMessages``).
    if method != "ring" or not group_name or keys.dim() == 3:
        return False
    group = group_by_name(group_name)
    rank, size, tokens = group.rank(), group.size(), queries.shape[2]
    own, last = (
        owned_ranges(each % size, size, tokens, balanced=is_balanced) for each in (rank, rank + 1)
    )
    starts = starts_of(documents) or ((),)
    return not any(
        _sees(query, key, window, of_row) for query in own for key in last for of_row in starts
    )


def _sees(query: OwnedRange, key: OwnedRange, window: int, starts: Sequence[int]) -> bool:
    """Return whether a query of one range sees a key of another.

    If any does, that is so for the two tokens that are nearest to each other.
    """
    first, last = key.position + key.length - 1, query.position
    if first > last:
        if window != NOT_CAUSAL:
            return False
        first, last = query.position + query.length - 1, key.position
    is_near = window in (NO_WINDOW, NOT_CAUSAL) or last - first < window
    return is_near and not any(first < start <= last for start in starts)


def _overlap(parts: Sequence[tuple[int, tuple[int, ...]]], weight: Tensor) -> bool:
    """Return whether two parts of a weight have an element in common.

    Args:
        parts: of each, the first place in memory, and the shape, of as many dims as the weight.
        weight: the whole weight.
    """
    boxes = []
    for place, shape in parts:
        begins, left = [], place - int(weight.storage_offset())
        for stride in weight.stride():
            begin, left = divmod(left, stride)
            begins.append(begin)
        boxes.append(
            [range(begin, begin + size) for begin, size in zip(begins, shape, strict=True)]
        )
    return any(
        all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(one, other, strict=True))
        for one, other in combinations(boxes, 2)
    )


def _mark_content(content: Content, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        vars(tensor.untyped_storage())[_CONTENT] = content


class _Types(NamedTuple):
    """The digits over which the values of a rank vary.

    Attributes:
        digits: all digits; if there are none, values have no types.
        stages: those over which everything varies, because other ranks hold other layers.
        batch: those over which tokens vary.
        stream: those over which the residual stream varies.
    """

    digits: tuple[places.Digit, ...]
    stages: Varying
    batch: Varying
    stream: Varying

    @classmethod
    def of(cls, recipe: Recipe) -> "_Types":
        digits = places.digits(recipe.mesh)

        def of_axes(*axes: str) -> Varying:
            return frozenset(digit for digit in digits if digit.axis in axes)

        stages = of_axes("pp")
        batch = stages | of_axes("dp_replicate", "dp_shard", "cp")
        stream = batch | of_axes("tp") if recipe.parallel.sequence_parallel else batch
        return cls(digits, stages, batch, stream)


def _watch_order(stage: Stage, blocks: Sequence[int], seams: Seams) -> None:
    """Check that each forward of a stage runs its blocks once, in order.

    A checkpointed block also runs in backward, which begins after the stage's forward.
    """
    wanted = [str(number) for number in blocks]
    ran: list[str] = []

    def begin(*_: object) -> None:
        ran.clear()

    def end(*_: object) -> None:
        problem = ""
        for place, (name, expected) in enumerate(zip_longest(ran, wanted, fillvalue="none")):
            if name != expected:
                problem = f"run in another order: in place {place} it is {name}, not {expected}"
                break
        seams.agree(f"the blocks of stage {stage.number}", not problem, problem)

    def run(name: str, *_: object) -> None:
        ran.append(name)

    stage.register_forward_pre_hook(begin)
    for name, block in stage.blocks.items():
        block.register_forward_pre_hook(partial(run, name))
    stage.register_forward_hook(end)


def _watch_seams(stage: Stage, types: _Types, seams: Seams) -> None:
    """Check the types of what each block and the stage return, and of their gradients."""
    for name, block in stage.blocks.items():
        block.register_forward_hook(seams.watch(f"block {name}", types.stream))
    if stage.last is not None:
        stage.register_forward_hook(seams.watch("the loss", types.batch))


def _follow_gradients(stage: nn.Module, types: _Types) -> None:
    """Begin the path of each gradient of a stage when backward adds to it."""
    names = {parameter: name for name, parameter in stage.named_parameters()}

    def follow(name: str, parameter: nn.Parameter) -> None:
        of_parameter = types.stages | of_placements(parameter, types.digits)
        fix(parameter, of_parameter)

        seen: tuple[Any, int] | None = None

        def begin(parameter: Tensor) -> None:
            nonlocal seen
            if parameter.grad is None:
                return
            gradient = local_shard(parameter.grad)
            version = gradient.untyped_storage(), parameter.grad._version
            if seen is not None and seen[0] is version[0] and seen[1] == version[1]:
                return  # no gradient was added; a later action computes it
            seen = version
            paths.begin(name, gradient, varying(gradient) - of_parameter)

        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(begin)

    units = fsdp.units(stage)
    if not units:
        for parameter, name in names.items():
            follow(name, parameter)
        return
    known: set[nn.Parameter] = set()

    def find_gathered(unit: Any, _: Any) -> None:
        for shard, gathered in gathered_by_shard(unit):
            if gathered not in known:
                known.add(gathered)
                follow(names[shard], gathered)

    for unit in units:
        # FSDP's own hook runs first, and gathers the parameters.
        cast(nn.Module, unit).register_forward_pre_hook(find_gathered)


# --- groups ---


def wrong_groups(
    recipe: Recipe, ranks: Sequence[int], plant: Callable[[], None] | None = None
) -> list[str]:
    """Form the groups of some ranks, one rank after the other, and compare them with ``places``.

    torch's meshes of all ranks, which are the same on every rank, are compared once. So are the
    places that ``Mesh`` gives ranks, from which they also know their samples.

    Returns:
        The first problems found, in words.
    """
    if plant is not None:
        plant()
    found: list[str] = []
    for rank in ranks:
        with fake_world(rank, recipe.world_size):
            found += _wrong_groups_of(recipe, rank, meshes=rank == ranks[0])
        if len(found) > _MOST:
            break
    return found[:_MOST]


_MOST = 8


def _wrong_groups_of(recipe: Recipe, rank: int, *, meshes: bool) -> Iterator[str]:
    sizes = recipe.mesh
    mesh = Mesh.build(sizes, torch.device("cpu"))
    has_experts = recipe.model.experts > 0
    if meshes:
        of_code = [(mesh.device_mesh, False)] + [(mesh.sparse, True)] * has_experts
        for device_mesh, of_experts in of_code:
            arranged = torch.empty_like(device_mesh.mesh)
            for index, place in enumerate(places.arrangement(sizes, of_experts=of_experts)):
                arranged[place] = index
            if not torch.equal(device_mesh.mesh, arranged):
                yield f"the mesh {device_mesh.mesh_dim_names} has ranks at other places"
        yield from _wrong_places(mesh)
    groups: dict[str, dist.ProcessGroup | None] = dict(mesh.groups(has_experts=has_experts))
    groups["stage"] = mesh.stage_group
    if has_experts:
        groups["sequence"] = mesh.sequence_group
    if recipe.parallel.zero == 0 and mesh.fsdp is not None:
        groups["replicas"] = mesh.replicas()["replica"].get_group()
    for name, group in groups.items():
        expected = places.members(name, rank, sizes)
        ranks = (rank,) if group is None else tuple(dist.get_process_group_ranks(group))
        if ranks != expected and (group is not None or len(expected) > 1):
            yield f"rank {rank}: {name} has {_some(ranks)}, and should have {_some(expected)}"
    if sizes.pp > 1:
        yield from _wrong_routes(recipe, rank, mesh)


def _wrong_places(mesh: Mesh) -> Iterator[str]:
    """Yield the ranks of the world that take themselves for other ones, or take others' samples."""
    for rank, wanted in enumerate(places.of_all_ranks(mesh.sizes)):
        own = replace(mesh, rank=rank)
        if own.coords != wanted.coordinates:
            yield f"rank {rank} has the coordinates {own.coords}, and should have {wanted[0]}"
        if own.batch_rank != wanted.batch_rank:
            yield (
                f"rank {rank} takes the samples of batch rank {own.batch_rank}, and should take "
                f"those of {wanted.batch_rank}"
            )


def _wrong_routes(recipe: Recipe, rank: int, mesh: Mesh) -> Iterator[str]:
    sizes = recipe.mesh
    stages = place_stages(sizes.pp, recipe.parallel, recipe.micro_batches).stages
    rank_of = {stage: pp_rank for pp_rank, held in enumerate(stages) for stage in held}
    pipeline = places.members("pp", rank, sizes)
    expected = {
        ends
        for stage in range(len(rank_of) - 1)
        for ends in _both_ways(pipeline[rank_of[stage]], pipeline[rank_of[stage + 1]])
        if rank in ends and ends[0] != ends[1]
    }
    routes = form_routes(stages, mesh)
    if {tuple(route) for route in routes} != expected:
        yield f"rank {rank} has routes {sorted(routes)}, and should have {sorted(expected)}"
    for route, group in routes.items():
        if sorted(dist.get_process_group_ranks(group)) != sorted(route):
            yield f"rank {rank}: the messages of {tuple(route)} have a group of other ranks"


def _both_ways(one: int, other: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (one, other), (other, one)


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    return f"{len(ranks):,} ranks ({shown}{', ...' if len(ranks) > 6 else ''})"
