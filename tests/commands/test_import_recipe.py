"""``composer3d import``: what it prints, writes and returns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from composer3d import cli
from tests.imports.configurations import DEEPSPEED, MEGATRON
from tools.prove.paths import ROOT


def test_the_recipe_is_printed_and_the_report_beside_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script, out = tmp_path / "pretrain.sh", tmp_path / "run.toml"
    script.write_text(MEGATRON)
    assert cli.main(["import", str(script)]) == 0
    printed = capsys.readouterr()
    out.write_text(printed.out)
    assert cli.main(["check", str(out), "--gpus", "16"]) == 0
    capsys.readouterr()
    titles = ["taken over:", "not in the file:", "no equal:", "contradictions: none"]
    assert [line for line in printed.err.splitlines() if line in titles] == titles


def test_a_file_is_made_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script, out = tmp_path / "pretrain.sh", tmp_path / "run.toml"
    script.write_text(MEGATRON)
    assert cli.main(["import", str(script), "-o", str(out)]) == 0
    next_command = capsys.readouterr().out.splitlines()[-1].partition("next: composer3d ")[2]
    assert cli.main(next_command.split()) == 0
    text = out.read_text()
    assert cli.main(["import", str(script), "-o", str(out)]) == 2
    assert "the file exists" in capsys.readouterr().err
    assert out.read_text() == text
    assert cli.main(["import", str(script), "-o", str(tmp_path / "no" / "x.toml")]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(DEEPSPEED)
    arguments = ["import", str(file), "--gpus", "4", "--model", "llama3-8b", "--json"]
    assert cli.main(arguments) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["ok"], answer["program"], answer["world_size"]) == (True, "DeepSpeed", 4)
    assert len(answer["contradictions"]) == 1
    assert cli.main([*arguments[:2], "--json"]) == 2
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["ok"] is False
    assert answer["errors"]


def test_it_answers_without_torch(tmp_path: Path) -> None:
    file = str(ROOT / "tools" / "prove" / "imports" / "moe-64e-1024.txt")
    code = (
        "import sys\nfrom composer3d import cli\n"
        f"assert cli.main(['import', {file!r}]) == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
