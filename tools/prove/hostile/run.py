"""``bash tools/hostile [NAME ...]`` runs every case of tests/hostile, or those whose name holds a NAME.

Prints what was wrong with each that did harm, and how many did none. Exit status: 0 where none did harm, 1 where one
did, 2 where no case has such a name.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from composer3d.runtime.launch import Pool
from tools.prove.paths import HOSTILE


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hostile", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help="part of a case's name")
    names = parser.parse_args(arguments).names
    from tools.prove.hostile.base import make_base
    from tools.prove.hostile.case import prepare_outside, problems_of
    from tools.prove.hostile.cases import CASES

    chosen = [
        case
        for case in CASES
        if not names or any(name in f"{case.name} {case.title}" for name in names)
    ]
    if not chosen:
        print(
            f"hostile: no case is called {' or '.join(names)}; they are in {HOSTILE}",
            file=sys.stderr,
        )
        return 2
    begin, harmful = time.monotonic(), 0
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-hostile-") as folder:
        root = Path(folder)
        prepare_outside(root)
        make_base(root / "base", pool)
        for case in chosen:
            problems = problems_of(case, root, pool)
            harmful += bool(problems)
            if problems:
                print(f"HARMFUL {case.name} {case.title}", *problems, sep="\n  ", flush=True)
            # Some hold folders deeper than shutil.rmtree can go.
            subprocess.run(["rm", "-rf", str(root / case.name)], check=True)
    seconds = time.monotonic() - begin
    print(
        f"{len(chosen) - harmful} of {len(chosen)} hostile inputs did no harm, in {seconds:.0f} s"
    )
    return 1 if harmful else 0
