"""The evaluation of the planner reads any file of published runs, and refuses broken ones."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from composer3d.facts.errors import UserError
from composer3d.planner.intervals import Interval, spread
from tools import planner_eval, planner_table
from tools.planner.rows import family_of, read, software_facts, tokens_s
from tools.planner.spreads import Error, estimate
from tools.prove.paths import ROOT

COLUMNS = (
    "id,source,model,n_layers,hidden,n_heads,ffn,vocab,seq_len,gpu,gpu_variant,n_gpus,tp,sp,pp,vp,"
    "dp,cp,sharding,shard_group,mbs,gbs,n_microbatches,precision,recompute,schedule,framework,"
    "tok_s_gpu_norm,mem_gib,mem_metric,oom,notes"
)
ROW = {
    "id": "x-1",
    "source": "Some Lab (2024)",
    "model": "7B",
    "n_layers": "32",
    "hidden": "4096",
    "n_heads": "32",
    "ffn": "16384",
    "vocab": "50432",
    "seq_len": "2048",
    "gpu": "A100-80GB",
    "n_gpus": "8",
    "tp": "1",
    "pp": "1",
    "dp": "8",
    "sharding": "FSDP FULL_SHARD",
    "mbs": "4",
    "gbs": "32",
    "recompute": "none",
    "tok_s_gpu_norm": "3800",
}


def write(folder: Path, *rows: dict[str, str], columns: str = COLUMNS) -> str:
    names = columns.split(",")
    lines = [columns, *(",".join(row.get(name, "") for name in names) for row in rows)]
    path = folder / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_row_becomes_a_setup(tmp_path: Path) -> None:
    (row,), skipped = read(write(tmp_path, ROW))
    assert not skipped
    assert row.family == "some"
    assert row.layout_class == "fsdp"
    assert row.setup.layout.zero == 3
    assert row.setup.batch.micro_batches == 1
    assert row.place.endswith("rows.csv:2")


def test_missing_optional_values_have_defaults(tmp_path: Path) -> None:
    few = "id,source,n_layers,hidden,n_heads,seq_len,gpu,n_gpus,tp,pp,dp,tok_s_gpu_norm"
    (row,), skipped = read(write(tmp_path, ROW, columns=few))
    assert not skipped
    assert row.setup.sizes.ffn == 4 * 4096
    assert row.memory_gib is None


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "measured"), [("1", "2", "4", "12054.81"), ("4", "1", "2", "11053.09")]
)
def test_runs_on_b200_are_not_predicted_too_fast(
    tp: str, pp: str, dp: str, measured: str, tmp_path: Path
) -> None:
    """Rows of SimuMax v1.2. With no limit of power, they would be 32% and 43% too fast."""
    b200 = {"gpu": "B200", "n_layers": "12", "hidden": "8192", "n_heads": "64", "ffn": "28672"}
    b200 |= {
        "n_kv_heads": "8",
        "gated": "1",
        "vocab": "128256",
        "seq_len": "4096",
        "framework": "megatron-core 0.14 TE 2.11 no overlap",
    }
    b200 |= {"tp": tp, "sp": "1", "pp": pp, "dp": dp, "schedule": "1F1B", "precision": "bf16"}
    b200 |= {"sharding": "distributed optimizer (ZeRO-1)", "mbs": "1", "n_microbatches": "32"}
    b200 |= {"gbs": str(32 * int(dp)), "tok_s_gpu_norm": measured}
    path = write(tmp_path, {**ROW, **b200}, columns=f"{COLUMNS},n_kv_heads,gated")
    outcomes, skipped = planner_eval.evaluate(read(path)[0], planner_eval.SHIPPED)
    assert not skipped
    assert abs(outcomes[0].tokens_error or 1.0) < 0.12


@pytest.fixture(scope="module")
def of_experts() -> list[planner_eval.Outcome]:
    """The outcomes of runs with experts that no constant was fitted to."""
    rows, skipped = read(ROOT / "tools" / "planner" / "published_moe.csv")
    outcomes, failed = planner_eval.evaluate(rows, planner_eval.SHIPPED)
    assert not skipped
    assert not failed
    return outcomes


def test_published_runs_of_deepseek_v3_are_predicted(
    of_experts: list[planner_eval.Outcome],
) -> None:
    found = [outcome for outcome in of_experts if outcome.row.model == "DeepSeek-V3"]
    assert len(found) == 3
    for outcome in found:
        assert abs(outcome.tokens_error or 1.0) < 0.15, outcome.row.id
        assert outcome.fits or not outcome.decision, outcome.row.id


def test_the_table_of_the_page_is_what_the_command_prints(
    of_experts: list[planner_eval.Outcome],
) -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    assert "\npython tools/planner_eval.py tools/planner/published_moe.csv --table\n" in page
    assert "\n".join(["", *planner_eval.table(of_experts), ""]) in page


def test_the_page_of_all_runs_is_what_the_command_writes() -> None:
    rows = [row for path in planner_table.FILES for row in read(path)[0]]
    assert len(planner_table.FILES) == 3
    outcomes, _ = planner_eval.evaluate(rows, planner_eval.SHIPPED)
    assert planner_table.PAGE.read_text() == planner_table.page(outcomes)


def test_a_page_has_what_others_predict_and_quotes_text(tmp_path: Path) -> None:
    columns = f"{COLUMNS},predicted_by,predicted_tok_s_gpu,predicted_mem_gib"
    other = {"predicted_by": "Them", "predicted_tok_s_gpu": "4180", "predicted_mem_gib": "60"}
    evil = {"model": "a|b<script>`", "mem_gib": "50", "mem_metric": "allocated"}
    rows, _ = read(write(tmp_path, {**ROW, **other, **evil}, columns=columns))
    text = planner_table.page(planner_eval.evaluate(rows, planner_eval.SHIPPED)[0])
    assert "| Them: +10.0% time, +20.0% memory |" in text
    assert r"| a\|b\<script\>\` |" in text


def test_a_run_calibrates_the_others_on_its_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "tools" / "planner" / "published_b200.csv")
    outcomes, _ = planner_eval.evaluate(read(path)[0], planner_eval.SHIPPED)
    before = planner_eval.tokens_coverage(outcomes)
    assert before.share == 1
    medians = []
    for known in outcomes:
        others = planner_eval.calibrated(outcomes, known.row.id)
        assert len(others) == 11
        medians.append(planner_eval.summary([o.tokens_error or 0.0 for o in others]).median)
        assert (planner_eval.tokens_coverage(others).width or 1) < 0.8 * (before.width or 0)
    assert sum(m is not None and m <= 0.05 for m in medians) == 11
    assert planner_eval.main([path, "--calibrate", "nobody"]) == 2
    assert "nobody: no run with tokens/s has this id" in capsys.readouterr().err


def test_a_preset_has_the_sizes_of_our_table(tmp_path: Path) -> None:
    """Latent attention is told by a preset only."""
    named = {**ROW, "preset": "deepseek-v3", "n_layers": "", "hidden": "", "n_heads": ""}
    unknown = {**named, "preset": "deepseek-v99"}
    path = write(tmp_path, named, unknown, columns=f"{COLUMNS},preset")
    (row,), (skipped,) = read(path)
    assert row.setup.sizes.layers == 61
    assert row.setup.sizes.latents is not None
    assert row.setup.sizes.latents.query == 1536
    assert skipped.reason == "the preset 'deepseek-v99' is unknown"


def test_a_step_of_several_pipelines_takes_as_often_as_long(tmp_path: Path) -> None:
    pipeline = {**ROW, "pp": "2", "dp": "4", "n_microbatches": "8", "gbs": "128"}
    (once,), _ = read(write(tmp_path, pipeline))
    (often,), _ = read(write(tmp_path, {**pipeline, "gbs": "512"}))
    (longer,), _ = read(write(tmp_path, {**pipeline, "gbs": "512", "n_microbatches": "32"}))
    assert (once.setup.rounds, often.setup.rounds, longer.setup.rounds) == (1, 4, 1)
    assert often.setup.step_tokens == longer.setup.step_tokens == 4 * once.setup.step_tokens
    constants = planner_eval.SHIPPED
    one, four, long = (tokens_s(row, constants) for row in (once, often, longer))
    # Four pipelines have four bubbles, and one step of the optimizer.
    assert one < four < long
    assert four == pytest.approx(one, rel=0.05)


def test_an_unknown_gpu_is_skipped_with_its_name(tmp_path: Path) -> None:
    rows, (skipped,) = read(write(tmp_path, {**ROW, "gpu": "TPU v5p"}))
    assert not rows
    assert "'TPU v5p' is unknown" in skipped.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": "many"}, "hidden must be a number"),
        ({"hidden": "nan"}, "hidden must be a number"),
        ({"hidden": "-1"}, "hidden must be a number"),
        ({"mbs": "1e300"}, "mbs must be a number"),
        ({"n_layers": "3.5"}, "n_layers must be a whole number"),
        ({"n_layers": "999999999"}, "is too large"),
        ({"dp": "4"}, "tp x pp x dp x cp = 4 is not n_gpus = 8"),
        ({"seq_len": "0"}, "must be above 0"),
        ({"n_microbatches": "999999999"}, "micro-batches are more than"),
        ({"shard_group": "3"}, "shard_group = 3 must divide dp = 8"),
    ],
)
def test_hostile_values_are_refused_with_their_line(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    path = write(tmp_path, ROW, {**ROW, **change})
    with pytest.raises(UserError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:3")


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "binary.csv")
    with pytest.raises(UserError, match=r":1: the columns .* are missing"):
        read(write(tmp_path, ROW, columns="id,source"))
    path = write(tmp_path, ROW)
    Path(path).write_text(Path(path).read_text() + "a,b\n")
    with pytest.raises(UserError, match=r":3: the row does not have one value"):
        read(path)


def test_no_constant_belongs_to_a_source_or_framework(tmp_path: Path) -> None:
    """The same facts give the same prediction, whoever published them."""
    (first,), _ = read(write(tmp_path, ROW))
    (second,), _ = read(write(tmp_path, {**ROW, "source": "Another Lab", "id": "y"}))
    assert first.setup == second.setup
    assert family_of("Another Lab") == "another"


def test_words_about_software_become_facts() -> None:
    assert software_facts("Megatron-LM (no FlashAttention)", "").software.attention == "unfused"
    assert software_facts("torchtitan, compile", "").software.fuses_elementwise
    assert not software_facts("torchtitan, eager", "").software.fuses_elementwise
    assert software_facts("X", "CUDA_LAUNCH_BLOCKING=1").software.launches_synchronously
    once = software_facts("NeMo AutoModel, TE, DeepEP", "fake balanced gate").software
    assert once.sends_tokens_once
    assert once.balances_routing
    assert once.routes_to_neighbours
    assert not once.fuses_elementwise
    forced = software_facts("Megatron-Core, TE", "force-balance").software
    assert not forced.sends_tokens_once
    assert forced.balances_routing
    assert not forced.routes_to_neighbours


def test_parameters_in_16_bits_have_no_other_copy(tmp_path: Path) -> None:
    narrow = {**ROW, "precision": "bf16; no master weights"}
    shards, _ = read(write(tmp_path, narrow, {**narrow, "sharding": "FSDP2 no reshard"}, ROW))
    # Two moments; with zero = 3 also the shard of the parameters, which is the master copy else.
    assert [row.setup.precision.optimizer for row in shards] == [2 + 2 * 2, 2 * 2, 4 + 2 * 4]
    assert [row.setup.precision.gradients for row in shards] == [2, 2, 4]


def test_layers_that_do_not_divide_are_cut_as_the_software_does(tmp_path: Path) -> None:
    of_33 = {**ROW, "n_layers": "33", "pp": "4", "dp": "2", "framework": "Megatron-Core TE"}
    (usual,), _ = read(write(tmp_path, of_33))
    assert usual.setup.layout.stage_blocks == (9, 9, 9, 6)
    (even,), _ = read(write(tmp_path, {**of_33, "framework": "NeMo AutoModel"}))
    assert even.setup.layout.stage_blocks == (9, 8, 8, 8)


def test_json_has_the_promised_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran_out = {**ROW, "id": "x-2", "tok_s_gpu_norm": "", "oom": "1", "mbs": "512"}
    with_memory = {**ROW, "id": "x-3", "mem_gib": "60", "mem_metric": "allocated"}
    unknown = {**ROW, "id": "x-4", "gpu": "abacus"}
    path = write(tmp_path, ROW, ran_out, with_memory, unknown)
    assert planner_eval.main([path, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["rows"] == 3
    assert answer["skipped"] == 1
    assert answer["false_fits"] == 0
    assert answer["false_refusals"] == 0
    assert 0 <= answer["median_error"] <= answer["p90_error"] < 1
    assert abs(answer["bias"]) < 1
    assert 0 <= answer["memory_median_error"] < 1
    assert answer["by_source"]["Some Lab (2024)"]["rows"] == 2
    assert answer["coverage_80"]["time"] in (0, 0.5, 1)
    assert answer["coverage_80"]["time_by_generation"].keys() == {"ampere"}
    assert 0.02 < answer["interval_width_median"]["memory"] < 0.5
    assert 0.02 < answer["interval_width_median"]["time"] < 0.5


def test_an_interval_holds_what_was_measured_or_not() -> None:
    """An error of +10% means that 1 / 1.1 of the prediction was measured."""
    narrow, wide = Interval(0.95, 1.05), Interval(0.8, 1.25)
    assert planner_eval.coverage([(0.1, narrow), (0.1, wide)]) == (0.5, pytest.approx(0.275))
    assert planner_eval.coverage([(-0.1, narrow), (-0.1, wide)]).share == 0.5
    assert planner_eval.coverage([]) == (None, None)


def test_spreads_are_those_of_the_errors() -> None:
    """Errors of known spreads are drawn; their estimate has them, and holds 80% of others."""
    names = ("tp", "cp", "ep", "dp", "bubble", "host", "nodes", "experts", "kin")
    nothing = dict.fromkeys(names, 0.0)
    draw = Random(1)
    errors = []
    for job in range(900):
        common, of_tp = draw.gauss(0, 0.04), draw.gauss(0, 0.3)
        for _ in range(4):
            tp = draw.uniform(0, 0.4)
            log = common + draw.gauss(0, 0.02) + tp * of_tp
            parts = {**nothing, "source": 1.0, "layout": 1.0, "tp": tp}
            errors.append(Error(f"f{job}", job, log, parts))
    memory = [Error(e.family, e.job, e.log, {"states": 1.0}) for e in errors]
    found = estimate(errors[:1200], memory[:1200])
    scale = found.quantile / 1.2816  # of a spread to a standard deviation
    assert scale * found.source == pytest.approx(0.04, rel=0.2)
    assert scale * found.layout == pytest.approx(0.02, rel=0.2)
    assert scale * found.collectives == pytest.approx(0.3, rel=0.2)
    inside = [abs(e.log) <= found.quantile * spread(e.shares, found) for e in errors[1200:]]
    assert 0.75 < sum(inside) / len(inside) < 0.85


def test_the_tool_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    path = write(tmp_path, ROW)
    script = (
        "import sys, tools.planner_eval as tool; "
        f"status = tool.main([{path!r}, '--json']); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_errors_go_to_stderr_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planner_eval.main([write(tmp_path, {**ROW, "tp": "x"})]) == 2
    assert "tp must be a number" in capsys.readouterr().err


def test_summary_interpolates_the_percentile() -> None:
    errors = planner_eval.summary([-0.1, 0.2, 0.3])
    assert errors.median == pytest.approx(0.2)
    assert errors.p90 == pytest.approx(0.28)
    assert errors.bias == pytest.approx(0.4 / 3)
