"""Plant every fault of ``tools/prove/faults``, or those whose title holds a NAME, and look for it.

``verify`` of a layout looks for a fault, or one of the checks in ``tools/prove/faults/checks.py``.
It prints a line for each fault: whether it was caught, its name, its layout or check, what was
found, and which axis is suspected.

Exit status: 0 if all were caught, 1 if one survived, 2 if no fault has such a name.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from composer3d.runtime.launch import Pool
from tools.prove.paths import FAULTS as FOLDER
from tools.prove.proof import make_parser


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("faults", __doc__)
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="part of a fault's name, layout or check"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float64"),
        default="float64",
        help="what verify compares in; float32 plants only the faults that verify looks for; "
        "default: %(default)s",
    )
    options = parser.parse_args(arguments)
    names = options.names

    # These import torch: not before the arguments are right.
    from tools.prove.faults.catch import catch
    from tools.prove.faults.table import FAULTS

    faults = [fault for fault in FAULTS if not names or any(name in fault.title for name in names)]
    if options.dtype == "float32":
        faults = [fault for fault in faults if fault.check == "verify"]
    if not faults:
        print(
            f"tools/prove/run faults: no fault is called {' or '.join(names)}; "
            f"they are in {FOLDER}",
            file=sys.stderr,
        )
        return 2

    begin, n_caught = time.monotonic(), 0
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-faults-") as folder:
        for fault in faults:
            outcome = catch(pool, Path(folder), fault, options.dtype)
            n_caught += outcome.is_caught
            word = "caught  " if outcome.is_caught else "SURVIVED"
            print(f"{word} {fault.title}: {outcome.finding}", flush=True)
    print(f"{n_caught} of {len(faults)} caught, in {time.monotonic() - begin:.0f} s")
    return 0 if n_caught == len(faults) else 1
