"""FedEcho over a network: the same algorithms, run asynchronously on Flower. Needs the extra ``fedecho[flower]``.

This module and the imports of a client process are free of torch, because Flower starts a process for each message.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("flwr") is None:
    raise ImportError("fedecho.flower needs Flower: pip install 'fedecho[flower]'")

if TYPE_CHECKING:
    from fedecho.flower.client_app import make_client_app
    from fedecho.flower.grid import Waiting
    from fedecho.flower.server_app import make_server_app
    from fedecho.flower.strategy import AsyncStrategy

__all__ = ["AsyncStrategy", "Waiting", "make_client_app", "make_server_app"]

MODULE_OF = {"AsyncStrategy": "strategy", "Waiting": "grid", "make_client_app": "client_app", "make_server_app": "server_app"}


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"module 'fedecho.flower' has no attribute {name!r}")
    return getattr(import_module(f"fedecho.flower.{MODULE_OF[name]}"), name)
