"""Flower's arrays (the .npy format) to tensors and back, without copies where that is possible and never with pickle.

``numpy.load`` allocates whatever an array's header claims. Here the header is compared first with what is expected.
"""

from io import BytesIO
from math import prod

import numpy as np
import torch
from flwr.app import Array
from numpy.lib import format as npy
from torch import Tensor

NUMPY = "numpy.ndarray"


def to_array(tensor: Tensor) -> Array:
    return Array(tensor.detach().cpu().contiguous().numpy())


def to_tensor(array: Array, name: str, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    """The array as a tensor of this very shape and type; anything else is an error that says what came."""
    if array.stype != NUMPY:
        raise ValueError(f"{name!r} is serialized as {array.stype!r}, not {NUMPY!r}")
    got, fortran, kind, start = _header(array.data, name)
    if got != shape:
        raise ValueError(f"{name!r} must have shape {shape}, got {got}")
    if kind != np.dtype(dtype):
        raise ValueError(f"{name!r} must be of type {dtype}, got {kind}")
    size = prod(shape)
    if len(array.data) - start != size * kind.itemsize:
        raise ValueError(f"{name!r} holds {len(array.data) - start} bytes, not {size * kind.itemsize}")
    if size == 0:
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    values = np.frombuffer(bytearray(memoryview(array.data)[start:]), kind, size)
    return torch.from_numpy(values.reshape(shape, order="F" if fortran else "C"))


def shape_of(array: Array, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and type as the data says, not as the label does."""
    shape, _, kind, _ = _header(array.data, name)
    return shape, str(kind)


def _header(data: bytes, name: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
    file = BytesIO(memoryview(data)[:4096])
    try:
        major, _ = npy.read_magic(file)
        read = npy.read_array_header_1_0 if major == 1 else npy.read_array_header_2_0
        shape, fortran, kind = read(file)
    except Exception as error:  # numpy evaluates the header as Python text, which fails in many ways
        raise ValueError(f"{name!r} is no array: {error}") from None
    return tuple(shape), bool(fortran), kind, file.tell()
