"""Greedy tokens are those of transformers; the cache, the batch and the ends do what they say."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from composer3d.facts.errors import CheckpointError, DeviceError, PlanError
from composer3d.generate import cache as caches
from composer3d.generate.cache import CachedSequence, KeyValueCache
from composer3d.generate.generator import Completion, Generator
from composer3d.generate.load import load_model, open_checkpoint
from composer3d.generate.sampling import Sampling
from composer3d.models.deepseek.shape import PRESETS
from composer3d.models.gpt_oss import plan as gpt_oss_plan
from composer3d.models.gpt_oss import shape as gpt_oss
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.models.registry import architecture, resolve
from tests.generate.jobs import MODELS, greedy, greedy_of_transformers, random_model
from tests.long import some_of

LENGTHS = (5, 1, 23, 11)
NEW_TOKENS = 64
CPU = torch.device("cpu")
SHAPE = ModelShape(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn=96, vocab=131, rope_theta=1e4)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 131, (length,), generator=generator).tolist() for length in LENGTHS]


@some_of(5, "name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Float32, one at a time; ragged batches whose places go to the next prompt; and in parts."""
    expected = greedy_of_transformers(name, tmp_path, prompts(), NEW_TOKENS)
    # Other tokens at most positions: a model that repeats itself would show little.
    assert len({token for tokens in expected for token in tokens}) > 20

    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.longest == 256
    model = load_model(checkpoint, dtype=torch.float32, device=CPU)
    generator = Generator(model, checkpoint.plan, device=CPU)
    options: list[dict[str, int]] = [
        {"batch": 1},
        {"batch": 3, "prefill_tokens": 6},
    ]
    for chosen in options:
        found = generator.generate(prompts(), max_tokens=NEW_TOKENS, **chosen)
        assert [completion.tokens for completion in found] == expected, chosen


@pytest.mark.parametrize("name", ["llama, tied", "qwen 3 moe"])
def test_weights_lie_in_one_allocation(name: str, tmp_path: Path) -> None:
    """Each at an address that torch itself would give; two names of a parameter stay one."""
    greedy_of_transformers(name, tmp_path, [[1]], 1)
    checkpoint = open_checkpoint(tmp_path)
    model = load_model(checkpoint, dtype=torch.bfloat16, device=CPU)
    named = dict(model.named_parameters(remove_duplicate=False))
    parameters = {id(parameter): parameter for parameter in named.values()}.values()
    assert len(named) - len(parameters) == (name == "llama, tied")
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
    begins = {parameter.data_ptr() for parameter in parameters}
    assert len(begins) == len(parameters)
    assert all(begin % 64 == 0 for begin in begins)
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, checkpoint.source.read(f"model.{key}").bfloat16())


def make_generator(shape: ModelShape = SHAPE, **options: Any) -> Generator:
    model = random_model("llama", shape, torch.float64)
    return Generator(model, sharding_plan(shape), device=CPU, **options)


def with_window(window: int, full_every: int = 0) -> ModelShape:
    return replace(SHAPE, window=window, full_every=full_every)


@cache
def tokens_without_cache(window: int, full_every: int) -> list[list[int]]:
    """The 24 greedy tokens after each prompt, in float64, by the whole sequence in each step."""
    model = random_model("llama", with_window(window, full_every), torch.float64)
    head: Any = model.last.head.weight  # type: ignore[union-attr]
    return [greedy(model, prompt, 24, head) for prompt in prompts()]


@pytest.mark.parametrize(("window", "full_every"), [(0, 0), (1, 0), (4, 0), (9, 0), (4, 2)])
@pytest.mark.parametrize("prefill_tokens", [2, 5, 64])
def test_the_cache_changes_nothing(window: int, full_every: int, prefill_tokens: int) -> None:
    """A ring of slots wraps many times. With ``full_every`` = 2, the second block keeps all."""
    found = make_generator(with_window(window, full_every)).generate(
        prompts(), max_tokens=24, batch=3, prefill_tokens=prefill_tokens
    )
    tokens = [completion.tokens for completion in found]
    assert tokens == tokens_without_cache(window, full_every)


