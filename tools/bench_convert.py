"""Speed and memory of ``convert``: ``python tools/bench_convert.py [--gb 4] [--folder /tmp]``.

A random model of that size is converted hf -> dcp -> hf and hf -> torch, each in a process of its own, proof
included. Beside each, ``cp -r`` and ``sync`` of its source. Memory is the peak of RssAnon above that of the interpreter
with torch imported. Prints a line for each, and exits with 1 where 0.3 of cp's speed or 1 GB is not kept.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from composer3d.models.llama.huggingface import make_config
from composer3d.models.llama.names import hf_names, parameter_shapes
from composer3d.models.llama.shape import ModelShape

_CHILD = """
import re, sys, threading, time, json
import torch
import composer3d.commands.convert as c
def anon():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
base = peak = anon()
def watch():
    global peak
    while True:
        peak = max(peak, anon())
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
began = time.perf_counter()
c.run(sys.argv[1], sys.argv[2], to=sys.argv[3], as_json=False)
print(json.dumps({"seconds": time.perf_counter() - began, "anon": peak - base}))
"""


def make(folder: Path, size: float) -> None:
    """A folder of Hugging Face's of about ``size`` bytes in bfloat16, in two files or more."""
    layers = max(1, round((size / 2 - 2 * 32000 * 2048) / 45.1e6))
    shape = ModelShape(dim=2048, n_layers=layers, n_heads=16, n_kv_heads=8, ffn=5632, vocab=32000)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(make_config(shape, "bfloat16")))
    own, parts, index = hf_names(shape), [{}], {}
    for name, sizes in parameter_shapes(shape).items():
        if sum(t.nbytes for t in parts[-1].values()) > 5e8:
            parts.append({})
        parts[-1][own[name]] = torch.empty(sizes, dtype=torch.bfloat16).normal_()
        index[own[name]] = f"model-{len(parts):05d}.safetensors"
        if len(parts) > 1 and parts[-2]:
            save_file(
                parts[-2],
                folder / f"model-{len(parts) - 1:05d}.safetensors",
                metadata={"format": "pt"},
            )
            parts[-2].clear()
    save_file(parts[-1], folder / f"model-{len(parts):05d}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    args = parser.parse_args()
    kept = True
    with tempfile.TemporaryDirectory(dir=args.folder) as text:
        folder = Path(text)
        make(folder / "hf", args.gb * 1e9)
        for src, dst, to in (
            ("hf", "dcp", "dcp"),
            ("dcp", "hf2", "hf"),
            ("hf", "torch.pt", "torch"),
        ):
            subprocess.run(["sync"], check=True)
            began = time.perf_counter()
            subprocess.run(["cp", "-r", str(folder / src), str(folder / "copy")], check=True)
            subprocess.run(["sync"], check=True)
            copying = time.perf_counter() - began
            shutil.rmtree(folder / "copy")
            command = [sys.executable, "-c", _CHILD, str(folder / src), str(folder / dst), to]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            size = sum(path.stat().st_size for path in (folder / src).rglob("*") if path.is_file())
            ratio, anon = copying / found["seconds"], found["anon"] / 1e9
            kept = kept and ratio >= 0.3 and anon < 1
            print(
                f"{src} -> {to}: {size / 1e9:.2f} GB, cp and sync {copying:.1f} s, convert {found['seconds']:.1f} s: "
                f"{ratio:.2f} of its speed, {anon:.2f} GB of anonymous memory",
                flush=True,
            )
            if src == "dcp":
                shutil.rmtree(folder / "dcp")
                shutil.rmtree(folder / "hf2")
    print("kept" if kept else "not kept: 0.3 of the speed of cp, under 1 GB")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
