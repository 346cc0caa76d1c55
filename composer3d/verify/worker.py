"""The two trainings that ``verify`` compares: a plain one on one process, and the composed one.

Both train on batches of a small corpus and on random batches in turn (``verify.data``). The
composed job gets its batches, gradients, learning rate, update and validation from the functions
that training calls, so the proof covers the code that runs. The plain training follows the
documented rules with code of its own. Random batches have properties that no corpus gives: a
micro-batch without a label, and a different number of labels in each row.
"""

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.data import Batch, Corpus
from composer3d.facts.flags import N_FLAGS
from composer3d.facts.limits import JOB
from composer3d.models.contract import IGNORE_INDEX, Decoder
from composer3d.models.layers.moe import Router, Routing
from composer3d.models.registry import architecture, resolve
from composer3d.parallel import Stages, grad_norm, init
from composer3d.parallel.context import kernels, segment_kernel, tiles
from composer3d.parallel.data import fsdp
from composer3d.parallel.data.reduce_scatter import SendNarrow, WithPlainBuffers
from composer3d.planner.matrices import limited_rounds
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.schema import OptimTable, PrecisionTable, Recipe
from composer3d.recipe.values import variant
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import form_group, pool_world
from composer3d.runtime.torch_private import ReduceScatter
from composer3d.training import batches
from composer3d.training import step as train_step
from composer3d.training import validation as train_validation
from composer3d.training.build import build_stages
from composer3d.training.optim import learning_rate
from composer3d.training.optimizers import Optimizer, build_stages_optimizer
from composer3d.training.optimizers.proof import OptimizerProof
from composer3d.training.step_values import StepSums, StepValues
from composer3d.verify import segments
from composer3d.verify.data import (
    corpus_batch,
    has_random_batch,
    make_corpus,
    make_training_data,
    random_batch,
    reference_learning_rate,
    reference_max_norm,
    shorten_run,
)
from composer3d.verify.float8 import use_float8
from composer3d.verify.judge import RankErrors, ShardError, scalar_scale
from composer3d.verify.limits import limits_of_proof, wait_limit_s
from composer3d.verify.rounding import (
    Noise,
    StepResults,
    measure_noise,
    noisy_copies,
    round_to_float32,
)
from composer3d.verify.routing import SeenOnOneProcess, find_wrong_load

_P = ParamSpec("_P")

ProofDtype = Literal["float32", "float64"]

# The relative error of one rounding to bfloat16 is below 2^-8. The rest is for the roundings of
# sums in float32, and for a double number that is rounded to float32 first.
_BFLOAT16_ROUNDING = 2.0**-8 * (1 + 2.0**-10)
# All roundings to float32 together are smaller than this.
_FLOAT32_ROUNDING = 2.0**-16
# Smaller numbers have fewer bits in bfloat16.
_SMALLEST_BFLOAT16 = 2.0**-126


