"""Jobs on a Ray cluster, of this machine or of many (extra ``[ray]``)."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from fedecho.simulation.executors.ray.address import check_address

__all__ = ["check_address", "check_ray", "ray_settings"]

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future way; Ray warns of its present one
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # no line of Ray's own into our output; a lost worker is told in our words
}


def check_ray() -> None:
    """Raise if Ray is not installed."""
    if sys.modules.get("ray", ...) is None or find_spec("ray") is None:
        raise ValueError("--executor ray needs Ray: pip install 'fedecho[ray]'")


@contextmanager
def ray_settings() -> Iterator[None]:
    """Environment variables that Ray reads when it is imported and when a cluster is started or joined. They are put back after."""
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
