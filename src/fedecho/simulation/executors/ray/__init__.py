"""Jobs on a Ray cluster, of this machine or of many (extra ``[ray]``)."""

from importlib.util import find_spec

from fedecho.simulation.executors.ray.address import check_address

__all__ = ["check_address", "check_ray"]


def check_ray() -> None:
    if find_spec("ray") is None:
        raise ValueError("--executor ray needs Ray: pip install 'fedecho[ray]'")
