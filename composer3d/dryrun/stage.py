"""The step of one pipeline rank on tensors without data, in a process of its own.

Everything is real but the data: the mesh of the whole world, ``compose``, the pipeline's schedule,
FSDP, the optimizer. The process group is torch's fake one, in which collectives return at once.
The tensors are torch's fake ones: they have a shape, a dtype and a storage that takes no memory.

Where the host reads a value from a tensor without data, it gets a plausible one.
What must have data keeps it: an operator whose inputs all have data computes (documents of a row,
rows of each expert). All ranks are taken to hold the same such data. On a GPU in name, a tensor
without data can have a value on the host beside it: that of a copy of a tensor with data, and of
what is computed from such tensors.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from functools import partial
from itertools import count, pairwise
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.checkpoint.optimizer_state import optimizer_state
from composer3d.data import Batch
from composer3d.dryrun.collectives import (
    CollectiveCounter,
    Message,
    axis_names,
    is_collective,
    tensors_in,
)
from composer3d.dryrun.kernels import norms_of_a_gpu
from composer3d.dryrun.memory import Kind, MemoryLedger
from composer3d.dryrun.replay import Lap, Tape, TapedStage
from composer3d.dryrun.routing import rows_of_experts
from composer3d.facts.errors import UserError
from composer3d.facts.schedules import Action, parse_action
from composer3d.models.contract import Constant, ShardingPlan
from composer3d.models.layers.moe import Router, Routing
from composer3d.models.registry import architecture
from composer3d.parallel import Stages
from composer3d.parallel.data import fsdp
from composer3d.parallel.pipeline.runtime import Pipeline, place_stages
from composer3d.parallel.pipeline.stage_cut import cut_into_stages
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.parallel.stages import Stage
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.rates import Rates, rates_of
from composer3d.recipe.schema import CompileTable, Recipe
from composer3d.runtime import collector
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.torch_private import (
    FAKE_TENSOR,
    DispatchMode,
    around_pipeline_start,
    around_shape_propagation,
    body_of,
    fake_tensors,
    fake_world,
    gathered_parameters,
    group_of_argument,
    has_data,
    in_fake_tensors,
    is_composed,
    watch_resizes,
    with_data,
)
from composer3d.training import step
from composer3d.training.build import build_stages, whole_model
from composer3d.training.optimizers import Optimizer, build_stages_optimizer

# The documents of a row, with data.packing = "documents": all of one length.
_DOCUMENTS = 4

# As many micro-batches do all that a step does.
_FIRST_MIDDLE_LAST = 3

# What the host reads from a floating-point tensor without data. As a squared norm it is a norm of
# 2, so that gradients are clipped at the usual limit, 1.
_FLOAT = 4.0

_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)


class _StageContent(NamedTuple):
    """What tells the stages of one pipeline rank from those of another.

    Attributes:
        blocks: for each stage of the rank, its blocks.
        ends: whether the rank holds the first stage, and the last.
        neighbours: for each of its stages but the last, whether the next one of the pipeline is on
            the rank as well, so that no message is sent.
    """

    blocks: tuple[tuple["_BlockContent", ...], ...]
    ends: tuple[bool, bool]
    neighbours: tuple[bool, ...]


class _BlockContent(NamedTuple):
    """What decides what a step does with a block.

    Attributes:
        modules: the type and the settings of each module, such as the window of an attention.
        parameters: all parameters.
        checkpointing: what backward computes again.
    """

    modules: tuple[tuple[Any, ...], ...]
    parameters: tuple["_ParameterKind", ...]
    checkpointing: str


class _ParameterKind(NamedTuple):
    """All of a parameter that decides what a step does with it.

    Attributes:
        shape: of the whole parameter.
        trains: whether it gets a gradient.
        is_matrix: whether the optimizer works on it as a whole.
        rates: the optimizer steps parameters of equal rates at once.
    """

    shape: tuple[int, ...]
    trains: bool
    is_matrix: bool
    rates: Rates


# Values that decide what a module computes. A function is the same one if its address is.
_SETTING = (
    *(bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, type(None)),
    *(torch.dtype, Enum, type, FunctionType, BuiltinFunctionType),
)
# What torch itself keeps in each module: parameters, hooks and the like.
_OF_TORCH = frozenset(vars(nn.Module()))


def first_alike(recipe: Recipe) -> list[int]:
    """Return for each pipeline rank the first one that holds equal stages.

    Their steps are equal if the orders of their actions are.
    """
    # All ranks of the job compare the file of a schedule.
    with fake_world(0, recipe.world_size):
        placement = place_stages(recipe.mesh.pp, recipe.parallel, recipe.micro_batches)
    matrices = matrices_of(architecture(recipe.model.architecture), recipe.model, recipe.optim)
    contents = []
    for rank in range(recipe.mesh.pp):
        stages = cut_into_stages(whole_model(recipe), placement.stages, rank, recipe.parallel)
        blocks = tuple(
            tuple(
                _content_of_block(
                    recipe,
                    f"blocks.{number}",
                    block,
                    matrices,
                    recipe.memory.checkpointing.mode_of(place, stage.number),
                )
                for place, (number, block) in enumerate(stage.blocks.items())
            )
            for stage in stages
        )
        ends = stages[0].first is not None, stages[-1].last is not None
        neighbours = tuple(after.number == stage.number + 1 for stage, after in pairwise(stages))
        contents.append(_StageContent(blocks, ends, neighbours))
    return [contents.index(content) for content in contents]


def _content_of_block(
    recipe: Recipe, block_name: str, block: nn.Module, matrices: Collection[str], mode: str
) -> _BlockContent:
    """Return the content of a block, which is checkpointed in ``mode``."""
    modules = tuple(
        (
            name,
            type(module),
            # As texts, which can be compared whatever a user's module has.
            *((key, repr(value)) for key, value in vars(module).items() if _is_setting(key, value)),
        )
        for name, module in block.named_modules()
    )
    parameters = []
    for own_name, parameter in block.named_parameters():
        name = f"{block_name}.{own_name}"
        rates = rates_of(name, parameter.dim(), recipe.optim)
        shape = tuple(parameter.shape)
        is_matrix = name in matrices
        parameters.append(_ParameterKind(shape, parameter.requires_grad, is_matrix, rates))
    return _BlockContent(modules, tuple(parameters), mode)


def _is_setting(key: str, value: Any) -> bool:
    return key not in _OF_TORCH and (isinstance(value, _SETTING) or is_dataclass(value))


def tape_stage(
    recipe: Recipe,
    pp_rank: int,
    skew: float,
    *,
    run_all: bool = False,
    recorder: "Recorder | None" = None,
    rank: int | None = None,
) -> TapedStage:
    """Run a step as a rank of pipeline rank ``pp_rank``.

    Without a pipeline, at most three micro-batches are run, unless ``run_all``. The batch in memory
    is whole.

    The process must not have formed a process group, and must end afterwards: torch caches meshes.

    Args:
        recipe: the whole recipe. Blocks are not compiled, whatever it says.
        pp_rank: a pipeline rank.
        skew: as in ``routing.rows_of_experts``.
        run_all: run all micro-batches.
        recorder: sees the step; None: a ``Recorder`` of its own.
        rank: one of the ranks of the pipeline rank; None: the first.

    Raises what ``compose`` raises.
    """
    recorder = recorder or Recorder(MemoryLedger(offload=recipe.memory.cpu_offload))
    ledger = recorder.ledger
    micro_batches = recipe.micro_batches
    if recipe.mesh.pp == 1 and not run_all:
        micro_batches = min(micro_batches, _FIRST_MIDDLE_LAST)
    rank = first_rank(recipe, pp_rank) if rank is None else rank
    with compose_without_data(recipe, rank, skew, recorder, micro_batches=micro_batches) as own:
        collectives = CollectiveCounter(axis_names(own.stages.mesh))
        recording = _Recording(recorder, collectives)
        with (
            recorder.counting(collectives),
            around_pipeline_start(recorder.starting_pipeline),
            recording.of_actions(own.stages),
            recorder.watching(own),
        ):
            own.take_a_step(before_update=partial(_end_gradients, own.stages, recorder))
        recording.mark(None)
        recording.tape.end = ledger.now
        return TapedStage(
            stage=pp_rank,
            ranks=recipe.world_size // recipe.mesh.pp,
            tape=recording.tape,
            groups={
                axis: [tuple(dist.get_process_group_ranks(group)) for group in groups]
                for axis, groups in collectives.groups.items()
            },
        )


class _Recording:
    """Cuts a step into the laps of a tape.

    Attributes:
        tape: what was recorded.
    """

    def __init__(self, recorder: "Recorder", collectives: CollectiveCounter) -> None:
        self.tape = Tape()
        self._recorder, self._collectives = recorder, collectives
        self._operators = recorder.operators
        self._traffic = self._usages()
        recorder.ledger.lap()
        self._begin = recorder.ledger.now

    def _usages(self) -> dict[tuple[str, str], tuple[int, int]]:
        return {
            (axis, name): (usage.count, usage.sent_bytes)
            for axis, operations in self._collectives.traffic.items()
            for name, usage in operations.items()
        }

    def mark(self, action: Action | None) -> None:
        """End a lap. The next one begins with ``action``, or after the last action."""
        traffic = self._usages()
        before = self._traffic
        sent = {
            name: (calls - before.get(name, (0, 0))[0], n_bytes - before.get(name, (0, 0))[1])
            for name, (calls, n_bytes) in traffic.items()
            if before.get(name) != (calls, n_bytes)
        }
        ledger, operators = self._recorder.ledger, self._recorder.operators
        self.tape.laps.append(Lap(operators - self._operators, sent, self._begin, ledger.lap()))
        if action is not None:
            self.tape.actions.append(action)
        self._operators, self._traffic, self._begin = operators, traffic, ledger.now

    @contextmanager
    def of_actions(self, stages: Stages) -> Iterator[None]:
        """Mark the actions of a step inside of this context.

        Without a pipeline, forward and backward of a micro-batch are one action, a forward.
        """
        finish = stages.finish_gradients

        def finish_with_mark() -> None:
            self.mark(None)
            finish()

        stages.finish_gradients = finish_with_mark  # type: ignore[method-assign]
        if isinstance(stages.executor, Pipeline):
            with stages.executor.around_actions(self._around_action):
                yield
            return
        forwards = count()

        def begin_micro_batch(*_: object) -> None:
            self.mark(Action(0, "F", next(forwards)))

        (module,) = stages.modules
        # Before FSDP's hook, which gathers parameters.
        module.register_forward_pre_hook(begin_micro_batch, prepend=True)
        yield

    @contextmanager
    def _around_action(self, name: str) -> Iterator[None]:
        action = parse_action(name)
        if action is not None:  # and not a wait
            self.mark(action)
        yield


@dataclass
class RankWithoutData:
    """A rank of a composed job, whose tensors have no data.

    Attributes:
        batch: of a step. Only its documents have data.
    """

    recipe: Recipe
    stages: Stages
    optimizer: Optimizer
    batch: Batch

    def take_a_step(self, before_update: Callable[[], None] | None = None) -> None:
        """Run the first optimizer step as ``training.loop`` does.

        ``before_update`` is called when all gradients are there.
        """
        sums = step.compute_gradients(self.stages, self.batch)
        if before_update is not None:
            before_update()
        rule = step.update_rule(self.recipe, 0)
        step.update(self.stages, self.optimizer, sums, **rule._asdict())


def first_rank(recipe: Recipe, pp_rank: int) -> int:
    """Return the first rank of a pipeline rank."""
    return pp_rank * (recipe.world_size // recipe.mesh.pp)


@contextmanager
def compose_without_data(
    recipe: Recipe,
    rank: int,
    skew: float,
    recorder: "Recorder",
    device: torch.device = _CPU,
    micro_batches: int | None = None,
) -> Iterator[RankWithoutData]:
    """Compose a rank of a job; inside of the context it can train.

    Args:
        recipe: the whole recipe.
        rank: the rank.
        skew: as in ``routing.rows_of_experts``.
        recorder: sees every operator, but counts those of the composition as nothing.
        device: the device of the model. A GPU may exist in name only.
        micro_batches: how many of a step it trains on; None: all. Its batch is whole in memory.
    """
    sizes = recipe.mesh
    whole = recipe
    kept = micro_batches or recipe.micro_batches
    rows = recipe.data.micro_batch * kept
    recipe = replace(recipe.with_micro_batches(kept), compile=CompileTable())
    ledger = recorder.ledger
    without_data = recorder.without_data
    # The table of a user's own model is read from the model, once in a process: now, as it cannot
    # be built while operators are recorded.
    _ = recipe.parameters

    def materialise(stage: Stage, *, device: torch.device) -> None:
        with without_data:
            stage.to_empty(device=device)

    with fake_world(rank, recipe.world_size):
        with recorder, recorder.ignoring():
            mesh = Mesh.build(sizes, device)
            stages = build_stages(
                recipe, mesh, change_plan=_without_random_values, materialise=materialise
            )
        documents_BT = _documents(whole)
        with (
            without_data,
            recorder,
            watch_resizes(ledger.resize),
            around_shape_propagation(recorder.ignoring),
            norms_of_a_gpu() if recipe.run.device != "cpu" else nullcontext(),
        ):
            optimizer = build_stages_optimizer(stages, recipe)
            parameters = [
                parameter for module in stages.modules for parameter in module.parameters()
            ]
            ledger.mark(map(local_shard, parameters), Kind.PARAMETERS)
            state = optimizer_state(optimizer, stages.named_parameters())
            ledger.mark(map(local_shard, state.values()), Kind.OPTIMIZER)
            del state
            collector.set_aside()
            for module in stages.modules:
                fix_routing(module, sizes.ep, skew, recorder.ignoring)
                _mark_gradients(module, ledger)
            in_memory = _batch(whole, documents_BT)
            batch = Batch._make(None if x is None else x[:rows] for x in in_memory)
            yield RankWithoutData(recipe, stages, optimizer, batch)


def _without_random_values(plan: ShardingPlan) -> ShardingPlan:
    """Fill parameters by one operator each: their values do not matter."""
    return replace(plan, init={"*": Constant(0.0)})


def _documents(recipe: Recipe) -> Tensor | None:
    """Return the documents of a rank's rows, with data; None if rows are not packed."""
    data = recipe.data
    if data.packing == "none":
        return None
    length = -(-data.seq_len // _DOCUMENTS)
    rows = data.micro_batch * recipe.micro_batches
    return (torch.arange(data.seq_len) // length).repeat(rows, 1)


def _batch(recipe: Recipe, documents_BT: Tensor | None) -> Batch:
    rows = recipe.data.micro_batch * recipe.micro_batches
    shape = (rows, recipe.data.seq_len // recipe.mesh.cp)
    tokens_BT, labels_BT, positions_BT = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    depths = recipe.model.mtp_layers
    ahead_B2KT = torch.zeros((rows, 2, depths, shape[1]), dtype=torch.int64) if depths else None
    return Batch(tokens_BT, labels_BT, positions_BT, documents_BT, ahead_B2KT)


def _end_gradients(stages: Stages, recorder: "Recorder") -> None:
    gradients = (parameter.grad for parameter in stages.parameters())
    shards = (local_shard(grad) for grad in gradients if grad is not None)
    recorder.ledger.mark(shards, Kind.GRADIENTS)
    recorder.see_gradients(stages)


def fix_routing(
    stage: nn.Module,
    ep: int,
    skew: float,
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Let the routers of ``stage`` tell numbers of rows, which they cannot count here.

    Args:
        stage: the numbers are on the device of the router's own.
        ep, skew: as in ``routing.rows_of_experts``.
        context: entered while the numbers are made, which is no part of a step.
    """

    def with_given_rows(_: nn.Module, __: object, routing: Routing) -> Routing:
        n_experts = len(routing.tokens_E)
        counts = rows_of_experts(routing.experts_NK.numel(), n_experts, ep, skew)
        with context():
            with with_data():
                given_E = torch.tensor(counts)
            return routing._replace(tokens_E=given_E.to(routing.tokens_E.device))

    for module in stage.modules():
        if isinstance(module, Router):
            module.register_forward_hook(with_given_rows)


def _mark_gradients(stage: nn.Module, ledger: MemoryLedger) -> None:
    """Tell the ledger which tensors are gradients of parameters, when backward adds to them."""

    def mark_as(kind: Kind) -> Any:
        def mark(parameter: Tensor) -> None:
            if parameter.grad is not None:
                ledger.mark([local_shard(parameter.grad)], kind)

        return mark

    units = fsdp.units(stage)
    if not units:
        for parameter in stage.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(mark_as(Kind.GRADIENTS))
        return

    known: set[int] = set()

    def find_gathered(unit: Any, _: Any) -> None:
        for parameter in gathered_parameters(unit):
            if id(parameter) not in known and parameter.requires_grad:
                known.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(mark_as(Kind.WHOLE_GRADIENTS))

    for unit in units:
        # FSDP's own hook runs before, and gathers the parameters.
        cast(nn.Module, unit).register_forward_pre_hook(find_gathered)


# Operators that only tell the device of a tensor without data, or a dtype, or name a range for a
# profiler. Of each tensor without data, torch asks the device several times.
QUESTIONS = frozenset(
    {
        "prim::device",
        "aten::promote_types",
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
    }
)
# Other operators that launch nothing, although their schemas do not say that they make a view.
LAUNCH_NOTHING = frozenset(
    {
        *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"),
        *("aten::new_empty_strided", "aten::_unsafe_view", "aten::resize_", "aten::set_"),
        "_c10d_functional::wait_tensor",
    }
)

# Operators from which the recorder learns what a storage holds.
_TELL_KIND = frozenset(
    {
        "fsdp::all_gather_copy_in",
        "fsdp::split_with_sizes_copy",
        "fsdp::chunk_cat",
        "fsdp::chunk_cat_mixed_dtype",
        "c10d::_reduce_scatter_base_",
        "c10d::alltoall_base_",
        "aten::_to_copy",
        "aten::copy_",
        "aten::div",
        "aten::sum",
    }
)


@dataclass(frozen=True)
class OperatorTraits:
    """What the recorder needs to know of an operator.

    Attributes:
        name: with its namespace, such as "aten::mm".
        body: the Python function of a custom operator, else None.
        is_composed: it only calls other operators, such as ``contiguous``, which may copy. Autograd
            replaces it by these; inside of a custom operator, it arrives as a whole.
        makes_tensors: its outputs have storages of their own.
        is_collective: it may send something.
        tells_kind: it is one of ``_TELL_KIND``.
        is_question: it is one of ``QUESTIONS``.
        launches: it computes, copies or sends tensors. All others make views or allocate.
    """

    name: str
    body: Callable[..., Any] | None
    is_composed: bool
    makes_tensors: bool
    is_collective: bool
    tells_kind: bool
    is_question: bool
    launches: bool


class Recorder(DispatchMode):
    """Sees every operator of a step: counts it, its collectives and what it allocates.

    Args:
        ledger: counts the storages.

    Attributes:
        ledger: the same.
        without_data: the context in which tensors are made without data.
        operators: how many have run that compute, copy or send.
        ignores: nothing counts at the moment.
        opens_composed: whether operators that only call others are replaced by these.
    """

    opens_composed = True

    def __init__(self, ledger: MemoryLedger) -> None:
        super().__init__()
        self.operators = 0
        self.ledger = ledger
        self.without_data = fake_tensors()
        self._collectives: CollectiveCounter | None = None
        self._traits: dict[Any, OperatorTraits] = {}
        self.ignores = False
        self._votes = False

    @property
    def counts(self) -> bool:
        """Whether operators and collectives count at the moment."""
        return self._collectives is not None and not self.ignores

    def axis(self, message: Message) -> str:
        """Return the axis for which a message counts."""
        assert self._collectives is not None
        return self._collectives.axis(message)

    @contextmanager
    def counting(self, collectives: CollectiveCounter | None) -> Iterator[None]:
        """Count operators and collectives inside of the context; with None, count neither."""
        before, self._collectives = self._collectives, collectives
        yield
        self._collectives = before

    @contextmanager
    def starting_pipeline(self) -> Iterator[None]:
        """Count neither operators nor collectives, and let stages vote for static shapes."""
        self._votes = True
        with self.counting(None):
            yield
        self._votes = False

    def watching(self, own: RankWithoutData) -> AbstractContextManager[None]:
        """Return a context around the one step of a rank, for what watches more than this."""
        return nullcontext()

    def watching_body(self, name: str, arguments: Sequence[Any]) -> AbstractContextManager[None]:
        """Return a context around the Python function of a custom operator."""
        return nullcontext()

    def see_read(self, number: Tensor) -> None:
        """Is called when the host reads a number without data, of any shape with one element."""

    def see_gradients(self, stages: Stages) -> None:
        """Is called when all gradients of the step are there, before the optimizer reads them."""

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Count nothing inside of the context, not even memory. Stages may vote."""
        before, self.ignores = self.ignores, True
        yield
        self.ignores = before

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor calls the operators of its shards
        keywords = keywords or {}
        traits = self._traits.get(operator)
        if traits is None:
            traits = self._traits[operator] = _traits_of(operator)

        if traits.is_question:
            return operator(*arguments, **keywords)
        if traits.is_composed and self.opens_composed:
            with self:
                return operator.decompose(*arguments, **keywords)
        if traits.body is not None:
            counter = self._collectives
            inside = nullcontext() if counter is None else counter.inside(operator)
            with self, inside, self.watching_body(traits.name, arguments):
                return traits.body(*arguments, **keywords)
        if _on_gpu(keywords) and not in_fake_tensors():
            # While a model is composed: no tensor with data can be there.
            with self.without_data:
                result = operator(*arguments, **keywords)
        elif FAKE_TENSOR not in types and _all_have_data(arguments) and not _on_gpu(keywords):
            with with_data():
                result = operator(*arguments, **keywords)
                _fill_output(traits.name, arguments)
        elif _all_have_values(arguments):
            result = _run_with_values(operator, traits.name, arguments, keywords)
        elif traits.name == "aten::_local_scalar_dense":
            if arguments[0].is_floating_point():
                self.see_read(arguments[0])
                return _FLOAT
            if self._votes or self.ignores:
                return 1
            raise UserError(
                f"a dry run cannot know a number of {arguments[0].dtype} that decides what is done"
            )
        elif traits.name == "aten::_grouped_mm" and arguments[0].dtype is not torch.bfloat16:
            a, b, *others = arguments
            result = _grouped_product(a, b, others[0] if others else keywords.get("offs"))
        else:
            result = operator(*arguments, **keywords)
            _forget_values(operator, arguments)
        if not self.ignores:
            self.see(operator, traits, arguments, keywords, result)
        return result

    def see(
        self,
        operator: Any,
        traits: OperatorTraits,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Count the call of an operator that has run."""
        ledger = self.ledger
        if self._collectives is not None:
            self.operators += traits.launches
            if traits.is_collective:
                self._collectives.see(operator, arguments)
        if traits.makes_tensors:
            for tensor in tensors_in(result):
                ledger.see(tensor)
        if traits.tells_kind:
            self._mark_kind(traits.name, arguments, keywords, result)

    def _mark_kind(
        self, name: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any], result: Any
    ) -> None:
        """Mark the buffers of FSDP, and gradients that are converted to another dtype."""
        ledger = self.ledger
        match name:
            case "fsdp::all_gather_copy_in":
                ledger.mark([arguments[1]], Kind.GATHERED)
            case "fsdp::split_with_sizes_copy":
                ledger.mark(keywords["out"], Kind.GATHERED)
            case "fsdp::chunk_cat" | "fsdp::chunk_cat_mixed_dtype":
                ledger.mark([keywords["out"]], Kind.WHOLE_GRADIENTS)
            case "c10d::_reduce_scatter_base_" | "aten::copy_":
                # Where one rank shards alone, FSDP copies.
                self._mark_result(arguments[1], [arguments[0]], Kind.GRADIENTS)
            case "c10d::alltoall_base_":  # of ``SendNarrow``, which then sums into the shard
                self._mark_result(arguments[1], [arguments[0]], Kind.WHOLE_GRADIENTS)
            case "aten::div":  # torch before 2.15 divides by the factor of gradients, even by 1
                self._mark_result(arguments[0], [result], Kind.WHOLE_GRADIENTS)
            case "aten::sum" if "out" in keywords:
                self._mark_result(arguments[0], [keywords["out"]], Kind.GRADIENTS)
            case "aten::_to_copy":
                kind = ledger.kind_of(arguments[0])
                if kind in (Kind.WHOLE_GRADIENTS, Kind.GRADIENTS):
                    ledger.mark([result], kind)

    def _mark_result(self, source: Tensor, targets: list[Tensor], kind: Kind) -> None:
        """Mark buffers that were made of whole gradients, unless they have a kind already."""
        ledger = self.ledger
        if ledger.kind_of(source) is Kind.WHOLE_GRADIENTS:
            new = [each for each in targets if ledger.kind_of(each) is Kind.ACTIVATIONS]
            ledger.mark(new, kind)


def _traits_of(operator: Any) -> OperatorTraits:
    schema, name = operator._schema, operator.name().partition(".")[0]
    makes_tensors = any(
        entry.alias_info is None and "Tensor" in str(entry.type) for entry in schema.returns
    )
    sends = is_collective(operator)
    return OperatorTraits(
        name=name,
        body=body_of(operator),
        is_composed=operator.namespace == "aten" and is_composed(operator),
        makes_tensors=makes_tensors,
        is_collective=sends,
        tells_kind=name in _TELL_KIND,
        is_question=name in QUESTIONS,
        launches=(makes_tensors or schema.is_mutable or sends) and name not in LAUNCH_NOTHING,
    )


def _grouped_product(a: Tensor, b: Tensor, offsets_G: Tensor | None) -> Tensor:
    """Return the output of ``grouped_mm``, which torch describes without data in bfloat16 only.

    G groups are those of the dim that both share, or of the rows of ``a``, or of the columns of
    ``b``: (M, K) x (G, K, N) and (G, M, K) x (K, N) give (M, N), and (M, K) x (K, N) gives
    (G, M, N).
    """
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim() == 3:
        shape = (a.shape[0], *shape)
    elif a.dim() == b.dim() == 2 and offsets_G is not None:
        shape = (offsets_G.shape[0], *shape)
    return a.new_empty(shape)


def _all_have_data(arguments: tuple[Any, ...]) -> bool:
    tensors = list(tensors_in(arguments))
    return bool(tensors) and all(map(has_data, tensors))


# The attribute of a tensor on a GPU in name that holds its value: a tensor on the CPU, with data.
_VALUE = "composer3d_value"


def _all_have_values(arguments: tuple[Any, ...]) -> bool:
    """Return whether each tensor has data, or a value beside it."""
    tensors = list(tensors_in(arguments))
    return bool(tensors) and all(has_data(tensor) or hasattr(tensor, _VALUE) for tensor in tensors)


def _run_with_values(
    operator: Any, name: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Any:
    """Run an operator whose inputs have values: on the CPU for its value, and without data.

    An output in host memory has data, as on a real GPU.
    """
    on_host = tuple(map(_on_host, arguments))
    with with_data():
        values = operator(*on_host, **{key: _on_host(value) for key, value in keywords.items()})
        _fill_output(name, on_host)
    if name == "aten::_local_scalar_dense" or torch.Tag.data_dependent_output in operator.tags:
        return values
    if torch.Tag.dynamic_output_shape in operator.tags:
        # torch cannot describe these outputs, but the values have their shapes.
        made = [torch.empty_like(value, device=_GPU) for value in tensors_in(values)]
        result = made[0] if isinstance(values, Tensor) else tuple(made)
    else:
        result = operator(*arguments, **keywords)
    if isinstance(result, Tensor) and result.device.type == "cpu":
        return values
    for tensor, value in zip(tensors_in(result), tensors_in(values), strict=True):
        setattr(tensor, _VALUE, value)
    return result


def _on_host(argument: Any) -> Any:
    """Return an argument of an operator with values in place of tensors without data."""
    if isinstance(argument, Tensor):
        return getattr(argument, _VALUE, argument)
    if isinstance(argument, list | tuple):
        return [_on_host(item) for item in argument]
    return _CPU if isinstance(argument, torch.device) else argument


def _forget_values(operator: Any, arguments: Sequence[Any]) -> None:
    """Remove the values of the tensors that an operator changes to something unknown."""
    for entry, argument in zip(operator._schema.arguments, arguments, strict=False):
        if entry.alias_info is not None and entry.alias_info.is_write:
            for tensor in tensors_in(argument):
                vars(tensor).pop(_VALUE, None)


def _on_gpu(keywords: Mapping[str, Any]) -> bool:
    """Return whether an operator was told to make its output on a GPU."""
    device = keywords.get("device")
    return device is not None and torch.device(device).type == "cuda"


def _fill_output(name: str, arguments: Sequence[Any]) -> None:
    """Write the output of a collective of tensors with data, as if all ranks had the same."""
    match name:
        case "c10d::alltoall_base_":
            out, given, group = arguments[0], arguments[1], group_of_argument(arguments[2])
            own_part = given.unflatten(0, (group.size(), -1))[group.rank()]
            out.copy_(own_part.repeat(group.size(), *[1] * (out.dim() - 1)))
        case "c10d::allgather_":
            for out in arguments[0][0]:
                out.copy_(arguments[1][0])
