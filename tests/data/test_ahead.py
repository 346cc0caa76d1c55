"""Batches made ahead are those of the loader, in its order, and a resume skips none of them."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from composer3d.data import Batch, BatchesAhead, Loader
from tests.data.samples import loader_of, rows
from tests.data.test_loader import CORPUS

CPU = torch.device("cpu")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def is_made(batches: BatchesAhead) -> bool:
    return len(batches._next) == 1 and batches._next[0].done()


def test_the_batches_and_the_state_are_those_of_the_loader() -> None:
    plain, ahead = loader_of(CORPUS, 1, 2), BatchesAhead(loader_of(CORPUS, 1, 2), CPU)
    assert ahead.state_dict() == plain.state_dict()
    for _ in range(7):
        assert torch.equal(rows([next(ahead)]), rows([next(plain)]))
        wait_until(lambda: is_made(ahead))
        assert ahead.state_dict() == plain.state_dict()
        assert ahead.order == plain.order
    ahead.close()


def test_a_resume_goes_on_with_the_batch_that_was_made_ahead() -> None:
    first = BatchesAhead(loader_of(CORPUS), CPU)
    for _ in range(3):
        next(first)
    wait_until(lambda: is_made(first))
    resumed = BatchesAhead(loader_of(CORPUS), CPU)
    next(resumed)  # its batch ahead must be dropped
    resumed.load_state_dict(first.state_dict())
    assert resumed.state_dict() == first.state_dict()
    assert torch.equal(rows([next(resumed)]), rows([loader_of(CORPUS)[3]]))
    assert torch.equal(rows([next(first)]), rows([loader_of(CORPUS)[3]]))


class Controlled(Loader):
    """A loader that waits for ``allowed``, and fails at the step ``fails_at``."""

    allowed: threading.Event
    fails_at = -1

    def __next__(self) -> Batch:
        assert self.allowed.wait(30)
        if self.next_step == self.fails_at:
            raise OSError(5, "Input/output error")
        return super().__next__()


def controlled(fails_at: int = -1, kind: type[Controlled] = Controlled) -> Controlled:
    loader = kind(CORPUS, seq_len=4, global_batch=8, seed=3, batch_rank=0, batch_ranks=1)
    loader.allowed, loader.fails_at = threading.Event(), fails_at
    loader.allowed.set()
    return loader


def test_a_batch_is_made_while_the_one_before_is_in_use() -> None:
    loader = controlled()
    batches = BatchesAhead(loader, CPU)
    next(batches)
    wait_until(lambda: is_made(batches))
    loader.allowed.clear()
    # The second one is there already, and the third one must wait.
    assert torch.equal(rows([next(batches)]), rows([loader_of(CORPUS)[1]]))
    assert not is_made(batches)
    loader.allowed.set()
    batches.close()
    assert is_made(batches)
    # Never more than one ahead.
    assert loader.next_step == 3


def test_an_error_is_raised_by_the_step_that_needs_the_batch() -> None:
    batches = BatchesAhead(controlled(fails_at=2), CPU)
    next(batches)
    next(batches)
    wait_until(lambda: is_made(batches))
    state = batches.state_dict()
    assert state["next_step"] == 2
    with pytest.raises(OSError, match="Input/output error"):
        next(batches)
    assert batches.state_dict() == state


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_batch_that_failed_is_made_again_when_it_is_asked_for(ahead: int) -> None:
    """A loop of one's own may ask again, after a store has failed for a while."""
    loader = controlled()
    batches = BatchesAhead(loader, CPU)
    batches._ahead = ahead
    next(batches)
    pick, fails = loader.__getitem__, [True]

    def fail_once(loader: Loader, step: int) -> Batch:
        if step == 3 and fails:
            fails.pop()
            raise OSError(5, "Input/output error")
        return pick(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Controlled, "__getitem__", fail_once)
        found = []
        while len(found) < 5:
            try:
                found.append(next(batches))
            except OSError:
                assert batches.state_dict()["next_step"] == 3
    batches.close()
    assert not fails
    expected = [loader_of(CORPUS)[step] for step in range(1, 6)]
    assert torch.equal(rows(found), rows(expected))


