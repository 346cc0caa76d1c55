"""The proof that healthy ranks are not named: its output and its status."""

from typing import Any, ClassVar

import pytest

from tools.prove import watch


class PoolOf:
    """A stand-in for the pool: each layout has shown ``lines``."""

    lines: ClassVar[list[str]] = []

    def __enter__(self) -> "PoolOf":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, task: Any, arguments: dict[str, Any], **options: Any) -> list[watch.Watched]:
        return [watch.Watched(self.lines, 0.25, 0.1), watch.Watched([], 0.25, 0.1)]


@pytest.mark.parametrize("lines", [[], ["step 20: straggler: rank 1 (x)"]])
def test_an_alarm_fails_the_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: list[str]
) -> None:
    monkeypatch.setattr(watch, "Pool", PoolOf)
    monkeypatch.setattr(watch, "LAYOUTS", ("mesh.dp_shard=2",))
    monkeypatch.setattr(PoolOf, "lines", lines)
    assert watch.main(["--steps", "40"]) == len(lines)
    word = "ALARM" if lines else "quiet"
    assert capsys.readouterr().out.splitlines() == [
        f"{word}  mesh.dp_shard=2: 40 steps of 250 ms, 4 comparisons of 100 ms",
        *(f"       {line}" for line in lines),
        f"{1 - len(lines)} of 1 layouts without an alarm",
    ]


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        watch.main(["--steps", "9"])
    assert caught.value.code == 2
    assert "--steps must be at least 10" in capsys.readouterr().err
