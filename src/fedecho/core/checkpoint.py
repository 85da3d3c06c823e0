"""Any state as one safetensors file: tensors as tensors, everything else as JSON in its header. No pickle, either way.

A file is written under another name, synced and renamed, so that it is there whole or not at all. It carries the sha256 of its
contents; of the few that are kept, loading takes the newest that is intact.
"""

import hashlib
import io
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedecho.core.disk import disk_full_at

KEEP = 2
FORMAT = "fedecho-checkpoint-1"


class CheckpointError(ValueError):
    """There is no usable checkpoint."""


def encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The JSON of a tree of dataclasses, containers, tensors and plain values; tensors go into ``tensors``."""
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        # A clone, because safetensors refuses two names for one storage, and rows of a bank are views of one.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if hasattr(value, "to_tree"):
        return {"tree": encode(value.to_tree(), tensors)}
    if is_dataclass(value) and not isinstance(value, type):
        return {"fields": {f.name: encode(getattr(value, f.name), tensors) for f in fields(value)}}
    if isinstance(value, Mapping):
        return {"map": [[_key(key), encode(child, tensors)] for key, child in value.items()]}
    if isinstance(value, list | tuple):
        return [encode(_listed(item), tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a checkpoint cannot hold a {type(value).__name__}: use tensors, numbers, strings, lists, dicts or dataclasses"
    )


def _key(key: Any) -> str | int:
    if not isinstance(key, str | int):
        raise TypeError(
            f"a checkpoint cannot hold a dict whose keys are of type {type(key).__name__}: use strings or whole numbers"
        )
    return key


def _listed(item: Any) -> Any:
    """A list says nothing of the types of its items, so what needs a type to be built again cannot be one."""
    if hasattr(item, "to_tree") or (is_dataclass(item) and not isinstance(item, type)):
        raise TypeError(f"a checkpoint cannot hold a {type(item).__name__} in a list: make it a field of the state")
    return item


def decode(node: Any, tensors: Mapping[str, Tensor], template: Any = None) -> Any:
    """The value of a node. Dataclasses and objects with ``from_tree`` get their type from ``template``, never the file."""
    if isinstance(node, list):
        return [decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        tensor = tensors[node["tensor"]]
        return tensor.to(template.device) if isinstance(template, Tensor) else tensor
    if "map" in node:
        known = template if isinstance(template, Mapping) else {}
        return {key: decode(value, tensors, known.get(key)) for key, value in node["map"]}
    if "tree" in node:
        return template.from_tree(decode(node["tree"], tensors))
    if template is None:
        raise CheckpointError("the checkpoint holds a state that this algorithm does not have")
    found = {name: decode(child, tensors, getattr(template, name, None)) for name, child in node["fields"].items()}
    return type(template)(**found)


class Every(dict[Any, Any]):
    """One template for whatever key."""

    def __init__(self, template: Any) -> None:
        super().__init__()
        self._template = template

    def get(self, key: Any, default: Any = None) -> Any:
        return self._template


def write_atomically(path: Path, data: bytes) -> None:
    """The file is there whole or not at all, also after a power cut. On a full disk, what stood under its name stays."""
    temporary = path.with_name(path.name + ".part")
    with disk_full_at(path):
        try:
            # Without a buffer, so that closing the file has nothing left to write, and nothing left to fail at.
            with temporary.open("wb", buffering=0) as file:
                _write_all(file, data)
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write_all(file: io.FileIO, data: bytes) -> None:
    """A disk that is nearly full takes a part, and says at the next write that it is full."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def save_checkpoint(folder: Path, number: int, value: Any) -> Path:
    """Write checkpoint ``number`` and drop all but the newest few."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, tensors), separators=(",", ":"))
    metadata = {"format": FORMAT, "tree": text, "sha256": _digest(text, tensors)}
    path = folder / f"checkpoint-{number:010d}.safetensors"
    write_atomically(path, save(tensors, metadata))
    for old in _checkpoints(folder)[KEEP:]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(folder: Path, say: Callable[[str], None] = lambda text: None) -> tuple[Any, dict[str, Tensor]] | None:
    """The newest intact checkpoint as (tree, tensors) for ``decode``, or None if there never was one."""
    paths = _checkpoints(folder)
    for path in paths:
        try:
            return _read(path)
        except (SafetensorError, CheckpointError, OSError, KeyError, struct.error, json.JSONDecodeError) as error:
            say(f"{path.name} is damaged ({error}); trying the one before")
    if paths:
        raise CheckpointError(f"no checkpoint in {folder} is intact; start the run anew in another folder")
    return None


def remove_checkpoints(folder: Path) -> None:
    """A finished run needs none."""
    for path in _checkpoints(folder):
        path.unlink(missing_ok=True)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.safetensors"), reverse=True)


def _read(path: Path) -> tuple[Any, dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        metadata = cast("dict[str, str]", file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata["sha256"] != _digest(metadata["tree"], tensors):
        raise CheckpointError("its checksum does not match")
    return json.loads(metadata["tree"]), tensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
