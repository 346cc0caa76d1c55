"""Resuming: it repeats the losses, refuses what does not fit, and logs what the recipe changes."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer3d import cli
from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.manifest import Manifest
from composer3d.commands import train as command
from composer3d.facts import events
from composer3d.facts.errors import CheckpointError
from composer3d.recipe.changes import TEXT_LIMIT, Change
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.training import resume
from tests.training.jobs import CUBE, RECIPE, SINGLE, losses, train


def test_a_resumed_run_repeats_the_losses_bit_for_bit(pool: Pool, folder: Path) -> None:
    """On one process, and on eight, which begin with the same weights and data."""
    short = ("run.steps=8", "optim.warmup=2", "optim.decay=8", "checkpoint.every=2")
    for mesh, out_dir in ((SINGLE, "single"), (CUBE, "cube")):
        (folder / "recipe.toml").write_text(RECIPE.format(mesh=mesh))
        parts = f"{out_dir}-parts"
        whole = train(pool, folder, f"run.out_dir={out_dir}", *short)
        assert whole.returncode == 0, whole.stderr
        first = train(pool, folder, f"run.out_dir={parts}", *short, "run.steps=4")
        assert first.returncode == 0, first.stderr
        second = train(pool, folder, f"run.out_dir={parts}", *short)
        assert second.returncode == 0, second.stderr
        assert (
            f"resumed from {parts}/small/checkpoints/step-00000004: 4 of 8 steps are done"
            in second.stderr
        )
        assert "learning rate" not in second.stderr  # that of the manifest is the recipe's
        assert losses(folder, parts) == losses(folder, out_dir)
        assert len(losses(folder, out_dir)) == 8
        assert losses(folder, out_dir)[8] < losses(folder, out_dir)[1] - 0.02  # and it learns
        run = folder / parts / "small"
        kept = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert kept == ["step-00000006", "step-00000008"]
        assert 'path = "corpus.txt"' in (run / "recipe.toml").read_text()

        found = [event for event in events.read(run) if event is not None]
        assert [(event.kind, event.step) for event in found if event.kind != "save"] == [
            ("start", 0),
            ("end", 4),
            ("start", 4),
            ("end", 8),
        ]
        assert [event.step for event in found if event.kind == "save"] == [2, 4, 6, 8]
        assert {event.device for event in found if event.kind == "start"} == {"cpu"}
        assert "from a checkpoint of step 4" in found[4].text
    assert losses(folder, "single") == pytest.approx(losses(folder, "cube"), rel=1e-5)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model.n_layers=3"], "was made with model.n_layers = 4, but the recipe says 3"),
        (
            ["model.rope_theta=123.0"],
            "was made with model.rope_theta = 10000.0, but the recipe says 123.0",
        ),
        (
            ["precision.params=float64"],
            "was made with precision.params = float32, but the recipe says float64",
        ),
        (["data.path=other.txt"], "the data has changed since"),
        (["data.global_batch=16"], "data.global_batch = 16, but the checkpoint was made with 8"),
        (["data.seed=9"], "data.seed = 9, but the checkpoint was made with 0"),
        (
            ["run.seed=4"],
            "step-00000005 was made with run.seed = 3, but the recipe says 4: "
            "a run keeps its seed; set it back,",
        ),
        (
            ['optim.name="muon"'],
            'was made with optim.name = "adamw", but the recipe says "muon": it has the '
            "optimizer's state of the first only; set it back, or start a run under another "
            "run.name with checkpoint.init = ",
        ),
        (
            ['optim.train=["last.*"]'],
            'was made with optim.train = absent, but the recipe says ["last.*"]: it has the '
            "optimizer's state of the first only; set it back, or start a run under another "
            'run.name with checkpoint.init = "runs/small/checkpoints/step-00000005"',
        ),
        (
            ["checkpoint.resume=none"],
            'checkpoint.resume = "none", but the newest checkpoint in runs/small/checkpoints is '
            'step-00000005; the same command with checkpoint.resume = "auto" goes on from it; or '
            "give the run another run.name, or remove its checkpoints",
        ),
        (["run.name=other", "checkpoint.resume=."], "is not a checkpoint: it has no manifest.json"),
        (["run.name=other", "checkpoint.resume=empty"], "empty has no checkpoint (step-* or "),
    ],
    ids=[
        "layers",
        "theta",
        "dtype",
        "data",
        "batch",
        "order",
        "seed",
        "optimizer",
        "frozen",
        "anew",
        "folder",
        "no checkpoint",
    ],
)
def test_checkpoint_that_does_not_fit_is_refused(
    pool: Pool, trained: Path, sets: list[str], message: str
) -> None:
    recipe = (trained / "runs/small/recipe.toml").read_bytes()
    (trained / "empty/checkpoints").mkdir(parents=True)
    result = train(pool, trained, *sets)
    assert result.returncode == 2
    assert message in result.stderr
    name = "other" if "run.name=other" in sets else "small"
    assert message in (trained / "runs" / name / "log.txt").read_text()
    assert (trained / "runs/small/recipe.toml").read_bytes() == recipe
    assert list((trained / "runs/small").glob("recipe-*")) == []


def test_damaged_checkpoint_is_named(pool: Pool, trained: Path) -> None:
    saved = trained / "runs/small/checkpoints/step-00000005"
    next(saved.glob("*.distcp")).write_bytes(b"torn")
    result = train(pool, trained)
    assert result.returncode == 2
    assert (
        "runs/small/checkpoints/step-00000005/__0_0.distcp has 4 bytes, but the manifest says"
        in result.stderr
    )


def add_a_field(newest: Path) -> None:
    saved = manifests.read(newest)
    manifests.write(newest, replace(saved, model=saved.model | {"model.logit_softcap": 30.0}))


def test_a_checkpoint_of_a_later_model_is_not_resumed(pool: Pool, trained: Path) -> None:
    add_a_field(trained / "runs/small/checkpoints/step-00000005")
    result = train(pool, trained)
    assert result.returncode == 2
    assert (
        "runs/small/checkpoints/step-00000005 has 'model.logit_softcap' = 30.0, which this version "
        "does not know: it would compute another model; use a newer composer3d" in result.stderr
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_done_starts_no_rank(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processes: int,
) -> None:
    monkeypatch.setattr(command, "train_rank", lambda *_: pytest.fail("a rank is started"))
    monkeypatch.setattr(command.launch, "warm_up", lambda: pytest.fail("ranks are started"))
    monkeypatch.chdir(trained)
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    sets = ["run.steps=5", f"mesh.dp_shard={processes}"]
    assert command.run(command.Options("recipe.toml", sets)) == 0
    assert capsys.readouterr().err == (
        "nothing to do: 5 of 5 steps are done; raise run.steps to train on\n"
    )
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def drop_a_byte(newest: Path) -> None:
    file = next(newest.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)


def drop_the_manifest(newest: Path) -> None:
    (newest / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("steps", "change", "spoil"),
    [
        (6, None, None),
        (5, None, drop_a_byte),
        (5, None, drop_the_manifest),
        (5, None, add_a_field),
        # The rank refuses these recipes.
        (5, "run.seed=4", None),
        (5, "model.n_layers=3", None),
        (5, "data.seed=1", None),
        (5, "data.path=other.txt", None),
        (5, "checkpoint.resume=none", None),
    ],
)
def test_a_run_that_is_not_done_or_does_not_fit_is_left_to_its_ranks(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    change: str | None,
    spoil: Callable[[Path], None] | None,
) -> None:
    monkeypatch.chdir(trained)
    sets = [f"run.steps={steps}", *([change] if change else [])]
    recipe = load("recipe.toml", sets).recipe
    if spoil is not None:
        assert command.step_of_finished_run(recipe) == 5
        spoil(trained / "runs/small/checkpoints/step-00000005")
    assert command.step_of_finished_run(recipe) is None


def test_another_runs_checkpoint_starts_a_run_only_once(pool: Pool, trained: Path) -> None:
    seeded = [
        "run.name=second",
        # The folder of a run stands for its newest whole checkpoint.
        "checkpoint.resume=runs/small",
        "run.seed=4",
    ]
    first = train(pool, trained, *seeded, "run.steps=8")
    assert (
        '\n  run.name: "small" -> "second"\n  run.seed: 3 -> 4\n  run.steps: 5 -> 8\n'
        in first.stderr
    )
    assert (
        "resumed from runs/small/checkpoints/step-00000005: 5 of 8 steps are done" in first.stderr
    )
    assert "no checkpoint in runs/second" not in first.stderr
    assert (
        "runs/small/checkpoints/step-00000005 is the newest whole checkpoint of runs/small\n"
        in first.stderr
    )
    shutil.rmtree(trained / "runs/small/checkpoints/step-00000005")  # as that run does in time
    again = train(pool, trained, *seeded, "run.steps=10")
    assert (
        "resumed from runs/second/checkpoints/step-00000008: 8 of 10 steps are done" in again.stderr
    )
    back = train(
        pool,
        trained,
        "run.name=second",
        "run.seed=4",
        "checkpoint.resume=runs/second/checkpoints/step-00000008",
    )
    assert back.returncode == 2
    assert 'is step-00000010; the same command with checkpoint.resume = "auto"' in back.stderr
    assert "; or give the run another run.name, or remove the newer ones\n" in back.stderr


def test_a_run_does_not_begin_anew_because_it_looks_for_its_checkpoints_elsewhere(
    pool: Pool, trained: Path
) -> None:
    run, store = trained / "runs/small", trained / "store"
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "recipe.toml")}
    moved = f"checkpoint.folder=file://{store}"
    refused = train(pool, trained, "run.steps=6", moved)
    assert refused.returncode == 2
    assert (
        f"there is no checkpoint in file://{store}/small, but runs/small/checkpoints/step-00000005 "
        "is one of this run; set checkpoint.folder back, or copy the checkpoints; or set "
        'checkpoint.resume = "runs/small/checkpoints/step-00000005" to go on from there, or '
        'checkpoint.resume = "none" to begin anew and replace the metrics in runs/small; or give '
        "the run another run.name" in refused.stderr
    )
    tuned = train(pool, trained, "run.steps=6", moved, "checkpoint.init=runs/small")
    assert (tuned.returncode, tuned.stderr) == (2, refused.stderr)
    assert {name: (run / name).read_bytes() for name in before} == before
    assert not store.exists()
    # What the error says goes on.
    origin = "checkpoint.resume=runs/small/checkpoints/step-00000005"
    assert train(pool, trained, "run.steps=6", moved, origin).returncode == 0
    assert list(losses(trained, "runs")) == [1, 2, 3, 4, 5, 6]
    assert train(pool, trained, "run.steps=7", moved).returncode == 0
    assert list(losses(trained, "runs")) == [1, 2, 3, 4, 5, 6, 7]


def mark_saved(run: Path) -> None:
    saved = events.Event(5, 1.0, "save", "checkpoint of step 5")
    (run / events.FILE).write_bytes(events.line(saved))


def mark_begun(run: Path) -> None:
    with (run / events.FILE).open("ab") as file:
        file.write(events.line(events.Event(0, 2.0, "start", "from the beginning")))


def start_in(run: Path, place: str) -> None:
    (run / "recipe.toml").write_text(f'[run]\nname = "small"\n[checkpoint]\nfolder = "{place}"\n')


# The files of the run, the overrides of a start that finds no checkpoint, and its error if it has.
ANEW: dict[str, tuple[Callable[[Path, str], object], str, str]] = {
    "new": (lambda run, store: None, "{}", ""),
    "ended before its first checkpoint": (lambda run, store: start_in(run, "s3://b/a"), "{}", ""),
    "its checkpoints were removed": (
        lambda run, store: [mark_saved(run), start_in(run, "s3://b/a")],
        "s3://b/a",
        "",
    ),
    "of a disk, which were removed": (
        lambda run, store: [mark_saved(run), (run / "recipe.toml").write_text("[checkpoint]")],
        "{}",
        "",
    ),
    "another bucket": (
        lambda run, store: [mark_saved(run), start_in(run, "s3://b/a")],
        "s3://b/c",
        "the run in runs/small has saved into s3://b/a/small; set checkpoint.folder back",
    ),
    "no bucket any more": (
        lambda run, store: [mark_saved(run), start_in(run, "s3://b/a")],
        "",
        "the run in runs/small has saved into s3://b/a/small; set checkpoint.folder back",
    ),
    "a bucket with a slash at its end": (
        lambda run, store: [mark_saved(run), start_in(run, "s3://b/a/")],
        "s3://b/a",
        "",
    ),
    "ended before its first checkpoint, in its second life": (
        lambda run, store: [mark_saved(run), start_in(run, "s3://b/a"), mark_begun(run)],
        "s3://b/c",
        "",
    ),
    "from another run": (
        lambda run, store: [mark_saved(run), start_in(run, "s3://b/a")],
        "s3://b/c checkpoint.resume=s3://b/a/other",
        'set checkpoint.resume = "s3://b/a/small" to go on from there',
    ),
    "from its former place": (
        lambda run, store: [mark_saved(run), start_in(run, "s3://b/a")],
        "s3://b/c checkpoint.resume=s3://b/a/small/step-00000005",
        "",
    ),
    "not mounted": (
        lambda run, store: [mark_saved(run), start_in(run, store)],
        "{}",
        "store/small, where nothing is now: mount it again; set checkpoint.folder back",
    ),
    "mounted, and removed": (
        lambda run, store: [
            mark_saved(run),
            start_in(run, store),
            Path("store/small").mkdir(parents=True),
            Path("store/small/writer").touch(),
        ],
        "{}",
        "",
    ),
}


@pytest.mark.parametrize(("make", "place", "message"), ANEW.values(), ids=ANEW)
def test_a_run_begins_anew_only_if_its_folder_knows_of_no_checkpoint(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path, str], object],
    place: str,
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=SINGLE))
    store = f"file://{folder}/store"
    Path("runs/small").mkdir(parents=True)
    make(Path("runs/small"), store)
    sets = f"checkpoint.folder={place.format(store)}".split() if place else []
    recipe = load("recipe.toml", sets, check_files=False).recipe
    if not message:
        resume._refuse_to_forget(recipe)
        return
    with pytest.raises(CheckpointError, match=re.escape(message)):
        resume._refuse_to_forget(recipe)


def test_restarts_by_torchrun_that_would_be_refused_are_announced(
    pool: Pool, trained: Path
) -> None:
    warning = 'checkpoint.resume = "none": once the run has saved a newer checkpoint, each restart '
    for restarts, resume_from, is_warned in (("3", "none", True), ("3", "auto", False)):
        sets = ("optim.warmup=1", f"run.name={resume_from}", "run.steps=1")
        said = train(
            pool,
            trained,
            *sets,
            f"checkpoint.resume={resume_from}",
            TORCHELASTIC_MAX_RESTARTS=restarts,
        ).stderr
        line = f"warning: {warning}by torchrun (--max-restarts 3) will be refused; set "
        assert (line in said) == ("will be refused" in said) == is_warned


def test_the_weights_of_another_run_start_a_new_one(
    pool: Pool, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other data and another seed: it begins at step 0, like a copy of the weights alone."""
    monkeypatch.chdir(trained)
    assert cli.main(["convert", "runs/small", "start", "--to", "dcp", "--weights-only"]) == 0
    new = ["data.path=other.txt", "run.seed=9", "data.seed=2", "optim.warmup=1"]
    new += ["optim.decay=3", "run.steps=2"]
    tuned = train(pool, trained, *new, "run.out_dir=tuned", "checkpoint.init=runs/small")
    assert tuned.returncode == 0, tuned.stderr
    path = "runs/small/checkpoints/step-00000005"
    assert f"starting at step 0 from the weights of {path}, step 5" in tuned.stderr
    assert train(pool, trained, *new, "run.out_dir=copy", "checkpoint.resume=start").returncode == 0
    assert losses(trained, "tuned") == losses(trained, "copy")
    assert list(losses(trained, "tuned")) == [1, 2]
    new[-1] = "run.steps=3"
    again = train(pool, trained, *new, "run.out_dir=tuned", "checkpoint.init=runs/small")
    assert "resumed from tuned/small/checkpoints/step-00000002: 2 of 3 steps" in again.stderr
    other = train(pool, trained, "run.out_dir=wide", "model.ffn=96", "checkpoint.init=runs/small")
    assert other.returncode == 2
    assert "was made with model.ffn = " in other.stderr
    assert "composer3d convert" not in other.stderr


