"""A hostile case, the command that meets it, and everything the command must not do.

Each case runs ``composer3d`` in a process of its own, forked from one that has imported torch. The
process reports its exit status, its output, its CPU time and its peak memory. Three traps show code
that ran, and files outside of the case's folder that were touched:

- a pickled or registered payload creates ``EXECUTED`` (a marker file) when it runs;
- ``outside`` holds files with a secret; their access times are reset before a case and read after
  it;
- an audit hook records every file that is opened for writing, every process that is started and
  every connection.
"""

import contextlib
import io
import os
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from composer3d.cli import main
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.starter import STORE_VARIABLE

LIMIT_CPU_S = 5.0
LIMIT_WALL_S = 60.0  # many times the CPU time, for a busy machine
LIMIT_MIB = 300.0  # beyond what a process has that has imported torch
SECRET = "a secret that nobody may read"
MARKER = "EXECUTED"
_EXITS = (1, 2)
# Events of an audit hook that no command has a reason for.
_NEVER = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")
# Modules of the values that the ranks of a job send each other as pickles.
_UNPICKLED = ("composer3d.", "torch", "collections", "pathlib", "numpy")
_DANGEROUS = ("eval", "exec", "compile", "__import__", "open", "getattr", "setattr", "breakpoint")
_NEVER_READ_NS = 10**9  # the access time of a file that was not read


@dataclass(frozen=True)
class Case:
    """One hostile input.

    Attributes:
        name: unique; also the name of its folder.
        make: writes the input into an empty folder and returns the arguments of ``composer3d``.
            Beside that folder are ``base`` (valid files to copy) and ``outside`` (files that must
            not be touched).
        message: a regular expression that the output must match. None if the input may also be
            harmless, such as a random change of a byte: then only the traps count.
        statuses: the exit statuses that are right.
    """

    name: str
    make: Callable[[Path], list[str]]
    message: str | None
    statuses: tuple[int, ...] = _EXITS

    def __str__(self) -> str:
        return self.name


@dataclass
class Outcome:
    """What a command did."""

    status: int | None = None
    output: str = ""
    cpu_s: float = 0.0
    peak_mib: float = 0.0
    traceback: str = ""
    touched: list[str] = field(default_factory=list)


def cases_of(
    name: str,
    make: Callable[[str, Path], list[str]],
    message: str | None,
    commands: Sequence[str],
) -> list[Case]:
    """An input as a case of each of several commands, whose name ``make`` gets first."""
    return [Case(f"{name}-{met}", partial(make, met), message) for met in commands]


def proof_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder for cases. ``watch`` allows no file in it but those of the case.

    composer3d's own temporary folders are called composer3d-*, and ``watch`` allows these.
    """
    return tempfile.TemporaryDirectory(prefix="proof-")


def marker_of(folder: Path) -> Path:
    """The file that code of a hostile input creates when it runs."""
    return folder.parent / "outside" / f"{MARKER}-{folder.name}"


def prepare_outside(root: Path) -> None:
    """Make the files that no case may touch.

    Raises:
        RuntimeError: the file system does not tell that a file was read, so no case could fail.
    """
    outside = root / "outside"
    outside.mkdir(exist_ok=True)
    for name in ("secret.txt", "tokenizer.json", "metrics.jsonl", "model.safetensors"):
        (outside / name).write_text(SECRET)
    _state_of(outside)
    (outside / "secret.txt").read_bytes()
    if not any(was_read for *_, was_read in _state_of(outside)):
        raise RuntimeError(
            f"the file system of {root} keeps no access times (mount option noatime), so a file "
            "that is read is not noticed: set TMPDIR to a folder on another one"
        )


def problems_of(case: Case, root: Path, pool: Pool) -> list[str]:
    """Run ``case`` in a new folder below ``root``, and list the harm that it did."""
    folder, outside = root / case.name, root / "outside"
    folder.mkdir()
    arguments = case.make(folder)
    # Making the case may have read these files: this resets their access times.
    _state_of(outside)
    before = _state_of(outside)
    outcome = run(arguments, folder, pool)
    after = _state_of(outside)
    problems = []
    if marker_of(folder).exists():
        problems.append("it ran code of the hostile input")
        marker_of(folder).unlink()
    elif after != before:
        problems.append(f"it read or wrote {outside}")
    problems += [f"it touched {path}" for path in outcome.touched]
    if outcome.traceback:
        problems.append(f"it raised:\n{outcome.traceback}")
    if "Traceback" in outcome.output or "panicked" in outcome.output:
        problems.append("it printed a traceback")
    problems += secrets_in(outcome.output, folder)
    statuses = case.statuses if case.message is not None else (*case.statuses, 0)
    if outcome.status not in statuses:
        problems.append(f"it exited with {outcome.status}, not with {case.statuses}")
    if case.message is not None and not re.search(case.message, outcome.output):
        problems.append(f"its output does not match {case.message!r}")
    if outcome.cpu_s > LIMIT_CPU_S:
        problems.append(f"it took {outcome.cpu_s:.1f} s of CPU time")
    if outcome.peak_mib > LIMIT_MIB:
        problems.append(f"it took {outcome.peak_mib:.0f} MiB of memory")
    if problems:
        problems.append(f"composer3d {' '.join(map(repr, arguments))} printed:\n{outcome.output}")
    return problems


def run(arguments: list[str], folder: Path, pool: Pool) -> Outcome:
    """Run ``composer3d`` with ``arguments`` in ``folder``, in a process of its own."""
    task = {"arguments": arguments, "folder": str(folder)}
    try:
        outcome: Outcome = pool.run(serve, task, world_size=1, limit_s=LIMIT_WALL_S)[0]
        return outcome
    except WorkerError as error:
        # The process died, or gave no answer.
        return Outcome(traceback=str(error))


def enter(folder: str | Path) -> None:
    """Make this process, which is a rank of the pool, one that a user starts in ``folder``."""
    os.chdir(folder)
    sys.argv = ["composer3d"]
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    for name in (*ranks, STORE_VARIABLE):
        os.environ.pop(name, None)


def run_main(arguments: list[str]) -> int:
    """Run ``composer3d`` in this process, and return its exit status."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


