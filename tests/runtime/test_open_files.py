"""The limit of open files is raised at the start, and a start that needs more is refused."""

import subprocess
import sys

from composer3d.runtime.open_files import needed

PROGRAM = """
import resource
from composer3d.facts.errors import MachineError
from composer3d.runtime import open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
try:
    open_files.allow({rank}, {size}, hosts_store={hosts_store})
except MachineError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def run(**values: object) -> str:
    program = PROGRAM.format(**values)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_the_soft_limit_becomes_the_hard_one() -> None:
    out = run(soft=256, hard=3000, rank=0, size=1024, hosts_store=False)
    assert out == "(3000, 3000)\n"


def test_a_start_that_needs_more_is_refused_with_the_figure() -> None:
    out = run(soft=256, hard=3000, rank=0, size=1024, hosts_store=True)
    assert out.startswith(
        "rank 0 of 1024 needs up to 3,326 open files for its connections to other ranks, but the "
        "limit is 3,000 (ulimit -Hn): raise it on the node of this rank"
    )


def test_the_usual_limit_is_enough_for_a_few_nodes_and_for_other_ranks() -> None:
    assert needed(0, 64, hosts_store=True) < 1024
    assert needed(1, 100_000, hosts_store=False) < 1024
