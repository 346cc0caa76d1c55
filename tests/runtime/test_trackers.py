"""Metrics for other services: a process of its own sends or serves them, whatever happens."""

import json
import logging
import math
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
import torch

from composer3d.recipe.schema import MeshTable, MetricsTable, ReliabilityTable
from composer3d.reliability.report import Report
from composer3d.runtime import log, trackers
from composer3d.training.observers import metrics as metrics_module
from composer3d.training.observers import stragglers
from composer3d.training.observers.metrics import Metrics
from composer3d.training.observers.stragglers import StragglerWatch
from tests.runtime.test_environment import free_port

TOKENS = 1000

# Stands in for the library, as it is slow to start: it writes its calls as lines of JSON.
FAKE_WANDB = """
import json, os, time
from pathlib import Path

CALLS = Path(os.environ["FAKE_CALLS"])
BEHAVIOUR = os.environ.get("FAKE_BEHAVIOUR", "works")


def Settings(**settings):
    return settings


def init(**arguments):
    if BEHAVIOUR == "refuses":
        raise RuntimeError("no network")
    _write("init", {key: arguments[key] for key in ("id", "name", "project", "config")})
    return Run()


def teardown():
    pass


def _write(kind, value):
    with CALLS.open("a") as file:
        file.write(json.dumps([kind, value]) + chr(10))


class Run:
    def define_metric(self, *names, **settings):
        pass

    def log(self, values):
        if BEHAVIOUR == "hangs":
            time.sleep(1000)
        if BEHAVIOUR == "breaks" and values["step"] == 3:
            raise OSError("the service is gone")
        _write("log", values)

    def finish(self, exit_code):
        _write("finish", exit_code)
"""


class FakeService:
    """What the fake library was asked."""

    def __init__(self, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls = calls
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("FAKE_CALLS", str(calls))

    def behave(self, behaviour: str) -> None:
        self._monkeypatch.setenv("FAKE_BEHAVIOUR", behaviour)

    def calls(self, kind: str) -> list[Any]:
        if not self._calls.exists():
            return []
        lines = [json.loads(line) for line in self._calls.read_text().splitlines()]
        return [value for name, value in lines if name == kind]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeService:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(trackers, "END_S", 5.0)
    return FakeService(tmp_path / "calls", monkeypatch)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    logger = logging.getLogger("test_trackers")
    monkeypatch.setattr(logger, "warning", found.append)
    monkeypatch.setattr(log, "get", lambda: logger)
    return found


def _metrics(
    tmp_path: Path, *, start_step: int = 0, service: str = "wandb", value: bool | int = True
) -> Metrics:
    run_dir = tmp_path / "runs" / "small"
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.toml").write_text(
        '[run]\nsteps = 9\n[optim]\nlr = 0.1\ntrain = ["a", "b"]\n'
        + (f"[metrics]\n{service} = {value}\n" if value is not True else "")
    )
    options: dict[str, Any] = {service: value}
    table = MetricsTable(every=1, tensorboard=False, **options)
    return Metrics(
        run_dir,
        table,
        total_steps=9,
        tokens_per_step=TOKENS,
        world_size=1,
        flops_per_token=lambda _: 1.0,
        peak_flops=None,
        device_type="cpu",
        main=True,
        start_step=start_step,
    )


def _train(metrics: Metrics, steps: range) -> None:
    for step in steps:
        metrics.log_step(step, loss=10.0 / step, grad_norm=float("nan"), lr=1e-3)
        if step == 2:
            metrics.end_validation(step, 7.0)
    metrics.close()


