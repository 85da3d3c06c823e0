"""Argument types of the benchmarks. argparse reports which argument is invalid, and why."""

import math
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection
from typing import TypeVar

import torch

Value = TypeVar("Value")


def at_least_one(text: str) -> int:
    """A whole number from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"it must be a whole number from 1, got {text!r}")
    return number


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (number > 0 and math.isfinite(number)):
        raise ArgumentTypeError(f"it must be a number above 0, got {text!r}")
    return number


def listed(kind: Callable[[str], Value], allowed: Collection[Value] | None = None) -> Callable[[str], list[Value]]:
    """Values separated by commas."""

    def read(text: str) -> list[Value]:
        try:
            values = [kind(part.strip()) for part in text.split(",")]
        except ValueError as error:
            raise ArgumentTypeError(f"it must be values separated by commas, got {text!r} ({error})") from None
        for value in values:
            if allowed is not None and value not in allowed:
                raise ArgumentTypeError(f"each must be one of {', '.join(map(str, allowed))}, got {value!r}")
        return values

    return read


def need_gpu(parser: ArgumentParser) -> None:
    if not torch.cuda.is_available():
        parser.error("it needs an NVIDIA GPU, and torch sees none here")
