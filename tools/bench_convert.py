"""Measure the speed and memory of ``convert``: ``python tools/bench_convert.py [--gb 4]``.

It makes a random model of that size, and converts it hf -> dcp -> hf and hf -> torch, each in a
process of its own, including the proof. For comparison it times ``cp -r`` and ``sync`` of each
source. Memory is the peak of RssAnon above that of the interpreter with torch imported.

Prints a line for each conversion. Exits with 1 if one is slower than 0.3 of the speed of ``cp``, or
takes 1 GB or more.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from composer3d.models.llama.huggingface import make_config
from composer3d.models.llama.shape import ModelShape
from composer3d.models.llama.table import table
from composer3d.models.locations import hf_locations

LEAST_SPEED = 0.3  # of that of cp
MEMORY_LIMIT_GB = 1.0

# Converts in a process of its own, while a thread watches the memory.
_CHILD = """
import json
import re
import sys
import threading
import time

import torch

from composer3d.commands import convert, registry


def anonymous_bytes():
    status = open("/proc/self/status").read()
    return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) * 1024


parsed = registry.parse(["convert", sys.argv[1], sys.argv[2], "--to", sys.argv[3]])
before = peak = anonymous_bytes()


def watch():
    global peak
    while True:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.005)


threading.Thread(target=watch, daemon=True).start()
began_s = time.perf_counter()
convert.run(parsed.options)
print(json.dumps({"seconds": time.perf_counter() - began_s, "anonymous": peak - before}))
"""


class Conversion(NamedTuple):
    """One conversion, between paths in the working folder."""

    source: str
    target: str
    to: str


CONVERSIONS = [
    Conversion("hf", "dcp", "dcp"),
    Conversion("dcp", "hf2", "hf"),
    Conversion("hf", "torch.pt", "torch"),
]


class Figures(NamedTuple):
    """What one conversion took, and copying its source."""

    source_gb: float
    copy_s: float
    convert_s: float
    memory_gb: float

    @property
    def speed(self) -> float:
        """The speed of the conversion as a ratio of that of the copy."""
        return self.copy_s / self.convert_s


def make_model(folder: Path, size_bytes: float) -> None:
    """Write a Hugging Face folder of about ``size_bytes`` in bfloat16, in files of about 0.5 GB."""
    layers = max(1, round((size_bytes / 2 - 2 * 32000 * 2048) / 45.1e6))
    shape = ModelShape(dim=2048, n_layers=layers, n_heads=16, n_kv_heads=8, ffn=5632, vocab=32000)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(make_config(shape, "bfloat16")))
    locations = hf_locations(table(shape))
    weight_map = {}
    file_number = 1
    tensors: dict[str, Tensor] = {}

    def save_tensors() -> None:
        save_file(tensors, folder / file_name(file_number), metadata={"format": "pt"})

    for location in locations.values():
        if sum(tensor.nbytes for tensor in tensors.values()) > 5e8:
            save_tensors()
            tensors = {}
            file_number += 1
        tensors[location.names[0]] = torch.empty(location.shape, dtype=torch.bfloat16).normal_()
        weight_map[location.names[0]] = file_name(file_number)
    save_tensors()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def file_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def measure(folder: Path, conversion: Conversion) -> Figures:
    """Copy the source, remove the copy, and convert the source."""
    source, target = folder / conversion.source, folder / conversion.target
    subprocess.run(["sync"], check=True)
    began_s = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(folder / "copy")], check=True)
    subprocess.run(["sync"], check=True)
    copy_s = time.perf_counter() - began_s
    shutil.rmtree(folder / "copy")

    command = [sys.executable, "-c", _CHILD, str(source), str(target), conversion.to]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    child = json.loads(result.stdout.splitlines()[-1])
    source_bytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    return Figures(
        source_gb=source_bytes / 1e9,
        copy_s=copy_s,
        convert_s=child["seconds"],
        memory_gb=child["anonymous"] / 1e9,
    )


def main() -> int:
    """Run all conversions; return 1 if one was too slow or took too much memory, else 0."""
    parser = argparse.ArgumentParser(
        description="Measure the speed and memory of convert, next to cp."
    )
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model")
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="where to put the files while it runs"
    )
    args = parser.parse_args()
    passed = True
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        make_model(folder / "hf", args.gb * 1e9)
        for conversion in CONVERSIONS:
            figures = measure(folder, conversion)
            if figures.speed < LEAST_SPEED or figures.memory_gb >= MEMORY_LIMIT_GB:
                passed = False
            print(
                f"{conversion.source} -> {conversion.to}: {figures.source_gb:.2f} GB, "
                f"cp and sync {figures.copy_s:.1f} s, convert {figures.convert_s:.1f} s: "
                f"{figures.speed:.2f} of its speed, "
                f"{figures.memory_gb:.2f} GB of anonymous memory",
                flush=True,
            )
            if conversion.source == "dcp":
                # Nothing reads these two again, and the disk may be small.
                shutil.rmtree(folder / "dcp")
                shutil.rmtree(folder / "hf2")
    if passed:
        print("passed")
    else:
        print(
            f"failed: convert must reach {LEAST_SPEED} of the speed of cp, "
            f"with less than {MEMORY_LIMIT_GB:.0f} GB"
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