def test_a_service_gets_the_recipe_and_each_line_with_its_tokens(
    tmp_path: Path, service: FakeService, warnings: list[str]
) -> None:
    _train(_metrics(tmp_path), range(1, 4))
    (begun,) = service.calls("init")
    assert (begun["name"], begun["project"]) == ("small", "composer3d")
    assert begun["config"] == {"run.steps": 9, "optim.lr": 0.1, "optim.train": ["a", "b"]}
    lines = service.calls("log")
    assert [line["loss/train"] for line in lines if "loss/train" in line] == [10.0, 5.0, 10 / 3]
    assert [line["step"] for line in lines] == [1, 2, 2, 3]
    assert all(line["tokens"] == line["step"] * TOKENS for line in lines)
    assert lines[2]["loss/validation"] == 7.0
    # What is not finite has no point.
    assert not any("optim/grad_norm" in line for line in lines)
    assert service.calls("finish") == [0]
    assert warnings == []


def test_a_resume_goes_on_with_the_same_run_and_a_new_start_with_a_new_one(
    tmp_path: Path, service: FakeService
) -> None:
    _train(_metrics(tmp_path), range(1, 5))
    _train(_metrics(tmp_path, start_step=3), range(4, 6))
    _train(_metrics(tmp_path), range(1, 2))
    first, resumed, anew = (begun["id"] for begun in service.calls("init"))
    assert first == resumed != anew
    steps = [line["step"] for line in service.calls("log") if "loss/train" in line]
    # Step 4 was done twice.
    assert steps == [1, 2, 3, 4, 4, 5, 1]


def test_a_service_that_fails_is_said_once_and_gets_the_rest_later(
    tmp_path: Path, service: FakeService, warnings: list[str]
) -> None:
    service.behave("breaks")
    metrics = _metrics(tmp_path)
    for step in range(1, 4):
        metrics.log_step(step, loss=1.0, grad_norm=1.0, lr=1e-3)
    _wait_until(lambda: metrics._trackers[0].problem() is not None)
    _train(metrics, range(4, 7))
    (warning,) = warnings
    assert "metrics.wandb: OSError: the service is gone" in warning
    assert (tmp_path / "runs/small/metrics.jsonl").read_text().count("\n") == 6

    service.behave("works")
    _train(_metrics(tmp_path, start_step=6), range(7, 8))
    assert sorted({line["step"] for line in service.calls("log")}) == [1, 2, 3, 4, 5, 6, 7]
    assert len({begun["id"] for begun in service.calls("init")}) == 1


def test_a_service_that_cannot_start_costs_the_training_nothing(
    tmp_path: Path, service: FakeService, warnings: list[str]
) -> None:
    service.behave("refuses")
    _train(_metrics(tmp_path), range(1, 4))
    (warning,) = warnings
    assert "RuntimeError: no network" in warning


