"""Dry-run recipes at full size, and check the time and the host memory that each takes.

python tools/dryrun_recipes.py                     all recipes of 8 ranks or more
python tools/dryrun_recipes.py llama3-405b-16384-3d --limit-s 180 --limit-gib 8
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from composer3d.recipe.resolve import load

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
KIB_PER_GIB = 1 << 20


def main() -> int:
    """Dry-run each recipe and print a line for it. Return 1 if one fails or is over a limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipes", metavar="RECIPE", nargs="*", help="default: all at full size")
    parser.add_argument("--limit-s", type=float, default=180.0, help="default: %(default)g")
    parser.add_argument("--limit-gib", type=float, default=8.0, help="default: %(default)g")
    arguments = parser.parse_args()

    failed = 0
    for name in arguments.recipes or full_size():
        begin = time.monotonic()
        command = [sys.executable, "-m", "composer3d", "dryrun", name, "--json"]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        most_gib = 0.0
        while True:
            try:
                out, _ = job.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                most_gib = max(most_gib, resident_gib(job.pid))
        seconds = time.monotonic() - begin

        is_over = seconds > arguments.limit_s or most_gib > arguments.limit_gib
        failed += job.returncode != 0 or is_over
        word = "failed" if job.returncode else "OVER" if is_over else "ok"
        print(f"{word:<7}{name:<34}{seconds:6.0f} s {most_gib:5.1f} GiB", end="", flush=True)
        if job.returncode == 0:
            stages = json.loads(out.splitlines()[-1])["stages"]
            peak = max(stages, key=lambda stage: stage["peak_gib"])
            print(f"  largest stage {peak['stage']}: {peak['peak_gib']:.1f} GiB", end="")
        print(flush=True)
    return 1 if failed else 0


def full_size() -> list[str]:
    """Return the names of the recipes that a laptop cannot train, the smallest mesh first."""
    sizes = {path.stem: load(path, check_files=False).recipe for path in RECIPES.glob("*.toml")}
    large = [name for name, recipe in sizes.items() if recipe.run.device == "cuda"]
    return sorted(large, key=lambda name: (sizes[name].world_size, name))


def resident_gib(session: int) -> float:
    """Return the resident memory of all processes of a session. Shared pages count in each."""
    total_kib = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) != session:
                continue
            status = (folder / "status").read_text()
        except (OSError, ValueError):
            continue  # it has ended
        lines = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        total_kib += sum(int(line.split()[1]) for line in lines)
    return total_kib / KIB_PER_GIB


if __name__ == "__main__":
    sys.exit(main())
