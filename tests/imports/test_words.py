"""The tables of words: their keys exist, the page has them, and the code reads each word."""

import re
from collections.abc import Callable

import pytest

from composer3d.imports import result
from composer3d.imports.translation import ENTRIES, Translation, setting
from composer3d.imports.words import WORDS, Word, find_word, index_of
from tools.words_page import PAGE, page

ALL = [(program, word) for program, words in WORDS.items() for word in words]


def test_our_keys_exist() -> None:
    keys = [key.strip() for _, word in ALL for key in word.ours.split(",") if word.ours]
    assert [key for key in keys if key not in ENTRIES] == []


@pytest.mark.parametrize("program", WORDS)
def test_a_name_has_one_word(program: str) -> None:
    names = [name for word in WORDS[program] for name in (word.name, *word.aliases)]
    assert sorted(names) == sorted(set(names))


def test_a_word_says_what_happens() -> None:
    assert [word.name for _, word in ALL if not word.ours and not word.note] == []
    assert [word.name for _, word in ALL if word.is_copied and "," in word.ours] == []


def test_the_page_has_the_tables_of_the_code() -> None:
    assert PAGE.read_text() == page(PAGE.read_text())


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks"):
        page("# A page")


def test_the_longest_prefix_wins() -> None:
    index = index_of([Word("a.*", note="1"), Word("a.b.*", note="2"), Word("a.b.c", note="3")])
    notes = {name: find_word(index, name) for name in ("a.x", "a.b.x", "a.b.c", "b", "a")}
    assert [word and word.note for word in notes.values()] == ["1", "2", "3", None, None]


@pytest.mark.parametrize("program", WORDS)
def test_each_word_is_read_by_the_code(program: str) -> None:
    """A word with a key of ours must be read by its translator, or be copied.

    A translation that has all words of a table in it reads each of them. So a word that stands in
    the table and on the page, but that no code reads, is found here.
    """
    names = [word.name for word in WORDS[program] if word.ours and not word.name.endswith("*")]
    read: set[str] = set()
    # Some words are read only if another one is absent or has a certain value.
    for base in ({}, *_SITUATIONS.get(program, ())):
        for left_out in ((), *_ALTERNATIVES.get(program, ())):
            values = {name: "1" for name in names if name not in left_out} | base
            settings = {name: setting(name, value, "x") for name, value in values.items()}
            model = None if settings.pop("--model", None) else "debug-tiny"
            made = Translation(program, "x", settings, model=model)
            translator: Callable[..., None] = result._TRANSLATORS[program]
            translator(made, 64)
            read |= made._read
    assert set(names) - read == set()


_SITUATIONS: dict[str, list[dict[str, object]]] = {
    "Megatron-LM": [
        {
            "tensor_model_parallel_size": 2,
            "bf16": True,
            "lr_decay_style": "WSD",
            "reset_attention_mask": True,
        },
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "softmax"},
    ],
    "torchtitan": [
        {
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.context_parallel_degree": 2,
            "model.name": "llama3",
            "model.flavor": "8B",
            "validation.enable": True,
        },
        {"model.name": "qwen3", "model.flavor": "8B", "--model": "none"},
    ],
    "NeMo Automodel": [{"distributed.pp_size": 2}],
    "nanotron": [{"tokens.val_check_interval": 10}],
}
_ALTERNATIVES: dict[str, list[tuple[str, ...]]] = {
    "Megatron-LM": [
        ("padded_vocab_size", "use_torch_fsdp2"),
        ("world_size", "use_torch_fsdp2", "use_megatron_fsdp", "data_parallel_sharding_strategy"),
        ("zero_stage", "use_torch_fsdp2", "use_megatron_fsdp", "data_parallel_sharding_strategy"),
        ("train_iters", "lr_decay_iters", "lr_warmup_iters", "context_parallel_size"),
        ("train_iters", "train_samples", "recompute_granularity"),
        ("recompute_granularity", "recompute_activations"),
    ],
}


def test_notes_fit_into_a_table() -> None:
    assert [word.name for _, word in ALL if re.search(r"[|\n]", word.note + word.ours)] == []
