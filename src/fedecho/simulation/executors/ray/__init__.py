"""Jobs on a Ray cluster, of this machine or of many (extra ``[ray]``)."""

import os
import sys
from importlib.util import find_spec

from fedecho.simulation.executors.ray.address import check_address

__all__ = ["check_address", "check_ray"]

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future way; Ray warns of its present one
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # no line of Ray's own into our output; a lost worker is told in our words
}


def check_ray() -> None:
    """Is there Ray? Its settings are read when it is imported, so they are made here, before that."""
    if sys.modules.get("ray", ...) is None or find_spec("ray") is None:
        raise ValueError("--executor ray needs Ray: pip install 'fedecho[ray]'")
    os.environ.update(ENVIRONMENT)
