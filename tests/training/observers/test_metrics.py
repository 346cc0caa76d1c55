"""The metrics of a run: what is logged when, and files that are damaged, odd or full."""

import json
import logging
import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from composer3d.facts import events as run_events
from composer3d.facts.errors import UserError
from composer3d.models.registry import architecture
from composer3d.recipe.schema import MetricsTable
from composer3d.reliability.report import Report
from composer3d.runtime import log
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.training.observers.metrics import FILE, Metrics, count_flops
from tests.planner.setups import recipe_of
from tests.training.jobs import is_imported

QUIET = MetricsTable(every=1, tensorboard=False)


def _metrics(run_dir: Path, table: MetricsTable = QUIET, **changes: Any) -> Metrics:
    if changes.get("main", True):
        run_dir.mkdir(exist_ok=True, parents=True)
    plain = {
        "total_steps": 10,
        "tokens_per_step": 1000,
        "world_size": 4,
        "flops_per_token": lambda _: 2e6,
        "peak_flops": None,
        "device_type": "cpu",
        "main": True,
        "start_step": 0,
    }
    return Metrics(run_dir, table, **{**plain, **changes})


def _run(metrics: Metrics, steps: range) -> None:
    for step in steps:
        metrics.log_step(step, loss=10.0 / step, grad_norm=0.5, lr=1e-3)
    metrics.close()


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / FILE).read_text().splitlines()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_first_every_and_last_step_are_logged_with_exact_numbers(tmp_path: Path) -> None:
    _run(_metrics(tmp_path, MetricsTable(every=4, tensorboard=False)), range(1, 11))
    assert [line["step"] for line in _lines(tmp_path)] == [1, 4, 8, 10]
    assert [line["loss"] for line in _lines(tmp_path)] == [10.0 / step for step in (1, 4, 8, 10)]


def test_throughput_leaves_out_validation_and_checkpoints(
    tmp_path: Path, clock: list[float]
) -> None:
    metrics = _metrics(
        tmp_path, MetricsTable(every=2, tensorboard=False), peak_flops=1e12, start_step=3
    )
    clock[0] += 5.0
    metrics.log_step(4, loss=1.0, grad_norm=1.0, lr=1.0)
    with metrics.phase("checkpoint"):
        clock[0] += 7.0
    for step in (5, 6):
        with metrics.phase("data"):
            clock[0] += 0.5
        clock[0] += 1.5
        if step == 5:
            with metrics.phase("validation"):
                clock[0] += 11.0
        metrics.log_step(step, loss=1.0, grad_norm=1.0, lr=1.0)
    with metrics.phase("checkpoint"):
        clock[0] += 3.0
    metrics.close()
    first, second, tail = _lines(tmp_path)
    assert (first["step"], first["tokens_per_s"], first["step_s"]) == (4, 200.0, 5.0)
    assert (second["tokens_per_s"], second["tokens_per_s_per_rank"]) == (500.0, 125.0)
    assert (second["step_s"], second["data_s"]) == (2.0, 0.5)
    assert (second["validation_s"], second["checkpoint_s"]) == (11.0, 7.0)
    assert second["tflops_per_rank"] == pytest.approx(125.0 * 2e6 / 1e12)
    assert second["mfu"] == pytest.approx(125.0 * 2e6 / 1e12)
    assert tail == {"step": 6, "checkpoint_s": 3.0}


