"""``python -m tools.bench COMMAND``: benchmarks. What each does, and its figures: ``README.md`` here."""

import signal
import sys

from tools.bench.commands import main

if __name__ == "__main__":
    # As an exception, so that no run outlives the bench.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
