"""Two hosts on this machine: network namespaces, a cable from each to a switch, and this process at the switch.

Needs the rights of root; `two_hosts` raises `Unavailable` where they are missing, with what failed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

CABLE = "cable"
"""The name of a host's interface, in its namespace."""


class Unavailable(Exception):
    """This machine makes no network namespaces for this process."""


@dataclass(frozen=True)
class Host:
    """A namespace with an address that this process and the other host reach."""

    namespace: str
    address: str
    port: str  # of the switch

    @property
    def command(self) -> tuple[str, ...]:
        """The words before a command that runs on this host.

        It has shared memory of its own, by which SGLang finds out which ranks are on one host; `ip` gives it mounts of
        its own.
        """
        own_memory = 'mount -t tmpfs shm /dev/shm && exec "$@"'
        return ("ip", "netns", "exec", self.namespace, "sh", "-c", own_memory, "sh")

    def cut_cable(self) -> None:
        """End all traffic to and from the host; no connection is closed, and the switch's other ports stay up."""
        ip("link", "set", self.port, "down")


def ip(*words: str) -> None:
    """Run `ip`.

    Raises:
        Unavailable: it fails, or is not installed.
    """
    try:
        done = subprocess.run(("ip", *words), capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"ip: {error}") from error
    if done.returncode:
        raise Unavailable(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts, and remove them in the end.

    Raises:
        Unavailable: see the module.
    """
    number, subnet = os.getpid(), f"10.213.{os.getpid() % 256}"
    switch = f"d4s{number}"
    hosts = [Host(f"d4-{number}-{i}", f"{subnet}.{i + 1}", f"d4p{number}{i}") for i in range(2)]
    with ExitStack() as stack:
        for host in hosts:
            ip("netns", "add", host.namespace)
            stack.callback(ip, "netns", "delete", host.namespace)
        ip("link", "add", switch, "type", "bridge")
        stack.callback(ip, "link", "delete", switch)
        ip("address", "add", f"{subnet}.254/24", "dev", switch)
        ip("link", "set", switch, "up")
        for host in hosts:
            ip("link", "add", host.port, "type", "veth", "peer", "name", CABLE, "netns", host.namespace)
            stack.callback(ip, "link", "delete", host.port)  # the namespace stays while a process of it does
            ip("link", "set", host.port, "master", switch, "up")
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", CABLE)
            for name in ("lo", CABLE):
                ip("-n", host.namespace, "link", "set", name, "up")
        yield hosts[0], hosts[1]
