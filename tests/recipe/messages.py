"""The snapshot of what a user reads of each wrong recipe: ``messages.txt``, a line a message.

``python -m tests.recipe.messages`` writes it anew. Read its changes as a user would.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from composer3d import cli
from tests.recipe import wrong_texts, wrong_values
from tests.recipe.wrong import Wrong

ALL = wrong_texts.ALL + wrong_values.ALL
SNAPSHOT = Path(__file__).with_name("messages.txt")


def write_files(case: Wrong, folder: Path) -> None:
    files = case.files if isinstance(case.files, Mapping) else {"x.toml": case.files}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def refusal_of(case: Wrong, folder: Path) -> list[str]:
    """Return the lines on stderr of ``composer3d check``, which must refuse the case with 2."""
    write_files(case, folder)
    out, err = io.StringIO(), io.StringIO()
    argv = ["check", "x.toml", "--json", *(f"--set={text}" for text in case.sets)]
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = cli.main(argv + ([f"--gpus={case.world}"] if case.world else []))
    lines = err.getvalue().splitlines()
    assert status == 2, status
    assert json.loads(out.getvalue().splitlines()[-1]) == {"ok": False, "errors": lines}
    return lines


def read() -> dict[str, list[str]]:
    """Return the lines of each case in the snapshot, by its name."""
    messages: dict[str, list[str]] = {}
    for line in SNAPSHOT.read_text("utf-8").splitlines():
        name, _, message = line.partition(" | ")
        messages.setdefault(name, []).append(message)
    return messages


def main() -> None:
    lines = []
    for case in ALL:
        with tempfile.TemporaryDirectory() as folder:
            lines += [f"{case.name} | {line}" for line in refusal_of(case, Path(folder))]
    SNAPSHOT.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
