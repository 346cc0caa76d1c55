"""Prompts of the command line and of files, and the lines of wrong ones."""

from pathlib import Path

import pytest

from composer3d.facts.errors import DataError
from composer3d.generate.prompts import Prompt, read_prompts


def test_prompts_come_from_the_command_line_and_from_files(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_bytes("\ufeffone\r\n\n  two é\n".encode())  # with a byte order mark
    lines.write_text('{"prompt": "a\\nb\u2028", "id": 3}\n\n{"prompt": [4, 0]}\n')
    assert read_prompts(["x", "y"], str(text)) == [
        Prompt("--prompt number 1", "x"),
        Prompt("--prompt number 2", "y"),
        Prompt(f"{text}:1", "one"),
        Prompt(f"{text}:3", "  two é"),
    ]
    assert read_prompts([], str(lines)) == [
        Prompt(f"{lines}:1", "a\nb\u2028"),
        Prompt(f"{lines}:3", None, (4, 0)),
    ]
    assert read_prompts(["x"], None) == [Prompt("--prompt x", "x")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "a"}', "b.jsonl:2: must be a JSON object such as"),
        ('{"prompt": [1, -2]}', "must be a JSON object such as"),
        ('{"prompt": [true]}', "must be a JSON object such as"),
        ('{"prompt": "\\ud800"}', "must be a JSON object such as"),
        ('{"prompt": "a"', "must be a JSON object such as"),
        ("[" * 9999, "it nests too deep"),
    ],
)
def test_a_wrong_line_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(DataError, match=problem) as caught:
        read_prompts([], str(path))
    assert len(caught.value.lines) == 1
    assert len(caught.value.lines[0]) < 700


def test_no_prompt_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no prompt; give one with --prompt TEXT"):
        read_prompts([], None)
    with pytest.raises(DataError, match="No such file or directory; give a file"):
        read_prompts([], str(tmp_path / "missing"))
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="byte 0xe9 at offset 3 is not UTF-8"):
        read_prompts([], str(tmp_path / "latin"))
    with pytest.raises(DataError, match="bytes that are not UTF-8"):
        read_prompts(["\udce9"], None)
