"""What is known of a Ray cluster before Ray is imported: its settings and its address. Imports without the ``[ray]`` extra."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future default; Ray warns about the current one
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # keep Ray's own log lines out of our output; we report lost workers ourselves
}


def check_ray() -> None:
    """Raise if Ray is not installed."""
    if sys.modules.get("ray", ...) is None or find_spec("ray") is None:
        raise ValueError("--executor ray needs Ray: pip install 'fedecho[ray]'")


@contextmanager
def ray_settings() -> Iterator[None]:
    """Set the environment variables that Ray reads on import and when a cluster starts or is joined; restore them afterwards."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


CONNECT_TIMEOUT_S = 5.0
START = "start one with `ray start --head --disable-usage-stats`, or omit --address to use only this machine"


def check_address(address: str | None) -> None:
    """Raise if ``address`` cannot be the address of a cluster to join."""
    if address in (None, "auto"):
        return
    if not isinstance(address, str) or "://" in address:
        raise ValueError(f"--address must be auto or HOST:PORT, got {address!r}. Start the run on one of the cluster's nodes.")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--address must be auto or HOST:PORT (Ray's own port is 6379), got {address!r}")


def check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster at --address {address} ({error}): {START}") from None
