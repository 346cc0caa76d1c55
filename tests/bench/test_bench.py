"""The benchmarks: the hand-written loop is equal to composer3d, and failures are reported.

No test checks a time.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from composer3d.data.tokens import find_damage
from composer3d.facts.token_manifest import CHUNK_BYTES, read_manifest
from composer3d.models.llama.model import Llama
from composer3d.models.llama.shape import PRESETS
from composer3d.runtime.launch import Pool
from tools.bench import host, jobs, layers, operators, plain, shards
from tools.bench.commands import LAYOUTS, main
from tools.bench.host import SETS, TITAN_LAYOUTS, titan_step_ms
from tools.bench.jobs import SHAPE, Job, JobError, measure
from tools.fake_cuda import device

SEQ_LEN = 48


@pytest.fixture
def in_pool(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands use the pool of all tests, whose server has imported torch."""
    for command in (host, operators):
        monkeypatch.setattr(command, "Pool", lambda: nullcontext(pool))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_plain_loop_computes_what_composer3d_does(compute: str) -> None:
    torch.manual_seed(0)
    shape = PRESETS["debug-bench"]
    ours = Llama(shape, device="cpu")
    sizes = {key: value for key, value in asdict(shape).items() if key in SHAPE}
    handwritten = plain.Llama(seq_len=SEQ_LEN, compute=getattr(torch, compute), **sizes)
    pairs = list(zip(ours.parameters(), handwritten.named_parameters(), strict=True))
    with torch.no_grad():
        for parameter, (_, copy) in pairs:
            is_norm = parameter.dim() == 1
            torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.05)
            copy.copy_(parameter)
    tokens_BT, labels_BT = torch.randint(shape.vocab, (2, 3, SEQ_LEN))
    expected = ours(tokens_BT, labels_BT, torch.arange(SEQ_LEN).repeat(3, 1)) / labels_BT.numel()
    loss = handwritten(tokens_BT, labels_BT)
    expected.backward()
    loss.backward()
    bound = 1e-5 if compute == "float32" else 0.05
    assert loss.item() == pytest.approx(expected.item(), rel=bound)
    assert all(parameter.dtype == torch.float32 for parameter in handwritten.parameters())
    for parameter, (name, copy) in pairs:
        assert parameter.grad is not None
        assert copy.grad is not None
        assert (copy.grad - parameter.grad).norm() < bound * parameter.grad.norm(), name


def test_the_plain_loop_imports_nothing_of_composer3d(root: Path) -> None:
    text = (root / "tools/bench/plain.py").read_text()
    assert "import composer3d" not in text
    assert "from composer3d" not in text


