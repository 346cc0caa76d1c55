"""Run the benchmarks: ``python -m tools.bench COMMAND``. ``README.md`` describes the commands."""

import signal
import sys

from tools.bench.commands import main

if __name__ == "__main__":
    # SIGTERM raises an exception, so that the bench ends its runs before it ends itself.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
