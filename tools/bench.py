"""Benchmarks: ``python tools/bench.py COMMAND``. What it does and its figures: ``bench/README.md``."""

import signal
import sys

from bench.commands import main  # the folder beside this file: a package goes before a module of its name

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by an exception, so that no run outlives the bench
    sys.exit(main())
