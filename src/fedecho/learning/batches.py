"""Batches as trees of tensors: a task may hand out a tensor, a pair, a dict, a dataclass, or such things inside each other."""

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from fedecho.core.task import Batch

PLAIN = (bool, int, float, str, type(None))


def mapped(batch: Batch, change: Callable[[Tensor], Any]) -> Any:
    """The same tree with every tensor changed, in a fixed order.

    >>> mapped({"x": (1, None)}, Tensor.clone)
    {'x': (1, None)}
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, PLAIN):
        return batch
    if type(batch) in (tuple, list):
        return type(batch)(mapped(part, change) for part in batch)
    if type(batch) is dict:
        return {name: mapped(part, change) for name, part in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{part.name: mapped(getattr(batch, part.name), change) for part in fields(batch)})
    raise TypeError(f"its batches hold a {type(batch).__name__}")


def tensors_of(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(batch, found.append)
    return found


def shape_of(batch: Batch) -> Hashable:
    """Equal for batches that differ in nothing but the values in their tensors."""
    if isinstance(batch, Tensor):
        return (*batch.shape, batch.dtype, batch.device)
    if isinstance(batch, PLAIN):
        return type(batch), batch
    if type(batch) in (tuple, list):
        return type(batch), tuple(map(shape_of, batch))
    if type(batch) is dict:
        return tuple((name, shape_of(part)) for name, part in batch.items())
    if is_dataclass(batch) and not isinstance(batch, type):
        return type(batch), tuple(shape_of(getattr(batch, part.name)) for part in fields(batch))
    raise TypeError(f"its batches hold a {type(batch).__name__}")
