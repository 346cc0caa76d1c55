"""Run one of the long proofs: ``python -m tools.prove NAME [OPTIONS]``.

``bash tools/prove/run NAME`` does the same in an environment that it makes first.

    matrix    every layout of the covering matrix is exact in float64
    faults    verify or a check finds every planted fault
    full      verify --full finds faults of communication without computing a number
    random    no random layout is called wrong, and planted faults are found in random settings
    kills     a training killed at any point of a save, or at random, resumes bitwise
    jobs      a job whose rank, launcher or whole group is killed resumes bitwise and leaves nothing
    storm     one training survives a hundred kills at random instants, bitwise
    resume    every layout resumes what every layout has saved
    order     what the ranks of a step launch never makes them wait for each other, on any GPU
    watch     no healthy rank is called slow or wrong in 200 steps
    timeline  the bubbles of pipelines whose layers sleep are those of the simulation
    imports   configurations of other programs go through import, check, plan, dryrun and verify
    newcomer  every command of docs/first_model.md runs from the wheel; tokens as in transformers
    hostile   hostile files: nothing is executed, nothing outside is read or written, no traceback
    fuzz      inputs changed at random are refused, or read rightly; --help says how many

``NAME --help`` lists the options of a proof.

Exit status: 0 if the proof holds, 1 if it does not, 2 if the arguments are wrong.
"""

import importlib
import sys

PROOFS = {
    "matrix": "tools.prove.matrix.run",
    "faults": "tools.prove.faults.run",
    "random": "tools.prove.random_layouts",
    "kills": "tools.prove.kills.run",
    "jobs": "tools.prove.kills.trouble",
    "storm": "tools.prove.kills.storm",
    "resume": "tools.prove.resume",
    "order": "tools.prove.order",
    "watch": "tools.prove.watch",
    "timeline": "tools.prove.timeline",
    "imports": "tools.prove.imports.run",
    "newcomer": "tools.prove.newcomer",
    "hostile": "tools.prove.hostile.run",
    "fuzz": "tools.prove.fuzz.run",
    "full": "tools.prove.full.run",
}


def main(arguments: list[str]) -> int:
    """Run the proof that ``arguments`` name, and return its exit status."""
    name, *options = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name not in PROOFS:
        print(
            f"tools/prove/run: there is no proof {name!r}; use one of {', '.join(PROOFS)}",
            file=sys.stderr,
        )
        return 2
    return importlib.import_module(PROOFS[name]).main(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
