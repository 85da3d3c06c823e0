"""Read CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) in the official pickle and binary formats."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fedecho.storage.user_files import FileError, open_regular, read_bytes
from fedecho.tasks.data_files import MissingDataError, remedy
from fedecho.tasks.vision.images import Images, Labels, Pixels

IMAGE_BYTES = 3 * 32 * 32
MAX_BYTES = 1 << 29
"""Limit per file; the largest official one, CIFAR-100's training set, has 155 MB."""


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """File names and contents of one dataset. Binary files have the pickles' names plus ``.bin``."""

    name: str
    train: tuple[str, ...]
    test: str
    label_key: bytes
    label_bytes: int
    """Bytes before each image of a binary file; the last one is the label."""
    num_classes: int


CIFAR10 = FileFormat(
    name="cifar10",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    label_key=b"labels",
    label_bytes=1,
    num_classes=10,
)
CIFAR100 = FileFormat(name="cifar100", train=("train",), test="test", label_key=b"fine_labels", label_bytes=2, num_classes=100)


def read_cifar10(folder: Path) -> tuple[Images, Images]:
    """Return (training, test) images from ``cifar-10-batches-py`` or ``cifar-10-batches-bin``."""
    return _read(folder, CIFAR10)


def read_cifar100(folder: Path) -> tuple[Images, Images]:
    """Return (training, test) images with fine labels from ``cifar-100-python`` or ``cifar-100-binary``."""
    return _read(folder, CIFAR100)


def _read(folder: Path, spec: FileFormat) -> tuple[Images, Images]:
    parts = [_read_file(_path(folder, name, spec), spec) for name in (*spec.train, spec.test)]
    sizes = [len(labels) for _, labels in parts[:-1]]
    if len(set(sizes)) > 1:
        raise ValueError(f"{folder}: its training files must contain equally many images, got {sizes}; one is truncated")
    pixels, labels = (np.concatenate(pieces) for pieces in zip(*parts[:-1], strict=True))
    return Images(pixels, labels, f"{folder.name}, training images"), Images(*parts[-1], f"{folder.name}, test images")


def _path(folder: Path, name: str, spec: FileFormat) -> Path:
    for path in (folder / name, folder / f"{name}.bin"):
        if path.is_file():
            return path
    raise MissingDataError(
        f"{folder} has neither {name} nor {name}.bin: remove the incomplete folder, then {remedy(spec.name)}"
    )


def _read_file(path: Path, spec: FileFormat) -> tuple[Pixels, Labels]:
    try:
        planes, labels = (_binary if path.suffix == ".bin" else _pickled)(path, spec)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    wrong = np.flatnonzero((labels < 0) | (labels >= spec.num_classes))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"{path}, image {row}: its label must be 0 to {spec.num_classes - 1}, got {labels[row]}")
    return np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels


def _binary(path: Path, spec: FileFormat) -> tuple[Pixels, Labels]:
    record = spec.label_bytes + IMAGE_BYTES
    content = np.frombuffer(read_bytes(path, MAX_BYTES), np.uint8)
    if not len(content) or len(content) % record:
        raise ValueError(f"{path}: must contain images of {record} bytes each, got {len(content)} bytes; the file is truncated")
    records = content.reshape(-1, record)
    return records[:, spec.label_bytes :], records[:, spec.label_bytes - 1].astype(np.int64)


def _pickled(path: Path, spec: FileFormat) -> tuple[Pixels, Labels]:
    batch = _unpickled(path)
    if not isinstance(batch, dict) or not {b"data", spec.label_key} <= batch.keys():
        raise ValueError(f"{path}: must be a dictionary with data and {spec.label_key.decode()}")
    array, labels = batch[b"data"], batch[spec.label_key]
    pixels = array.pixels if isinstance(array, _Array) else None
    if pixels is None or pixels.ndim != 2 or pixels.shape[1] != IMAGE_BYTES or not len(pixels):
        raise ValueError(f"{path}: data must be uint8 [n, {IMAGE_BYTES}], got {array}")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        got = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise ValueError(f"{path}: {spec.label_key.decode()} must be a list of {len(pixels)}, got {got}")
    if not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise ValueError(f"{path}: {spec.label_key.decode()} must be small integers")
    return pixels, np.array(labels, np.int64)


def _unpickled(path: Path) -> Any:
    try:
        with open_regular(path, MAX_BYTES) as file:
            return _ArrayUnpickler(file, encoding="bytes").load()
    except (OSError, FileError):
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path}: not a valid CIFAR pickle ({str(error) or type(error).__name__})") from None


class _Dtype:
    """Stand-in for numpy's dtype, which a malicious pickle could use to read bytes as pointers. Accepts only uint8."""

    def __init__(self, code: bytes | str, align: bool, copy: bool) -> None:
        if code not in (b"u1", "u1"):
            raise pickle.UnpicklingError(f"an array must be uint8, got dtype {code!r}")

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and similar details, which do not apply to single bytes."""


class _Array:
    """Stand-in for numpy's array during unpickling."""

    pixels: Pixels | None = None

    def __init__(self, kind: object, shape: object, code: object) -> None:
        """Accept the arguments for an empty array; the content follows as state."""

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, dtype, by_columns, content = state
        if not isinstance(dtype, _Dtype) or not isinstance(content, bytes) or prod(shape) != len(content):
            raise pickle.UnpicklingError(f"an array of shape {shape} does not match its content")
        self.pixels = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")

    def __str__(self) -> str:
        return "an empty array" if self.pixels is None else f"uint8 {list(self.pixels.shape)}"


def _encode(text: str, encoding: str) -> bytes:
    """Decode bytes that Python 3 wrote into a pickle for Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes must be written as latin1, got {encoding!r}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encode,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,  # only used as an argument of _reconstruct
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, numbers, bytes and uint8 arrays. Rejects every other global before looking it up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which official files do not; do not trust it")
        allowed = _ALLOWED[module, name]
        # A new function each time, because a pickle can set attributes on what it gets.
        return lambda *arguments: allowed(*arguments)
