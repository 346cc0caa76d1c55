"""Take configurations of other programs through import, check, plan, dryrun and verify.

    bash tools/prove/run imports                          # all of them, at full size
    bash tools/prove/run imports megatron-deepspeed-16    # one of them

The configurations stand beside this file. Each step is a process of its own with a limit of time,
as a user would start it.

Exit status: 0 if every step has the status 0, 1 if one has not.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CONFIGURATIONS = {
    path.stem: path for path in sorted(FOLDER.iterdir()) if path.suffix in (".sh", ".txt")
}
LIMIT_S = 1800.0


def steps(configuration: Path, recipe: Path) -> list[list[str]]:
    """Return the arguments of each command, in order."""
    return [
        ["import", str(configuration), "-o", str(recipe)],
        ["check", str(recipe)],
        ["plan", str(recipe), "--top", "1"],
        ["dryrun", str(recipe)],
        ["verify", str(recipe)],
    ]


def main(arguments: list[str]) -> int:
    """Run all steps of the chosen configurations; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="tools/prove/run imports", description=__doc__, add_help=True
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CONFIGURATIONS))
    names = parser.parse_args(arguments).names or list(CONFIGURATIONS)
    unknown = [name for name in names if name not in CONFIGURATIONS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; use {', '.join(CONFIGURATIONS)}")

    failed = 0
    with tempfile.TemporaryDirectory(prefix="composer3d-imports-") as folder:
        for name in names:
            for command in steps(CONFIGURATIONS[name], Path(folder, f"{name}.toml")):
                failed += not _holds(name, command)
    return 1 if failed else 0


def _holds(name: str, command: list[str]) -> bool:
    """Run one command and print its line."""
    start = time.monotonic()
    try:
        result = subprocess.run(
            [sys.executable, "-m", "composer3d", *command],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        status, output = str(result.returncode), result.stdout + result.stderr
    except subprocess.TimeoutExpired:
        status, output = "none in time", ""
    seconds = time.monotonic() - start
    word = "ok" if status == "0" else f"FAILED (status {status})"
    print(f"{name:<24} {command[0]:<8} {seconds:6.0f} s  {word}", flush=True)
    if status != "0":
        print(output[-2000:], flush=True)
    return status == "0"
