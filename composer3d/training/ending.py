"""How a training ends after an error: what is said, saved and closed, in this order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from composer3d.facts.errors import (
    DataError,
    RankDataError,
    TrainingError,
    UserError,
    reason_in_one_line,
)
from composer3d.training.build import Run

# Tells the user of an error, on the rank that has to do so.
Tell = Callable[[UserError], None]


@contextmanager
def closing(run: Run, tell: Tell) -> Iterator[None]:
    """Close the loader and the observers of a run when the context ends, also after an error.

    Before that, an error of the user is told: services of metrics can take long to close, and a
    launcher may end this process meanwhile. Then a save in the background may end.

    Raises:
        TrainingError: in place of a UserError of status 2, unless it is a DataError.
    """
    try:
        yield
    except UserError as caught:
        error = _of_training(caught)
        tell(error)
        run.observers.event(run.step, "stop", reason_in_one_line(error))
        run.saver.store.finish(_patience_s(run, error))
        if error is caught:
            raise
        raise error from caught
    except Exception as error:
        run.observers.event(run.step, "stop", reason_in_one_line(error))
        raise
    finally:
        run.loader.close()
        run.observers.close()


def _of_training(error: UserError) -> UserError:
    # Status 2 says that the input is wrong. It has been checked; but data may have changed.
    if error.status == UserError.status and not isinstance(error, DataError):
        return TrainingError(error.lines)
    return error


def _patience_s(run: Run, error: UserError) -> float:
    """Return how long a save in the background may go on after an error.

    All ranks have the error, and wait for their own part of the save: no rank ends before the
    others need it no longer. Only a RankDataError is that of one rank: the others wait for it in a
    collective of training, which must not fail before the error is known.
    """
    table = run.recipe
    save_s = 60.0 * table.checkpoint.timeout_minutes
    if isinstance(error, RankDataError):
        return min(save_s, 30.0 * table.run.timeout_minutes)
    return save_s
