"""The end of a training after an error."""

from types import SimpleNamespace
from typing import Any

import pytest

from composer3d.facts.errors import DataError, ModelError, RankDataError, TrainingError, UserError
from composer3d.training.ending import closing


class Recorder:
    """A run whose parts only note which of their methods is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.recipe = SimpleNamespace(
            checkpoint=SimpleNamespace(timeout_minutes=60), run=SimpleNamespace(timeout_minutes=10)
        )
        self.step = 7
        note = self.calls.append
        store = SimpleNamespace(finish=lambda limit_s: note(f"finish in {limit_s:.0f} s"))
        self.saver = SimpleNamespace(store=store)
        self.loader = SimpleNamespace(close=lambda: note("loader"))
        self.observers = SimpleNamespace(
            event=lambda step, kind, text: note(f"{kind} at {step}: {text}"),
            close=lambda: note("observers"),
        )


@pytest.mark.parametrize(
    ("error", "raised", "limit_s"),
    [
        (TrainingError("bad"), TrainingError, 3600),
        # The input was checked before.
        (ModelError("bad"), TrainingError, 3600),
        (DataError("bad"), DataError, 3600),
        # The other ranks wait for this one in a collective.
        (RankDataError("bad"), RankDataError, 300),
    ],
)
def test_an_error_is_told_and_the_save_ends_before_anything_is_closed(
    error: UserError, raised: type[UserError], limit_s: int
) -> None:
    run: Any = Recorder()
    with (
        pytest.raises(raised, match="bad") as caught,
        closing(run, lambda told: run.calls.append(f"told {type(told).__name__}")),
    ):
        raise error
    assert type(caught.value) is raised
    assert run.calls == [
        f"told {raised.__name__}",
        "stop at 7: bad",
        f"finish in {limit_s} s",
        "loader",
        "observers",
    ]


def test_a_lost_peer_ends_a_run_without_a_wait_for_its_save() -> None:
    run: Any = Recorder()
    with pytest.raises(RuntimeError), closing(run, lambda told: pytest.fail("not told here")):
        raise RuntimeError("Connection reset by peer")
    assert run.calls == [
        "stop at 7: RuntimeError: Connection reset by peer",
        "loader",
        "observers",
    ]
