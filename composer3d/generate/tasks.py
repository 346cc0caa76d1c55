"""What ``composer3d eval --tasks`` does: tasks of lm-eval on a checkpoint, in one process or tp.

lm-eval is an extra: its modules are imported by functions, after ``require_lm_eval``. A task is a
program of its author: it may name Python functions and a data set. So only names of lm-eval's own
tasks, and YAML files that the user names, are loaded.
"""

import difflib
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from composer3d.data.prompt_tokenizer import PromptTokenizer
from composer3d.facts.bars import share_bars_by_threads
from composer3d.facts.errors import DataError, UserError, reason_in_one_line
from composer3d.facts.files import read_plain
from composer3d.facts.text import one_line
from composer3d.generate.crew import Crew
from composer3d.generate.load import Checkpoint, open_checkpoint
from composer3d.generate.model import (
    compose_generator,
    dtype_of,
    end_tokens_of,
    load_generator,
    no_tokenizer,
    open_tokenizer,
)
from composer3d.recipe.schema import Recipe
from composer3d.runtime.process_group import on_main, pick_device

if TYPE_CHECKING:
    from composer3d.generate.harness import HarnessModel

# The version whose model API the adapter has, and whose ``TaskManager.load`` is used.
_LEAST_VERSION = (0, 4, 13)

# As lm-eval's own adapters: the longest sequence of a model whose files do not say.
_USUAL_LONGEST = 2048

_FILE_BYTES = 1 << 20
_FILE_ENDINGS = (".yaml", ".yml")
# A key at the top of a YAML file that makes it a group of other tasks.
_GROUP_KEY = re.compile(rb"^['\"]?group['\"]?\s*:", re.MULTILINE)
_MOST_SUGGESTIONS = 3


@dataclass(frozen=True, kw_only=True)
class TasksRequest:
    """What a user asks for.

    Attributes:
        src: the checkpoint.
        recipe: the recipe of its run, for an architecture of the user's own.
        tasks: names of lm-eval's tasks, groups or tags, which may have wildcards, and paths of YAML
            files.
        limit: the most documents of a task; None: all.
        shots: the examples before each question; None: what each task says.
        batch: the most passages or prompts that are read together.
        longest: the most tokens of a sequence; None: those of the model.
        dtype: the name of the dtype of the model; None: that of the checkpoint.
        tokenizer: "bytes", the path of a tokenizer.json, or None for that of the checkpoint.
        adds_special_tokens: whether texts get the special tokens that the tokenizer adds.
        is_chat: whether the chat template of the tokenizer renders the questions.
        keeps_samples: whether the result has what the model said of each document.
    """

    src: str
    recipe: Recipe | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    shots: int | None = None
    batch: int = 8
    longest: int | None = None
    dtype: str | None = None
    tokenizer: str | None = None
    adds_special_tokens: bool = True
    is_chat: bool = False
    keeps_samples: bool = False


class Figure(NamedTuple):
    """One figure of a task or of a group of tasks.

    Attributes:
        task: its name.
        version: of the task; None if it has none.
        shots: the examples before each question; None if they differ in a group.
        documents: the number of documents.
        metric: such as "acc".
        filter: what was done to the answers first; "none" is usual.
        value: the figure; None if it is no finite number.
        stderr: its standard error; None if there is none.
    """

    task: str
    version: str | None
    shots: int | None
    documents: int | None
    metric: str
    filter: str
    value: float | None
    stderr: float | None


class Figures(NamedTuple):
    """What tasks have given.

    Attributes:
        figures: in the order of lm-eval.
        samples: for each task, what lm-eval keeps of each document; empty unless it was asked for.
    """

    figures: list[Figure]
    samples: dict[str, list[dict[str, Any]]]


def require_lm_eval() -> None:
    """Raise DataError if lm-eval is missing, or older than the adapter needs."""
    try:
        found = version("lm_eval")
    except PackageNotFoundError:
        found = "none"
    numbers = tuple(map(int, re.findall(r"\d+", found)[:3]))
    if numbers < _LEAST_VERSION:
        raise DataError(
            f"tasks need the package lm-eval, {'.'.join(map(str, _LEAST_VERSION))} or newer, and "
            f"{found} is installed; install it with pip install 'composer3d[eval]'"
        )


class TasksSession(NamedTuple):
    """A request whose checkpoint is open.

    Attributes:
        request: the request.
        checkpoint: its checkpoint.
    """

    request: TasksRequest
    checkpoint: Checkpoint

    @property
    def longest(self) -> int:
        """The most tokens of a sequence."""
        return self.request.longest or self.checkpoint.longest or _USUAL_LONGEST

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return dtype_of(self.checkpoint, self.request.dtype)


def open_tasks_session(request: TasksRequest) -> TasksSession:
    """Open the checkpoint of a request.

    Raises:
        CheckpointError: as ``open_checkpoint``.
        DataError: ``longest`` is beyond the longest sequence of the model.
    """
    checkpoint = open_checkpoint(Path(request.src), request.recipe)
    most = checkpoint.longest
    if most is not None and (request.longest or 0) > most:
        raise DataError(
            f"--seq-len {request.longest}: the longest sequence of the model has {most} tokens; "
            "use a smaller number"
        )
    return TasksSession(request, checkpoint)


