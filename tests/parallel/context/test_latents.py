"""Latents over ranks: exact values, their bytes, and what each pass computes and keeps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from composer3d.models.deepseek.model import Deepseek
from composer3d.models.deepseek.plan import sharding_plan
from composer3d.models.deepseek.shape import PRESETS
from composer3d.parallel.checkpointing import save_policy
from composer3d.parallel.context import api, messages, ownership
from composer3d.parallel.context.latents import apply, latent_ring_attention
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from tests.parallel.context.attention import group_of_all, random_documents
from tests.parallel.context.recorder import recording
from tests.reference.attention import attend, visible_keys

DEBUG = PRESETS["debug-deepseek"]
METHODS: tuple[api.Method, ...] = ("ring", "allgather")
ROWS, HEADS, WIDTH = 2, 3, 10  # samples, heads, the width of a query and a key


class Widths(NamedTuple):
    """Of a latent, of the rotated part of a key, and of a value."""

    latent: int
    rotated: int
    value: int


NARROW, NO_PADDING, ALL_ROTATED = Widths(5, 4, 7), Widths(6, 2, 10), Widths(3, 10, 4)


class Inputs(NamedTuple):
    """The whole q and latents, the weight, and the gradient of the output."""

    q: Tensor
    latents: Tensor
    weight: Tensor
    grad: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(x.to(dtype) for x in self))

    def leaves(self) -> list[Tensor]:
        return [x.clone().requires_grad_() for x in self[:3]]


def inputs(tokens: int, widths: Widths) -> Inputs:
    up = HEADS * (WIDTH - widths.rotated + widths.value)
    shapes = (
        (ROWS, HEADS, tokens, WIDTH),
        (ROWS, tokens, widths.latent + widths.rotated),
        (up, widths.latent),
        (ROWS, HEADS, tokens, WIDTH),
    )
    generator = torch.Generator().manual_seed(3)
    return Inputs(
        *(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    )


def reference(whole: Inputs, documents: Tensor | None) -> list[Tensor]:
    """The output and the gradients of q, latents and weight, of all scores of each head."""
    q, latents, weight = leaves = whole.leaves()
    latent, rotated = latents[..., : weight.shape[1]], latents[..., weight.shape[1] :]
    keys, values = [], []
    for of_head in weight.chunk(HEADS):
        up = latent @ of_head.T
        plain = WIDTH - rotated.shape[-1]
        keys.append(torch.cat((up[..., :plain], rotated), -1))
        values.append(F.pad(up[..., plain:], (0, WIDTH - (up.shape[-1] - plain))))
    visible = visible_keys(q.shape[2], documents_BT=documents, window=0, is_causal=True)
    out = attend(q, torch.stack(keys, 1), torch.stack(values, 1), visible)
    return [out.detach(), *torch.autograd.grad(out, leaves, whole.grad)]


def composed(
    whole: Inputs, documents: Tensor | None, *, method: api.Method, balanced: bool
) -> list[Tensor]:
    """The results of ``reference``, computed from shards by all ranks and gathered again."""
    group = group_of_all()
    cut = partial(ownership.shard_sequence, group=group, balanced=balanced)
    shards = Inputs(cut(whole.q, 2), cut(whole.latents, 1), whole.weight, cut(whole.grad, 2))
    leaves = shards.leaves()
    out = latent_ring_attention(
        *leaves, group=group, documents=documents, method=method, balanced=balanced
    )
    dq, dlatents, dweight = torch.autograd.grad(out, leaves, shards.grad)
    dist.all_reduce(dweight, group=group)
    join = partial(ownership.unshard_sequence, group=group, balanced=balanced)
    return [join(out.detach(), 2), join(dq, 2), join(dlatents, 1), dweight]


def check_values() -> int:
    """Compare with one process; return the number of comparisons."""
    with pool_world():
        tokens = 12 * dist.get_world_size()
        all_documents = (None, random_documents(tokens, 0.2), random_documents(tokens, 1.0))
        cases = list(
            product((NARROW, NO_PADDING, ALL_ROTATED), all_documents, METHODS, (True, False))
        )
        for widths, documents, method, balanced in cases:
            whole = inputs(tokens, widths)
            expected = reference(whole, documents)
            results = composed(whole, documents, method=method, balanced=balanced)
            for actual, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
        return len(cases)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_attention_to_latents_agrees_with_one_process(pool: Pool, size: int) -> None:
    assert pool.run(check_values, {}, world_size=size) == [36] * size


def measure_errors() -> list[tuple[torch.dtype, float, float]]:
    """Return the largest errors in each dtype: of latents, and of keys that autograd projects."""
    with pool_world():
        group, found = group_of_all(), []
        for dtype, method in product((torch.float32, torch.bfloat16), METHODS):
            narrow = inputs(32 * group.size(), NARROW).to(dtype)
            exact = reference(narrow.to(torch.float64), None)
            results = composed(narrow, None, method=method, balanced=True)
            assert all(result.dtype == dtype for result in results)
            alone = reference(narrow, None)
            errors = [
                max(
                    ((x.double() - wanted).norm() / wanted.norm()).item()
                    for x, wanted in zip(found_, exact, strict=True)
                )
                for found_ in (results, alone)
            ]
            found.append((dtype, *errors))
        return found


def test_sums_over_ranks_are_wide(pool: Pool) -> None:
    """In bfloat16, the sums over ranks and rounds add no error to that of the products."""
    for dtype, error, alone in pool.run(measure_errors, {}, world_size=4)[0]:
        assert torch.finfo(dtype).eps / 16 < error < 2 * alone, (dtype, error, alone)


def count_bytes() -> dict[tuple[api.Method, torch.dtype], tuple[int, int]]:
    """Return the bytes that this rank sends in forward and in backward."""
    with pool_world():
        group, counted = group_of_all(), {}
        for method, dtype in product(METHODS, (torch.float64, torch.bfloat16)):
            of_rank = inputs(8, NARROW).to(dtype)
            leaves = of_rank.leaves()
            with recording() as forward:
                out = latent_ring_attention(*leaves, group=group, method=method)
            with recording() as backward:
                out.backward(of_rank.grad)
            counted[method, dtype] = forward.sent_bytes(), backward.sent_bytes()
        return counted


@pytest.mark.parametrize("size", [2, 4])
def test_only_latents_are_sent(pool: Pool, size: int) -> None:
    numbers = ROWS * 8 * (NARROW.latent + NARROW.rotated)
    for counted in pool.run(count_bytes, {}, world_size=size):
        for (_, dtype), (forward, backward) in counted.items():
            sent, gradients = numbers * dtype.itemsize, numbers * max(4, dtype.itemsize)
            assert forward == (size - 1) * sent
            assert backward == (size - 1) * (sent + gradients)


@contextmanager
def counting_projections() -> Iterator[list[int]]:
    """Collect the number of tokens of each message that is projected up."""
    right, tokens = messages.LatentMessages.key_values, []

    def key_values(sent: Any, message: Tensor) -> Any:
        tokens.append(message.shape[1])
        return right(sent, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages.LatentMessages, "key_values", key_values)
        yield tokens


class Work(NamedTuple):
    """What a rank does in forward and backward.

    Attributes:
        projected: the tokens that are projected up.
        forwards_per_backward: forward blocks of attention for each backward block.
        messages: that start.
    """

    projected: int
    forwards_per_backward: float
    messages: int


def count_work(method: api.Method) -> dict[str, Work]:
    """Count the work in each mode of activation checkpointing. Gradients must be equal bitwise."""
    with pool_world():
        group = group_of_all()
        leaves = inputs(8, NARROW).leaves()

        def run(q: Tensor, latents: Tensor, weight: Tensor) -> Tensor:
            out = latent_ring_attention(q.sin(), latents.sin(), weight, group=group, method=method)
            return out.square()

        def run_full(*tensors: Tensor) -> Tensor:
            return checkpoint(run, *tensors, use_reentrant=False)

        def run_selective(*tensors: Tensor) -> Tensor:
            policy = save_policy(sharding_plan(DEBUG).save)
            contexts = partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(run, *tensors, use_reentrant=False, context_fn=contexts)

        modes: dict[str, Callable[..., Tensor]] = {
            "none": run,
            "full": run_full,
            "selective": run_selective,
        }
        found, expected = {}, None
        for mode, run_mode in modes.items():
            with recording() as recorder, counting_projections() as projected:
                grads = torch.autograd.grad(run_mode(*leaves).sum(), leaves)
            expected = expected or grads
            for actual, wanted in zip(grads, expected, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
            kinds = recorder.kinds()
            ratio = kinds.count("forward") / kinds.count("backward")
            found[mode] = Work(sum(projected), ratio, kinds.count("post"))
        return found


@pytest.mark.parametrize("method", METHODS)
def test_backward_projects_latents_once_more(pool: Pool, method: str) -> None:
    """Those of all ranks, in each pass; selective checkpointing repeats no forward."""
    for found in pool.run(count_work, {"method": method}, world_size=2):
        once, again = Work(2 * 2 * 8, 1, 1 + 2), Work(3 * 2 * 8, 2, 2 + 2)
        assert found == {"none": once, "full": again, "selective": once}


def count_kept() -> int:
    """Return the numbers that forward keeps for backward, without the output and its logsumexp."""
    with pool_world():
        leaves = inputs(8, NARROW).leaves()
        kept: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            kept.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = latent_ring_attention(*leaves, group=group_of_all(), method="allgather")
        known = {x.data_ptr() for x in (*leaves, out)}
        return sum(x.numel() for x in kept if x.data_ptr() not in known)


def test_forward_keeps_no_keys_and_values(pool: Pool) -> None:
    logsumexp = ROWS * HEADS * 8
    assert pool.run(count_kept, {}, world_size=2) == [logsumexp] * 2


def check_operators() -> None:
    """torch accepts the operators; shapes that do not fit are refused."""
    with pool_world():
        group = group_of_all()
        of_rank = inputs(8, NARROW)
        (q, latents, weight, grad), leaves = of_rank, of_rank.leaves()
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        operator = torch.ops.composer3d.ring_attention.default
        backward = torch.ops.composer3d.ring_attention_backward.default
        for documents, method in product((None, random_documents(8, 0.3)), METHODS):
            options = (0, method, True, group.group_name)  # no window
            torch.library.opcheck(operator, (*leaves, None, documents, *options), test_utils=checks)
            out, lse = operator(*leaves, None, documents, *options)
            assert not lse.requires_grad
            saved = [x.detach() for x in (*leaves, out, lse)]
            arguments = (grad, saved, documents, *options)
            torch.library.opcheck(backward, arguments, test_utils=(checks[0], checks[2]))

        wrong = {
            "fewer latents than queries": (q, latents[:, :6], weight),
            "other rows": (q, latents[:1], weight),
            "heads that do not divide": (q, latents, weight[:-1]),
            "a rotated part that is wider than a key": (q[..., :3], latents, weight),
            "a value that is wider than a key": (q, latents, weight.repeat(2, 1)),
            "a latent that is wider than latents": (q, latents[..., :4], weight),
        }
        for name, tensors in wrong.items():
            with pytest.raises(ValueError, match=r"they must be \(B, H, n, D\), \(B, n, R\) and"):
                print(name, latent_ring_attention(*tensors, group=group).shape)
        with pytest.raises(ValueError, match='"ulysses" must be "ring" or "allgather"'):
            latent_ring_attention(q, latents, weight, group=group, method="ulysses")
        odd = (q[:, :, :7], latents[:, :7], weight)
        with pytest.raises(ValueError, match="each rank holds 7 tokens; balanced order needs"):
            latent_ring_attention(*odd, group=group)
        with pytest.raises(ValueError, match=r"documents are \(1, 16\); they must be \(2, 16\)"):
            latent_ring_attention(q, latents, weight, group=group, documents=torch.zeros(1, 16))


def test_operators_of_latents(pool: Pool) -> None:
    pool.run(check_operators, {}, world_size=2)


def check_no_gradient() -> None:
    class NoGradient(torch.autograd.Function):
        """Returns its input; backward returns no gradient."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    with pool_world():
        leaves = inputs(8, NARROW).leaves()
        out = latent_ring_attention(*leaves, group=group_of_all())
        for grad in torch.autograd.grad(NoGradient.apply(out).sum(), leaves):
            assert not grad.any()


