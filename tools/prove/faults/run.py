"""``bash tools/mutate [NAME ...]`` plants every fault of tests/faults, or those whose title holds a NAME.

Each is looked for by ``verify`` of a layout, or by one of ``tests/faults/checks.py``. Prints a line for each: what was
planted, in which layout or check, what caught it and whom it suspects. Exit status: 0 where all
were caught, 1 where one survived, 2 where no fault has such a name.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from composer3d.runtime.launch import Pool
from tools.prove.paths import FAULTS as FOLDER


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="part of a fault's name, layout or check"
    )
    help_dtype = (
        "what verify compares in; with float32 only faults that it looks for; default: %(default)s"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float64"), default="float64", help=help_dtype
    )
    options = parser.parse_args(arguments)
    names, dtype = options.names, options.dtype
    from tools.prove.faults.catch import (
        catch,  # it imports torch: not before the arguments are right
    )
    from tools.prove.faults.table import FAULTS

    chosen = [fault for fault in FAULTS if not names or any(name in fault.title for name in names)]
    if dtype == "float32":
        chosen = [fault for fault in chosen if fault.check == "verify"]
    if not chosen:
        print(
            f"mutate: no fault is called {' or '.join(names)}; they are in {FOLDER}",
            file=sys.stderr,
        )
        return 2
    begin, caught = time.monotonic(), 0
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-mutate-") as folder:
        for fault in chosen:
            found = catch(pool, Path(folder), fault, dtype)
            caught += found.seen
            print(
                f"{'caught  ' if found.seen else 'SURVIVED'} {fault.title}: {found.told}",
                flush=True,
            )
    print(f"{caught} of {len(chosen)} caught, in {time.monotonic() - begin:.0f} s")
    return 0 if caught == len(chosen) else 1