@contextmanager
def lm_eval_model(
    src: str | Path,
    *,
    batch: int = 8,
    longest: int | None = None,
    dtype: Literal["float32", "bfloat16", "float64"] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    tokenizer: str | None = None,
    adds_special_tokens: bool = True,
    has_chat: bool = False,
) -> Iterator[Any]:
    """Open a checkpoint as a model of lm-eval, in this process alone.

    Args:
        src: a checkpoint of any format that ``convert`` reads.
        batch: the most passages or prompts that are read together.
        longest: the most tokens of a sequence, whose beginning is cut; None: those of the model.
        dtype: of the model; None: that of the checkpoint, or float32 for float16.
        device: of the model.
        tokenizer: "bytes", or the path of a tokenizer.json; None: that of the checkpoint.
        adds_special_tokens: whether texts get the special tokens that the tokenizer adds.
        has_chat: whether to read the chat template, for ``apply_chat_template=True``.

    Yields:
        The model, for ``lm_eval.simple_evaluate(model=...)``: an ``lm_eval.api.model.LM``.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        DataError: lm-eval is missing, or there is no tokenizer that can be used.
        DeviceError: the device cannot be used.
    """
    require_lm_eval()
    request = TasksRequest(
        src=str(src),
        batch=batch,
        longest=longest,
        dtype=dtype,
        tokenizer=tokenizer,
        adds_special_tokens=adds_special_tokens,
        is_chat=has_chat,
    )
    session = open_tasks_session(request)
    with _opened_tokenizer(session) as opened:
        yield _load(session, pick_device(device), opened)


def evaluate_tasks_here(session: TasksSession, device: torch.device) -> Figures:
    """Evaluate the tasks of a request in this process alone.

    Args:
        session: the request.
        device: the device of the model.

    Raises:
        CheckpointError: a tensor cannot be read, or a logit is not finite.
        DataError: lm-eval is missing, or a task or the tokenizer cannot be used.
    """
    require_lm_eval()
    with _opened_tokenizer(session) as tokenizer:
        tasks = load_tasks(session.request.tasks)
        return _evaluate(_load(session, device, tokenizer), tasks, session.request)


def _load(
    session: TasksSession, device: torch.device, tokenizer: PromptTokenizer
) -> "HarnessModel":
    """Load the whole model into this process."""
    generator = load_generator(
        session.checkpoint,
        dtype=session.dtype,
        device=device,
        end_tokens=end_tokens_of(session.checkpoint, tokenizer),
    )
    return _adapt(session, Crew(generator, device=device, batch=session.request.batch), tokenizer)


def evaluate_tasks_on_ranks(
    session: TasksSession, recipe: Recipe, device: torch.device
) -> Figures | None:
    """Evaluate tasks as one rank of tp. Collective over all ranks.

    Only rank 0 has the tasks, their data and the tokenizer.

    Args:
        session: the request.
        recipe: gives the mesh.
        device: the device of this rank.

    Returns:
        The figures on rank 0, and None on the others.

    Raises:
        CheckpointError: as ``evaluate_tasks_here``, on all ranks.
        DataError: as ``evaluate_tasks_here``, on all ranks.
        PlanError: as ``compose_for_generation``.
    """
    tasks: Mapping[str, Any] = {}
    figures: Figures | None = None
    with ExitStack() as stack:
        tokenizer = PromptTokenizer()

        def prepare() -> tuple[int, ...]:
            """Open what rank 0 alone has, and return the tokens that end a text."""
            nonlocal tasks, tokenizer
            require_lm_eval()
            tokenizer = stack.enter_context(_opened_tokenizer(session))
            tasks = load_tasks(session.request.tasks)
            return end_tokens_of(session.checkpoint, tokenizer)

        end_tokens = on_main("--tasks", prepare)
        generator = compose_generator(
            session.checkpoint, recipe, dtype=session.dtype, device=device, end_tokens=end_tokens
        )
        crew = Crew(
            generator,
            device=device,
            batch=session.request.batch,
            has_others=dist.get_world_size() > 1,
        )

        def lead() -> None:
            nonlocal figures
            try:
                model = _adapt(session, crew, tokenizer)
                figures = _evaluate(model, tasks, session.request)
            finally:
                crew.dismiss()

        if dist.get_rank() > 0:
            crew.follow()
        on_main("--tasks", lead)
    return figures


@contextmanager
def _opened_tokenizer(session: TasksSession) -> Iterator[PromptTokenizer]:
    """Open the tokenizer of a request, which adds no special tokens by itself.

    Raises DataError if there is none, or it cannot be used.
    """
    request = session.request
    tokenizer = open_tokenizer(
        session.checkpoint, request.tokenizer, adds_special_tokens=False, has_chat=request.is_chat
    )
    if tokenizer is None:
        raise no_tokenizer(session.checkpoint)
    with closing(tokenizer):
        yield tokenizer


