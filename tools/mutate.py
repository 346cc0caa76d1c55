"""``bash tools/mutate [NAME ...]`` plants every fault of tests/faults, or those whose title holds a NAME, and verifies.

Prints a line for each: what was planted, in which layout, what caught it and whom it suspects. Exit status: 0 where all
were caught, 1 where one survived, 2 where no fault has such a name.
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from composer3d.launch import Pool  # noqa: E402
from composer3d.verify import Verdict, verify_layout  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help="part of a fault's name or layout")
    names = parser.parse_args().names
    from faults.table import FAULTS  # it imports torch: not before the arguments are right

    chosen = [fault for fault in FAULTS if not names or any(name in fault.title for name in names)]
    if not chosen:
        print(f"mutate: no fault is called {' or '.join(names)}; they are in {TESTS / 'faults'}", file=sys.stderr)
        return 2
    begin, caught = time.monotonic(), 0
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-mutate-") as folder:
        for fault in chosen:
            sets = fault.layout.split()
            recipe = str(TESTS / "verify.toml")
            verdict = verify_layout(pool, Path(folder), recipe, sets, dtype="float64", steps=2, fault=fault.plant)
            seen = not verdict.passed and re.search(fault.says, verdict.error or "") is not None
            caught += seen
            print(f"{'caught  ' if seen else 'SURVIVED'} {fault.title}: {told(verdict)}", flush=True)
    print(f"{caught} of {len(chosen)} caught, in {time.monotonic() - begin:.0f} s")
    return 0 if caught == len(chosen) else 1


def told(verdict: Verdict) -> str:
    """What caught a fault, and whom the verdict suspects."""
    error = verdict.error or "nothing"
    if verdict.refused:
        return f"the layout is refused: {error}"
    if verdict.worst_parameter is None and not verdict.passed:
        return f"error raised: {error.strip().splitlines()[-1]}"
    what, *hints = error.split("; ")
    return "; ".join([re.sub(r" (at step \d+ )?(is off|while).*", "", what), *hints])


if __name__ == "__main__":
    sys.exit(main())
