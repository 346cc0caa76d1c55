"""Two hosts on one machine: network namespaces that a pair of virtual interfaces joins.

Linux, root and iproute2 (``ip`` and ``tc``) are needed. The two share the processor and all files.
"""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

_PORT = 29400


class NoHostsError(Exception):
    """This machine cannot make network namespaces."""


class Host(NamedTuple):
    """One of the hosts.

    Attributes:
        number: 0 or 1; torchrun's rendezvous is on host 0.
        namespace: its network namespace.
        interface: its end of the link.
        address: the address of that end.
    """

    number: int
    namespace: str
    interface: str
    address: str

    def torchrun(self, processes: int, arguments: Sequence[str], *options: str) -> list[str]:
        """Return the command of this host's agent of a job.

        Args:
            processes: the ranks of each host.
            arguments: the program and its arguments, such as ``["-m", "composer3d", "train"]``.
            options: further options of torchrun.
        """
        program = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", str(processes)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{_address(0)}:{_PORT}"),
            *("--rdzv-id", "job", "--rdzv-conf", f"is_host={1 - self.number}"),
            *("--local-addr", self.address, *options, *arguments),
        ]
        return self.command(program, {})

    def command(self, program: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Return the command that runs ``program`` on this host, with further variables."""
        variables = {"GLOO_SOCKET_IFNAME": self.interface, **environment}
        return [
            *("ip", "netns", "exec", self.namespace, "env"),
            *(f"{name}={value}" for name, value in variables.items()),
            *program,
        ]


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


@contextmanager
def two_hosts(mbit_s: float | None = None) -> Iterator[tuple[Host, Host]]:
    """Make two hosts, and remove them at the end.

    Args:
        mbit_s: the rate of the link in each direction, in Mbit/s; None: as fast as the kernel is.

    Raises:
        NoHostsError: this machine cannot make them.
    """
    mark = uuid.uuid4().hex[:6]
    hosts = tuple(Host(n, f"c3d-{mark}-{n}", f"v{mark}{n}", _address(n)) for n in (0, 1))
    with ExitStack() as stack:
        try:
            for host in hosts:
                _run("ip", "netns", "add", host.namespace)
                stack.callback(_run, "ip", "netns", "del", host.namespace)
            first, second = hosts
            ends = ("netns", first.namespace, "type", "veth", "peer")
            other = ("name", second.interface, "netns", second.namespace)
            _run("ip", "link", "add", first.interface, *ends, *other)
            for host in hosts:
                inside = ("ip", "-n", host.namespace)
                _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
                _run(*inside, "link", "set", host.interface, "up")
                _run(*inside, "link", "set", "lo", "up")
                if mbit_s is not None:
                    shape = ("tbf", "rate", f"{mbit_s}mbit", "burst", "256kb", "latency", "1000ms")
                    queue = ("qdisc", "add", "dev", host.interface, "root")
                    _run("tc", "-n", host.namespace, *queue, *shape)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            raise NoHostsError(
                f"two network namespaces cannot be made here (root, ip and tc are needed): {reason}"
            ) from None
        yield first, second


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Ended(NamedTuple):
    """How one host's part of a job ended: the exit status of its agent, and what it printed."""

    status: int
    output: str
    errors: str


def run_job(
    hosts: Sequence[Host],
    processes: int,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    limit_s: float = 180.0,
) -> list[Ended]:
    """Run a job under torchrun on both hosts, and wait for its end.

    Args:
        hosts: from ``two_hosts``.
        processes: the ranks of each host.
        arguments: the program and its arguments.
        environment: variables to add to those of this process.
        limit_s: the seconds after which the job is killed.

    Raises:
        subprocess.TimeoutExpired: the job has not ended in time.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    agents = [
        subprocess.Popen(
            host.torchrun(processes, arguments),
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in hosts
    ]
    try:
        # Neither prints more than a pipe holds before the other one is read.
        texts = [agent.communicate(timeout=limit_s) for agent in agents]
    finally:
        for agent in agents:
            with suppress(ProcessLookupError):
                agent.kill()
            agent.wait()
    return [Ended(agent.returncode, *text) for agent, text in zip(agents, texts, strict=True)]
