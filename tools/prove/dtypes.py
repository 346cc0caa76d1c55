"""The ledger of dtypes: which operators of a step in mixed precision may compute narrow.

Proofs in float64 cannot see a sum in bfloat16. Here, a rank runs a step and an evaluation with
``precision.compute = "bfloat16"`` on tensors without data, on the CPU or on a GPU in name, and a
dispatch mode sees the dtypes of every operator. All that computes must compute in float32 or wider,
except for the rows of ``NARROW``. ``WIDE`` has what must be there, some of it in float64.

A place is the function that calls an operator, as "file:function": of composer3d, of FSDP ("fsdp")
or of torch's optimizers ("optim"); in backward, it may be the node of the graph ("node").
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer3d.dryrun.collectives import tensors_in
from composer3d.dryrun.memory import MemoryLedger
from composer3d.dryrun.stage import Recorder, compose_without_data, first_rank
from composer3d.recipe.resolve import load
from composer3d.runtime.torch_private import around_pipeline_start, body_of
from composer3d.training.validation import evaluate_batch
from tools.fake_cuda import device


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Operation(NamedTuple):
    """What a step does: an operator, the dtypes of its tensors, and the place that calls it."""

    name: str
    inputs: frozenset[torch.dtype]
    outputs: frozenset[torch.dtype]
    place: str

    def __str__(self) -> str:
        def words(dtypes: Iterable[torch.dtype]) -> str:
            return ", ".join(sorted(map(_name_of, dtypes))) or "no floating-point numbers"

        return f"{self.place}: {self.name} of {words(self.inputs)} gives {words(self.outputs)}"


class Wide(NamedTuple):
    """Operators that must compute wide. Each row is seen in a step of some layout.

    Attributes:
        what: they compute.
        operators, places: patterns of ``fnmatch``. The first row that matches counts.
        reason: why.
        least: the narrowest dtype of an output.
    """

    what: str
    operators: tuple[str, ...]
    places: tuple[str, ...]
    reason: str
    least: torch.dtype = torch.float32


class Narrow(NamedTuple):
    """Operators that may compute in the dtype of ``precision.compute``.

    Attributes:
        what: they compute.
        operators, places: patterns of ``fnmatch``.
        reason: why this is exact enough.
        has_wide_part: one input or output must be in float32, such as the statistics of a norm.
    """

    what: str
    operators: tuple[str, ...]
    places: tuple[str, ...]
    reason: str
    has_wide_part: bool = False


_ANY = ("*",)

WIDE = (
    Wide(
        "the loss of a micro-batch",
        ("_log_softmax", "nll_loss*"),
        ("models/layers/head.py:cross_entropy",),
        "bfloat16 holds 256 steps between a number and its double: a sum over tokens stands still",
    ),
    Wide(
        "the loss of a vocabulary that tp cuts",
        ("exp_", "sum*", "allreduce_", "scatter_add_"),
        ("parallel/tensor/vocab.py:*",),
        "the same, with the sums of exponentials and the logits of labels",
    ),
    Wide(
        "a loss in parts, and its gradient of the head",
        ("sum", "add_*"),
        ("models/layers/head.py:_LossInParts.*", "models/layers/head.py:_Parts.*"),
        "the parts of one sum: a rounding for each would grow with their number",
    ),
    Wide(
        "the losses of micro-batches, added up",
        ("add_*",),
        ("parallel/executor.py:OneStage.*", "parallel/pipeline/runtime.py:Pipeline.*"),
        "the logged loss must not depend on how many micro-batches there are",
        torch.float64,
    ),
    Wide(
        "the losses of the micro-batches of a pipeline, added up",
        ("add*", "sum*"),
        ("parallel/pipeline/runtime.py:*",),
        "as without a pipeline",
        torch.float64,
    ),
    Wide(
        "the norm of one gradient",
        ("_foreach_norm*", "linalg_vector_norm"),
        ("parallel/grad_norm.py:_norm_sq",),
        "the gradients' own dtype: few squares, or those that a GPU adds up in a tree",
    ),
    Wide(
        "the squared norm, and what is made of it",
        _ANY,
        ("parallel/grad_norm.py:*", "training/step*.py:*", "runtime/mesh.py:*"),
        "squares have twice the range of gradients, and thousands of them are added",
        torch.float64,
    ),
    Wide(
        "scores, weights and losses of routers",
        ("mm", "_softmax", "sigmoid", "div*", "sum*", "logsumexp", "mul*"),
        ("models/layers/moe.py:Router.*",),
        "in bfloat16, many scores are equal, and other experts are chosen (arXiv 2202.08906)",
    ),
    Wide(
        "what routers have seen",
        ("cat", "add*", "all_reduce", "allreduce_"),
        ("models/layers/moe.py:RouterStatistics.*", "parallel/expert/balance.py:*.collect"),
        "counts of tokens are exact",
        torch.float64,
    ),
    Wide(
        "the weighted sum of a token's experts",
        ("mul*", "sum*", "addcmul_"),
        (
            "models/layers/moe.py:weighted_sum",
            "models/layers/moe.py:_WeightedSum.*",
            "models/layers/moe.py:_SumOperands.*",
        ),
        "it is rounded once, whatever the number of experts",
    ),
    Wide(
        "the merge of the blocks of a ring",
        ("sub*", "sigmoid", "lerp_*", "logaddexp"),
        ("parallel/context/ring.py:_merge",),
        "a rounding for each block would grow with the number of ranks",
    ),
    Wide(
        "the gradients of queries, keys and values, added up over blocks",
        ("add_*",),
        ("parallel/context/ring.py:*",),
        "the same",
    ),
    Wide(
        "rotary angles",
        ("arange", "pow*", "mul*", "cos", "sin"),
        ("models/layers/rope.py:rope_table",),
        "bfloat16 cannot tell positions above 256 apart",
    ),
    Wide(
        "statistics of norms where no kernel has them",
        ("pow*", "mean*", "rsqrt"),
        ("models/*/model.py:*",),
        "a mean of squares over the width of the model",
    ),
    Wide(
        "gradients, summed over micro-batches and over ranks",
        ("add*", "chunk_cat*", "*reduce*", "div_*"),
        ("fsdp:*",),
        "precision.params: a sum in bfloat16 loses a bit with each doubling of its terms",
    ),
    Wide(
        "gradients that were sent narrow, summed",
        ("sum*",),
        ("parallel/data/reduce_scatter.py:*",),
        "each contribution is rounded once, and their sum is not",
    ),
    Wide(
        "gradients that are parts of a sum over tp, and those of tied parameters",
        ("allreduce_", "add*"),
        ("parallel/stages.py:Stages.finish_gradients", "parallel/pipeline/ties.py:*"),
        "precision.params",
    ),
    Wide(
        "moments and weights of the optimizer",
        _ANY,
        ("optim:*", "training/optimizers/*.py:*"),
        "an update is often smaller than a rounding of its weight in bfloat16",
    ),
)

# Nodes of the graph that multiply.
_PRODUCTS = ("node:MmBackward*", "node:AddmmBackward*", "node:BmmBackward*", "node:GroupedMm*")

NARROW = (
    Narrow(
        "products of matrices",
        ("mm", "bmm", "addmm", "_grouped_mm", "_scaled_mm*", "grouped_float8_*"),
        (
            "models/layers/attention.py:*",
            "models/layers/ffn.py:*",
            "models/layers/head.py:Head._loss",
            "models/layers/moe.py:grouped_product",
            "parallel/tensor/styles.py:*",
            "parallel/pipeline/zero_bubble.py:*",
            "parallel/float8.py:*",
            *_PRODUCTS,
        ),
        "the kernels add up in float32 and round each result once",
    ),
    Narrow(
        "attention",
        ("*flash_attention*",),
        (
            "models/layers/attention.py:sdpa",
            "parallel/context/kernels.py:*",
            "parallel/context/segment_kernel.py:*",
            "node:ScaledDotProductFlashAttention*",
        ),
        "the kernels add up in float32; the logsumexp, which merges read, is float32",
        has_wide_part=True,
    ),
    Narrow(
        "norms in one kernel",
        ("_fused_rms_norm*",),
        ("models/*/model.py:*", "parallel/tensor/styles.py:*", "node:FusedRmsNorm*"),
        "the kernel computes in float32, and keeps the statistics in it",
        has_wide_part=True,
    ),
    Narrow(
        "sums of the residual stream",
        ("add.Tensor",),
        ("models/*/model.py:*Block.*", "models/layers/moe.py:MoE.combine"),
        "the dtype of the stream is precision.compute: each layer adds to it once",
    ),
    Narrow(
        "gates, rotations of queries and keys, and factors of queries and embeddings",
        ("silu", "gelu", "mul.Tensor", "addcmul"),
        (
            "models/layers/ffn.py:*",
            "models/*/model.py:*FeedForward.forward",
            "models/*/model.py:*First.forward",
            "models/layers/attention.py:Attention.forward",
            "models/layers/moe.py:expert_ffn",
            "models/layers/rope.py:rotate",
        ),
        "each number by itself: one rounding, or two",
    ),
    Narrow(
        "the derivatives of that",
        ("mul.Tensor", "mul.Scalar", "silu_backward", "gelu_backward"),
        (
            *("node:MulBackward*", "node:AddcmulBackward*"),
            *("node:SiluBackward*", "node:GeluBackward*"),
        ),
        "the same",
    ),
    Narrow(
        "gradients of the outputs of experts",
        ("mul.out",),
        ("models/layers/moe.py:_SumOperands.backward",),
        "computed in float32, and rounded once",
    ),
    Narrow(
        "gradients of one value from the few operators that read it",
        ("add.Tensor",),
        ("node:*Backward*",),
        "at most four terms; gradients of parameters (AccumulateGrad) are not among them",
    ),
    Narrow(
        "what is rounded when it has been computed wide",
        ("_to_copy", "copy_"),
        (
            "models/layers/rope.py:rope_table",
            "models/layers/moe.py:MoE.combine",
            "models/layers/head.py:_LossInParts.backward",
            "models/layers/head.py:_Parts.gradients",
            "models/*/model.py:*",
            "parallel/context/ring.py:*",
            "parallel/tensor/forwards.py:*",
            "parallel/tensor/styles.py:*",
            "parallel/tensor/vocab.py:_CrossEntropy.backward",
            "node:ToCopyBackward*",
            "node:MulBackward*",
        ),
        "one rounding, at its end",
    ),
    Narrow(
        "gradients of a loss in parts, times the gradient of the loss",
        ("mul_*",),
        ("models/layers/head.py:_LossInParts.backward",),
        "one rounding of a number that is rounded already",
    ),
    Narrow(
        "parameters that FSDP gathers",
        ("_to_copy",),
        ("fsdp:_to_dtype_if_needed",),
        "precision.compute",
    ),
    Narrow(
        "gradients that are sent narrow",
        ("_to_copy",),
        ("parallel/data/reduce_scatter.py:SendNarrow.*",),
        "precision.reduce: each contribution is rounded once",
    ),
    Narrow(
        "products in float8",
        ("_to_copy", "mul.Tensor"),
        ("parallel/float8.py:*",),
        "precision.matmul",
    ),
    Narrow(
        "activations, summed over the ranks of tp",
        ("allreduce_", "_reduce_scatter_base_"),
        ("parallel/tensor/collectives.py:*",),
        "a term for each rank, in the dtype of the stream, as in Megatron-LM",
    ),
    Narrow(
        "the gradient of a token from its experts",
        ("sum.dim_IntList",),
        ("models/layers/moe.py:_PermuteRows.backward",),
        "the kernel adds up a few terms in float32 and rounds once",
    ),
    Narrow(
        "gradients of biases",
        ("sum.dim_IntList",),
        ("node:AddmmBackward*", "parallel/pipeline/zero_bubble.py:*"),
        "the kernel adds up the tokens of a micro-batch in float32 and rounds once, as products do",
    ),
    Narrow(
        "gradients of embeddings",
        ("embedding_dense_backward",),
        ("node:EmbeddingBackward*",),
        "torch's kernel for GPUs adds up in float32; that for CPUs rounds each addition",
    ),
)

# Operators that return numbers of their inputs, or constants.
_EXACT = frozenset(
    {
        *("abs", "amax", "aminmax", "clamp", "neg", "masked_fill", "masked_fill_", "roll", "where"),
        *("cat", "stack", "clone", "index", "gather", "embedding", "unbind", "select_backward"),
        *("split_with_sizes_copy", "all_gather_copy_in", "_unsafe_view", "slice_backward"),
        *("zeros", "zeros_like", "ones_like", "full", "full_like", "fill_", "zero_", "arange"),
        *("new_zeros", "new_full", "new_empty", "new_empty_strided", "new_ones", "scalar_tensor"),
        *("empty", "empty_like", "empty_strided", "send", "recv_", "broadcast_", "wait_tensor"),
        *("_allgather_base_", "alltoall_base_", "all_to_all_single", "index_put_", "scatter"),
        "detach",
    }
)
_CASTS = ("_to_copy", "copy_")
_WIDE_DTYPES = frozenset({torch.float32, torch.float64})


class Job(NamedTuple):
    """A rank to run: the first one of a pipeline rank.

    Attributes:
        recipe, sets: the recipe and its overrides.
        pp_rank: a pipeline rank.
        library: of ``fake_cuda.device``, to run on a GPU in name; None: on the CPU.
        plant: changes the program first.
    """

    recipe: Path
    sets: Sequence[str]
    pp_rank: int = 0
    library: Path | None = None
    plant: Callable[[], None] | None = None


def operations_of(job: Job) -> set[Operation]:
    """Run a step and an evaluation. The process must end afterwards, as for ``tape_stage``."""
    torch.set_num_threads(1)
    on = torch.device("cpu")
    if job.library is not None:
        device.install(job.library)
        on = torch.device("cuda", 0)
    if job.plant is not None:
        job.plant()
    # For a GPU, a dry run has norms of its own, which compute nothing.
    recipe = load(job.recipe, [*job.sets, "run.device=cpu"], check_files=False).recipe
    recorder = _DtypeRecorder()
    first = first_rank(recipe, job.pp_rank)
    with (
        compose_without_data(recipe, first, 1.0, recorder, on) as rank,
        around_pipeline_start(recorder.ignoring),
    ):
        rank.take_a_step()
        evaluate_batch(rank.stages, rank.batch)
    return recorder.operations


def findings_of(job: Job) -> list[str]:
    """Return a line for each operator of a job that computes narrower than it may."""
    return judge(operations_of(job))


def judge(operations: Iterable[Operation]) -> list[str]:
    """Return a line for each operator that computes narrower than it may."""
    findings = []
    for operation in sorted(operations, key=str):
        if not operation.outputs:
            continue
        rule = wide_rule(operation)
        if not operation.outputs <= _WIDE_DTYPES:
            if narrow_rule(operation) is None:
                findings.append(f"narrow: {operation}" + (f" ({rule.what})" if rule else ""))
        elif rule is not None and not operation.outputs <= _at_least(rule.least):
            findings.append(f"not in {_name_of(rule.least)}: {operation} ({rule.what})")
    return findings


def _at_least(dtype: torch.dtype) -> frozenset[torch.dtype]:
    return frozenset({torch.float64}) if dtype == torch.float64 else _WIDE_DTYPES


def wide_rule(operation: Operation) -> Wide | None:
    """Return the row of ``WIDE`` that says what an operator must do, or None."""
    return next((row for row in WIDE if _matches(row, operation)), None)


def narrow_rule(operation: Operation) -> Narrow | None:
    """Return the row of ``NARROW`` that lets an operator compute narrow, or None."""
    has_wide_part = not (operation.inputs | operation.outputs).isdisjoint(_WIDE_DTYPES)
    return next(
        (
            row
            for row in NARROW
            if _matches(row, operation) and (has_wide_part or not row.has_wide_part)
        ),
        None,
    )


def _matches(row: Wide | Narrow, operation: Operation) -> bool:
    name = operation.name.partition("::")[2]
    return any(fnmatchcase(name, pattern) for pattern in row.operators) and any(
        fnmatchcase(operation.place, pattern) for pattern in row.places
    )


class _DtypeRecorder(Recorder):
    """Collects in ``operations`` what computes floating-point numbers."""

    # The ledger names operators as the host calls them.
    opens_composed = False

    def __init__(self) -> None:
        super().__init__(MemoryLedger(offload=False))
        self.operations: set[Operation] = set()

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(operator, types, arguments, keywords)
        if result is not NotImplemented and body_of(operator) is None and not self.ignores:
            self._collect(operator, arguments, keywords or {}, result)
        return result

    def _collect(
        self, operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], result: Any
    ) -> None:
        name = operator.name()
        short = name.partition("::")[2].partition(".")[0]
        if short in _EXACT or operator.name().startswith("prim::"):
            return
        returned = operator._schema.returns
        if returned and all(
            entry.alias_info is not None and not entry.alias_info.is_write for entry in returned
        ):
            return  # a view
        # The target of a copy tells its own dtype.
        inputs = _dtypes(arguments[1:2] if short == "copy_" else (arguments, *keywords.values()))
        outputs = _dtypes(result if returned else _written(operator, arguments, keywords))
        is_cast = short in _CASTS
        if is_cast and (inputs == outputs or outputs <= _WIDE_DTYPES):
            return
        self.operations.add(Operation(name, inputs, outputs, _place()))


def _written(operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operator without results changes."""
    for place, entry in enumerate(operator._schema.arguments):
        if entry.alias_info is not None and entry.alias_info.is_write:
            yield arguments[place] if place < len(arguments) else keywords.get(entry.name)


def _dtypes(values: Any) -> frozenset[torch.dtype]:
    tensors: Iterable[Tensor] = tensors_in(values)
    return frozenset(tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point)


def _place() -> str:
    """Return who calls an operator: see the module."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if "/composer3d/" in file and "/dryrun/" not in file and "torch_private" not in file:
            return f"{file.rpartition('/composer3d/')[2]}:{function}"
        if "/torch/distributed/fsdp/" in file:
            return f"fsdp:{function}"
        if "/torch/optim/" in file:
            return f"optim:{function}"
        if function == "_engine_run_backward":
            break
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    return f"node:{'none' if node is None else node.name()}"
