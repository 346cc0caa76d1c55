"""Fixtures of all tests: one pool of workers for the session, whose server imports torch once."""

import os
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

from tools.prove.paths import ROOT

# Before torch is imported: a worker that ran several threads would slow down the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from composer3d.runtime import collector, launch
from composer3d.runtime.launch import Pool
from tools.two_hosts import Host, NoHostsError, two_hosts

# A busy machine is no failure. Tests have limits of their own.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

# The process that forks the tasks of tests imports what they need, once for all.
launch._PRELOAD = "tests.preloaded"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let Python's garbage collector skip what is collected: millions of objects that stay."""
    with collector.importing():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _signals_that_processes_inherit() -> None:
    """Let signals reach the jobs of tests, if the tests run under nohup or in the background."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool() as workers:
        yield workers


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one-process runs, which all layouts that share one read."""
    return tmp_path_factory.mktemp("references")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GPU in name, compiled: 4 s of CPU time. Its tests are skipped without a compiler."""
    # Imported here, as it imports torch, which the process that starts xdist's workers has no use
    # for.
    from tools.fake_cuda import device

    return device.build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Host]]:
    """Two hosts, with a link of ``request.param`` Mbit/s if given. Skips if they cannot be made."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(two_hosts(getattr(request, "param", None)))
        except NoHostsError as error:
            pytest.skip(str(error))
        yield made


@pytest.fixture
def root() -> Path:
    """The folder of the repository."""
    return ROOT
