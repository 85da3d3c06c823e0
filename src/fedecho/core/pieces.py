"""A safetensors file written piece by piece. The library's own writer wants all tensors, and all their bytes again, in memory."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

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


class Later(ABC):
    """A tensor that is made when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @abstractmethod
    def tensor(self) -> Tensor: ...


Held = Tensor | Later


def made(held: Held) -> Tensor:
    return held if isinstance(held, Tensor) else held.tensor()


def bytes_of(held: Held) -> memoryview:
    """Without a copy where the tensor is whole and on the CPU."""
    flat = made(held).detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data).cast("B") if flat.numel() else memoryview(b"")


def pieces_of(tensors: Mapping[str, Held], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The header, then each tensor; the widest types first, so that all lie as the machine reads them best."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    end = 0
    for name in order:
        held = tensors[name]
        if held.dtype not in DTYPES:
            raise TypeError(f"a checkpoint cannot hold a tensor of {held.dtype}")
        start, end = end, end + prod(held.shape) * held.dtype.itemsize
        header[name] = {"dtype": DTYPES[held.dtype], "shape": list(held.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield bytes_of(tensors[name])
