"""``python -m tools.prove NAME [OPTIONS]``: run one of the long proofs. ``NAME --help`` lists its options.

    matrix    every layout of the covering matrix, in float64, against one process
    faults    every planted fault must be seen by verify or by a check
    float32   random layouts in float32, none of which may be called wrong
    kills     a training is killed at every point of a save, and at random times; it resumes bitwise
    jobs      ranks, launchers and whole jobs are killed; the job resumes bitwise and nothing is left
    resume    every layout resumes what every other layout has saved
    hostile   hostile files: nothing is executed, read or written outside, no traceback

Exit status: 0 where the proof holds, 1 where it does not, 2 where the arguments are wrong.
"""

import importlib
import sys

PROOFS = {
    "matrix": "tools.prove.matrix.run",
    "faults": "tools.prove.faults.run",
    "float32": "tools.prove.float32",
    "kills": "tools.prove.kills.run",
    "jobs": "tools.prove.kills.jobs",
    "resume": "tools.prove.resume",
    "hostile": "tools.prove.hostile.run",
}


def main(arguments: list[str]) -> int:
    """Run the proof that ``arguments`` names; returns its exit status."""
    name, *options = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name not in PROOFS:
        print(f"tools/prove: no proof {name!r}; there are {', '.join(PROOFS)}", file=sys.stderr)
        return 2
    return importlib.import_module(PROOFS[name]).main(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