@pytest.mark.parametrize("queries", [1, 3, 128])
def test_sinks_are_seen_whatever_the_parts_of_a_call(
    monkeypatch: pytest.MonkeyPatch, queries: int
) -> None:
    monkeypatch.setattr(caches, "_MASKED_QUERIES", queries)
    shape = replace(gpt_oss.PRESETS["debug-gpt-oss"], window=4)
    model = random_model("gpt_oss", shape, torch.float64)
    head: Any = model.last.head.weight  # type: ignore[union-attr]
    expected = [greedy(model, prompt, 24, head) for prompt in prompts()]
    plan = gpt_oss_plan.sharding_plan(shape)
    found = Generator(model, plan, device=CPU).generate(
        prompts(), max_tokens=24, batch=3, prefill_tokens=64
    )
    assert [completion.tokens for completion in found] == expected


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize(
    ("prefill_tokens", "shapes"),
    [
        (64, [(3, 5), (1, 2), (1, 5), (1, 5)]),
        (10, [(2, 5), (1, 5), (1, 2), (1, 5), (1, 5)]),
        (3, [(1, 3), (1, 2)] * 3 + [(1, 2)] + [(1, 3), (1, 2)] * 2),
    ],
)
def test_prompts_of_one_length_are_read_together(
    window: int, prefill_tokens: int, shapes: list[tuple[int, int]]
) -> None:
    """As many as have a place; also if one of them ends with its first token."""
    numbers = torch.Generator().manual_seed(6)
    given = [
        torch.randint(1, 131, (length,), generator=numbers).tolist()
        for length in (5, 5, 5, 2, 5, 5)
    ]
    shape = with_window(window)
    free = make_generator(shape).generate(given, max_tokens=9, batch=1)
    end = free[1].tokens[0]

    model = random_model("llama", shape, torch.float64)
    generator = Generator(model, sharding_plan(shape), device=CPU, end_tokens=[end])
    calls: list[tuple[int, int]] = []
    first: Any = model.first
    first.register_forward_pre_hook(lambda _, inputs: calls.append(tuple(inputs[0].shape)))
    alone = generator.generate(given, max_tokens=9, batch=1)
    assert alone[1] == ([end], "end")
    assert sum(len(one.tokens) == 9 for one in alone) >= 3
    calls.clear()
    found = generator.generate(given, max_tokens=9, batch=4, prefill_tokens=prefill_tokens)
    assert found == alone
    assert [call for call in calls if call[1] > 1] == shapes


def test_a_window_bounds_the_memory() -> None:
    cache = KeyValueCache(2, longest=1000, longest_call=50)
    assert cache.slots(0) == 1000
    assert cache.slots(100) == 149
    assert cache.slots(5000) == 1000


def test_blocks_of_one_model_have_caches_of_their_own_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: dict[object, int] = {}
    right = KeyValueCache.of_module

    def watched(self: KeyValueCache, module: object, k: torch.Tensor, window: int) -> Any:
        keys, values = right(self, module, k, window)
        sizes[module] = keys.shape[2]
        return keys, values

    monkeypatch.setattr(KeyValueCache, "of_module", watched)
    shape = replace(with_window(4, 2), n_layers=4)
    make_generator(shape).generate([[1, 2, 3]], max_tokens=20, prefill_tokens=3)
    # Windows of 4 and a call of 3 tokens; and 3 tokens of the prompt with 20 new ones.
    assert list(sizes.values()) == [6, 23, 6, 23]


def test_a_text_ends_at_an_end_token_at_enough_tokens_or_at_the_longest_sequence() -> None:
    free = [one.tokens for one in make_generator().generate(prompts(), max_tokens=12)]
    ends = (free[0][7], free[3][3])
    seen = set()
    for end_tokens, longest in ((ends, None), ((), 30)):
        calls: list[tuple[int, int]] = []
        done: dict[int, Completion] = {}
        found = make_generator(end_tokens=end_tokens, longest=longest).generate(
            prompts(),
            max_tokens=12,
            batch=2,
            on_token=lambda prompt, token, calls=calls: calls.append((prompt, token)),
            on_done=done.__setitem__,
        )
        for number, completion in enumerate(found):
            room = min(12, (longest or 99) - LENGTHS[number])
            tokens = free[number][:room]
            stopped = "max_tokens" if room == 12 else "longest"
            stops = [place for place, token in enumerate(tokens) if token in end_tokens]
            if stops:
                tokens, stopped = tokens[: stops[0] + 1], "end"
            assert completion == (tokens, stopped)
            assert [token for prompt, token in calls if prompt == number] == tokens
            assert done[number] == completion
            seen.add(stopped)
    assert seen == {"end", "max_tokens", "longest"}