def test_train_prints_four_figures(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(root / "recipes/debug-1-single.toml")
    assert main(["train", recipe, "--set", "run.steps=6", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(figures) == ["tokens_per_s", "step_s", "launch_to_first_step_s", "peak_rss_gib"]
    tokens_of_a_step = 8 * 64
    assert figures["tokens_per_s"] * figures["step_s"] == pytest.approx(tokens_of_a_step)
    assert figures["step_s"] < figures["launch_to_first_step_s"] < 120
    # torch alone takes 0.2 GiB.
    assert 0.1 < figures["peak_rss_gib"] < 4


def test_a_wrong_recipe_is_reported_as_by_composer3d(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    assert main(["train", str(root / "recipes/debug-1-single.toml"), "--set", "mesh.tq=2"]) == 2
    assert "unknown key 'mesh.tq'" in capsys.readouterr().err


def test_a_missing_interpreter_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--python", "/no/such/python"]) == 2
    error = capsys.readouterr().err
    assert "bench gpu:" in error
    assert "/no/such/python" in error


def test_the_output_of_a_failed_run_is_reported() -> None:
    def make_jobs(folder: Path) -> list[Job]:
        command = ["bash", "-c", "echo the reason; exit 3"]
        return [Job(command=command, output=folder / "output")]

    with pytest.raises(JobError, match="the reason"):
        measure(make_jobs)


def test_a_run_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LIMIT_S", 1.0)
    command = ["bash", "-c", "sleep 60 & echo $! > pid; wait"]

    def make_jobs(folder: Path) -> list[Job]:
        return [Job(command=command, cwd=tmp_path, output=folder / "output")]

    with pytest.raises(JobError, match="not done after 1 s"):
        measure(make_jobs)
    running = jobs.parents_of_processes()
    assert int((tmp_path / "pid").read_text()) not in running
    assert os.getpid() in running


def test_the_gpu_benchmark_is_refused_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho\n")  # torch, which takes long to import, sees none
    python.chmod(0o755)
    assert main(["gpu", "--json", "--python", str(python)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no CUDA GPU" in captured.err


@pytest.mark.parametrize("name", LAYOUTS)
def test_composer3d_and_its_peer_run_the_same_layout(name: str) -> None:
    sets = dict(override.split("=") for override in LAYOUTS[name].sets)
    processes, batch, batch_ranks, *flags = LAYOUTS[name].peer.split()
    peer = dict(zip(flags[::2], flags[1::2], strict=True))
    shards = int(sets.get("mesh.dp_shard", 1))
    world_size = shards
    for axis, peer_name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")):
        size = int(sets.get(f"mesh.{axis}", 1))
        assert int(peer.get(f"--parallelism.{peer_name}-parallel-degree", 1)) == size, axis
        world_size *= size
    assert (int(processes), int(batch), int(batch_ranks)) == (world_size, 8, shards)
    micro_batch = peer.get("--parallelism.pipeline-parallel-microbatch-size", 8 // shards)
    assert int(sets["data.micro_batch"]) == int(micro_batch)


@pytest.mark.usefixtures("in_pool")
def test_host_measures_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["host", "--only", "fsdp2,pp2", "--steps", "3", "--repeats", "1", "--json"]
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["name"] for row in rows] == ["fsdp2", "pp2"]
    for row in rows:
        assert len(row["plain_ms"]) == len(row["ours_ms"]) == 1
        assert min(row["plain_ms"] + row["ours_ms"]) > 0
        assert row["titan_ms"] == []


@pytest.mark.usefixtures("in_pool")
def test_host_reads_torchtitans_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$WORLD_SIZE $*" > arguments; echo HOST_STEP_MS 1000000.5\n')
    python.chmod(0o755)
    command = ["host", "--only", "tp2", "--steps", "3", "--repeats", "1", "--titan", str(tmp_path)]
    assert main(command) == 0
    assert "| tp2 | " in (table := capsys.readouterr().out)
    assert "| 1000000.5 | " in table
    called = (tmp_path / "arguments").read_text()
    assert called.startswith("2 ")
    assert "titan_host.py 3 1 32 32 --module peerbench" in called
    assert "--parallelism.tensor-parallel-degree 2" in called

    python.write_text("#!/bin/sh\necho broken\n")
    with pytest.raises(JobError, match="no figure: broken"):
        titan_step_ms(tmp_path, "one", 3)


@pytest.mark.parametrize("name", host.LAYOUTS)
def test_host_gives_torchtitan_the_same_batch(name: str) -> None:
    sets = dict(pair.split("=") for pair in (*SETS, *host.LAYOUTS[name]))
    words = TITAN_LAYOUTS[name].split()
    peer = dict(zip(words[::2], words[1::2], strict=True))
    local_batch = int(peer["--training.local-batch-size"])
    assert local_batch * int(sets.get("mesh.dp_shard", 1)) == int(sets["data.global_batch"])
    micro_batch = peer.get("--parallelism.pipeline-parallel-microbatch-size", local_batch)
    assert int(micro_batch) == int(sets["data.micro_batch"])


def test_torchtitans_host_program_starts(root: Path, tmp_path: Path) -> None:
    # It runs as a program, so a module beside it can hide one of Python's own, such as tokenize.
    program = root / "tools/bench/titan_host.py"
    (tmp_path / "titan_cpu.py").write_text("import linecache; print('reached', linecache.tokenize)")
    result = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "reached" in result.stdout, result.stderr
    assert str(program.parent) not in result.stdout


@pytest.mark.skipif(device.compiler() is None, reason="no C++ compiler here")
@pytest.mark.usefixtures("in_pool")
def test_counts_prints_what_a_layout_launches_copies_and_sends(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "build", lambda _: library)
    assert main(["counts", "--only", "one;fsdp2, offload", "--json"]) == 0
    *_, one, offload, answer = capsys.readouterr().out.splitlines()
    assert one == "| one | 22 | 39 | 3 | 1 | 1 |  |"
    assert offload.startswith("| fsdp2, offload | ")
    rows = json.loads(answer)["rows"]
    assert list(rows) == ["one", "fsdp2, offload"]
    row = rows["fsdp2, offload"]
    assert row["to_device"] > row["to_host"] > row["waits"] == 5
    # The embedding, 4 blocks in forward and in backward, and the last stage.
    assert row["traffic"]["fsdp"]["all_gather"][0] == 1 + 2 * 4 + 1


@pytest.mark.long
def test_a_compiled_layer_with_experts_launches_few_operators(pool: Pool) -> None:
    eager, compiled = (
        pool.run(layers.measure, {"kind": "experts", "is_compiled": is_compiled}, world_size=1)[0]
        for is_compiled in (False, True)
    )
    assert compiled.forward <= 35 < eager.forward
    assert compiled.backward <= 35 < eager.backward


def test_counts_names_an_unknown_layout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["counts", "--only", "fsdp3"])
    assert "fsdp3: use one; one, bf16; " in capsys.readouterr().err


def test_the_sparse_shards_of_the_bench_are_whole(tmp_path: Path) -> None:
    for count, tokens in ((1, CHUNK_BYTES // 2 + 5), (3, 1000)):
        shards.make_shards(tmp_path / str(count), count, shard_tokens=tokens)
        manifest = read_manifest(tmp_path / str(count))
        assert find_damage(manifest, full=True) == []
        assert (manifest.tokens, len(manifest.shards)) == (count * tokens, count)
