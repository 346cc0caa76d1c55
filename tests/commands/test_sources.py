"""Checkpoints that commands copy from an object store."""

from pathlib import Path

import pytest

from composer3d.cli import main
from composer3d.commands import inspect
from composer3d.commands.sources import local_source
from composer3d.facts.errors import CheckpointError
from composer3d.facts.remote import RemotePath
from tools.object_store import new_folder


@pytest.fixture(scope="module")
def runs() -> RemotePath:
    runs = new_folder()
    for step, content in ((1, b"old"), (2, b"new")):
        (runs / "run" / f"step-0000000{step}" / "manifest.json").write(content)
    (runs / "run" / "step-00000003" / "__0_0.distcp").write(b"torn")
    return runs


def test_a_path_stands_for_itself(tmp_path: Path) -> None:
    with local_source(str(tmp_path)) as path:
        assert path == tmp_path


@pytest.mark.parametrize(("name", "content"), [("run", b"new"), ("run/step-00000001", b"old")])
def test_a_folder_of_several_stands_for_the_newest_whole_one(
    runs: RemotePath, name: str, content: bytes
) -> None:
    with local_source(f"{runs}/{name}") as path:
        assert [each.name for each in path.iterdir()] == ["manifest.json"]
        assert (path / "manifest.json").read_bytes() == content
    assert not path.exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket/runs/nothing", "s3://bucket/runs/nothing holds no files"),
        ("s3://bucket/../a", "s3://bucket/../a must be KIND://BUCKET/PATH"),
        ("gs://bucket/a", "gs://bucket/a cannot be copied: needs gcsfs"),
    ],
)
def test_what_cannot_be_copied_is_an_error(runs: RemotePath, url: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words), local_source(url):
        pass


@pytest.mark.parametrize("name", ["URL/run", "hf://organisation/name"])
def test_an_option_without_effect_is_refused_before_a_copy(
    runs: RemotePath,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(inspect, "local_source", None)
        assert main(["inspect", name.replace("URL", str(runs)), "--full"]) == 2
    assert "--full has no effect on a checkpoint; leave it out" in capsys.readouterr().err
    assert main(["inspect", f"{runs}/nothing", "--full"]) == 2
    assert "nothing holds no files" in capsys.readouterr().err


def test_a_command_reads_what_was_copied(
    runs: RemotePath, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", f"{runs}/run"]) == 1
    assert "manifest.json cannot be used" in capsys.readouterr().out