@pytest.mark.parametrize("batch", [1, 3])
def test_a_text_ends_where_the_caller_wants(batch: int) -> None:
    """After a token that the caller names for each prompt, which gives its place to the next."""
    free = [one.tokens for one in make_generator().generate(prompts(), max_tokens=12)]
    wanted = [tokens[:count] for tokens, count in zip(free, (1, 12, 5, 3), strict=True)]
    calls: list[tuple[int, list[int]]] = []

    def wants_stop(prompt: int, tokens: Sequence[int]) -> bool:
        calls.append((prompt, list(tokens)))
        return list(tokens) == wanted[prompt]

    found = make_generator().generate(prompts(), max_tokens=13, batch=batch, wants_stop=wants_stop)
    assert [one.tokens for one in found] == wanted
    assert {one.stopped for one in found} == {"wanted"}
    for number, tokens in enumerate(wanted):
        seen = [so_far for prompt, so_far in calls if prompt == number]
        assert seen == [tokens[:count] for count in range(1, len(tokens) + 1)]


def test_samples_depend_on_seed_and_prompt_alone() -> None:
    generator = make_generator()

    def sample(given: list[list[int]], seed: int, batch: int) -> list[list[int]]:
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=seed)
        found = generator.generate(given, max_tokens=20, sampling=sampling, batch=batch)
        return [completion.tokens for completion in found]

    together = sample(prompts(), seed=1, batch=3)
    assert together == [sample([prompt], seed=1, batch=1)[0] for prompt in prompts()]
    assert together == sample(prompts()[::-1], seed=1, batch=2)[::-1]
    assert together != sample(prompts(), seed=2, batch=3)
    assert len({tuple(tokens) for tokens in together}) == len(LENGTHS)


def test_wrong_prompts_weights_and_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt 1 has 0 tokens"):
        make_generator().generate([[1], []], max_tokens=2)
    with pytest.raises(ValueError, match="prompt 0 has 8 tokens"):
        make_generator(longest=8).generate([[1] * 8], max_tokens=2)

    model = random_model("llama", SHAPE)
    plan = sharding_plan(SHAPE)
    with torch.no_grad():
        model.last.norm.weight[3] = torch.nan  # type: ignore[union-attr]
    generator = Generator(model, plan, device=CPU)
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        with pytest.raises(CheckpointError, match="a logit that is not finite"):
            generator.generate([[1]], max_tokens=2, sampling=sampling)

    model = random_model("llama", SHAPE)
    del model.last.head.cross_entropy  # type: ignore[union-attr]
    with pytest.raises(PlanError, match="the seam `cross_entropy`"):
        Generator(model, plan, device=CPU)


def test_a_cache_without_memory_has_one_line() -> None:
    with pytest.raises(DeviceError, match=r"no memory for the keys and values of 1 sequences") as e:
        make_generator().generate([[1]], max_tokens=10**15)
    assert len(e.value.lines) == 1


def test_latents_are_cached_in_place_of_keys_and_values() -> None:
    """A latent and a rotated part of each token and layer, however many heads there are."""
    caches = []
    for heads in (2, 4):
        shape = replace(PRESETS["debug-deepseek"], n_layers=2, n_heads=heads, n_kv_heads=heads)
        model = random_model("deepseek", shape, torch.float64)
        generator = Generator(model, resolve(architecture("deepseek").plan)(shape), device=CPU)
        cache = KeyValueCache(2, longest=10, longest_call=5)
        seq = CachedSequence(cache, 0, [0, 0], 5, CPU)
        with torch.no_grad():
            generator._run(torch.ones(2, 5, dtype=torch.long), seq, False)
        caches.append(cache.bytes)
    assert caches == [2 * 2 * 10 * (shape.kv_rank + shape.rope_dim) * 8] * 2