def test_an_error_does_not_wait_for_a_read_that_hangs() -> None:
    loader = controlled()
    batches = BatchesAhead(loader, CPU)
    batches._ahead = 2
    next(batches)

    def fail_and_hang(loader: Controlled) -> Batch:
        if loader.next_step == 3:
            loader.allowed.clear()
            loader.next_step += 1
            raise OSError(5, "Input/output error")
        return Loader.__next__(loader) if loader.allowed.wait(30) else Batch(*[None] * 5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Controlled, "__next__", fail_and_hang)
        next(batches)
        next(batches)
        begin_s = time.monotonic()
        with pytest.raises(OSError, match="Input/output error"):
            next(batches)
        assert time.monotonic() - begin_s < 10
        loader.allowed.set()
        batches.close()


def test_close_waits_for_the_thread_but_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = controlled()
    batches = BatchesAhead(loader, CPU)
    batches.close()  # nothing was begun
    next(batches)
    thread = batches._thread
    assert thread is not None
    # A read that hangs does not keep the process from ending.
    assert thread.daemon
    batches.close()
    assert not thread.is_alive()

    next(batches)
    batches.close()
    loader.allowed.clear()
    next(batches)
    monkeypatch.setattr("composer3d.data.ahead._CLOSE_S", 0.05)
    begin_s = time.monotonic()
    batches.close()
    assert time.monotonic() - begin_s < 5
    loader.allowed.set()  # so that the thread ends


def test_a_gpu_gets_its_batches_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus: list[Any] = []
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        assert gpus[-1] == (threading.current_thread().name, torch.device("cuda", 3))
        pinned.append(tensor.clone())
        return pinned[-1]

    def set_device(device: torch.device) -> None:
        gpus.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    batches = BatchesAhead(loader_of(CORPUS), torch.device("cuda", 3))
    batch = next(batches)
    batches.close()
    assert torch.equal(rows([batch]), rows([loader_of(CORPUS)[0]]))
    assert [tensor.data_ptr() for tensor in batch[:3]] == [x.data_ptr() for x in pinned[:3]]
    assert {name for name, _ in gpus} == {"next batch"}


class Remote(Controlled):
    """A loader that says that it reads a store."""

    reads_store = True


@pytest.mark.parametrize("kind", [Controlled, Remote])
def test_no_batch_is_made_from_the_last_step_on(kind: type[Controlled]) -> None:
    loader = controlled(kind=kind)
    batches = BatchesAhead(loader, CPU, stop=3)
    made = [next(batches) for _ in range(3)]
    assert torch.equal(rows(made), rows([loader_of(CORPUS)[step] for step in range(3)]))
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()
    assert loader.next_step == 3


def test_more_batches_of_a_store_are_made_ahead_and_the_state_stays_exact() -> None:
    loader = controlled(fails_at=7, kind=Remote)
    batches = BatchesAhead(loader, CPU)
    assert torch.equal(rows([next(batches)]), rows([loader_of(CORPUS)[0]]))
    wait_until(lambda: len(batches._next) == 4 and all(made.done() for made in batches._next))
    assert loader.next_step == 5
    assert batches.state_dict()["next_step"] == 1
    resumed = BatchesAhead(loader_of(CORPUS), CPU)
    resumed.load_state_dict(batches.state_dict())
    for step in range(1, 7):
        expected = rows([loader_of(CORPUS)[step]])
        assert torch.equal(rows([next(batches)]), expected)
        assert torch.equal(rows([next(resumed)]), expected)
        assert batches.state_dict() == resumed.state_dict()
    with pytest.raises(OSError, match="Input/output error"):
        next(batches)
    assert batches.state_dict()["next_step"] == 7

    # Batches that are not begun are dropped by a close, and by another state.
    loader.fails_at = -1
    batches.load_state_dict(resumed.state_dict())
    assert torch.equal(rows([next(batches)]), rows([loader_of(CORPUS)[7]]))
    batches.close()
    resumed.close()
    state = batches.state_dict()
    assert torch.equal(rows([next(batches)]), rows([loader_of(CORPUS)[8]]))
    batches.load_state_dict(state)
    assert torch.equal(rows([next(batches)]), rows([loader_of(CORPUS)[8]]))
    batches.close()
