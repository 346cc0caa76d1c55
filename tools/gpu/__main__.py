"""The command ``python -m tools.gpu``; the package says what it does."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gpu import kernels, page
from tools.gpu.parts import PARTS
from tools.prove.paths import ROOT

# A part that has not ended is ended then.
_MOST_S = 540.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the parts, with the seconds that each may take")
    run_parser = commands.add_parser("run", help="run parts, each in a process of its own")
    run_parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)}")
    run_parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    run_parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    part_parser = commands.add_parser("part", help="run one part in this process")
    part_parser.add_argument("part", choices=PARTS)
    part_parser.add_argument("--rehearse", action="store_true")
    page_parser = commands.add_parser("page", help="write docs/gpu.md from results")
    page_parser.add_argument("folder", type=Path, nargs="?", default=page.RESULTS)
    options = parser.parse_args(argv)
    match options.command:
        case "list":
            for name, part in PARTS.items():
                print(f"{name:<10} {part.seconds:>4.0f} s  {part.what}")
        case "part":
            figures = PARTS[options.part].run(options.rehearse)
            print(f"\n{json.dumps({'card': kernels.name_of_card(), 'figures': figures})}")
        case "page":
            page.write(options.folder)
        case "run":
            unknown = [name for name in options.parts if name not in PARTS]
            if unknown:
                parser.error(f"{', '.join(unknown)}: use {', '.join(PARTS)}")
            return _run(options.parts or list(PARTS), options.out, rehearse=options.rehearse)
    return 0


def _run(names: list[str], out: Path, *, rehearse: bool) -> int:
    """Run parts, print a line for each, and return 1 if one has failed."""
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names:
        result = _run_part(name, rehearse=rehearse)
        (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        failed += "error" in result or _has_failed(result["figures"])
        shown = result.get("error") or json.dumps(result["figures"])
        print(f"{name}: {result['seconds']:.0f} s: {str(shown)[-1500:]}", flush=True)
    return int(failed > 0)


def _has_failed(figures: Any) -> bool:
    """Return whether a figure, at any depth, is called ``failed`` and says something."""
    if not isinstance(figures, dict):
        return False
    return bool(figures.get("failed")) or any(map(_has_failed, figures.values()))


def _run_part(name: str, *, rehearse: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.gpu", "part", name]
    command += ["--rehearse"] * rehearse
    begin = time.monotonic()
    result: dict[str, Any] = {"part": name, "date": time.strftime("%Y-%m-%d")}
    limit_s = min(_MOST_S, 3 * PARTS[name].seconds + 60)
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        result["error"] = f"not done after {limit_s:.0f} s: {text[-3000:]}"
    else:
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            result |= json.loads(lines[-1])
        else:
            result["error"] = (done.stdout[-1500:] + done.stderr[-3000:]).strip()
    result["seconds"] = round(time.monotonic() - begin, 1)
    return result


if __name__ == "__main__":
    sys.exit(main())
