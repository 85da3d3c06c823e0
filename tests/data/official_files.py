"""Generated images in the file formats in which CIFAR and STL-10 are published."""

import pickle
import struct
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Examples = tuple[Pixels, Labels]
Form = Literal["python2", "python3", "binary"]
"""python2 is what the authors publish; python3 is the same, pickled anew."""


def generated(num: int, num_classes: int, seed: int = 0, size: int = 32) -> Examples:
    """Noise tinted by the class, so that a model can learn it; every class occurs where there are enough images."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num) % num_classes).astype(np.int64)
    tints = np.random.default_rng(num_classes).integers(32, 192, (num_classes, 1, 1, 3))
    noise = rng.integers(0, 64, (num, size, size, 3))
    return (tints[labels] + noise).astype(np.uint8), labels


def write_cifar10(parent: Path, train: Examples, test: Examples, form: Form = "python2") -> Path:
    """The folder, with ``train`` in five files of equal size."""
    folder = _folder(parent, "cifar-10-batches-bin" if form == "binary" else "cifar-10-batches-py")
    if len(train[1]) % 5:
        raise ValueError(f"five files of equal size cannot hold {len(train[1])} images")
    pieces = zip(np.split(train[0], 5), np.split(train[1], 5), strict=True)
    for number, (pixels, labels) in enumerate(pieces, 1):
        write_batch(folder / f"data_batch_{number}", pixels, {b"labels": labels}, form)
    write_batch(folder / "test_batch", test[0], {b"labels": test[1]}, form)
    return folder


def write_cifar100(parent: Path, train: Examples, test: Examples, form: Form = "python2") -> Path:
    """The folder; the coarse labels are the fine ones by fives."""
    folder = _folder(parent, "cifar-100-binary" if form == "binary" else "cifar-100-python")
    for name, (pixels, labels) in {"train": train, "test": test}.items():
        write_batch(folder / name, pixels, {b"coarse_labels": labels // 5, b"fine_labels": labels}, form)
    return folder


def write_stl10(parent: Path, train: Examples, test: Examples, unlabeled: Pixels) -> Path:
    """The folder; images are 96 x 96, labels count from 0 here and from 1 in the files."""
    folder = _folder(parent, "stl10_binary")
    for name, (pixels, labels) in {"train": train, "test": test}.items():
        (folder / f"{name}_y.bin").write_bytes((labels + 1).astype(np.uint8).tobytes())
        _write_columns(folder / f"{name}_X.bin", pixels)
    _write_columns(folder / "unlabeled_X.bin", unlabeled)
    return folder


def write_batch(path: Path, pixels: Pixels, labels: dict[bytes, Labels], form: Form) -> None:
    planes = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(len(pixels), -1)
    if form == "binary":
        columns = [column.astype(np.uint8)[:, None] for column in labels.values()]
        path.with_name(f"{path.name}.bin").write_bytes(np.concatenate([*columns, planes], axis=1).tobytes())
    elif form == "python3":
        lists = {key: column.tolist() for key, column in labels.items()}
        path.write_bytes(pickle.dumps({b"data": planes, **lists}, protocol=2))
    else:
        path.write_bytes(python2_pickle(planes, {key: column.tolist() for key, column in labels.items()}))


def python2_pickle(planes: Pixels, labels: dict[bytes, list[int]]) -> bytes:
    """As Python 2 wrote it: strings are bytes, and numpy's parts have the names they had then."""
    items = [_string(b"batch_label"), _string(b"training batch 1 of 5"), _string(b"data"), _array(planes)]
    for key, values in labels.items():
        items += [_string(key), b"](" + b"".join(map(_number, values)) + b"e"]
    items += [_string(b"filenames"), b"](" + b"".join(_string(b"image_%d.png" % row) for row in range(len(planes))) + b"e"]
    return b"\x80\x02}(" + b"".join(items) + b"u."


def _array(planes: Pixels) -> bytes:
    empty = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + _string(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + _string(b"u1") + b"K\x00K\x01\x87R"
    dtype_state = b"(K\x03" + _string(b"|") + b"NNN" + _number(-1) + _number(-1) + b"K\x00tb"
    shape = b"".join(map(_number, planes.shape)) + b"\x86"
    return empty + b"(K\x01" + shape + dtype + dtype_state + b"\x89" + _string(planes.tobytes()) + b"tb"


def _string(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<i", len(text)) + text


def _number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _write_columns(path: Path, pixels: Pixels) -> None:
    path.write_bytes(np.ascontiguousarray(pixels.transpose(0, 3, 2, 1)).tobytes())


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir(parents=True, exist_ok=True)
    return parent / name
