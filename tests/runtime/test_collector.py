"""The garbage collector: paused where modules are imported, and kept away from what they make."""

import gc
import weakref

import pytest

from composer3d.runtime import collector
from composer3d.runtime.launch import Pool


class Circle:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_it_is_paused_and_is_as_it_was_afterwards() -> None:
    with collector.paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"), collector.paused():
        raise ValueError("x")
    assert gc.isenabled()
    gc.disable()
    try:
        with collector.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def objects_looked_through() -> dict[str, int]:
    """Count the objects of a new process of the pool; then set them aside, and make some."""
    counts = {"at the start": len(gc.get_objects())}
    with collector.importing():
        module = [object() for _ in range(10)] + [[] for _ in range(1000)]
    counts["after an import"] = len(gc.get_objects())

    garbage = weakref.ref(Circle())
    collector.set_aside()
    counts["garbage"] = int(garbage() is not None)
    later = weakref.ref(Circle())
    gc.collect()
    counts["later garbage"] = int(later() is not None)
    del module
    return counts


def test_objects_of_imports_are_set_aside_and_garbage_is_freed(pool: Pool) -> None:
    """The process is forked by a starter that has imported torch."""
    (counts,) = pool.run(objects_looked_through, {}, world_size=1)
    assert counts["at the start"] < 20_000
    assert counts["after an import"] < 1000
    assert counts["garbage"] == counts["later garbage"] == 0
