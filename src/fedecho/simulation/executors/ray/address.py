"""Where a cluster is: said clearly before Ray is asked, which would try for a long time."""

import socket

TRY_S = 5.0
START = "start one with `ray start --head --disable-usage-stats`, or leave --address out to use this machine alone"


def check_address(address: str | None) -> None:
    """Is this the address of a cluster that this process can be part of?"""
    if address in (None, "auto"):
        return
    if not isinstance(address, str) or "://" in address:
        raise ValueError(
            f"--address must be auto or HOST:PORT, got {address!r}; a run is part of the cluster: start it on one of its nodes"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--address must be auto or HOST:PORT (Ray's own port is 6379), got {address!r}")


def check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TRY_S).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster at --address {address} ({error}): {START}") from None
