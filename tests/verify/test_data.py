"""The data of a proof and its reference rules, which agree with the package's own code."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from composer3d.data import Blend
from composer3d.models.contract import IGNORE_INDEX
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.training.optim import learning_rate
from composer3d.verify.data import (
    corpus_batch,
    has_random_batch,
    make_corpus,
    make_training_data,
    random_batch,
    reference_learning_rate,
    shorten_run,
)
from composer3d.verify.shrink import shrink
from composer3d.verify.worker import run_reference
from tests.data.samples import loader_of
from tools.prove.paths import RECIPE

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def recipe_of(*sets: str) -> Recipe:
    return load(RECIPE, ["data.seq_len=16", *sets], check_files=False).recipe


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("optim.warmup=7",),
        ("optim.warmup=7", "optim.decay=20", "optim.min_lr=1e-5"),
        ("optim.warmup=7", "optim.decay=20", "optim.decay_steps=5"),
        ("optim.warmup=30",),
    ],
    ids=" ".join,
)
def test_the_reference_learning_rate_is_the_one_of_training(
    schedule: str, sets: tuple[str, ...]
) -> None:
    unread = {"constant": ("decay", "min_lr"), "wsd": ()}.get(schedule, ("decay_steps",))
    kept = [override for override in sets if not any(word in override for word in unread)]
    recipe = recipe_of("run.steps=30", f"optim.schedule={schedule}", *kept)
    got = [learning_rate(step, recipe.optim, 30) for step in range(35)]
    assert got == pytest.approx(
        [reference_learning_rate(recipe, step) for step in range(35)], rel=1e-12, abs=1e-18
    )


@pytest.mark.parametrize("warmup", ["0", "10"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_three_steps_of_a_proof_show_the_schedule(schedule: str, warmup: str) -> None:
    recipe = shorten_run(recipe_of(f"optim.schedule={schedule}", f"optim.warmup={warmup}"), 3)
    rates = [reference_learning_rate(recipe, step) for step in range(3)]
    peak = recipe.optim.lr
    if warmup == "10":
        assert rates[:2] == [peak / 2, peak]
    assert rates[2] == pytest.approx(peak if schedule == "constant" else recipe.optim.min_lr)
    assert recipe.optim.min_lr > 0
    if schedule in ("cosine", "linear"):
        assert len(set(rates)) == 3


def test_a_proof_never_validates_with_the_seed_of_its_training() -> None:
    assert shorten_run(recipe_of(), 3).data.seed == 1
    assert shorten_run(recipe_of("data.seed=9"), 3).data.seed == 9
    recipe = shorten_run(recipe_of(), 3)
    held_out = make_corpus(recipe, "validation")
    drawn = [
        [
            corpus_batch(recipe, held_out, seed=seed, step=step)
            for step in range(recipe.validation.steps)
        ]
        for seed in (0, recipe.data.seed)
    ]
    rows = [
        sorted(row for batch in batches for row in batch.tokens_BT.tolist()) for batches in drawn
    ]
    assert rows[0] != rows[1]


@pytest.mark.parametrize("global_batch", [1, 2, 3, 4, 16])
def test_a_proof_draws_from_two_epochs(global_batch: int) -> None:
    recipe = recipe_of(f"data.global_batch={global_batch}", "data.micro_batch=1")
    corpus = make_corpus(recipe, "train")
    samples = (len(corpus.tokens) - 1) // 16
    assert global_batch < samples < 2 * global_batch or global_batch < 3
    assert (len(corpus.tokens) - 1) % 16  # the last tokens do not fill a sample
    assert corpus.tokens.max() < recipe.model.vocab


SOURCES = 'data.sources=[{path="a",weight=1.5},{path="b",weight=1},{path="c",weight=0.25}]'


@pytest.mark.parametrize("packing", ["none", "documents", "whole_documents"])
@pytest.mark.parametrize("sets", [(), ("data.path=a",), (SOURCES,)])
def test_the_loader_draws_what_the_proof_expects(packing: str, sets: tuple[str, ...]) -> None:
    """Of one text, of token files with a mask, and of a blend of which some have masks."""
    source = "tokens" if sets else "python"
    recipe = recipe_of(f"data.source={source}", f"data.packing={packing}", *sets)
    data = make_training_data(recipe)
    corpora = data.corpora if isinstance(data, Blend) else (data,)
    assert len(corpora) == (3 if sets == (SOURCES,) else 1)
    have_masks = [corpus.mask is not None for corpus in corpora]
    assert have_masks == [bool(sets), False, bool(sets)][: len(corpora)]
    sizes = {"seq_len": recipe.data.seq_len, "global_batch": recipe.data.global_batch}
    loader = loader_of(data, **sizes, seed=7, packing=recipe.data.packing)
    for step in range(4):
        expected, batch = corpus_batch(recipe, data, seed=7, step=step), loader[step]
        for wanted, actual in zip(expected, batch, strict=True):
            assert (wanted is None) == (actual is None)
            assert wanted is None or torch.equal(wanted, actual)


@pytest.mark.parametrize("vocab", [1, 2, 3])
def test_a_corpus_holds_only_tokens_of_its_vocabulary(vocab: int) -> None:
    recipe = recipe_of()
    recipe = replace(recipe, model=replace(recipe.model, vocab=vocab))
    corpus = make_corpus(recipe, "train")
    assert sorted(set(corpus.tokens.tolist())) == list(range(vocab))
    assert corpus.end_of_document == vocab - 1


def test_batches_of_documents_have_uneven_numbers_of_labels() -> None:
    recipe = recipe_of("data.packing=documents")
    held_out = make_corpus(recipe, "validation")
    labels = [corpus_batch(recipe, held_out, seed=0, step=step).labels_BT for step in range(2)]
    first, second = ((labels_BT != IGNORE_INDEX).sum(1) for labels_BT in labels)
    assert first.sum() != second.sum()
    assert len(set(first.tolist())) > 3


def test_samples_of_whole_documents_are_filled_up_in_every_batch() -> None:
    recipe = recipe_of("data.packing=whole_documents")
    corpus = make_corpus(recipe, "train")
    for step in range(3):
        batch = corpus_batch(recipe, corpus, seed=recipe.data.seed, step=step)
        filling = (batch.tokens_BT == corpus.end_of_document) & (batch.positions_BT > 0)
        # An end of a document is followed by another document, or else by what fills up.
        assert (filling[:, 1:] & filling[:, :-1]).any(1).sum() > 1
        assert (batch.labels_BT[:, -1] != IGNORE_INDEX).any()  # a document that is cut


def test_a_batch_without_a_label_has_a_reference(tmp_path: Path) -> None:
    sets = ("data.seq_len=1", "data.packing=documents", "data.global_batch=1", "data.micro_batch=1")
    (recipe,) = shrink(recipe_of(*sets))
    known = run_reference(recipe, "float64", 1, str(tmp_path / "reference.pt"))
    assert set(known["norms"]["gradient"][0].values()) == {0.0}


def test_a_random_batch_has_a_micro_batch_without_labels() -> None:
    assert [step for step in range(5) if has_random_batch(step)] == [1, 3]
    recipe = recipe_of()
    counted = (random_batch(recipe, 1).labels_BT != IGNORE_INDEX).view(
        -1, recipe.data.micro_batch, 16
    )
    per_micro_batch = counted.sum((1, 2))
    assert (per_micro_batch == 0).sum() == 1
    assert torch.unique(per_micro_batch).numel() > 2
