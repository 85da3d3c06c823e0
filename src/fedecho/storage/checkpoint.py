"""Checkpoints: a state as one safetensors file, with tensors as tensors and everything else as JSON."""

import hashlib
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeGuard, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedecho.core.task import defines
from fedecho.storage.files import write_atomically

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class LazyTensor(ABC):
    """A tensor that is computed when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @abstractmethod
    def tensor(self) -> Tensor: ...


TensorSource = Tensor | LazyTensor


def materialized(source: TensorSource) -> Tensor:
    return source if isinstance(source, Tensor) else source.tensor()


def bytes_of(source: TensorSource) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    flat = materialized(source).detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data).cast("B") if flat.numel() else memoryview(b"")


def pieces_of(tensors: Mapping[str, TensorSource], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the header and then each tensor of a safetensors file, the widest types first so that all are aligned."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    end = 0
    for name in order:
        source = tensors[name]
        if source.dtype not in DTYPES:
            raise TypeError(f"a checkpoint cannot hold a tensor of {source.dtype}")
        start, end = end, end + prod(source.shape) * source.dtype.itemsize
        header[name] = {"dtype": DTYPES[source.dtype], "shape": list(source.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield bytes_of(tensors[name])


KEEP = 2
"""How many checkpoints a folder keeps."""
FORMAT = "fedecho-checkpoint-1"
MANY = 1000
"""From this length on, a list of numbers is stored as a tensor."""


class CheckpointError(ValueError):
    """There is no usable checkpoint."""


def encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Encode a tree of dataclasses, containers, tensors and plain values as JSON. Copies of its tensors go into ``tensors``."""
    sources: dict[str, TensorSource] = {}
    tree = _encoded(value, sources)
    tensors |= {name: materialized(source).detach().cpu().contiguous().clone() for name, source in sources.items()}
    return tree


class Encodable(Protocol):
    """An object that converts itself to a tree that ``encode`` accepts, and restores itself from one."""

    def to_tree(self) -> Any: ...

    def from_tree(self, tree: Any, /) -> Any: ...


def is_encodable(value: object) -> TypeGuard[Encodable]:
    """Report whether the value has the methods ``to_tree`` and ``from_tree``."""
    return defines(value, "to_tree", "from_tree")


def _encoded(value: Any, tensors: dict[str, TensorSource]) -> Any:
    if isinstance(value, Tensor | LazyTensor):
        return {"tensor": _named(value, tensors)}
    if is_encodable(value):
        return {"tree": _encoded(value.to_tree(), tensors)}
    if is_dataclass(value) and not isinstance(value, type):
        return {"fields": {f.name: _encoded(getattr(value, f.name), tensors) for f in fields(value)}}
    if isinstance(value, Mapping):
        keys, values = _numbers(list(value)), _numbers(list(value.values()))
        if keys is not None and values is not None:
            return {"pairs": [_named(keys, tensors), _named(values, tensors)]}
        return {"map": [[_key(key), _encoded(child, tensors)] for key, child in value.items()]}
    if isinstance(value, list | tuple):
        numbers = _numbers(value)
        if numbers is not None:
            return {"numbers": _named(numbers, tensors)}
        return [_encoded(_listed(item), tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a checkpoint cannot hold a {type(value).__name__}: use tensors, numbers, strings, lists, dicts or dataclasses"
    )


def _named(tensor: TensorSource, tensors: dict[str, TensorSource]) -> str:
    name = f"t{len(tensors)}"
    tensors[name] = tensor
    return name


def _numbers(values: Sequence[Any]) -> Tensor | None:
    """Convert a long list of ints or of floats to a tensor: as JSON, a million clients would make the header too long."""
    if len(values) < MANY:
        return None
    if all(type(value) is int and -(2**63) <= value < 2**63 for value in values):
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.float64) if all(type(value) is float for value in values) else None


def _key(key: Any) -> str | int:
    if not isinstance(key, str | int):
        raise TypeError(
            f"a checkpoint cannot hold a dict whose keys are of type {type(key).__name__}: use strings or whole numbers"
        )
    return key


