"""Every wrong recipe is refused with the exact lines that a user reads."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from composer3d import cli
from tests.recipe import wrong_texts, wrong_values
from tests.recipe.wrong import Wrong

ALL = wrong_texts.ALL + wrong_values.ALL


@pytest.fixture(params=ALL, ids=lambda wrong: wrong.name)
def wrong(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wrong:
    case: Wrong = request.param
    files = case.files if isinstance(case.files, Mapping) else {"x.toml": case.files}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    return case


def test_check_prints_the_lines_and_exits_with_2(
    wrong: Wrong, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["check", "x.toml", "--json", *(f"--set={text}" for text in wrong.sets)]
    status = cli.main(argv + ([f"--gpus={wrong.world}"] if wrong.world else []))
    out, err = capsys.readouterr()
    assert status == 2
    assert err.splitlines() == wrong.lines
    assert json.loads(out.splitlines()[-1]) == {"ok": False, "errors": wrong.lines}


def test_names_of_cases_are_unique() -> None:
    assert len({wrong.name for wrong in ALL}) == len(ALL) >= 45