class Part(NamedTuple):
    """A rank's box of a tensor of the reference.

    Attributes:
        shape: the shape of the whole tensor.
        offset: the global index of the first element of the box.
        values: the box; None if it does not lie in the whole tensor.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor | None


# The plain one-process training.


def run_reference(
    recipe: Recipe, dtype: str, steps: int, path: str, threads: int = 1
) -> dict[str, Any]:
    """Train on one process, and write the losses, norms, gradients and weights to ``path``.

    It computes in float64. The initial weights are the only part of ``parallel`` that it uses, and
    float8 products also know the number of tp ranks (``verify.float8``). It measures how far
    rounding in ``dtype`` alone moves losses and gradients (``verify.rounding``). If ``dtype`` is
    "float32", it rounds the weights to values that float32 can hold.

    Args:
        recipe: a small recipe.
        dtype: the dtype of the composed job, "float64" or "float32".
        steps: the number of training steps.
        path: the file to write, in the format of ``torch.save``.
        threads: the number of threads.

    Returns:
        The fields of ``judge.ReferenceStats``.
    """
    torch.set_num_threads(threads)
    recipe = shorten_run(recipe, steps)
    reference = _train_plainly(recipe, dtype, steps)
    noise: list[Noise] = reference.pop("noise")
    clips = reference.pop("clips")
    closest_scores = reference.pop("closest_scores")
    closest_rounding = reference.pop("closest_rounding")
    torch.save(reference, path)

    norms = {
        kind: [
            {name: _norm(tensor) for name, tensor in tensors.items()} for tensors in reference[kind]
        ]
        for kind in ("gradient", "weight")
    }
    shapes = {name: list(tensor.shape) for name, tensor in reference["weight"][0].items()}
    return {
        "noise": [of_step.gradients for of_step in noise],
        "norms_of_all": [of_step.norm_of_all for of_step in noise],
        "norms": norms,
        "shapes": shapes,
        "clips": clips,
        "closest_scores": closest_scores,
        "closest_rounding": closest_rounding,
    }


def _train_plainly(recipe: Recipe, dtype: str, steps: int) -> dict[str, Any]:
    """Train with plain PyTorch in float64: forward, backward, clipping and update.

    Returns:
        Lists with an entry for each step:

        - ``loss``, with one more entry: the validation loss before the last step;
        - ``norm`` and ``clipped``: the gradient norm before and after clipping. These three are
          pairs of the value and of the number by which its error is divided;
        - ``clips``: whether the step clipped;
        - ``mtp_losses``: what each depth of multi-token prediction adds to the loss;
        - ``gradient`` and ``weight``: tensors by name, before clipping and after the step;
        - ``noise``: the result of ``measure_noise``;
        - ``routing``: what each router has seen (``SeenOnOneProcess``).

        Also ``initial``: the weights before the first step, by name.
    """
    chosen = architecture(recipe.model.architecture)
    model = chosen.build(recipe.model, dtype=torch.float64, device="cpu")
    plan = resolve(chosen.plan)(recipe.model)
    init.initialise(model, plan, recipe.run.seed)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    rounding = None
    if recipe.precision.matmul == "float8":
        rounding = use_float8(model, plan, recipe.mesh.tp)
    for name, parameter in model.named_parameters():
        globs = ("*",) if recipe.optim.train is None else recipe.optim.train
        if not any(fnmatch.fnmatchcase(name, glob) for glob in globs):
            parameter.requires_grad_(False)
        _starve_first_expert(name, parameter, recipe.model.experts > 0)
    optimizer = _proof_class(recipe.optim).plain(
        model.named_parameters(), recipe.optim, matrices_of(chosen, recipe.model, recipe.optim)
    )
    training_data = make_training_data(recipe)
    held_out = make_corpus(recipe, "validation")

    keys = ("loss", "mtp_losses", "norm", "clipped", "clips", "gradient", "weight", "noise")
    reference: dict[str, Any] = {key: [] for key in (*keys, "routing")}
    if dtype == "float32":
        round_to_float32(model)
    reference["initial"] = _copy_weights(model)

    closest = math.inf
    seen = SeenOnOneProcess(model)
    for step in range(steps):
        copies = noisy_copies(model, getattr(torch, dtype), trainable)
        if step == steps - 1:
            validation_loss = _validate_plainly(model, recipe, held_out)
            losses = [_validate_plainly(copied, recipe, held_out) for copied in copies]
            noise_of_validation = max(abs(loss - validation_loss) for loss in losses)

        if has_random_batch(step):
            batch = random_batch(recipe, step)
        else:
            batch = corpus_batch(recipe, training_data, seed=recipe.data.seed, step=step)
        with _record_routers(model) as routers:
            exact = _plain_results(batch, model)
        closest = min(closest, routers.closest)
        reference["routing"].append(seen.take())
        gradients = exact.gradients
        noise = measure_noise(copies, exact, partial(_plain_results, batch))

        norm = math.hypot(*map(_norm, gradients.values()))
        max_norm = reference_max_norm(recipe, step)
        clips = 0 < max_norm < norm
        if clips:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= max_norm / norm

        for group in optimizer.param_groups:
            group["lr"] = reference_learning_rate(recipe, step) * group["lr_factor"]
        optimizer.step()
        _move_router_biases(routers.tokens)
        if dtype == "float32":
            round_to_float32(model)

        scale = scalar_scale("loss", dtype, exact.loss, noise=noise.loss)
        reference["loss"].append((exact.loss, scale))
        reference["mtp_losses"].append(exact.mtp_losses)
        norm_noise, whole = math.hypot(*noise.gradients.values()), noise.norm_of_all
        scale = scalar_scale("norm", dtype, norm, noise=norm_noise, whole=whole)
        reference["norm"].append((norm, scale))
        # Clipping sets the norm, whatever it was.
        reference["clipped"].append((max_norm, max_norm) if clips else (norm, scale))
        reference["noise"].append(noise)
        reference["clips"].append(clips)
        reference["gradient"].append(gradients)
        reference["weight"].append(_copy_weights(model))
    scale = scalar_scale("loss", dtype, validation_loss, noise=noise_of_validation)
    reference["loss"].append((validation_loss, scale))
    reference["closest_scores"] = closest if math.isfinite(closest) else None
    reference["closest_rounding"] = rounding and rounding.closest
    return reference


def _proof_class(table: OptimTable) -> type[OptimizerProof]:
    found: type[OptimizerProof] = resolve(table.optimizer.proof)
    return found


@dataclass
class _RouterRecord:
    """What the routers of a plain model have chosen.

    Attributes:
        tokens: the tokens that each router sent to each expert (E).
        closest: the smallest difference of two scores between which a choice was made.
    """

    tokens: dict[Router, Tensor] = field(default_factory=dict)
    closest: float = math.inf


@contextmanager
def _record_routers(model: Decoder) -> Iterator[_RouterRecord]:
    """Record what the routers of ``model`` choose until the end of the block."""
    record = _RouterRecord()

    def watch(router: nn.Module, inputs: Any, routing: Routing) -> None:
        assert isinstance(router, Router)
        record.tokens[router] = record.tokens.get(router, 0) + routing.tokens_E
        record.closest = min(record.closest, _closest_scores(router, inputs[0]))

    hooks = [
        module.register_forward_hook(watch)
        for module in model.modules()
        if isinstance(module, Router)
    ]
    yield record
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def _closest_scores(router: Router, x_BTC: Tensor) -> float:
    """The smallest difference between the last score that is chosen and the first that is not."""
    logits_NE = x_BTC.flatten(0, 1) @ router.weight.T
    scores_NE = logits_NE.softmax(-1) if router.scores == "softmax" else logits_NE.sigmoid()
    if router.bias is not None:
        scores_NE = scores_NE + router.bias
    if router.groups == 1:
        return _gap(scores_NE, router.per_token)
    by_group = scores_NE.unflatten(1, (router.groups, -1)).sort(descending=True).values
    group_scores = by_group[..., :2].sum(-1)
    gap = _gap(group_scores, router.groups_per_token)
    chosen = group_scores.argsort(descending=True)[:, : router.groups_per_token]
    own = by_group.gather(1, chosen[..., None].expand(-1, -1, by_group.shape[-1]))
    return min(gap, _gap(own.flatten(1), router.per_token))


def _gap(values_NM: Tensor, chosen: int) -> float:
    """The smallest difference, over rows, of the last of ``chosen`` largest values and the next."""
    if chosen == values_NM.shape[1]:
        return math.inf
    largest = values_NM.topk(chosen + 1).values
    return (largest[:, chosen - 1] - largest[:, chosen]).min().item()


@torch.no_grad()
def _move_router_biases(tokens_of_experts: Mapping[Router, Tensor]) -> None:
    """Raise the bias of each expert that got fewer tokens than the mean, and lower the others.

    The bias of a router that does not train stays as it is.
    """
    for router, tokens_E in tokens_of_experts.items():
        if router.bias is not None and router.weight.requires_grad:
            total, experts = int(tokens_E.sum()), len(tokens_E)
            for expert, tokens in enumerate(tokens_E.tolist()):
                if tokens * experts < total:
                    router.bias[expert] += router.bias_rate
                elif tokens * experts > total:
                    router.bias[expert] -= router.bias_rate


def _starve_first_expert(name: str, parameter: Tensor, experts: bool) -> None:
    """Change initial weights so that expert 0 of each layer gets no token.

    The first feature of every embedding becomes positive, and the router of each layer subtracts it
    from the score of expert 0. So a proof sees that an expert without tokens is updated too.
    """
    if not experts:
        return
    if name == "first.embed.weight":
        _set_box(parameter, (slice(None), slice(0, 1)), 0.05)
    elif name.endswith("moe.router.weight"):
        _set_box(parameter, (slice(0, 1), slice(None)), 0.0)
        _set_box(parameter, (slice(0, 1), slice(0, 1)), -10.0)


@torch.no_grad()
def _set_box(parameter: Tensor, box: tuple[slice, ...], value: float) -> None:
    """Set a box of the whole tensor, as far as this rank holds it."""
    local, offset = init.local_part(parameter)
    own = []
    for part, begin, size, whole in zip(box, offset, local.shape, parameter.shape, strict=True):
        first, last, _ = part.indices(whole)
        own.append(slice(max(first - begin, 0), max(min(last - begin, size), 0)))
    local[tuple(own)] = value


@torch.no_grad()
def _validate_plainly(model: Decoder, recipe: Recipe, held_out: Corpus) -> float:
    """Compute the mean loss over the valid tokens of ``validation.steps`` batches."""
    held_out_batches = [
        corpus_batch(recipe, held_out, seed=0, step=step) for step in range(recipe.validation.steps)
    ]
    loss = sum(model(*batch._replace(ahead_B2KT=None)).item() for batch in held_out_batches)
    valid_tokens = sum(_count_valid(batch) for batch in held_out_batches)
    return loss / max(1, valid_tokens)


def _plain_results(batch: Batch, model: Decoder, rows: int = 0) -> StepResults:
    """Compute the mean losses of a global batch, and the gradients of their sum.

    ``rows`` samples are computed at a time; 0 means all at once.
    """
    model.zero_grad()
    batch_rows = len(batch.tokens_BT)
    rows = rows or batch_rows
    valid_tokens = max(1, _count_valid(batch))
    valid_ahead = _count_valid_ahead(batch)
    total_loss, *total_ahead = [0.0] * (1 + len(valid_ahead))
    for first in range(0, batch_rows, rows):
        step_tokens = batch.tokens_BT.numel()
        loss, *of_depths = model(*_rows(batch, first, rows), step_tokens).view(-1)
        loss = loss / valid_tokens
        means = [one / max(1, count) for one, count in zip(of_depths, valid_ahead, strict=True)]
        sum(means, loss).backward()
        total_loss += loss.item()
        total_ahead = [total + mean.item() for total, mean in zip(total_ahead, means, strict=True)]
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return StepResults(total_loss, gradients, tuple(total_ahead))


def _count_valid(batch: Batch) -> int:
    return int((batch.labels_BT != IGNORE_INDEX).sum())


def _count_valid_ahead(batch: Batch) -> list[int]:
    """Count the valid labels of each depth of multi-token prediction."""
    if batch.ahead_B2KT is None:
        return []
    depths = range(batch.ahead_B2KT.shape[2])
    return [int((batch.ahead_B2KT[:, 1, depth] != IGNORE_INDEX).sum()) for depth in depths]


def _copy_weights(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# The composed training.


def run_composed(
    recipe: Recipe,
    dtype: ProofDtype,
    steps: int,
    reference: str,
    fault: Callable[[], None] | None = None,
    compute: ProofDtype | None = None,
) -> RankErrors:
    """Train as one rank of the composed job, and compare with the reference in each step.

    It is a task of ``launch.Pool``: it forms the process group itself.

    Args:
        recipe: a small recipe.
        dtype: the dtype of parameters and optimizer.
        steps: the number of training steps.
        reference: the file that ``run_reference`` wrote.
        fault: a function to call before anything is built, with which a test plants a fault.
        compute: the dtype for the forward and backward of a mixed-precision recipe. The default is
            ``dtype``, which still runs the code of mixed precision.

    Returns:
        The differences that this rank measured.
    """
    torch.set_num_threads(1)
    if fault is not None:
        fault()
    expected = torch.load(reference, mmap=True, weights_only=True)
    with pool_world(timeout_s=wait_limit_s(recipe)) as device:
        mesh = Mesh.build(recipe.mesh, device)
        return compare_steps(recipe, mesh, dtype, steps, lambda _: expected, compute)


def _with_small_limits(
    compare: Callable[Concatenate[Recipe, _P], RankErrors],
) -> Callable[Concatenate[Recipe, _P], RankErrors]:
    """Let the small tensors of a proof be computed in parts, as the large ones of a job are."""

    @wraps(compare)
    def compare_in_parts(recipe: Recipe, /, *args: _P.args, **kwargs: _P.kwargs) -> RankErrors:
        small = limits_of_proof(recipe)
        grad_norm.ROW, init.CHUNK = small.row, small.initial_weights
        try:
            with limited_rounds(small.elements_per_round):
                return compare(recipe, *args, **kwargs)
        finally:
            grad_norm.ROW, init.CHUNK = JOB.row, JOB.initial_weights
            _compute_attention(JOB.band)

    return compare_in_parts


def _compute_attention(
    band: int,
    of_cpu: kernels.Kernel = kernels.Kernel.CPU_FLASH,
    *,
    in_segments: bool = False,
) -> None:
    """Let attention compute from now on as a GPU does.

    Args:
        band: the most queries of a tile (``facts.limits``).
        of_cpu: the kernel that a CPU takes.
        in_segments: let a CPU take the segments of a variable-length kernel for documents and
            windows, which ``verify.segments`` computes.
    """
    kernels.KERNEL_OF_CPU = of_cpu
    segment_kernel.VARIABLE_LENGTH.pop(kernels.Kernel.CPU_FLASH, None)
    if in_segments:
        segment_kernel.VARIABLE_LENGTH[kernels.Kernel.CPU_FLASH] = segments.KERNEL
    if band != tiles.BAND:
        tiles.BAND = band
        tiles.tiles.cache_clear()


def _compute_attention_in_another_way(step: int, band: int) -> None:
    """Compute the attention of a step of a proof in one of the ways of ``parallel.context``.

    The ways are taken in turn: plain scores in bands, as GPUs do in wide dtypes; segments, as they
    do in bfloat16; and the kernel of a CPU, with whole tiles.
    """
    if step % 3 == 0:
        _compute_attention(band, kernels.Kernel.REFERENCE)
    elif step % 3 == 1:
        _compute_attention(band, in_segments=True)
    else:
        _compute_attention(JOB.band)


@_with_small_limits
def compare_steps(
    recipe: Recipe,
    mesh: Mesh,
    dtype: ProofDtype,
    steps: int,
    find_reference: Callable[[Stages], Mapping[str, Any]],
    compute: ProofDtype | None = None,
) -> RankErrors:
    """Train on the ranks of ``mesh``, and compare with the reference in each step.

    Collective over all ranks.

    Args:
        recipe: a small recipe with this mesh.
        mesh: the mesh of the job.
        dtype: the dtype of parameters and optimizer.
        steps: the number of training steps.
        find_reference: is called on all ranks with the stages. It returns what ``run_reference``
            wrote; each tensor may be a ``Part`` with this rank's box.
        compute: as in ``run_composed``.

    Returns:
        The differences that this rank measured.
    """
    wrong_learning_rate = _find_wrong_learning_rate(recipe, steps)
    mixed = recipe.precision.compute is not None
    sends_narrow = recipe.precision.reduce == "bfloat16"
    precision = PrecisionTable(
        params=dtype,
        compute=(compute or dtype) if mixed else None,
        # It is narrower than float64 too.
        reduce="bfloat16" if sends_narrow else None,
        matmul=recipe.precision.matmul,
    )
    # Muon's bfloat16 rounds far more than a proof can tell from an error.
    recipe = shorten_run(recipe, steps)
    optim = replace(recipe.optim, newton_schulz_dtype=dtype)
    recipe = replace(recipe, precision=precision, optim=optim)

    stages = build_stages(recipe, mesh)
    expected = find_reference(stages)
    # Training forms a group here too, for its checkpoints. If ranks had formed different groups
    # before, they would wait for each other.
    dist.barrier(form_group())
    for name, parameter in stages.named_parameters():
        _starve_first_expert(name, parameter, recipe.model.experts > 0)
    optimizer = build_stages_optimizer(stages, recipe)
    training_data = make_training_data(recipe)
    loader = batches.make_loader(recipe, mesh, training_data, seed=recipe.data.seed)
    held_out = make_corpus(recipe, "validation")
    replay = _proof_class(recipe.optim)(
        recipe.optim,
        getattr(torch, dtype),
        matrices_of(architecture(recipe.model.architecture), recipe.model, recipe.optim),
    )

    errors = RankErrors(
        identity=mesh.identity,
        coords=mesh.coords,
        loss=[math.nan] * (steps + 1),
        wrong_learning_rate=wrong_learning_rate,
    )
    batch_tokens = recipe.data.global_batch * recipe.data.seq_len
    small_band = limits_of_proof(recipe).band
    for step in range(steps):
        _compute_attention_in_another_way(step, small_band)
        # Validate between two steps, so that a validation that disturbs the next step shows.
        if step == steps - 1:
            validation_loss = train_validation.validate(
                recipe, stages, train_validation.make_held_out_loader(recipe, mesh, held_out)
            )
            assert validation_loss is not None
            errors.loss[steps] = _relative_error(validation_loss, *expected["loss"][steps])

        batch = next(loader)
        if has_random_batch(step):
            batch = local_batch(random_batch(recipe, step), stages)
        if sends_narrow and step == 0:
            errors.wrong_reduction = _find_wrong_reduction(stages, batch)
        sums = train_step.compute_gradients(stages, batch)
        values = sums.await_values()
        errors.loss[step] = _error_of_losses(values, expected, step)
        errors.norm.append(_relative_error(values.norm, *expected["norm"][step]))
        errors.wrong_load = errors.wrong_load or find_wrong_load(
            stages.router_loads, expected["routing"][step], batch_tokens, dtype
        )
        gradients = {
            name: parameter.grad
            for name, parameter in stages.named_parameters()
            if parameter.requires_grad
        }
        for name, gradient in gradients.items():
            expected_gradient = expected["gradient"][step].get(name)
            errors.shards.append(_compare(step, "gradient", name, gradient, expected_gradient))

        max_norm = reference_max_norm(recipe, step)
        replay.record_gradients(gradients, norm=values.norm, max_norm=max_norm)
        rule = train_step.update_rule(variant(recipe, {"optim.clip": max_norm}), step)
        train_step.update(stages, optimizer, sums, **rule._asdict())

        # A factor of all gradients may hardly change the weights (as with an optimizer that
        # divides by their size), but it changes this norm.
        clipped = _clipped_norm(stages)
        errors.clipped.append(_relative_error(clipped, *expected["clipped"][step]))
        errors.shards += _compare_weights(
            step, stages, expected, replay, lr=reference_learning_rate(recipe, step)
        )
        if step == 0:
            errors.wrong_bad_step = _take_bad_step(stages, optimizer, lr=rule.lr)
    return errors


def _take_bad_step(stages: Stages, optimizer: Optimizer, *, lr: float) -> str | None:
    """Take a step whose loss and gradients are NaN, and describe what it changed; None: nothing.

    Weights are then set back. Later steps show whether the states of the optimizer have changed,
    and whether gradients are left. Collectives: those of ``training.step.update``.
    """
    parameters = dict(stages.named_parameters())
    before = {name: init.local_part(parameter)[0].clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        if parameter.grad is not None:
            init.local_part(parameter.grad)[0].fill_(math.nan)
    n_sums = 2 + N_FLAGS + len(grad_norm.PARTS)
    sums = torch.zeros(n_sums, dtype=torch.float64, device=stages.mesh.device)
    sums[:2] = math.nan
    train_step.update(stages, optimizer, StepSums(sums), max_norm=1.0, lr=lr)
    changed = None
    for name, parameter in parameters.items():
        local, _ = init.local_part(parameter)
        if changed is None and not torch.equal(local, before[name]):
            changed = f"a step whose loss is not finite changed {name}"
        local.copy_(before[name])
    return changed


def _error_of_losses(values: StepValues, expected: Mapping[str, Any], step: int) -> float:
    """Return the largest error of a step's losses, relative to the scale of the main one."""
    main, scale = expected["loss"][step]
    pairs = zip(
        (values.loss, *values.mtp_losses), (main, *expected["mtp_losses"][step]), strict=True
    )
    errors = [_relative_error(actual, wanted, scale) for actual, wanted in pairs]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _find_wrong_learning_rate(recipe: Recipe, steps: int) -> str | None:
    """Describe the first step whose learning rate in training breaks the documented rule, if any.

    The few steps of a proof show little of a schedule. A learning rate needs no training, so many
    more steps are compared, of the proof's run and of the whole run (``_sampled_steps``).
    """
    for run_name, run in (
        ("the proof's run", shorten_run(recipe, steps)),
        ("the whole run", recipe),
    ):
        table, total_steps = run.optim, run.run.steps
        for step in _sampled_steps(table, total_steps):
            actual = learning_rate(step, table, total_steps)
            expected = reference_learning_rate(run, step)
            # With ``not <=``, a learning rate of NaN is wrong.
            if not abs(actual - expected) <= 1e-12 * table.lr:
                return (
                    f"learning rate of step {step + 1} of {run_name} of {total_steps} steps is "
                    f"{actual:.6g}, not {expected:.6g}"
                )
    return None


