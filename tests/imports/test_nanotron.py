"""nanotron's YAML."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from composer3d.facts.errors import RecipeError
from tests.imports.configurations import NANOTRON, assert_has, imported


def test_a_file(tmp_path: Path) -> None:
    made = imported(tmp_path, "config.yaml", NANOTRON)
    recipe = made.resolved.recipe
    assert (recipe.run.name, recipe.run.seed, recipe.run.steps) == ("tiny", 7, 100)
    assert (recipe.mesh.pp, recipe.mesh.dp_shard, recipe.mesh.tp) == (2, 4, 2)
    assert (recipe.parallel.zero, recipe.parallel.schedule) == (1, "1F1B")
    assert recipe.parallel.sequence_parallel
    assert (recipe.data.global_batch, recipe.data.micro_batch) == (64, 2)
    assert (recipe.model.vocab, recipe.model.tied) == (32002, True)  # padded to tp
    assert (recipe.model.rope_theta, recipe.model.norm_eps) == (10_000.0, 1e-6)
    assert (recipe.optim.lr, recipe.optim.clip) == (3e-4, 0.0)  # YAML 1.1 reads 3e-4 as text
    assert (recipe.optim.schedule, recipe.optim.decay, recipe.optim.min_lr) == ("cosine", 100, 1e-5)
    assert (made.made.contradictions, made.made.lost) == ([], [])


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("pp_engine: 1f1b, ", "", 'parallel.schedule = "GPipe"'),
        (
            "tp_mode: REDUCE_SCATTER",
            "recompute_layer: true",
            'memory.activation_checkpoint = "full"',
        ),
        ("tp_mode: REDUCE_SCATTER", "recompute_layer: true", "parallel.sequence_parallel = false"),
        ("zero_stage: 1", "zero_stage: 0", "mesh.dp_replicate = 4"),
        (
            "lr_decay_style: cosine",
            "lr_decay_style: linear, lr_decay_starting_step: 10",
            'optim.schedule = "linear"',
        ),
        (
            "lr_decay_steps: 90",
            "lr_decay_steps: 20, lr_decay_starting_step: 80",
            "optim.decay_steps = 20",
        ),
        (
            "is_llama_config: true",
            "rope_scaling: {rope_type: llama3, factor: 32.0}",
            "model.rope_factor = 32.0",
        ),
        (
            "is_llama_config: true",
            "rope_scaling: {type: linear, factor: 4.0}",
            'model.rope_scaling = "linear"',
        ),
        (
            "is_llama_config: true",
            "rope_scaling: {rope_type: yarn, factor: 4.0, truncate: false}",
            "model.rope_truncate = false",
        ),
        ("is_llama_config: true", "sliding_window_size: 64", "model.window = 64"),
        (
            "is_llama_config: true",
            "moe_config: {num_experts: 8, top_k: 2, moe_intermediate_size: 256}",
            "model.expert_ffn = 256",
        ),
        ("num_key_value_heads: 4", "use_cache: true", "model.n_kv_heads = 16"),
        ("adam_beta1: 0.9, ", "", "optim.betas = [0.9, 0.95]"),
    ],
)
def test_a_change(tmp_path: Path, old: str, new: str, line: str) -> None:
    assert old in NANOTRON
    recipe = imported(tmp_path, "x.yaml", NANOTRON.replace(old, new)).resolved.recipe
    assert_has(recipe, line)


@pytest.mark.parametrize(
    ("stretch", "is_open"),
    [
        ("{type: linear, factor: 1.0}", False),
        ("{type: yarn, factor: 1, beta_fast: 8, attention_factor: 1.0}", False),
        ("{type: yarn, factor: 1, attention_factor: 1.2}", True),
        ("{type: dynamic, factor: 2}", True),
        ("{type: linear, factor: null}", True),
    ],
)
def test_what_stretches_nothing_is_dropped(tmp_path: Path, stretch: str, is_open: bool) -> None:
    text = NANOTRON.replace("is_llama_config: true", f"rope_scaling: {stretch}")
    made = imported(tmp_path, "x.yaml", text)
    model = made.resolved.recipe.model
    assert (model.rope_scaling, model.rope_factor, model.rope_beta_fast) == ("llama3", 1, 32)
    assert bool(made.made.open) is is_open
    dropped = [line for line in made.made.harmless if "rope_scaling" in line]
    assert bool(dropped) is not is_open


@pytest.mark.parametrize(
    ("stretch", "sets", "context", "is_open"),
    [
        ("{type: yarn, factor: 4.0}", (), 32768, False),
        (
            "{type: yarn, factor: 4.0, original_max_position_embeddings: 4096}",
            (),
            4096,
            False,
        ),
        # transformers would take the longest length, and warn that it is too long.
        ("{type: llama3, factor: 4.0}", (), 8192, True),
        ("{type: llama3, factor: 4.0}", ("model.rope_context=2048",), 2048, False),
        ("{type: linear, factor: 4.0}", (), 8192, False),  # it has no use for a context
    ],
)
def test_the_context_before_a_stretch(
    tmp_path: Path, stretch: str, sets: tuple[str, ...], context: int, is_open: bool
) -> None:
    rope = f"max_position_embeddings: 32768\n    rope_scaling: {stretch}"
    text = NANOTRON.replace("is_llama_config: true", rope)
    made = imported(tmp_path, "x.yaml", text, sets)
    assert made.resolved.recipe.model.rope_context == context
    assert bool(made.made.open) is is_open


def test_yarn_of_a_model_of_unknown_length_is_open(tmp_path: Path) -> None:
    rope = "rope_scaling: {rope_type: yarn, factor: 4.0}"
    made = imported(tmp_path, "x.yaml", NANOTRON.replace("is_llama_config: true", rope)).made
    ((point, line),) = made.open.items()
    assert point.endswith("rope_type")
    assert "no context before the stretch; set model.rope_context" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NANOTRON.replace("dtype: bfloat16", "dtype: float16"), "no float16"),
        (NANOTRON.replace("zero_stage: 1", "zero_stage: 4"), "must be 0, 1, 2 or 3"),
        ("tokens: !!python/object/apply:os.system ['touch /tmp/never']", "cannot be read as YAML"),
        ("a: &a [1]\ntokens: *a", "aliases"),
        ("tokens: 1\ntokens: 2", "the key tokens stands twice"),
        ("[" * 5_000, "cannot be read as YAML"),
        ('tokens: !!int ""', "a value does not fit its tag"),
        ("tokens: !!bool maybe", "a value does not fit its tag"),
        ("tokens: !!timestamp soon", "a value does not fit its tag"),
        ("tokens: !!map [a, b]", "a value does not fit its tag"),
        ("- 1", "must be a YAML mapping"),
        ("x: 1", "has no words of"),
        ("tokens: {a: 1\x00}", "cannot be read as YAML"),
    ],
)
def test_a_refusal(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        imported(tmp_path, "x.yaml", text)


def test_pyyaml_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_yaml(name: str, *arguments: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_yaml)
    with pytest.raises(RecipeError, match=r"pip install composer3d\[import\]"):
        imported(tmp_path, "x.yaml", NANOTRON)