def test_the_start_of_a_run_is_no_time_of_its_first_step(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("", main=True)
    metrics = _metrics(tmp_path, total_steps=61)
    clock[0] += 8.0  # other observers and the validation are made
    with metrics.training():
        clock[0] += 4.0
        with metrics.step(1):
            clock[0] += 1.0
        metrics.log_step(1, loss=1.0, grad_norm=1.0, lr=1.0)
    assert _lines(tmp_path)[0]["step_s"] == 1.0
    assert capsys.readouterr().err.endswith("left 60 s\n")


def test_comparisons_of_replicas_are_no_time_of_a_step(tmp_path: Path, clock: list[float]) -> None:
    table = MetricsTable(every=9, tensorboard=False)
    metrics = _metrics(tmp_path, table, total_steps=12, start_step=1)
    for step in range(2, 13):
        clock[0] += 0.25
        metrics.log_step(step, loss=1.0, grad_norm=1.0, lr=1.0)
        if step % 3 == 0:
            with metrics.phase("replicas"):
                clock[0] += 4.0
    metrics.close()
    *lines, tail = _lines(tmp_path)
    assert [line["step"] for line in lines] == [2, 9, 12]
    assert [line["step_s"] for line in lines] == [0.25] * 3
    assert [line["tokens_per_s"] for line in lines] == [4000.0] * 3
    assert [line["replicas_s"] for line in lines] == [0.0, 8.0, 4.0]
    assert tail == {"step": 12, "replicas_s": 4.0}


def test_attention_is_counted_within_each_document(tmp_path: Path) -> None:
    """Rows of 12 tokens, whose documents have numbers from 0."""
    recipe = recipe_of("debug-1-single", "data.seq_len=12", "model.window=3", "model.full_every=2")
    rows = [[12], [5, 7], [1, 2, 3, 4, 2]]
    documents_BT = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    )
    lengths = [length for row in rows for length in row]
    count = partial(architecture("llama").count_flops, recipe.model)
    expected = sum(map(mul, lengths, map(count, lengths))) / 36
    assert expected < count(12)
    flops_per_token = count_flops(recipe)
    assert flops_per_token(None) == count(12)
    assert flops_per_token(documents_BT) == pytest.approx(expected)

    metrics = _metrics(tmp_path, flops_per_token=flops_per_token, peak_flops=1e12)
    metrics.log_step(1, loss=1.0, grad_norm=1.0, lr=1.0, documents_BT=documents_BT)
    metrics.close()
    (line,) = _lines(tmp_path)
    assert line["tflops_per_rank"] == pytest.approx(line["tokens_per_s_per_rank"] * expected / 1e12)
    assert line["mfu"] == line["tflops_per_rank"]


def test_flops_of_a_frozen_model_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("", main=True)
    frozen = recipe_of("debug-1-single", "optim.train=['last.*']")
    assert count_flops(recipe_of("debug-1-single", "optim.train=['*']"))(None) is not None
    metrics = _metrics(tmp_path, flops_per_token=count_flops(frozen), peak_flops=1e12)
    metrics.log_step(1, loss=1.0, grad_norm=1.0, lr=1.0)
    metrics.close()
    (line,) = _lines(tmp_path)
    assert line["mfu"] is line["tflops_per_rank"] is None
    printed = capsys.readouterr().err
    assert re.search(r" tok/s  \d+\.\d GiB ", printed)
    assert "FLOP" not in printed
    assert "mfu" not in printed


