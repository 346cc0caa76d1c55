"""Hold the rendezvous of torchrun's agents, so that a job survives the loss of any of its nodes.

Usage: ``python rendezvous.py HOST:PORT``, on a machine that outlives the job: not one
of its nodes. HOST is an address of this machine that the nodes reach, and HOST:PORT the first
argument of ``node``. SIGTERM or Ctrl-C ends it. The store listens on all interfaces
without authentication, as torchrun's own does: use it on a network that you trust.
"""

import signal
import sys
from collections.abc import Sequence

_ENDS = {signal.SIGTERM, signal.SIGINT}


def main(arguments: Sequence[str]) -> int:
    host, _, port = arguments[0].rpartition(":") if len(arguments) == 1 else ("", "", "")
    if not host or not port.isdigit():
        print("usage: python rendezvous.py HOST:PORT", file=sys.stderr)
        return 2
    from torch.distributed import TCPStore  # takes a second, so a wrong argument is named first

    # Blocked before the store starts its threads, so that only ``sigwait`` takes them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    # The store lives as long as this variable.
    store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    print(f"torchrun meets at {host}:{store.port}", flush=True)
    signal.sigwait(_ENDS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
