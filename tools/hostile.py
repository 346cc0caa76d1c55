"""``bash tools/hostile [NAME ...]`` runs every case of tests/hostile, or those whose name holds a NAME.

Prints what was wrong with each that did harm, and how many did none. Exit status: 0 where none did harm, 1 where one
did, 2 where no case has such a name.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from composer3d import launch  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="hostile", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help="part of a case's name")
    names = parser.parse_args().names
    launch.warm_up()
    from hostile.base import make_base
    from hostile.case import prepare_outside, problems_of
    from hostile.cases import CASES

    chosen = [case for case in CASES if not names or any(name in case.name for name in names)]
    if not chosen:
        print(f"hostile: no case is called {' or '.join(names)}; they are in {TESTS / 'hostile'}", file=sys.stderr)
        return 2
    begin, harmful = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="composer3d-hostile-") as folder:
        root = Path(folder)
        prepare_outside(root)
        make_base(root / "base")
        for case in chosen:
            problems = problems_of(case, root)
            harmful += bool(problems)
            if problems:
                print(f"HARMFUL {case.name}", *problems, sep="\n  ", flush=True)
            shutil.rmtree(root / case.name, ignore_errors=True)
    seconds = time.monotonic() - begin
    print(f"{len(chosen) - harmful} of {len(chosen)} hostile inputs did no harm, in {seconds:.0f} s")
    return 1 if harmful else 0


if __name__ == "__main__":
    sys.exit(main())
