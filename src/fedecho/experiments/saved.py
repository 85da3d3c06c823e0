"""What a run saves beside its record, read back: each part of the kind it must have, whoever wrote the file."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedecho.core.checkpoint import CheckpointError, Every, decode, load_checkpoint
from fedecho.core.server import Server
from fedecho.experiments.record import Mark

ANEW = "start in a new folder"
ITS_OWN = "state"
"""The algorithm's part of a server: it has what types it likes."""


def restored(
    folder: Path,
    server: Server[Any],
    fresh: Mapping[str, Any],
    take: Callable[[Mapping[str, Any]], None],
    say: Callable[[str], None],
) -> Mark | None:
    """Let ``take`` have the newest checkpoint; its place in the record, or None if the run never came to one.

    ``fresh`` is what would be saved of the run as it was put together: what was saved must be of the same kinds.
    """
    found = load_checkpoint(folder, say)
    if found is None:
        return None
    try:
        tree = decode(*found, {"server": {"state": server.state, "models": Every(server.model)}})
        if tree["fingerprint"] != fresh["fingerprint"]:
            raise CheckpointError(f"the checkpoint in {folder} is of another configuration than its record; {ANEW}")
        _check_kinds(tree, fresh, "")
        take(tree)
        return Mark(tree["position"], tree.get("record_sha256"), tree.get("record_others", 0))
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(f"the checkpoint in {folder} is of another fedecho ({told}); {ANEW}") from error


def _check_kinds(found: Any, fresh: Any, name: str) -> None:
    """Is it what could stand where ``fresh`` stands? What was not there yet (None, an empty table) may be anything."""
    if fresh is None:
        return
    if isinstance(fresh, Mapping):
        _of_kind(isinstance(found, Mapping), found, name)
        named = all(isinstance(key, str) for key in fresh)
        for key, value in found.items():
            like = fresh.get(key) if named else next(iter(fresh.values()))
            if key != ITS_OWN:
                _check_kinds(value, like, f"{name}.{key}".removeprefix("."))
    elif isinstance(fresh, list | tuple):
        _of_kind(isinstance(found, list), found, name)
    elif isinstance(fresh, Tensor):
        _of_kind(isinstance(found, Tensor) and (found.shape, found.dtype) == (fresh.shape, fresh.dtype), found, name)
    elif is_dataclass(fresh):
        _of_kind(type(found) is type(fresh), found, name)
        for each in fields(fresh):
            _check_kinds(getattr(found, each.name), getattr(fresh, each.name), f"{name}.{each.name}")
    else:
        kinds = {float: (float, int), str: (str, type(None))}
        _of_kind(type(found) in kinds.get(type(fresh), (type(fresh),)), found, name)


def _of_kind(it_is: bool, found: Any, name: str) -> None:
    if not it_is:
        told = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.40}"
        raise TypeError(f"{name or 'all of it'} is {told}")
