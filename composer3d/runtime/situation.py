"""Describe what this process does at an instant, for the report of a job that has failed.

Everything is read from the stacks of its threads when a report is wanted, so a step pays nothing
for it. The local variables of a few functions, named in ``_DETAILS``, say which step, micro-batch
and action of the pipeline is running. A test runs into each of them.
"""

import json
import linecache
import platform
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

# Functions in which a rank waits for other ranks, but without a frame of torch.distributed: the
# wait is a copy from a GPU or a meeting in the store, the collective runs in another thread, or its
# time is measured.
_WAITING = frozenset({"sum_over_world", "await_values", "result", "wait_and_tell", "wait_in_store"})

# The axis, or the purpose, of a collective that is called below these folders and files. The
# innermost one decides.
_AXES = (
    ("composer3d/parallel/tensor/", "tp"),
    ("composer3d/parallel/context/", "cp"),
    ("composer3d/parallel/expert/", "ep"),
    ("composer3d/parallel/pipeline/", "pp"),
    ("torch/distributed/pipelining/", "pp"),
    ("composer3d/parallel/data/", "dp"),
    ("torch/distributed/fsdp/", "dp"),
    ("composer3d/checkpoint/", "the ranks of a checkpoint"),
    ("composer3d/runtime/mesh.py", "all ranks"),
    ("composer3d/runtime/process_group.py", "all ranks"),
    ("composer3d/runtime/meeting.py", "all ranks"),
)

# Functions of torch.distributed that move data between ranks.
_COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_gather_tensor",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "irecv",
        "isend",
        "recv",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter_object_list",
        "send",
    }
)

# What local variables of a function tell, by the end of its file's path and its name.
_DETAILS: Mapping[tuple[str, str], Callable[[Mapping[str, Any]], str]] = {
    ("composer3d/training/loop.py", "do_step"): lambda names: f"step {names['run'].step + 1}",
    ("composer3d/parallel/executor.py", "forward_backward"): lambda names: (
        f"micro-batch {names['index']}"
    ),
    ("torch/distributed/pipelining/schedules.py", "_step_microbatches"): lambda names: (
        f"action {names['action']} of the schedule"
        if "action" in names
        # One stage on each rank: the loop counts.
        else f"forward of micro-batch {names['fwd_mb_index']}, "
        f"backward of micro-batch {names['bwd_mb_index']}"
    ),
    ("torch/distributed/pipelining/stage.py", "forward_one_chunk"): lambda names: (
        f"forward of micro-batch {names['fwd_chunk_id']} in stage {names['self'].stage_index}"
    ),
    ("torch/distributed/pipelining/stage.py", "backward_one_chunk"): lambda names: (
        f"backward of micro-batch {names['bwd_chunk_id']} in stage {names['self'].stage_index}"
    ),
}

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = str(Path(_PACKAGE).parent)
_LONGEST_TEXT = 500
_MOST_FRAMES = 60  # of a thread, the innermost ones

# Frames and the lines that they run, outermost first.
_Stack = list[tuple[FrameType, int]]


class Situation(NamedTuple):
    """What a process does.

    Attributes:
        host: the name of its machine.
        place: the line of composer3d that the main thread runs; "" inside of a collective.
        details: the step, the micro-batch and the action, as far as the main thread is in them.
        waits_for: the collective in which the main thread waits, and its axis; "" outside of one.
        threads: the stack of each thread that runs code of composer3d, outermost call first.
    """

    host: str
    place: str
    details: str
    waits_for: str
    threads: dict[str, list[str]]

    def to_json(self) -> str:
        """Return the situation as text that ``parse`` reads."""
        return json.dumps(self._asdict())


def parse(text: str) -> Situation:
    """Return the situation from ``Situation.to_json``.

    Raises:
        ValueError: the text is something else.
    """
    values = json.loads(text)
    if type(values) is not dict or values.keys() != set(Situation._fields):
        raise ValueError("it is no situation of a rank")
    return Situation(**values)


def situation_of(main_thread: int) -> Situation:
    """Describe this process, whose main thread has the identity ``main_thread``."""
    frames = sys._current_frames()
    main = _walk(frames.get(main_thread))
    place = _place_of(main)
    return Situation(
        host=platform.node(),
        place=place,
        details=", ".join(_details_of(main)),
        waits_for="" if place else _wait_of(main),
        threads=_stacks_of(frames),
    )


def _walk(frame: FrameType | None) -> _Stack:
    """Return the frames of a stack and their lines, outermost first."""
    return [] if frame is None else list(traceback.walk_stack(frame))[::-1]


def _place_of(stack: _Stack) -> str:
    own = [number for number, (frame, _) in enumerate(stack) if _is_own(frame)]
    if not own:
        return ""
    # What torch.distributed calls, such as a stage of its pipeline, is no wait by itself.
    innermost = stack[own[-1] :]
    is_waiting = any(
        "torch/distributed" in frame.f_code.co_filename or frame.f_code.co_name in _WAITING
        for frame, _ in innermost
    )
    frame, line = innermost[0]
    # A wait for a message has no frame of its own.
    if is_waiting or ".wait()" in linecache.getline(frame.f_code.co_filename, line):
        return ""
    return f"{Path(frame.f_code.co_filename).relative_to(_PACKAGE)}:{line}"


def _details_of(stack: _Stack) -> Iterator[str]:
    for frame, _ in stack:
        for (file, function), describe in _DETAILS.items():
            code = frame.f_code
            if code.co_name == function and code.co_filename.endswith(file):
                # The function may not have set that variable yet, and another version of torch may
                # call it otherwise. A rank that failed to report would be called dead.
                with suppress(Exception):
                    yield describe(frame.f_locals)[:_LONGEST_TEXT]


def _wait_of(stack: _Stack) -> str:
    codes = [frame.f_code for frame, _ in reversed(stack)]
    collectives = (
        code.co_name
        for code in codes
        if code.co_name in _COLLECTIVES and "torch/distributed" in code.co_filename
    )
    collective = next(collectives, "a collective")
    axes = (axis for code in codes for part, axis in _AXES if part in code.co_filename)
    axis = next(axes, "other ranks")
    return f"{collective} over {axis}"


def _stacks_of(frames: Mapping[int, FrameType]) -> dict[str, list[str]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {}
    for identity, frame in frames.items():
        stack = _walk(frame)
        if identity != threading.get_ident() and any(_is_own(frame) for frame, _ in stack):
            stacks[names.get(identity, str(identity))] = _lines_of(stack)
    return stacks


def _lines_of(stack: _Stack) -> list[str]:
    innermost = stack[-_MOST_FRAMES:]
    return [f"{_file_of(frame)}:{line} in {frame.f_code.co_name}" for frame, line in innermost]


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE + "/")


def _file_of(frame: FrameType) -> str:
    """Return the path of a frame's file from its package on."""
    path = frame.f_code.co_filename
    _, found, inside = path.rpartition("/site-packages/")
    if found:
        return inside
    return path.removeprefix(_LIBRARIES + "/")


def situation_of_error(error: BaseException) -> Situation:
    """Describe this process at the place where its main thread raised ``error``."""
    stack = list(traceback.walk_tb(error.__traceback__))
    return Situation(
        host=platform.node(),
        place="",
        details=", ".join(_details_of(stack)),
        waits_for=_wait_of(stack),
        threads={"MainThread": _lines_of(stack)},
    )
