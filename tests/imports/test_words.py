"""The tables of words: their keys exist, the page has them, and the code reads each word."""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from composer3d.imports import result
from composer3d.imports.layout import StatedLayout
from composer3d.imports.translation import ENTRIES, Translation, setting
from composer3d.imports.words import PROGRAMS, Program, Word, read_program
from composer3d.recipe.values import coerce, type_of
from tools.words_page import PAGE, page

ALL = [(name, word) for name, program in PROGRAMS.items() for word in program.words]


def test_our_keys_exist() -> None:
    keys = [key.strip() for _, word in ALL for key in word.ours.split(",") if word.ours]
    assert [key for key in keys if key not in ENTRIES] == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_name_has_one_word(program: str) -> None:
    names = [name for word in PROGRAMS[program].words for name in (word.name, *word.aliases)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_entry_of_a_file_is_well_formed(program: str) -> None:
    """What a file says of our keys is a value of their types, and of words that it has."""
    known = PROGRAMS[program]

    def fits(key: str, value: object) -> bool:
        found = coerce(value, type_of(key, ENTRIES))
        return (list(found) if isinstance(found, tuple) else found) == value

    for word in known.words:
        assert all(fits(word.ours, value) for value in word.values.values()), word
        assert all(isinstance(value, str) for value in word.fits), word
    for name, values in known.flags.items():
        assert 1 <= len(values) <= 2
        assert all(fits(known.index[name].ours, value) for value in values), name
    for name, choices in known.choices.items():
        assert all(fits(known.index[name].ours, value) for value in choices.values()), name
        assert all(theirs == theirs.lower() for theirs in choices), name
    for key, (value, reason, *words) in known.defaults.items():
        assert fits(key, value), key
        assert reason
        assert all(word in known.index for word in words), key
    assert all(isinstance(value, list) for value in known.absent.values())
    assert {field.name for field in fields(StatedLayout)} >= known.layout.keys()
    assert all(word in known.index for word in known.layout.values())


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"flag": {}}, "unknown tables: flag"),
        ({"also": {"b": "c"}}, r"\[also\] has unknown words: b"),
        ({"flags": {"b": [1]}}, r"\[flags\] has unknown words: b"),
    ],
)
def test_a_table_of_unknown_words_is_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_program({"words": {"a": "run.seed"}, **tables}, {})


def test_a_word_says_what_happens() -> None:
    assert [word.name for _, word in ALL if not word.ours and not word.note] == []
    assert [word.name for _, word in ALL if word.is_copied and "," in word.ours] == []


def test_the_page_has_the_tables_of_the_code() -> None:
    assert PAGE.read_text() == page(PAGE.read_text())


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks"):
        page("# A page")


def test_the_longest_prefix_wins() -> None:
    program = Program([Word("a.*", note="1"), Word("a.b.*", note="2"), Word("a.b.c", note="3")])
    notes = {name: program.find(name) for name in ("a.x", "a.b.x", "a.b.c", "b", "a")}
    assert [word and word.note for word in notes.values()] == ["1", "2", "3", None, None]


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_word_is_read_by_the_code(program: str) -> None:
    """A word with a key of ours must be read by its translator, or be copied.

    A translation that has all words of a table in it reads each of them. So a word that stands in
    the table and on the page, but that no code reads, is found here.
    """
    names = [
        word.name for word in PROGRAMS[program].words if word.ours and not word.name.endswith("*")
    ]
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
        {"optimizer": "muon"},
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
    "DeepSpeed": [{"scheduler.type": "WarmupCosineLR"}],
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
