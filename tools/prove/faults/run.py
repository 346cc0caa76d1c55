"""Plant every fault of ``tools/prove/faults``, or those whose title holds a NAME, and look for it.

``verify`` of a layout looks for a fault, or one of the checks in ``tools/prove/faults/checks.py``.
It prints a line for each fault: whether it was caught, its name, its layout or check, what was
found, and which axis is suspected.

Exit status: 0 if all were caught, 1 if one survived, 2 if no fault has such a name.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from composer3d.runtime.launch import Pool
from tools.prove.proof import add_names, choose, make_parser


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("faults", __doc__)
    add_names(parser, "fault's name, layout or check")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float64"),
        default="float64",
        help="what verify compares in; float32 plants only the faults that verify looks for; "
        "default: %(default)s",
    )
    options = parser.parse_args(arguments)
    # These import torch: not before the arguments are right.
    from tools.prove.faults.catch import catch
    from tools.prove.faults.table import FAULTS

    is_wide = options.dtype == "float64"
    planted = [fault for fault in FAULTS if is_wide or fault.check == "verify"]
    faults = choose(parser, planted, options.names, "no fault is called")
    begin, n_caught = time.monotonic(), 0
    with Pool() as pool, tempfile.TemporaryDirectory(prefix="composer3d-faults-") as folder:
        for fault in faults:
            outcome = catch(pool, Path(folder), fault, options.dtype)
            n_caught += outcome.is_caught
            word = "caught  " if outcome.is_caught else "SURVIVED"
            print(f"{word} {fault}: {outcome.finding}", flush=True)
    print(f"{n_caught} of {len(faults)} caught, in {time.monotonic() - begin:.0f} s")
    return 0 if n_caught == len(faults) else 1
