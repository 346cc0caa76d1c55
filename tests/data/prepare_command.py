"""``composer3d prepare`` as tests run it, and the sources that they give to it."""

import json
from pathlib import Path
from typing import Any

import pytest

from composer3d import cli

Sources = Path | str | tuple[Path | str, ...]


def write_texts(file: Path, texts: list[str], field: str = "text") -> Path:
    """Write a JSONL file of texts, with blank lines between them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(json.dumps({"id": 1, field: text}) for text in texts) + "\n")
    return file


class PrepareCommand:
    """Runs ``composer3d prepare`` in the folder of a test.

    Sources and outputs are named by their paths in that folder. Several sources are a tuple.
    Without another tokenizer, the tokens are bytes.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys

    def arguments(self, source: Sources, *options: str, out: Path | str = "out") -> list[str]:
        sources = source if isinstance(source, tuple) else (source,)
        paths = [str(self.folder / each) for each in sources]
        named = ["prepare", *paths, "-o", str(self.folder / out), *options]
        has_tokenizer = "--tokenizer" in options or "--train-tokenizer" in options
        return named if has_tokenizer else [*named, "--tokenizer", "bytes"]

    def run(self, source: Sources, *options: str, out: Path | str = "out") -> dict[str, Any]:
        """Prepare a source; return the answer as JSON."""
        assert cli.main([*self.arguments(source, *options, out=out), "--json"]) == 0
        summary, *details, last = self.capsys.readouterr().out.splitlines()
        assert summary.startswith(f"{self.folder / out}: ")
        # Only a split, a mask and a trained tokenizer have more to tell.
        assert not details or {"--split", "--kind", "--train-tokenizer"} & set(options)
        answer: dict[str, Any] = json.loads(last)
        assert answer.pop("ok") is True
        return answer

    def errors(self, status: int, source: Sources, *options: str, out: Path | str = "out") -> str:
        """Run a command that must end with ``status``; return its standard error."""
        assert cli.main(self.arguments(source, *options, out=out)) == status
        return self.capsys.readouterr().err

    def refusal(self, source: Sources, *options: str, out: Path | str = "out") -> str:
        """Run a command that must fail and leave nothing; return the one line that refuses."""
        parent = (self.folder / out).parent
        before = sorted(parent.iterdir())
        assert cli.main([*self.arguments(source, *options, out=out), "--json"]) == 2
        shown = self.capsys.readouterr()
        assert sorted(parent.iterdir()) == before
        (line,) = shown.err.splitlines()
        assert json.loads(shown.out) == {"ok": False, "errors": [line]}
        return line