def _listed(item: Any) -> Any:
    """Reject items that need a type to be decoded: a list has no template for its items."""
    if is_encodable(item) or (is_dataclass(item) and not isinstance(item, type)):
        raise TypeError(f"a checkpoint cannot hold a {type(item).__name__} in a list: make it a field of the state")
    return item


def decode(node: Any, tensors: Mapping[str, Tensor], template: Any = None, home: torch.device | None = None) -> Any:
    """Decode a node. Dataclasses and objects with ``from_tree`` get their type from ``template``, never from the file.

    A tensor is placed on the device of the template's tensor. If the template has none (a first correction, an empty list), it
    goes to ``home``, the device of the other tensors of its dataclass.
    """
    if isinstance(node, list):
        return [decode(item, tensors, home=home) for item in node]
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return tensors[node["tensor"]].to(template.device if isinstance(template, Tensor) else home)
    if "numbers" in node:
        return tensors[node["numbers"]].tolist()
    if "pairs" in node:
        keys, values = (tensors[name].tolist() for name in node["pairs"])
        return dict(zip(keys, values, strict=True))
    if "map" in node:
        templates = template if isinstance(template, Mapping) else {}
        return {key: decode(value, tensors, templates.get(key), home) for key, value in node["map"]}
    if "tree" in node:
        return template.from_tree(decode(node["tree"], tensors))
    if template is None:
        raise CheckpointError("the checkpoint holds a state that this algorithm does not have")
    home = _home(template) or home
    children = {name: decode(child, tensors, getattr(template, name, None), home) for name, child in node["fields"].items()}
    return type(template)(**children)


def _home(template: Any) -> torch.device | None:
    """Return the device of the first tensor in a dataclass, or None."""
    if isinstance(template, Tensor):
        return template.device
    values = [getattr(template, field.name) for field in fields(template)] if is_dataclass(template) else []
    return next((device for value in values if (device := _home(value)) is not None), None)


class SameTemplate(dict[Any, Any]):
    """A dict of templates with the same template for every key."""

    def __init__(self, template: Any) -> None:
        super().__init__()
        self._template = template

    def get(self, key: Any, default: Any = None) -> Any:
        return self._template


def save_checkpoint(folder: Path, number: int, value: Any) -> Path:
    """Write checkpoint ``number`` and delete all but the newest ``KEEP``. File-backed rows are copied block by block."""
    tensors: dict[str, TensorSource] = {}
    text = json.dumps(_encoded(value, tensors), separators=(",", ":"))
    metadata = {"format": FORMAT, "tree": text, "sha256": _digest(text, tensors)}
    path = folder / f"checkpoint-{number:010d}.safetensors"
    write_atomically(path, pieces_of(tensors, metadata))
    for old in _checkpoints(folder)[KEEP:]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(folder: Path, warn: Callable[[str], None] = lambda text: None) -> tuple[Any, dict[str, Tensor]] | None:
    """Return the newest intact checkpoint as (tree, tensors) for ``decode``, or None if the folder has no checkpoints."""
    paths = sorted(folder.glob("checkpoint-*.safetensors"), reverse=True)
    for path in paths:
        try:
            if not path.is_file():
                raise CheckpointError("it is not a file")
            return _read(path)
        except (SafetensorError, OSError, KeyError, struct.error, ValueError, RecursionError) as error:
            warn(f"{path.name} is damaged ({error}); trying the previous one")
    if paths:
        raise CheckpointError(f"no checkpoint in {folder} is intact: start a new run in another folder")
    return None


def remove_checkpoints(folder: Path) -> None:
    """Delete all checkpoints in a folder, as a finished run needs none."""
    for path in _checkpoints(folder):
        path.unlink(missing_ok=True)


def _checkpoints(folder: Path) -> list[Path]:
    """List the checkpoint files, newest first. Folders and pipes with such a name are skipped."""
    return sorted((path for path in folder.glob("checkpoint-*.safetensors") if path.is_file()), reverse=True)


def _read(path: Path) -> tuple[Any, dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        metadata = cast("dict[str, str]", file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata["sha256"] != _digest(metadata["tree"], tensors):
        raise CheckpointError("its checksum does not match")
    return json.loads(metadata["tree"]), tensors


def _digest(text: str, tensors: Mapping[str, TensorSource]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
