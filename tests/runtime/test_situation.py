"""What a process says about itself when its job has failed."""

import ast
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from composer3d.runtime import situation
from composer3d.runtime.situation import Situation, parse, situation_of, situation_of_error

PACKAGE = Path(situation.__file__).parents[1]


def compiled(source: str, file: Path | str, name: str) -> Callable[..., object]:
    """A function whose code claims to be in ``file``."""
    names: dict[str, object] = {}
    exec(compile(source, str(file), "exec"), names)
    function = names[name]
    assert callable(function)
    return function


def situation_in(function: Callable[..., object], *arguments: object) -> Situation:
    """The situation of a thread that runs ``function(pause, *arguments)``."""
    is_there, may_end = threading.Event(), threading.Event()

    def pause() -> None:
        is_there.set()
        may_end.wait(30.0)

    thread = threading.Thread(target=function, args=(pause, *arguments), name="worker")
    thread.start()
    try:
        assert is_there.wait(30.0)
        assert thread.ident is not None
        return situation_of(thread.ident)
    finally:
        may_end.set()
        thread.join()


def test_a_thread_outside_of_a_collective_has_a_place_and_a_stack() -> None:
    own = compiled("def work(pause):\n    pause()\n", PACKAGE / "data/loader.py", "work")
    found = situation_in(own)
    assert found.place == "data/loader.py:2"
    assert found.waits_for == ""
    assert "composer3d/data/loader.py:2 in work" in found.threads["worker"]


@pytest.mark.parametrize(
    ("file", "axis"),
    [
        ("parallel/tensor/collectives.py", "tp"),
        ("parallel/context/ring.py", "cp"),
        ("parallel/expert/dispatch.py", "ep"),
        ("parallel/pipeline/runtime.py", "pp"),
        ("parallel/data/fsdp.py", "dp"),
        ("checkpoint/store.py", "the ranks of a checkpoint"),
        ("runtime/mesh.py", "all ranks"),
        ("training/loop.py", "other ranks"),
    ],
)
def test_a_wait_names_the_collective_and_the_axis(file: str, axis: str) -> None:
    torch = compiled(
        "def all_reduce(pause):\n    pause()\n",
        "/x/site-packages/torch/distributed/distributed_c10d.py",
        "all_reduce",
    )
    own = compiled("def call(pause, torch):\n    torch(pause)\n", PACKAGE / file, "call")
    found = situation_in(own, torch)
    assert (found.place, found.waits_for) == ("", f"all_reduce over {axis}")
    assert "torch/distributed/distributed_c10d.py:2 in all_reduce" in found.threads["worker"]


def test_what_the_pipeline_of_torch_calls_is_a_place() -> None:
    torch = compiled(
        "def forward_one_chunk(pause, own):\n    own(pause)\n",
        "/x/site-packages/torch/distributed/pipelining/stage.py",
        "forward_one_chunk",
    )
    own = compiled(
        "def forward(pause):\n    pause()\n", PACKAGE / "models/llama/model.py", "forward"
    )
    assert situation_in(torch, own).place == "models/llama/model.py:2"


def test_a_wait_for_a_message_is_no_place(tmp_path: Path) -> None:
    """The wait itself is compiled code: only the line of composer3d shows it."""
    ring = PACKAGE / "parallel/context/ring.py"
    number = next(
        number
        for number, line in enumerate(ring.read_text().splitlines(), start=1)
        if ".wait()" in line
    )
    lines = "\n" * (number - 2)
    own = compiled(f"{lines}def receive(pause):\n    pause()\n", ring, "receive")
    assert situation_in(own).waits_for == "a collective over cp"


def test_local_variables_tell_the_step_and_the_micro_batch() -> None:
    step = compiled(
        "class Run:\n    step = 6\n\n"
        "def do_step(pause, inner):\n    run = Run()\n    inner(pause)\n",
        PACKAGE / "training/loop.py",
        "do_step",
    )
    inner = compiled(
        "def forward_backward(pause):\n    index = 2\n    pause()\n",
        PACKAGE / "parallel/executor.py",
        "forward_backward",
    )
    assert situation_in(step, inner).details == "step 7, micro-batch 2"


@pytest.mark.parametrize(("file", "function"), situation._DETAILS)
def test_the_functions_whose_variables_are_told_exist(file: str, function: str) -> None:
    package, _, rest = file.partition("/")
    source = (Path(import_module(package).__file__ or "").parent / rest).read_text()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert function in [node.name for node in functions]


def test_a_variable_that_is_not_set_yet_is_left_out() -> None:
    step = compiled("def do_step(pause):\n    pause()\n", PACKAGE / "training/loop.py", "do_step")
    found = situation_in(step)
    assert (found.details, found.place) == ("", "training/loop.py:2")


def test_an_error_has_the_situation_in_which_it_was_raised() -> None:
    own = compiled(
        'def gather():\n    raise KeyError("x")\n', PACKAGE / "parallel/tensor/styles.py", "gather"
    )
    with pytest.raises(KeyError) as caught:
        own()
    found = situation_of_error(caught.value)
    assert (found.place, found.waits_for) == ("", "a collective over tp")
    assert found.threads["MainThread"][-1] == "composer3d/parallel/tensor/styles.py:2 in gather"
    assert parse(found.to_json()) == found


@pytest.mark.parametrize("text", ["[]", "{}", "x", '{"host": 1}'])
def test_a_text_that_is_no_situation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"it is no situation|Expecting value"):
        parse(text)