def test_an_output_without_a_gradient_gives_zero_gradients(pool: Pool) -> None:
    pool.run(check_no_gradient, {}, world_size=2)


# --- what a model sends ---


def test_the_fewer_numbers_are_sent() -> None:
    """DeepSeek-V3 has 128 heads of 192 numbers, and latents of 512 + 64."""
    shape = PRESETS["deepseek-v3"]

    def sends(tp: int, method: str = "ring", *, is_float8: bool = False) -> bool:
        return shape.sends_latents(tp=tp, cp_method=method, is_float8=is_float8)

    assert shape.latent_width == 576
    # 49,152 / tp numbers of keys and values: 768 with tp 64, 384 with tp 128.
    assert [sends(tp) for tp in (1, 8, 64, 128)] == [True, True, True, False]
    assert [sends(8, method) for method in api.METHODS] == [True, True, False]
    assert not sends(1, is_float8=True)
    # As many of both: 2 x 4 heads x 24 numbers with tp 6 are 32.
    assert not DEBUG.sends_latents(tp=6, cp_method="ring", is_float8=False)


def choices(tp: int, is_float8: bool) -> list[bool]:
    """Return whether each block sends latents, over all ranks as cp, and over none."""
    with pool_world():
        found: list[bool] = []
        for group in (group_of_all(), None):
            model, plan = Deepseek(DEBUG), sharding_plan(DEBUG)
            weight = model.blocks["0"].get_parameter("attn.keys.wkv_b.weight")
            apply(model, plan, group, ParallelTable(), tp=tp, is_float8=is_float8)
            blocks: Any = model.blocks.values()
            sends = {block.attn.attend_latents is not None for block in blocks}
            assert len(sends) == 1
            found += sends
            # The parameter keeps its name, and stays itself.
            assert model.blocks["0"].get_parameter("attn.keys.wkv_b.weight") is weight
        return found


@pytest.mark.parametrize(
    ("tp", "is_float8", "expected"), [(1, False, True), (1, True, False), (6, False, False)]
)
def test_a_model_sends_what_its_shape_says(
    pool: Pool, tp: int, is_float8: bool, expected: bool
) -> None:
    arguments = {"tp": tp, "is_float8": is_float8}
    assert pool.run(choices, arguments, world_size=2) == [[expected, False]] * 2
