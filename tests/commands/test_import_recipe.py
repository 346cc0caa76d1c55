"""``composer3d import``: what it prints, writes and returns."""

from pathlib import Path

import pytest

from composer3d import cli
from tests.commands.conftest import Ask
from tests.imports.configurations import DEEPSPEED, MEGATRON


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
    titles = ["taken over:", "not in the file:", "no equal: none", "contradictions: none"]
    titles.append("open points: none")
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


def test_a_draft_is_refused_until_each_point_is_settled(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script, out = tmp_path / "pretrain.sh", tmp_path / "run.toml"
    script.write_text(MEGATRON.replace("--swiglu", "--quick-geglu").rstrip() + " --my-own-word 3\n")
    assert cli.main(["import", str(script), "-o", str(out)]) == 1
    assert "is a draft, which no command runs" in capsys.readouterr().out
    derived = tmp_path / "derived.toml"
    derived.write_text(f'base = "{out.name}"\n[open]\n')
    for command in ("check", "train", "plan", "dryrun"):
        for recipe in (out, derived):
            assert cli.main([command, str(recipe)]) == 2
            lines = capsys.readouterr().err.splitlines()
            assert [line.split("'")[1] for line in lines] == ["quick_geglu", "my_own_word"]
            assert all(line.startswith(f"{out}:") and "--accept" in line for line in lines)
    assert cli.main(["verify", str(out)]) == 2
    assert "open point 'quick_geglu'" in capsys.readouterr().out
    text = out.read_text()
    out.write_text("\n".join(line for line in text.splitlines() if "_own_word = " not in line))
    assert cli.main(["check", str(out)]) == 2
    out.unlink()
    arguments = ["import", str(script), "-o", str(out), "--accept", "quick-geglu"]
    assert cli.main([*arguments, "--accept=--my-own-word"]) == 0
    capsys.readouterr()
    assert cli.main(["check", str(out)]) == 0
    assert cli.main(["import", str(script), "--accept", "swiglu"]) == 2
    assert "no such point is open; open: quick_geglu, my_own_word" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["open = 3\n", "[[open]]\nx = 1\n", "[open]\nx = 1\n"])
def test_an_odd_table_of_open_points_is_refused(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "x.toml").write_text(text + '[model]\npreset = "debug-tiny"\n')
    assert cli.main(["check", str(tmp_path / "x.toml")]) == 2
    assert "open" in capsys.readouterr().err


def test_json(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(DEEPSPEED)
    status, answer = ask("import", str(file), "--gpus", "4", "--model", "llama3-8b")
    assert status == 0
    assert (answer["ok"], answer["program"], answer["world_size"]) == (True, "DeepSpeed", 4)
    assert len(answer["contradictions"]) == 1
    status, answer = ask("import", str(file))
    assert (status, answer["ok"]) == (2, False)
    assert answer["errors"]