def test_a_service_that_hangs_neither_slows_steps_nor_the_end(
    tmp_path: Path, service: FakeService, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.behave("hangs")
    monkeypatch.setattr(trackers, "END_S", 0.5)
    metrics = _metrics(tmp_path)
    metrics.log_step(1, loss=1.0, grad_norm=1.0, lr=1e-3)
    _wait_until(lambda: bool(service.calls("init")))
    begin_s = time.perf_counter()
    for step in range(2, 9):
        metrics.log_step(step, loss=1.0, grad_norm=1.0, lr=1e-3)
    assert time.perf_counter() - begin_s < 10  # the service hangs for ever
    begin_s = time.perf_counter()
    metrics.close()
    assert time.perf_counter() - begin_s < 30
    (warning,) = warnings
    assert "did not take the last points within 0 s" in warning


def test_a_process_that_is_killed_is_not_said_to_be_late(
    tmp_path: Path, service: FakeService, warnings: list[str]
) -> None:
    metrics = _metrics(tmp_path)
    metrics.log_step(1, loss=1.0, grad_norm=1.0, lr=1e-3)
    (tracker,) = metrics._trackers
    _wait_until(lambda: bool(service.calls("log")))
    with tracker._log_path.open("a") as file:
        file.write("what the library says\n")
    tracker._process.kill()
    _wait_until(lambda: tracker.problem() is not None)
    _train(metrics, range(2, 3))
    (warning,) = warnings
    assert "metrics.wandb: its process was ended by signal 9 (SIGKILL" in warning


def test_the_points_of_a_killed_training_arrive(tmp_path: Path, service: FakeService) -> None:
    metrics = _metrics(tmp_path)
    metrics.log_step(1, loss=1.0, grad_norm=1.0, lr=1e-3)
    process = metrics._trackers[0]._process
    assert process.stdin is not None
    # As the kernel does when rank 0 is killed.
    process.stdin.close()
    assert process.wait(20) == 0
    assert [line["step"] for line in service.calls("log")] == [1]
    assert service.calls("finish") == [1]


def test_a_state_that_is_none_begins_a_new_run(tmp_path: Path, service: FakeService) -> None:
    _train(_metrics(tmp_path), range(1, 3))
    state = tmp_path / "runs/small/wandb/run.json"
    assert json.loads(state.read_text())["id"] == service.calls("init")[0]["id"]
    for text in ('{"id": "../x", "sent_bytes": 0}', '{"id": "a", "sent_bytes": true}', "[1]", "{"):
        state.write_text(text)
        assert trackers._read_state(state.parent) == (None, 0)


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed", exc_type=ImportError)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    _train(_metrics(tmp_path), range(1, 4))
    _train(_metrics(tmp_path, start_step=3), range(4, 6))
    folder = tmp_path / "runs/small/wandb"
    run_id = json.loads((folder / "run.json").read_text())["id"]
    starts = sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    contents = [path.read_bytes() for path in starts]
    assert len(contents) == 2
    assert all(b"loss/train" in content for content in contents)
    assert b"loss/validation" in contents[0]
    assert b"optim.lr" in contents[0]


# MLflow's own use of SQLAlchemy warns.
@pytest.mark.filterwarnings("ignore")
def test_mlflow_in_a_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(trackers, "END_S", 60.0)
    _train(_metrics(tmp_path, service="mlflow"), range(1, 4))
    metrics = _metrics(tmp_path, service="mlflow", start_step=3)
    recipe = tmp_path / "runs/small/recipe.toml"
    recipe.write_text(recipe.read_text().replace("0.1", "0.2"))
    _train(metrics, range(4, 6))

    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("composer3d")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.data.params["optim.lr"] == "0.1"
    points = client.get_metric_history(run.info.run_id, "loss/train")
    assert [(point.step, point.value) for point in points] == [(n, 10.0 / n) for n in range(1, 6)]
    tokens = client.get_metric_history(run.info.run_id, "tokens")
    assert {(point.step, point.value) for point in tokens} == {(n, n * TOKENS) for n in range(1, 6)}


def _served(port: int) -> dict[str, float]:
    """Return what Prometheus would read now."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            samples = [sample for family in families for sample in family.samples]
    except OSError:  # it has not begun yet
        return {}
    assert all(sample.labels == {"run": "small"} for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_prometheus_knows_the_slow_ranks_of_this_start(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "prometheus_client is not installed"
    pytest.importorskip("prometheus_client", reason=reason, exc_type=ImportError)
    monkeypatch.setattr(metrics_module, "_TRACKER_RETRY_S", 0.0)
    port = int(free_port())
    slow = Report([], {"straggler_rank": 3.0, "straggler_factor": 2.0})
    metrics = _metrics(tmp_path, service="prometheus", value=port)
    metrics.log_step(1, loss=9.0, grad_norm=1.0, lr=1e-3)
    metrics.report(1, slow)
    _wait_until(lambda: "composer3d_ranks_straggler_rank" in _served(port))

    # A rank is named once: a second process has no other line to know it from.
    (tracker,) = metrics._trackers
    tracker._process.kill()
    _wait_until(lambda: tracker.problem() is not None)
    metrics.log_step(2, loss=8.0, grad_norm=1.0, lr=1e-3)
    _wait_until(lambda: _served(port).get("composer3d_step") == 2)
    assert _served(port)["composer3d_ranks_straggler_rank"] == 3
    metrics.close()

    # The ranks of the next start are other processes, perhaps on other machines.
    (tmp_path / "runs/small/prometheus/run.json").unlink()
    metrics = _metrics(tmp_path, service="prometheus", value=port, start_step=2)
    metrics.log_step(3, loss=7.0, grad_norm=1.0, lr=1e-3)
    _wait_until(lambda: _served(port).get("composer3d_step") == 3)
    assert not any("_ranks_" in name for name in _served(port))
    metrics.close()


def test_prometheus_reads_the_last_values(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "prometheus_client is not installed"
    pytest.importorskip("prometheus_client", reason=reason, exc_type=ImportError)
    monkeypatch.setattr(trackers, "END_S", 60.0)
    port = int(free_port())
    metrics = _metrics(tmp_path, service="prometheus", value=port)
    metrics.log_step(1, loss=9.0, grad_norm=float("nan"), lr=1e-3)
    metrics.log_step(2, loss=3.5, grad_norm=float("nan"), lr=1e-3)

    served = partial(_served, port)
    _wait_until(lambda: served().get("composer3d_step") == 2)
    values = served()
    assert values["composer3d_loss_train"] == 3.5
    assert values["composer3d_tokens"] == 2 * TOKENS
    assert abs(values["composer3d_last_point_timestamp_seconds"] - time.time()) < 60
    assert math.isnan(values["composer3d_optim_grad_norm"])

    def judge(own_s: list[float]) -> None:
        """As at the end of a window, in which each rank had this time of its own in a step."""
        messages = [stragglers._MESSAGE.pack(seconds, b"host") for seconds in own_s]
        report = watch._judge_window(messages)
        if report is not None:
            metrics.report(next(steps), report)

    def gauges_after_a_step() -> dict[str, float]:
        step = next(steps)
        metrics.log_step(step, loss=3.0, grad_norm=1.0, lr=1e-3)
        _wait_until(lambda: served().get("composer3d_step") == step)
        return {name: value for name, value in served().items() if "_ranks_" in name}

    mesh: Any = SimpleNamespace(sizes=MeshTable(dp_shard=4), device=torch.device("cpu"))
    watch = StragglerWatch(ReliabilityTable(), mesh, [[0, 1, 2, 3]], metrics.report)
    steps = count(3)
    slow = {"composer3d_ranks_straggler_rank": 3, "composer3d_ranks_straggler_factor": 2}
    for _ in range(3):
        judge([0.1, 0.1, 0.1, 0.2])
    # It is named once, and slow from then on.
    assert gauges_after_a_step() == slow
    assert gauges_after_a_step() == slow
    for _ in range(2):
        judge([0.1, 0.4, 0.1, 0.2])
    assert gauges_after_a_step()["composer3d_ranks_straggler_rank"] == 1
    for _ in range(2):
        judge([0.1, 0.1, 0.1, 0.2])
    assert gauges_after_a_step() == slow
    metrics.report(next(steps), Report(["wrong bits"], {"corrupt_rank": 2.0}))
    for _ in range(2):
        judge([0.1, 0.1, 0.1, 0.1])
    assert gauges_after_a_step() == {"composer3d_ranks_corrupt_rank": 2}
    last = json.loads((tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()[-2])
    assert (last["straggler_rank"], last["straggler_factor"]) == (None, None)

    metrics.log_step(next(steps), loss=float("nan"), grad_norm=1.0, lr=1e-3)
    _wait_until(lambda: math.isnan(served()["composer3d_loss_train"]))

    warnings.clear()
    other = _metrics(tmp_path / "other", service="prometheus", value=port)

    def has_warned() -> bool:
        other.log_step(next(steps), loss=1.0, grad_norm=1.0, lr=1.0)
        return bool(warnings)

    steps = count(1)
    _wait_until(has_warned)
    assert "metrics.prometheus: OSError:" in warnings[0]
    assert "Address already in use" in warnings[0]
    other.close()
    metrics.close()
    assert served() == {}


def _wait_until(condition: Any) -> None:
    end_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)