def _sampled_steps(table: OptimTable, total_steps: int) -> list[int]:
    """Return steps, counted from 0, that show each part of a learning rate schedule.

    These are 64 steps from the first to the end of the decay, the steps around each change of the
    rule, and two steps far after the end.
    """
    decay_end = total_steps if table.decay is None else table.decay
    decay_begin = decay_end - (table.decay_steps or max(1, decay_end // 10))
    steps = {(decay_end + 2) * index // 63 for index in range(64)}
    for change in (0, table.warmup, decay_begin, decay_end, total_steps):
        steps.update(range(change - 3, change + 4))
    steps.update((2 * decay_end, 10 * total_steps))
    return sorted(step for step in steps if step >= 0)


class _SumAbsolute(WithPlainBuffers):
    """Sums the absolute values of what ranks contribute, by an all-reduce."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        whole = input_tensor.abs()
        dist.all_reduce(whole, group=group)
        output_tensor.copy_(whole.view(group.size(), -1)[group.rank()])


def _find_wrong_reduction(stages: Stages, batch: Batch) -> str | None:
    """Describe the first gradient that sending it in bfloat16 makes wrong on this rank, if any.

    The rule: each contribution of a rank is rounded once to bfloat16, so an element differs from
    that of the exact sum by at most 2^-8 times the sum of the contributions' absolute values. This
    sum is computed by the same layout, with another reduce-scatter.

    Afterwards, the stages send the same messages in the dtype of their parameters, and have no
    gradients. What they then compute is compared with the reference like any other layout.

    Collectives: those of three times the gradients of a step.

    Args:
        stages: as they were built.
        batch: this rank's part of the global batch.
    """
    rounded = _take_gradients(stages, batch)
    _replace_reduce_scatter(stages, _SumAbsolute())
    absolute = _take_gradients(stages, batch)
    dtype = next(iter(stages.parameters())).dtype
    _replace_reduce_scatter(stages, SendNarrow(dtype))
    exact = _take_gradients(stages, batch)

    is_narrow = False
    for name, gradient in exact.items():
        error = (rounded[name] - gradient).abs()
        bound = _BFLOAT16_ROUNDING * absolute[name] + _SMALLEST_BFLOAT16
        is_narrow = is_narrow or bool((error > _FLOAT32_ROUNDING * absolute[name]).any())
        # With ``not <=``, an error of NaN is wrong.
        if not bool((error <= bound).all()):
            ratio = (error / bound).max().item()
            return (
                f"gradient of {name} in bfloat16 differs from the exact one by {ratio:.3g} times "
                "what one rounding of each rank's contribution explains"
            )
    if is_narrow or not any(values.any() for values in absolute.values()):
        return None
    return "gradients are sent in a wider dtype than bfloat16"


def _replace_reduce_scatter(stages: Stages, reduce_scatter: ReduceScatter) -> None:
    for module in stages.modules:
        fsdp.set_reduce_scatter(module, reduce_scatter)


def _take_gradients(stages: Stages, batch: Batch) -> dict[str, Tensor]:
    """Compute the gradients of a step, and return this rank's shards of them by name, in float64.

    ``stages`` keep none.
    """
    train_step.compute_gradients(stages, batch)
    found = {}
    for name, parameter in stages.named_parameters():
        if parameter.grad is not None:
            local, _ = init.local_part(parameter.grad)
            found[name] = local.to("cpu", torch.float64, copy=True)
            parameter.grad = None
    return found


def _clipped_norm(stages: Stages) -> float:
    """Compute the norm of the clipped gradients. Collective: one all-reduce over all ranks."""
    mesh = stages.mesh
    (norm_sq,) = mesh.sum_over_world(grad_norm.local_grad_norm_sq(stages.parameters(), mesh))
    return math.sqrt(norm_sq)


def local_batch(batch: Batch, stages: Stages) -> Batch:
    """Cut this rank's part out of a global batch: its rows, and its tokens of these rows.

    ``documents_BT`` keeps whole sequences, as in the batches of the loader.

    Args:
        batch: tensors of shape (global_batch, T).
        stages: the stages of this rank, which know the tokens of its cp rank.

    Returns:
        Tensors of shape (global_batch / batch_ranks, T / cp), with T for ``documents_BT``, and
        (global_batch / batch_ranks, 2, depths, T / cp) for ``ahead_B2KT``.
    """
    rows = len(batch.tokens_BT) // stages.mesh.batch_ranks
    own_rows = _rows(batch, stages.mesh.batch_rank * rows, rows)
    return Batch(
        stages.own_tokens(own_rows.tokens_BT),
        stages.own_tokens(own_rows.labels_BT),
        stages.own_tokens(own_rows.positions_BT),
        own_rows.documents_BT,
        None if own_rows.ahead_B2KT is None else stages.own_tokens(own_rows.ahead_B2KT),
    )


def _rows(batch: Batch, first: int, count: int) -> Batch:
    return Batch._make(
        None if tensor is None else tensor[first : first + count] for tensor in batch
    )


# Comparisons.


def _compare_weights(
    step: int, stages: Stages, expected: Mapping[str, Any], replay: OptimizerProof, *, lr: float
) -> list[ShardError]:
    """Compare each weight with the reference and with its replayed update, and then set it.

    It is set to the weight of the reference, as a proof judges each step by itself.
    """
    weights_before = expected["weight"][step - 1] if step else expected["initial"]
    shards = []
    for name, parameter in stages.named_parameters():
        before, after = weights_before.get(name), expected["weight"][step].get(name)
        box = None if before is None else _read_box(before, *init.local_part(parameter))
        remove_rounding: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        if box is not None and parameter.requires_grad:
            remove_rounding = partial(_replay, replay, name, box.to(torch.float64), lr=lr)
        elif box is not None:
            # There is no optimizer step to replay: the biases of routers move by a fixed rate.
            # Frozen weights stay as they are.
            remove_rounding = partial(_remove_one_rounding, box, parameter.dtype)
        shards.append(_compare(step, "weight", name, parameter.detach(), after, remove_rounding))
        _set_shard(parameter, after)
    return shards


def _replay(
    replay: OptimizerProof, name: str, before: Tensor, actual: Tensor, _: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Call ``replay.remove_rounding`` as ``_compare`` calls a function of two tensors."""
    return replay.remove_rounding(name, actual, before, **options)


def _remove_one_rounding(
    before: Tensor, dtype: torch.dtype, actual: Tensor, expected: Tensor
) -> tuple[Tensor, Tensor]:
    """Move ``actual`` to ``expected`` where they differ by less than ``dtype`` rounds a sum by.

    One term of the sum is ``before``; all three are this rank's shards.
    """
    bound = 2 * torch.finfo(dtype).eps * (before.abs() + expected.abs())
    is_rounding = (actual - expected).abs() <= bound
    return torch.where(is_rounding, expected, actual), expected


def _compare(
    step: int,
    kind: str,
    name: str,
    tensor: Tensor | None,
    whole: Tensor | Part | None,
    remove_rounding: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> ShardError:
    """Compare this rank's shard of a tensor with the same box of the reference. No collective.

    Args:
        step: the step, counted from 0.
        kind: "gradient" or "weight".
        name: the name of the parameter.
        tensor: a tensor, or a DTensor with this rank's shard; None if this rank has none.
        whole: the tensor of the reference, whole or this rank's part; None if there is none.
        remove_rounding: a function of this rank's shard and the same box of ``whole``, both in
            float64. It returns two tensors whose difference is what rounding does not explain.
            None: that is the difference of the arguments themselves.
    """
    fails = partial(ShardError.of_problem, step, kind, name)
    if tensor is None:
        return fails("is missing")
    if whole is None:
        return fails("is not in the reference")
    if isinstance(tensor, DTensor) and any(
        placement.is_partial() for placement in tensor.placements
    ):
        return fails("is a partial sum that nothing has reduced")

    local, offset = init.local_part(tensor)
    box = _read_box(whole, local, offset)
    if box is None:
        return fails(f"holds {list(local.shape)} at {list(offset)} of {list(whole.shape)}")

    actual, expected = local.to("cpu", torch.float64), box.to(torch.float64)
    whole_diff = actual - expected
    if remove_rounding is not None:
        actual, expected = remove_rounding(actual, expected)
    diff = actual - expected
    return ShardError(
        step=step,
        kind=kind,
        name=name,
        offset=offset,
        shape=tuple(local.shape),
        diff_sq=(diff * diff).sum().item(),
        norm_sq=(expected * expected).sum().item(),
        dot=(actual * expected).sum().item(),
        whole_diff_sq=(whole_diff * whole_diff).sum().item(),
    )


def _set_shard(parameter: Tensor, whole: Tensor | Part | None) -> None:
    """Copy the values of the reference into this rank's shard of a parameter.

    A shard that the reference does not have is not changed. Its ``ShardError`` names the problem.
    """
    local, offset = init.local_part(parameter)
    if whole is None:
        return
    box = _read_box(whole, local, offset)
    if box is not None:
        local.copy_(box)


def _read_box(whole: Tensor | Part, local: Tensor, offset: tuple[int, ...]) -> Tensor | None:
    """Return the values of the reference for a rank's shard ``local`` at ``offset``.

    None if the tensor does not have such a box. A ``Part`` has one box alone: that which the shard
    of the parameter had when the stages were built.
    """
    if isinstance(whole, Part):
        values = whole.values
        is_box = values is not None and whole.offset == offset and values.shape == local.shape
        return values if is_box else None
    box = whole[tuple(slice(a, a + size) for a, size in zip(offset, local.shape, strict=True))]
    return box if box.shape == local.shape else None


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


def _relative_error(actual: float, expected: float, scale: float) -> float:
    """Return the error relative to ``scale``, a number of ``judge.scalar_scale``."""
    return abs(actual - expected) / scale