def serve(arguments: list[str], folder: str) -> Outcome:
    """Run ``composer3d`` in this process, which ends afterwards, and report what it did."""
    enter(folder)
    outcome = Outcome()
    output = io.StringIO()
    before_mib = reset_peak_mib()
    watch(Path(folder), outcome.touched)
    begin = time.process_time()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            outcome.status = run_main(arguments)
        except BaseException:
            outcome.traceback = traceback.format_exc()
    outcome.cpu_s = time.process_time() - begin
    outcome.peak_mib = peak_mib() - before_mib
    outcome.output = output.getvalue()
    return outcome


def reset_peak_mib() -> float:
    """Reset the peak of this process's memory, which a fork inherits, and return it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_mib()


def peak_mib() -> float:
    """Return the most memory that this process has had since the reset."""
    with contextlib.suppress(OSError):
        match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        if match:
            return int(match[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def watch(folder: Path, touched: list[str]) -> None:
    """Record what this process does that no hostile input may make it do, until it ends.

    That is: changes of files outside of ``folder``, started processes, connections, and names that
    Python's own unpickler looks up outside of ``_UNPICKLED``.
    """
    # The folders of proofs must not have these prefixes. See ``proof_folder``.
    allowed = (f"{folder.resolve()}/", "/dev/null", "/dev/shm", "/tmp/torch", "/tmp/composer3d-")
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        # All calls but most of ``open`` act on a link itself, not on what it names.
        follows_links = False
        if event == "open":
            path, _, flags = arguments
            paths = [path] if isinstance(flags, int) and flags & writing else []
            follows_links = not (isinstance(flags, int) and flags & os.O_NOFOLLOW)
        elif event in ("os.rename", "os.link", "os.symlink"):
            paths = list(arguments[:2])
        elif event in ("os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
            paths = list(arguments[:1])
        elif event == "subprocess.Popen" and list(arguments[1][:2]) == [sys.executable, "-P"]:
            # Tokenizers and tables have processes, which must run our own files and nothing else.
            program = str(arguments[1][2])
            is_tokenizer = program.endswith("composer3d/data/tokenizer_worker.py")
            is_table = program.endswith("composer3d/data/table_worker.py")
            if (len(arguments[1]), is_tokenizer, is_table) not in (
                (3, True, False),
                (4, False, True),  # with its settings
            ):
                touched.append(f"{event} {arguments!r:.200}")
            return
        elif event in _NEVER:
            touched.append(f"{event} {arguments!r:.200}")
            return
        elif event == "pickle.find_class":
            module, name = map(str, arguments)
            is_value = module == "builtins" and name not in _DANGEROUS
            if not (is_value or module.startswith(_UNPICKLED)):
                touched.append(f"{event} {arguments!r:.200}")
            return
        else:
            return
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                real_path = os.path.realpath(os.fsdecode(path))
                if not follows_links:
                    parent, name = os.path.split(os.fsdecode(path))
                    real_path = os.path.join(os.path.realpath(parent), name)
                is_thread_name = re.fullmatch(r"/proc/\d+/(task/\d+/)?comm", real_path)
                is_cache = "__pycache__" in real_path
                if not (real_path.startswith(allowed) or is_thread_name or is_cache):
                    touched.append(f"{event} {real_path}")

    sys.addaudithook(note)


def _state_of(outside: Path) -> list[tuple[str, int, int, bool]]:
    """List each file's name, size, time of change, and whether it was read since the last call.

    The access time is reset to 1970: with the usual ``relatime``, the next read sets it again.
    """
    state = []
    for path in sorted(outside.iterdir()):
        status = path.lstat()
        was_read = status.st_atime_ns != _NEVER_READ_NS
        state.append((path.name, status.st_size, status.st_mtime_ns, was_read))
        os.utime(path, ns=(_NEVER_READ_NS, status.st_mtime_ns))
    return state


def secrets_in(output: str, folder: Path) -> list[str]:
    """The problem that an output or a file of a folder holds a secret from outside, or none."""
    is_copied = SECRET in output or any(map(_holds_secret, folder.rglob("*")))
    return ["it copied a secret from outside"] if is_copied else []


def _holds_secret(path: Path) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 24:
        return False
    return SECRET.encode() in path.read_bytes()
