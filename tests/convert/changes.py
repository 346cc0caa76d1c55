"""Changes of a checkpoint's files, and the lines that refuse a conversion."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from composer3d.convert.convert import convert
from composer3d.facts.errors import CheckpointError
from tools.prove.paths import ROOT

Change = Callable[[dict[str, Any]], object]


def refusal(*arguments: Any, function: Callable[..., Any] = convert, **options: Any) -> list[str]:
    """Return the lines of the error that ``function``, by default ``convert``, must raise."""
    with pytest.raises(CheckpointError) as caught:
        function(*arguments, **options)
    return list(caught.value.lines)


def rewrite_json(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rewrite_safetensors(path: Path, change: Change) -> None:
    held = load_file(path)
    change(held)
    save_file(held, path)


def rewrite_torch(path: Path, change: Change) -> None:
    held = torch.load(path, weights_only=True)
    change(held)
    torch.save(held, path)


def flip(path: Path, at: int) -> None:
    """Flip a bit of the byte ``at``."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


_MEASURE = """
import json, re, sys
from pathlib import Path
import torch
from composer3d.convert.convert import convert
import composer3d.convert.convert as module
anon = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
inner = module.digest_of
def measured(tensor):
    global peak
    peak = max(peak, anon() - base)
    return inner(tensor)
module.digest_of = measured
for number, (source, to, dtype) in enumerate(json.loads(sys.argv[1])):
    base, peak = anon(), 0
    convert(Path(source), Path(f"out-{number}"), to, dtype=dtype or None)
    print(peak)
"""


def peaks_of_converts(folder: Path, jobs: list[tuple[str, str, str]]) -> list[int]:
    """Convert in another process, whose current folder is ``folder``.

    Args:
        folder: holds the sources.
        jobs: the source, the format and the dtype of each conversion.

    Returns:
        The most bytes of memory that each conversion took beyond its start.
    """
    # With this threshold, freed memory goes back to the system, so that the peak can be measured.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _MEASURE, json.dumps(jobs)]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=True
    )
    return [int(line) for line in done.stdout.split()]