def test_steps_that_are_left_out_are_neither_timed_nor_counted(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("", main=True)
    table = MetricsTable(every=10, tensorboard=False)
    metrics = _metrics(tmp_path, table, start_step=400, total_steps=1060)
    # The run resumes at step 400, and leaves out steps 401 to 450, 454 and 455.
    for step in [*range(451, 454), *range(456, 461)]:
        if step in (451, 456):
            clock[0] += 20.0
            with metrics.phase("checkpoint"):
                clock[0] += 7.0
            clock[0] += 30.0
        with metrics.step(step):
            clock[0] += 3.0
        metrics.log_step(step, loss=1.0, grad_norm=1.0, lr=1.0)
    (line,) = _lines(tmp_path)
    assert (line["step"], line["step_s"], line["checkpoint_s"]) == (460, 3.0, 14.0)
    assert line["tokens_per_s"] == pytest.approx(1000 / 3)
    # Saves do count here: 7 s of them in 7 steps of 3 s.
    assert capsys.readouterr().err.endswith("left 40 min\n")


def test_console_says_progress_speed_and_time_left(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("", main=True)
    metrics = _metrics(tmp_path, total_steps=1000, tokens_per_step=82_400)
    known = _metrics(tmp_path / "known", total_steps=1000, peak_flops=4e7)
    clock[0] += 60.0  # the first step warms up and must not count in the time left
    metrics.log_step(1, loss=2.34117, grad_norm=0.8149, lr=2.94e-4)
    clock[0] += 2.0
    metrics.log_step(2, loss=2.34117, grad_norm=0.8149, lr=2.94e-4)
    metrics.end_validation(2, 2.5)
    known.log_step(1, loss=1.0, grad_norm=1.0, lr=1.0)
    first, second, validation, with_mfu = capsys.readouterr().err.splitlines()
    assert first.startswith("step    1/1000  loss 2.3412  norm 0.81  lr 2.9e-04  1,373 tok/s  ")
    assert second.startswith(
        "step    2/1000  loss 2.3412  norm 0.81  lr 2.9e-04  41,200 tok/s  0.0206 TFLOP/s  "
    )
    assert re.search(r"  \d+\.\d GiB  left 33 min$", second)
    assert validation == "step    2/1000  validation loss 2.5000"
    # 1,000 tokens of 2e6 FLOPs in 62 s, on 4 ranks of 4e7 FLOP/s
    assert "  mfu 20.2%  " in with_mfu
    assert "FLOP" not in with_mfu


def test_a_console_line_fits_100_columns(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("", main=True)
    metrics = _metrics(
        tmp_path, total_steps=50_000, start_step=11_998, tokens_per_step=464_984, peak_flops=4e14
    )
    for step in (11_999, 12_000):
        clock[0] += 1.0
        metrics.log_step(step, loss=2.34117, grad_norm=0.8149, lr=2.94e-4)
    *_, line = capsys.readouterr().err.splitlines()
    assert "464,984 tok/s" in line
    assert len(line) <= 100


def test_resume_drops_later_lines(tmp_path: Path) -> None:
    first = _metrics(tmp_path)
    first.end_validation(0, 5.0)
    _run(first, range(1, 8))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 8, "lo')  # a killed process
    _run(_metrics(tmp_path, start_step=5), range(6, 11))
    assert [line["step"] for line in _lines(tmp_path)] == list(range(11))
    _run(_metrics(tmp_path), range(1, 3))
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    metrics = _metrics(tmp_path / "run", MetricsTable(), main=False)
    with metrics.phase("data"):
        pass
    metrics.end_validation(1, 1.0)
    _run(metrics, range(1, 3))
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    metrics = _metrics(tmp_path)
    metrics.log_step(1, loss=float("nan"), grad_norm=float("inf"), lr=1.0)
    assert (_lines(tmp_path)[0]["loss"], _lines(tmp_path)[0]["grad_norm"]) == (None, None)


def test_a_report_goes_to_the_console_the_file_and_tensorboard(
    tmp_path: Path, warnings: list[str]
) -> None:
    metrics = _metrics(tmp_path, MetricsTable(every=1))
    values = {"straggler_rank": 3, "straggler_factor": 1.5, "corrupt_rank": 2}
    metrics.report(7, Report(["a slow rank", "another"], values))
    metrics.report(8, Report(["it is fast again"]))
    _metrics(tmp_path / "other", MetricsTable(), main=False).report(7, Report(["mine"], values))
    metrics.close()
    assert warnings == [
        "step 7: a slow rank",
        "step 7: another",
        "step 8: it is fast again",
    ]
    assert _lines(tmp_path) == [{"step": 7, **values}]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name in values:
        (event,) = events.Scalars(f"ranks/{name}")
        assert (event.step, event.value) == (7, values[name])
    texts = events.Tensors("ranks/text_summary")
    shown = [event.tensor_proto.string_val[0].decode() for event in texts]
    assert shown == ["a slow rank  \nanother", "it is fast again"]
    found = [event for event in run_events.read(tmp_path) if event is not None]
    assert [(event.step, event.kind, event.text) for event in found] == [
        (7, "ranks", "a slow rank"),
        (7, "ranks", "another"),
        (8, "ranks", "it is fast again"),
    ]
    assert abs(found[0].unix_s - time.time()) < 60


def test_events_are_not_written_through_a_link_nor_into_a_lost_folder(
    tmp_path: Path, warnings: list[str]
) -> None:
    lost = _metrics(tmp_path / "lost", may_write=lambda: False)
    lost.event(1, "save", "checkpoint of step 1")
    assert not (tmp_path / "lost" / run_events.FILE).exists()

    victim = tmp_path / "victim"
    victim.write_text("mine")
    metrics = _metrics(tmp_path / "run")
    (tmp_path / "run" / run_events.FILE).symlink_to(victim)
    metrics.event(1, "save", "checkpoint of step 1")
    assert victim.read_text() == "mine"
    assert len(warnings) == 1
    assert f"{run_events.FILE} cannot be written: is a symbolic link" in warnings[0]


def test_tensorboard_has_a_tag_for_each_metric(tmp_path: Path) -> None:
    metrics = _metrics(tmp_path, MetricsTable(every=1), total_steps=1)
    metrics.log_step(
        1, loss=1.0, grad_norm=1.0, lr=1.0, extra=lambda: {"cp_balance": 1.5, "moe_balance": 2.5}
    )
    metrics.end_validation(1, 2.0)
    metrics.close()
    assert _lines(tmp_path)[0]["moe_balance"] == 2.5
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags == {
        "loss/train",
        "loss/validation",
        "optim/lr",
        "optim/grad_norm",
        "speed/tokens_per_s",
        "speed/tokens_per_s_per_rank",
        "speed/tflops_per_rank",
        "speed/cp_balance",
        "time/step_s",
        "time/data_s",
        "time/validation_s",
        "time/checkpoint_s",
        "time/replicas_s",
        "memory/peak_gib",
        "other/moe_balance",  # it has no tag of its own
    }  # and no MFU, because the peak is not known
    assert [event.value for event in events.Scalars("other/moe_balance")] == [2.5]
    assert [event.value for event in events.Scalars("speed/cp_balance")] == [1.5]
    assert [event.value for event in events.Scalars("loss/validation")] == [2.0]


def test_memory_is_the_resident_peak_on_cpu(tmp_path: Path) -> None:
    _run(_metrics(tmp_path), range(1, 2))
    # torch alone takes a tenth of a GiB; a wrong unit would be off by 1024.
    assert 0.05 < _lines(tmp_path)[0]["memory_gib"] < 64


def metrics_of_gpus(folder: Path, peaks: list[tuple[int, int, int]]) -> None:
    """A task: log 5 steps of ranks on GPUs in name only, with these bytes and retries by rank."""
    rank = int(os.environ["RANK"])
    allocated, reserved, retries = peaks[rank]
    torch.cuda.max_memory_allocated = lambda *_: allocated
    torch.cuda.max_memory_reserved = lambda *_: reserved
    torch.cuda.memory_stats = lambda *_: {"num_alloc_retries": retries}
    with pool_world():
        table = MetricsTable(every=2, tensorboard=False)
        main = rank == 0
        _run(_metrics(folder, table, device_type="cuda", main=main, total_steps=5), range(1, 6))


def test_memory_on_gpus_is_that_of_the_rank_with_most(pool: Pool, tmp_path: Path) -> None:
    peaks = [(3 << 30, 4 << 30, 0), (2 << 30, 9 << 29, 7), (1 << 30, 1 << 30, 2)]
    pool.run(metrics_of_gpus, {"folder": tmp_path, "peaks": peaks}, world_size=3)
    lines = _lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 4, 5]
    for line in lines:
        assert line["memory_gib"] == 3.0
        assert line["memory_reserved_gib"] == 4.5
        assert line["memory_retries"] == 7


def test_tensorboard_is_not_imported_until_it_is_needed(pool: Pool) -> None:
    # The task is of a module that imports the loop of the training, and all that it needs.
    assert pool.run(is_imported, {"name": "tensorboard"}, world_size=1) == [False]


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """A full disk: no file of this process grows beyond ``size`` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


LARGE = 2 << 20  # bytes; all other files of this process are smaller


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(log.get(), "warning", lines.append)
    return lines


@pytest.mark.parametrize("room", [1, 10])
@pytest.mark.parametrize("torn", [b"", b'{"step": 3, "lo'])
def test_a_run_goes_on_after_a_full_disk(
    tmp_path: Path, warnings: list[str], room: int, torn: bytes
) -> None:
    table = MetricsTable(every=1, tensorboard=True)
    metrics = _metrics(tmp_path, table)
    text_log = log._RunFile("")
    text_log.open(tmp_path / log.FILE, lambda: True)

    def step(number: int) -> None:
        metrics.log_step(number, loss=1.0, grad_norm=1.0, lr=1.0)
        metrics.event(number, "save", "a checkpoint")
        text_log.handle(logging.makeLogRecord({"msg": f"step {number}", "levelno": 20}))

    step(1)
    with files_end_at(room):  # beyond the size of all files, or a few bytes into a new one
        for number in (2, 3):
            step(number)
    with (tmp_path / FILE).open("ab") as file:
        file.write(torn)
    step(4)
    metrics.close()

    # What was lost is said once, and how much.
    files = [tmp_path / FILE, f"TensorBoard's files in {tmp_path}"]
    files += [tmp_path / run_events.FILE, tmp_path / log.FILE]
    for file in files:
        begin, end = (text for text in warnings if text.startswith(f"{file} "))
        assert "cannot be written: File too large; " in begin
        lost = re.fullmatch(r".* can be written again; .*: (\d+)", end)
        assert lost is not None
        assert int(lost[1]) == 2 or "TensorBoard" in end
    assert len(warnings) == 2 * len(files)

    # Each line is whole, whatever stands before it.
    lines = (tmp_path / FILE).read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines if line != torn] == [1, 4]
    found = [event.step for event in run_events.read(tmp_path) if event is not None]
    assert found == [1, 4]
    steps = [line.split()[-1] for line in (tmp_path / log.FILE).read_text().splitlines()]
    assert steps == ["1", "4"]
    shown = EventMultiplexer()
    shown.AddRunsFromDirectory(str(tmp_path))
    shown.Reload()
    assert [event.step for event in shown.Scalars(".", "loss/train")] == [1, 4]

    # A line that was cut off meanwhile is no reason to put the file aside.
    _metrics(tmp_path, table, start_step=4).close()
    assert [line["step"] for line in _lines(tmp_path)] == [1, 4]
    assert len(warnings) == 2 * len(files)


def test_a_full_disk_at_the_start_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    line = b'{"step": 1, "loss": 1.0}\n'
    (tmp_path / FILE).write_bytes(line * (LARGE // len(line) + 100))
    before = (tmp_path / FILE).read_bytes()
    with files_end_at(LARGE), pytest.raises(OSError, match="File too large"):
        _metrics(tmp_path, start_step=5)
    assert (tmp_path / FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


GOOD = b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'


@pytest.mark.parametrize(
    "odd",
    [
        b"\x00\xff\xfe binary junk",
        b"[1, 2, 3]\n",
        b'{"step": "3"}\n',
        b'{"step": true}\n',
        b'{"step": -3}\n',
        b'{"step": 3.0}\n',
        b'{"step": 2, "loss": NaN}\n',
        b'{"loss": 1.0}\n',
        b"[" * 100_000 + b"\n",
        b'{"step": ' + b"9" * 10_000 + b"}\n",
        b'{"step": 1, "lo{"step": 2}\n',
        b"0" * 300_000,
        b"\0" * 4096,
        '{"step": 2, "é": 1}\n'.encode("latin-1"),
    ],
    ids=lambda odd: ascii(odd[:20]),
)
@pytest.mark.parametrize("start_step", [0, 2])
def test_an_odd_file_is_kept_beside(
    tmp_path: Path, warnings: list[str], odd: bytes, start_step: int
) -> None:
    (tmp_path / f"{FILE}.1").write_text("another one")
    (tmp_path / FILE).write_bytes(GOOD + odd)
    _metrics(tmp_path, start_step=start_step).close()
    assert (tmp_path / FILE).read_bytes() == (GOOD if start_step else b"")
    assert (tmp_path / f"{FILE}.2").read_bytes() == GOOD + odd
    assert (tmp_path / f"{FILE}.1").read_text() == "another one"
    assert warnings == [
        f"{tmp_path / FILE} has lines that are not metrics: it is kept as {tmp_path / FILE}.2"
    ]


@pytest.mark.parametrize("cut", [b"", b"\n", b"{", b'{"st', b'{"step": 3, "loss": 1'], ids=ascii)
def test_a_line_cut_off_by_a_kill_is_not_odd(
    tmp_path: Path, warnings: list[str], cut: bytes
) -> None:
    (tmp_path / FILE).write_bytes(GOOD + cut)
    _metrics(tmp_path, start_step=2).close()
    assert (tmp_path / FILE).read_bytes() == GOOD
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert warnings == []


def test_gigabytes_are_kept_and_not_read(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / FILE).touch()
    os.truncate(tmp_path / FILE, 200 << 30)
    begin = time.monotonic()
    _metrics(tmp_path, start_step=2).close()
    assert time.monotonic() - begin < 2
    assert (tmp_path / FILE).stat().st_size == 0
    assert (tmp_path / f"{FILE}.1").stat().st_size == 200 << 30
    assert "is larger than 1,073,741,824 bytes: it is kept as" in warnings[0]


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "dangling link"])
def test_a_file_that_is_not_plain_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    run_dir.mkdir()
    other.write_bytes(GOOD)
    make: dict[str, Callable[[Path], object]] = {
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "link": lambda path: path.symlink_to(other),
        "dangling link": lambda path: path.symlink_to(tmp_path / "nothing"),
    }
    make[kind](run_dir / FILE)
    with pytest.raises(UserError, match="the run writes its metrics there: move it away") as caught:
        _metrics(run_dir, start_step=1)
    assert len(caught.value.lines) == 1
    assert other.read_bytes() == GOOD
    assert not (tmp_path / "nothing").exists()


def test_a_link_placed_during_a_run_is_not_followed(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "other").touch()
    metrics = _metrics(tmp_path)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).symlink_to(tmp_path / "other")
    metrics.log_step(1, loss=1.0, grad_norm=1.0, lr=1.0)
    assert (tmp_path / "other").read_bytes() == b""
    assert "is a symbolic link, which is not followed here" in warnings[0]


def test_tensorboard_shows_a_run_by_its_name(tmp_path: Path) -> None:
    table = MetricsTable(every=1)
    _run(_metrics(tmp_path / "first", table), range(1, 4))
    _run(_metrics(tmp_path / "second", table), range(1, 4))
    shown = EventMultiplexer()
    shown.AddRunsFromDirectory(str(tmp_path))
    shown.Reload()
    # Curves by tokens have a folder of their own.
    names = {"first", "second"}
    assert set(shown.Runs()) == names | {f"{name}/by_tokens" for name in names}
    assert [event.step for event in shown.Scalars("first", "loss/train")] == [1, 2, 3]


def test_event_files_of_an_earlier_version_go_on_in_one_run(tmp_path: Path) -> None:
    table, old = MetricsTable(every=1), tmp_path / "run" / "tensorboard"
    _run(_metrics(old, table), range(1, 8))
    (old / FILE).unlink()
    shutil.rmtree(old / "by_tokens")  # that version had no curves by tokens
    _run(_metrics(tmp_path / "run", table, start_step=5), range(6, 11))
    assert not old.exists()
    shown = EventMultiplexer()
    shown.AddRunsFromDirectory(str(tmp_path))
    shown.Reload()
    assert set(shown.Runs()) == {"run", "run/by_tokens"}
    assert [event.step for event in shown.Scalars("run", "loss/train")] == list(range(1, 11))


@pytest.mark.parametrize(
    "kind", ["link to a folder", "a user's file in it", "link in it", "plain file"]
)
def test_nothing_else_in_an_old_folder_is_moved(tmp_path: Path, kind: str) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    run_dir.mkdir()
    other.mkdir()
    (other / "events.out.tfevents.1").write_text("of someone else")
    old = run_dir / "tensorboard"
    if kind == "link to a folder":
        old.symlink_to(other)
    elif kind == "plain file":
        old.touch()
    else:
        old.mkdir()
        (old / "events.out.tfevents.2").symlink_to(other / "events.out.tfevents.1")
        (old / "notes").touch()
    before = sorted(run_dir.rglob("*"))
    _metrics(run_dir, MetricsTable()).close()
    assert set(before) <= set(run_dir.rglob("*"))
    assert (other / "events.out.tfevents.1").read_text() == "of someone else"
