"""``composer3d completion``: what the shells offer."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from composer3d import cli
from composer3d.commands import completion
from tools.prove.paths import ROOT

PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_tests_install_what_completion_needs() -> None:
    extras = PROJECT["optional-dependencies"]
    own = next(name for name in extras["test"] if name.startswith("composer3d["))
    assert "completion" in own.removeprefix("composer3d[").removesuffix("]").split(",")
    assert [name.partition(">")[0] for name in extras["completion"]] == ["shtab"]
    assert "\nshtab==" in (ROOT / "tools/constraints.txt").read_text()


def test_without_shtab_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert capsys.readouterr() == (
        "",
        "composer3d completion needs shtab: pip install 'composer3d[completion]'\n",
    )


@pytest.fixture
def bash_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    pytest.importorskip("shtab")
    assert cli.main(["completion", "bash"]) == 0
    path = tmp_path / "completion.bash"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("composer3d tr", ["train"]),
        ("composer3d recipes ", ["cp", "ls", "show"]),
        ("composer3d check quickst", ["quickstart", "quickstart-moe"]),
        ("composer3d train mix", ["mixtral-8x7b-64-4d", "mixed.toml"]),
        ("composer3d recipes cp mix", ["mixtral-8x7b-64-4d"]),
        ("composer3d verify --dt", ["--dtype"]),
        ("composer3d verify --dtype ", ["float32", "float64"]),
        ("composer3d completion t", ["tcsh"]),
    ],
)
def test_bash_completes(line: str, offered: list[str], bash_script: Path) -> None:
    words = line.split(" ")
    (bash_script.parent / "mixed.toml").touch()
    quoted = " ".join(f"'{word}'" for word in words)
    # Completion runs with these variables. compopt works only while a shell completes.
    program = f"""
        compopt() {{ :; }}
        source {bash_script}
        function=$(complete -p composer3d | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}'
        $function composer3d '{words[-1]}' '{words[-2]}'
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", program],
        cwd=bash_script.parent,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    found = {word.strip() for word in done.stdout.splitlines()}
    assert found - {"-h", "--help"} == set(offered), done.stderr


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_script_knows_commands_and_recipes_and_parses(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("verify", "layouts", "quickstart-moe", "float64"):
        assert word in script
    if shutil.which(shell) and shell != "tcsh":
        path = tmp_path / "script"
        path.write_text(script)
        subprocess.run([shell, "-n", str(path)], timeout=30, check=True)
