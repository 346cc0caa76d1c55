"""Commands that write a checkpoint or token files to an object store, by its URL."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from composer3d import cli
from composer3d.commands import sources
from composer3d.facts.remote import RemotePath, Upload, place_of
from tests.commands.conftest import Ask
from tests.convert.sample_checkpoints import make_hf
from tools.object_store import new_folder
from tools.prove.paths import ROOT

FORMATS = ("hf", "meta", "torch", "dcp")
OPENED_FIRST = {"hf": "config.json", "meta": "params.json", "dcp": "manifest.json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(f'{{"text": "number {n} and {n * n}"}}\n' for n in range(200)))
    return path


@pytest.fixture(params=["s3", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> RemotePath:
    """A path at which nothing is."""
    folder = RemotePath(f"file://{tmp_path}/store") if request.param == "file" else new_folder()
    return folder / "made"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that TMPDIR names."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr("os.fsync", lambda number: None)
    return folder


def contents(place: Path | RemotePath) -> dict[str, bytes]:
    """Return all files at a place, by their path in it."""
    if isinstance(place, RemotePath):
        files = {name: place / name for name in place.files()} or {"": place}
        return {name: path.read(1 << 24) for name, path in files.items()}
    if place.is_file():
        return {"": place.read_bytes()}
    paths = [path for path in place.rglob("*") if path.is_file()]
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in paths}


@contextmanager
def uploads(*, fail_at: int, cause: BaseException, removes: bool = True) -> Iterator[list[str]]:
    """Let the write to a file of an upload fail; yield the names of the files that were begun.

    Args:
        fail_at: the number of the file, from 0.
        cause: what is raised.
        removes: whether files are removed after that, which one that is killed does not do.
    """
    begun: list[str] = []
    create, remove = RemotePath.create, RemotePath.remove

    @contextmanager
    def failing(self: RemotePath, *arguments: Any) -> Iterator[Upload]:
        with create(self, *arguments) as stream:
            begun.append(self.name)
            if len(begun) > fail_at:
                raise cause
            yield stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemotePath, "create", failing)
        if not removes:
            patch.setattr(RemotePath, "remove", lambda self: begun or remove(self))
        yield begun


@pytest.mark.parametrize("to", FORMATS)
def test_convert_writes_to_a_store_what_it_writes_to_a_disk(
    model: Path, place: RemotePath, to: str, tmp_path: Path, temporary: Path, ask: Ask
) -> None:
    assert cli.main(["convert", str(model), str(tmp_path / "made"), "--to", to]) == 0
    status, report = ask("convert", str(model), f"{place}/", "--to", to)
    assert (status, report["target"]) == (0, str(place))
    assert contents(place) == contents(tmp_path / "made")
    # It can be read from there, and written there again.
    back = place.parent / "back"
    assert cli.main(["convert", str(place), str(back), "--to", "hf"]) == 0
    assert cli.main(["convert", str(tmp_path / "made"), str(tmp_path / "back"), "--to", "hf"]) == 0
    assert contents(back) == contents(tmp_path / "back")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("to", OPENED_FIRST)
def test_a_killed_upload_leaves_no_checkpoint(
    model: Path, to: str, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = new_folder()
    killed = uploads(fail_at=99, cause=KeyError())
    with killed as names:
        assert cli.main(["convert", str(model), str(folder / "whole"), "--to", to]) == 0
    assert names[-1] == OPENED_FIRST[to]
    assert len(names) > 2
    for number in range(1, len(names)):
        place = folder / f"killed-{number}"
        with uploads(fail_at=number, cause=KeyboardInterrupt(), removes=False):
            assert cli.main(["convert", str(model), str(place), "--to", to]) == cli.INTERRUPTED
        left = len(place.files())
        assert left == number
        with sources.local_source(str(place)) as copy:
            copied = shutil.copytree(copy, temporary / f"copy-{number}")
        for path in (str(place), str(copied)):
            assert cli.main(["inspect", path]) != 0
            assert cli.main(["convert", path, str(temporary / "out"), "--to", "torch"]) == 2
        if to == "hf":
            with pytest.raises((OSError, ValueError), match=r"config\.json"):
                AutoModelForCausalLM.from_pretrained(copied)
        # It is in the way until somebody removes it.
        capsys.readouterr()
        assert cli.main(["convert", str(model), str(place), "--to", to]) == 2
        assert f"{place} exists; give a URL at which nothing is" in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_failed_upload_leaves_nothing_but_its_source(
    model: Path,
    place: RemotePath,
    number: int,
    temporary: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with uploads(fail_at=number, cause=OSError(5, "the line is cut")):
        assert cli.main(["convert", str(model), str(place), "--to", "hf"]) == 1
    assert not place.exists()
    (kept,) = temporary.glob("composer3d-*/made")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"{place} cannot be written: the line is cut; what was sent is removed as far as possible, "
        f"and all of it is kept in {kept}: copy it yourself, or remove it"
    )
    assert cli.main(["convert", str(model), str(temporary / "same"), "--to", "hf"]) == 0
    assert contents(kept) == contents(temporary / "same")


def test_an_interrupt_leaves_nothing(model: Path, temporary: Path) -> None:
    place = new_folder() / "made"
    with uploads(fail_at=1, cause=KeyboardInterrupt()):
        assert cli.main(["convert", str(model), str(place), "--to", "hf"]) == cli.INTERRUPTED
    assert not place.exists()
    assert list(temporary.iterdir()) == []


def test_who_writes_there_meanwhile_is_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = new_folder() / "made"
    upload = sources.upload

    def late(*arguments: Any) -> None:
        (place / "model.safetensors.index.json").write(b"{}")
        upload(*arguments)

    monkeypatch.setattr(sources, "upload", late)
    assert cli.main(["convert", str(model), str(place), "--to", "hf"]) == 1
    assert "holds other files than were sent: another process writes" in capsys.readouterr().err
    assert list(place.files()) == ["model.safetensors.index.json"]


@pytest.mark.parametrize("command", ["convert", "prepare"])
def test_a_url_that_cannot_be_written_is_refused_before_the_work(
    command: str,
    model: Path,
    text: Path,
    temporary: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = new_folder()
    (folder / "file").write(b"1")
    (folder / "folder" / "file").write(b"1")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.setattr("composer3d.convert.convert.open_source", None)
    monkeypatch.setattr("composer3d.data.prepare._list_sources", None)
    for url, words in (
        (f"{folder}/file", f"{folder}/file exists; give a URL at which nothing is"),
        (f"{folder}/folder/", f"{folder}/folder exists; give a URL at which nothing is"),
        (str(place_of("s3://bucket")), "s3://bucket exists; give a URL"),
        ("s3://nobody/made", "s3://nobody/made cannot be written: "),
        ("s3://nobody", "s3://nobody cannot be written: "),
        ("s3://bucket/../made", "s3://bucket/../made must be KIND://BUCKET/PATH"),
        ("s3://key:word@bucket/made", "must be KIND://BUCKET/PATH"),
        ("gs://bucket/made", "cannot be written: needs gcsfs: pip install composer3d[gs]"),
    ):
        words_of = {
            "convert": ["convert", str(model), url, "--to", "hf"],
            "prepare": ["prepare", str(text), "-o", url, "--tokenizer", "bytes"],
        }
        assert cli.main(words_of[command]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    assert folder.files() == {"file": 1, "folder/file": 1}
    assert list(temporary.iterdir()) == []


def test_a_copy_within_its_source_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "s3://b/run/", "s3://b/run/out", "--to", "hf"]) == 2
    assert "s3://b/run/out lies in s3://b/run/; give a DST outside" in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_said_before(
    model: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = new_folder() / "made"
    usage = shutil.disk_usage(temporary)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr("composer3d.convert.convert.write", None)
    for dst in (str(place), str(temporary / "made")):
        assert cli.main(["convert", str(model), dst, "--to", "hf"]) == 1
        assert " bytes, and 1,000 are free there; free some" in capsys.readouterr().err
    assert not place.exists()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [["--tokenizer", "bytes", "--shard-tokens", "500"], ["--train-tokenizer", "300"]],
    ids=["bytes", "trained"],
)
@pytest.mark.parametrize("split", [[], ["--split", "0.2"]], ids=["whole", "split"])
def test_prepare_writes_to_a_store_what_it_writes_to_a_disk(
    text: Path,
    place: RemotePath,
    options: list[str],
    split: list[str],
    tmp_path: Path,
    temporary: Path,
    ask: Ask,
) -> None:
    status, report = ask("prepare", str(text), "-o", str(tmp_path / "made"), *options, *split)
    assert status == 0
    with uploads(fail_at=99, cause=KeyError()) as names:
        status, remote_report = ask("prepare", str(text), "-o", str(place), *options, *split)
    assert status == 0
    assert names.index("tokens.json") == len(names) - 1 - len(split) // 2
    assert contents(place) == contents(tmp_path / "made")
    for known in (report, remote_report):
        known.pop("seconds")
    shown = {
        key: str(value).replace(str(tmp_path / "made"), str(place)) for key, value in report.items()
    }
    assert {key: str(value) for key, value in remote_report.items()} == shown
    for part in ["train", "validation"] if split else ["."]:
        folder = place if part == "." else place / part
        assert ask("inspect", str(folder), "--full")[0] == 0
    assert list(temporary.iterdir()) == []


def test_a_run_trains_on_what_prepare_wrote_to_a_store(text: Path, tmp_path: Path) -> None:
    place = new_folder() / "made"
    losses = []
    for run, out in (("remote", str(place)), ("local", str(tmp_path / "made"))):
        assert cli.main(["prepare", str(text), "-o", out, "--tokenizer", "bytes"]) == 0
        sets = [
            "run.steps=2",
            "optim.warmup=1",
            "data.source=tokens",
            f"data.path={out}",
            "data.seq_len=32",
            "validation.every=0",
            f"run.out_dir={tmp_path / run}",
            "metrics.tensorboard=false",
        ]
        recipe = str(ROOT / "recipes" / "debug-1-single.toml")
        assert cli.main(["train", recipe, *(f"--set={each}" for each in sets)]) == 0
        (metrics,) = (tmp_path / run).rglob("metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


def test_an_interrupted_prepare_to_a_store_leaves_nothing(
    text: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = new_folder() / "made"

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("composer3d.data.prepare._finish_folder", stop)
    words = ["prepare", str(text), "--tokenizer", "bytes", "--shard-tokens", "500", "-o"]
    assert cli.main([*words, str(place)]) == cli.INTERRUPTED
    assert "go on" not in capsys.readouterr().err
    assert list(temporary.iterdir()) == []
    assert not place.exists()
    assert cli.main([*words, str(temporary / "made")]) == cli.INTERRUPTED
    assert "run the same command again to go on" in capsys.readouterr().err


def test_a_killed_upload_of_tokens_leaves_no_token_files(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = new_folder() / "made"
    words = [
        "prepare",
        str(text),
        "-o",
        str(place),
        "--tokenizer",
        "bytes",
        "--shard-tokens",
        "900",
    ]
    with uploads(fail_at=3, cause=KeyboardInterrupt(), removes=False):
        assert cli.main(words) == cli.INTERRUPTED
    assert len(place.files()) == 3
    assert cli.main(["inspect", str(place)]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