def _adapt(session: TasksSession, crew: Crew, tokenizer: PromptTokenizer) -> "HarnessModel":
    # Imported here because this module imports lm_eval.
    from composer3d.generate.harness import HarnessModel

    return HarnessModel(
        crew,
        tokenizer,
        vocab=session.checkpoint.shape.vocab,
        longest=session.longest,
        adds_special_tokens=session.request.adds_special_tokens,
    )


def load_tasks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Load tasks with their data sets, from the Hub if they are there.

    The Python functions that a task names are imported.

    Args:
        names: as in ``TasksRequest.tasks``.

    Returns:
        As ``lm_eval.tasks.TaskManager.load``.

    Raises:
        DataError: a name is unknown, or a task or its data cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    share_bars_by_threads()
    # lm-eval sets these seeds before it loads tasks, which may draw their documents.
    _set_seeds()
    own = list(filter(_is_file, names))
    for name in own:
        _check_file(name)
    with _reported("--tasks"):
        # The names of all tasks are read from 14,000 files, in about 20 s.
        manager = TaskManager(include_defaults=len(own) < len(names))
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        specs = [name] if _is_file(name) else manager.match_tasks([name])
        if not specs:
            near = difflib.get_close_matches(name, manager.all_tasks, n=_MOST_SUGGESTIONS)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise DataError(
                f"--tasks {one_line(name)}: lm-eval {version('lm_eval')} has no such task{hint}; a "
                "file of your own must end in .yaml"
            )
        for spec in specs:
            with _reported(f"--tasks {one_line(spec)}"):
                found: Any = manager.load([spec])
            for task in found["tasks"]:
                if task in loaded["tasks"]:
                    raise DataError(
                        f"--tasks {one_line(spec)}: {one_line(task)} is named already; name each "
                        "task once"
                    )
            for kind in loaded:
                loaded[kind] |= found[kind]
    for name, task in loaded["tasks"].items():
        _refuse_what_is_not_run(name, task)
    return loaded


def _is_file(name: str) -> bool:
    return name.endswith(_FILE_ENDINGS)


def _check_file(name: str) -> None:
    """Raise DataError if a file cannot be read, or has a group, which lm-eval takes by name."""
    try:
        content = read_plain(name, limit=_FILE_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(f"--tasks {one_line(name)}: cannot be read: {reason or error}") from None
    if _GROUP_KEY.search(content) is not None:
        raise DataError(f"--tasks {one_line(name)}: it is a group; name the files of its tasks")


def _refuse_what_is_not_run(name: str, task: Any) -> None:
    """Raise DataError for a task that would run a model's code, or that asks for images."""
    if getattr(task, "UNSAFE_CODE", False):
        raise DataError(
            f"--tasks {one_line(name)}: it runs code that the model writes, which composer3d does "
            "not; leave it out"
        )
    if getattr(task, "MULTIMODAL", False):
        raise DataError(f"--tasks {one_line(name)}: it shows images or sounds; leave it out")


@contextmanager
def _reported(place: str) -> Iterator[None]:
    """Raise DataError, which begins with ``place``, if lm-eval or a task fails in the body.

    Their errors are of any kind: of YAML, of templates, of data sets, of connections.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise DataError(f"{place}: {reason_in_one_line(error)}") from error


def _set_seeds() -> None:
    """Set the seeds that ``lm_eval.simple_evaluate`` sets by default."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)


def _evaluate(
    model: "HarnessModel", loaded: Mapping[str, Mapping[str, Any]], request: TasksRequest
) -> Figures:
    """Evaluate loaded tasks with the defaults of ``lm_eval.simple_evaluate``.

    That function would also run ``git``, and ``pip`` with the modules of the current folder, to
    describe the machine.
    """
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.evaluator import evaluate

    with _reported("--tasks"):
        for task in loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            # A task whose own number is 0 never takes examples.
            if request.shots is not None and own != 0:
                task.set_config(key="num_fewshot", value=request.shots)
            elif own is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        results: Any = evaluate(
            model,
            loaded,
            limit=request.limit,
            log_samples=request.keeps_samples,
            apply_chat_template=request.is_chat,
            fewshot_as_multiturn=True,
        )
    return Figures(_figures_of(results), results.get("samples", {}))


def _figures_of(results: Mapping[str, Any]) -> list[Figure]:
    figures = []
    for task, values in results["results"].items():
        documents = results["n-samples"].get(task, {}).get("effective")
        task_version = results["versions"].get(task)
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            figures.append(
                Figure(
                    task=task,
                    version=None if task_version is None else str(task_version),
                    shots=results["n-shot"].get(task),
                    documents=documents,
                    metric=metric,
                    filter=chosen,
                    value=_finite(value),
                    stderr=_finite(values.get(f"{metric}_stderr,{chosen}")),
                )
            )
    return figures


def _finite(value: Any) -> float | None:
    """Return a figure as a float; None if it is none, as lm-eval's "N/A"."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