def test_weights_in_a_dtype_that_no_recipe_can_have_are_to_be_converted(
    pool: Pool, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published models are in bfloat16, and their conversion keeps it."""
    monkeypatch.chdir(trained)
    command = ["convert", "runs/small", "start", "--to", "dcp", "--weights-only"]
    assert cli.main([*command, "--dtype", "bfloat16"]) == 0
    cause = "start was made with precision.params = bfloat16, but the recipe says float32"
    way_out = (
        "a run cannot have these parameters: composer3d convert start DST --to dcp --dtype float32 "
        "makes a checkpoint in float32; name DST instead"
    )
    set_back = "a checkpoint can only be resumed with its own model; set these back"
    new = ["run.name=new", "run.steps=2", "optim.warmup=1", "optim.decay=2"]
    for key in ("resume", "init"):
        refused = train(pool, trained, *new, f"checkpoint.{key}=start")
        assert (refused.returncode, refused.stderr.splitlines()[-2:]) == (2, [cause, way_out])
        assert set_back not in refused.stderr
    both = train(pool, trained, *new, "model.ffn=96", "checkpoint.init=start")
    assert both.stderr.splitlines()[-3:] == [cause, set_back, way_out]
    assert cli.main(["convert", "start", "fit", "--to", "dcp", "--dtype", "float32"]) == 0
    assert train(pool, trained, *new, "checkpoint.init=fit").returncode == 0


def test_changes_of_the_recipe_are_logged_and_the_former_recipe_is_kept(
    pool: Pool, trained: Path
) -> None:
    folder = trained / "runs/small"
    former = (folder / "recipe.toml").read_bytes()
    result = train(pool, trained, "run.steps=6", "optim.lr=2e-3", "data.packing=documents")
    assert result.returncode == 0
    assert "warning: another schedule of the learning rate: step 5 had" in result.stderr
    assert (
        "the recipe differs from that of runs/small/checkpoints/step-00000005:\n"
        '  data.packing: "none" -> "documents"\n'
        "  optim.lr: 0.001 -> 0.002\n"
        "  run.steps: 5 -> 6\n"
    ) in result.stderr
    assert (folder / "recipe-00000005.toml").read_bytes() == former
    assert "lr = 0.002" in (folder / "recipe.toml").read_text()


@pytest.mark.parametrize(
    "text",
    ["[[", "a = " + "[" * 20_000, "#" * (TEXT_LIMIT + 1)],
    ids=["not TOML", "deep", "long"],
)
def test_a_recipe_in_a_manifest_that_cannot_be_read_is_one_line(folder: Path, text: str) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=SINGLE))
    recipe = load(folder / "recipe.toml", [f"data.path={folder}/corpus.txt"]).recipe
    manifest = Manifest(step=5, model={}, recipe=text)
    with pytest.raises(
        CheckpointError, match="the recipe in its manifest cannot be read"
    ) as caught:
        resume._changes_since(folder, manifest, recipe)
    (line,) = caught.value.lines
    assert len(line) < 500
    # Converted weights have no recipe.
    assert resume._changes_since(folder, Manifest(step=5, model={}), recipe) == []


@pytest.mark.parametrize(
    ("optim", "then", "now", "step", "refused"),
    [
        ({}, 250, 500, 250, True),  # finished
        ({}, 250, 500, 100, True),  # a cosine decays from its begin
        ({"schedule": "linear"}, 250, 500, 250, True),
        ({"schedule": "wsd"}, 250, 500, 250, True),
        ({"schedule": "wsd"}, 250, 500, 100, False),  # its decay has not begun
        ({"schedule": "constant"}, 250, 500, 250, False),
        ({"warmup": 120}, 250, 500, 100, False),  # in the warmup
        ({"decay": 250}, 250, 500, 250, False),
        ({"decay": 500}, 250, 500, 250, False),
        ({"min_lr": 3e-4}, 250, 500, 250, False),
        ({}, 500, 250, 100, False),  # the rate falls
    ],
)
def test_more_steps_do_not_raise_the_rate_of_a_decay_unasked(
    optim: dict[str, Any], then: int, now: int, step: int, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "r.toml").write_text('[run]\nname = "a"\n[model]\npreset = "debug-tiny"\n')
    plain = load(tmp_path / "r.toml", []).recipe
    recipe = replace(plain, run=replace(plain.run, steps=now), optim=replace(plain.optim, **optim))
    manifest = Manifest(step=step, model={}, data={})
    changed = [Change("run.steps", str(then), str(now))]
    if not refused:
        resume._refuse_reheating(manifest, recipe, changed)
        return
    with pytest.raises(CheckpointError) as caught:
        resume._refuse_reheating(manifest, recipe, changed)
    (line,) = caught.value.lines
    assert f"the learning rate of step {step + 1} would rise from " in line
    rates = re.search(r"from (\S+) to (\S+),", line)
    assert rates is not None
    assert 0 <= float(rates[1]) < float(rates[2]) <= 3e-4
    assert "set optim.decay = 250 to keep the old rate" in line
    assert "optim.decay = 500 to take the new one" in line
