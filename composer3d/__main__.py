"""The program ``composer3d``.

Ctrl-C, and the end of torchrun's agent, are handled before anything else is imported.
"""

import os
import sys

from composer3d.facts.interrupts import INTERRUPTED, Interrupts


def main() -> int:
    """Run one command with the arguments of this process, and return its exit status."""
    interrupts = Interrupts()
    interrupts.catch()
    try:
        from composer3d.runtime.parent import die_with_agent

        die_with_agent()
        from composer3d.cli import enter

        return enter(interrupts)
    except KeyboardInterrupt:
        # It came while modules were imported. There is nothing to clean up.
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
