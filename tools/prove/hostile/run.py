"""Run every hostile case, or those whose name holds a NAME, and list the harm that each did.

Exit status: 0 if none did harm, 1 if one did, 2 if no case has such a name.
"""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from composer3d.runtime.launch import Pool
from tools.prove.proof import add_names, choose, make_parser


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("hostile", __doc__)
    add_names(parser, "case's name")
    names = parser.parse_args(arguments).names

    # These import torch: not before the arguments are right.
    from tools.prove.hostile.base import make_base
    from tools.prove.hostile.case import prepare_outside, problems_of, proof_folder
    from tools.prove.hostile.cases import CASES

    chosen = choose(parser, CASES, names, "no case is called")
    begin, harmful = time.monotonic(), 0
    with Pool() as pool, proof_folder() as folder:
        root = Path(folder)
        prepare_outside(root)
        make_base(root / "base", pool)
        for case in chosen:
            problems = problems_of(case, root, pool)
            harmful += bool(problems)
            if problems:
                print(f"HARMFUL {case}", *problems, sep="\n  ", flush=True)
            # shutil.rmtree cannot remove the deepest folders.
            subprocess.run(["rm", "-rf", str(root / case.name)], check=True)
    seconds = time.monotonic() - begin
    print(
        f"{len(chosen) - harmful} of {len(chosen)} hostile inputs did no harm, in {seconds:.0f} s"
    )
    return 1 if harmful else 0
