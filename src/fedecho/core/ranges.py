"""Ranges of settings, declared on the field and checked in one place.

>>> @dataclass(frozen=True)
... class Pace:
...     workers: Annotated[int, at_least(1, most=64)] = 2
...     def __post_init__(self) -> None:
...         check_ranges(self)
>>> Pace(workers=0)
Traceback (most recent call last):
fedecho.core.ranges.SettingError: workers must be at least 1, got 0: choose a value from 1 to 64
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import get_annotations
from math import inf, isnan
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

MOST = 2**31 - 1
"""The default upper limit of a count: every library we hand one to takes 32 bits."""
MOST_FACTOR = 1e9
"""The default upper limit of a number: far from what float32 holds (3.4e38), even after some products."""
TINY = 1.2e-38
"""The smallest normal number of float32. What is smaller may be computed as 0."""
SHOWN = 40


class SettingError(ValueError):
    """A setting out of its range: ``name`` is the field's, ``told`` says what it must be and what it is."""

    def __init__(self, prefix: str, name: str, told: str) -> None:
        super().__init__(f"{prefix}{name} {told}")
        self.prefix, self.name, self.told = prefix, name, told

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prefix, self.name, self.told)


@dataclass(frozen=True)
class Range:
    """From ``least`` to ``most``; ``above`` and ``below`` exclude the ends. ``note`` says what one of the values means."""

    least: float
    most: float
    above: bool = False
    below: bool = False
    whole: bool = False
    """Name both ends in every message: of ranges that are best known as such."""
    note: str = ""

    def fault(self, value: Any) -> str | None:
        """What ``value`` must be and what to do, or None."""
        too_small = value <= self.least if self.above else value < self.least
        too_large = value >= self.most if self.below else value > self.most
        if not (too_small or too_large or isnan(value)):
            if self.above and self.least == 0 and value < TINY:
                return f"must be above 0{self.note}, got {shown(value)}, which float32 may take for 0"
            return None
        if self.whole or self.most == inf:
            return f"must be {self}{self.note}, got {shown(value)}"
        wanted = self._upper if too_large else self._lower
        return f"must be {wanted}{self.note}, got {shown(value)}: choose a value {self}"

    @property
    def _lower(self) -> str:
        return f"{'above' if self.above else 'at least'} {_plainly(self.least)}"

    @property
    def _upper(self) -> str:
        return f"{'below' if self.below else 'at most'} {_plainly(self.most)}"

    def __str__(self) -> str:
        if self.most == inf:
            return self._lower
        if self.above == self.below:
            word = ("between", "and") if self.whole else ("from", "to")
            return f"{word[0]} {_plainly(self.least)} {word[1]} {_plainly(self.most)}"
        return f"{self._lower} and {self._upper}"


def at_least(least: float, most: float = MOST, note: str = "") -> Range:
    return Range(least, most, note=note)


def positive(most: float = MOST_FACTOR, note: str = "") -> Range:
    return Range(0, most, above=True, note=note)


def between(least: float, most: float) -> Range:
    return Range(least, most, whole=True)


def share(*, above: bool = False, below: bool = False) -> Range:
    """A part of a whole, from 0 to 1; ``above`` excludes 0, ``below`` 1."""
    return Range(0, 1, above, below, whole=True)


SEEDS = Range(-(2**63), 2**63 - 1)
"""64 bits, as torch and Flower's messages have them."""
Seed = Annotated[int, SEEDS]
NumClients = Annotated[int, at_least(1, most=10**8)]
"""A hundred million: some bytes of each are held."""
VERSIONS = at_least(1, most=10**7)
"""Ten million: a record has a line for each."""
Versions = Annotated[int, VERSIONS]
InFlight = Annotated[int, at_least(1, most=10**6)]
"""A million clients at once: each has a job, and a place in the buffer."""
Rate = Annotated[float, positive(most=1e30)]
"""A learning rate. Some are meant to make a run diverge; from 1e38 on, a step is not even a number of float32."""
Decay = Annotated[float, share(below=True)]
"""Of a moment of Adam's kind."""
Epsilon = Annotated[float, positive(most=1.0)]
"""What Adam's kind adds to a denominator."""
Factor = Annotated[float, at_least(0, most=MOST_FACTOR)]


class Declared(NamedTuple):
    """What one field may hold: a number in a range, one of some texts, or None."""

    allowed: Range | None
    is_whole: bool
    choices: tuple[Any, ...]
    optional: bool

    def fault(self, value: Any) -> str | None:
        if (value is None and self.optional) or (type(value) is str and value in self.choices):
            return None
        if self.allowed is None:
            return f"must be {_either(self.choices)}, got {shown(value)}"
        kind: type[Any] = Integral if self.is_whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return f"must be {'a whole number' if self.is_whole else 'a number'}{self.allowed.note}, got {shown(value)}"
        return self.allowed.fault(value)


def check_ranges(settings: object, prefix: str = "") -> None:
    """Is every field in the range that its class declares? ``prefix`` stands before the field's name in the error."""
    cls: Any = type(settings)
    for name, declared in ranges_of(cls).items():
        if (fault := declared.fault(getattr(settings, name))) is not None:
            raise SettingError(prefix, name, fault)


@cache
def ranges_of(cls: type[object]) -> dict[str, Declared]:
    """What the annotations of a class say. One that is still a text, as in a user's subclass, says nothing."""
    found: dict[str, Declared] = {}
    for base in reversed(cls.__mro__):
        for name, hint in get_annotations(base).items():
            if (declared := declared_by(hint)) is not None:
                found[name] = declared
    return found


def declared_by(hint: Any) -> Declared | None:
    parts = list(_parts(hint))
    ranges = [part for part in parts if isinstance(part, Range)]
    choices = tuple(choice for part in parts if get_origin(part) is Literal for choice in get_args(part))
    if not ranges and not choices:
        return None
    return Declared(ranges[0] if ranges else None, int in parts, choices, type(None) in parts)


def _parts(hint: Any) -> Iterator[Any]:
    """The alternatives of a hint, and what they are annotated with."""
    if get_origin(hint) is Annotated:
        yield from _parts(get_args(hint)[0])
        yield from hint.__metadata__
    elif get_origin(hint) in (Union, UnionType):
        for option in get_args(hint):
            yield from _parts(option)
    else:
        yield hint


def shown(value: Any) -> str:
    """A value as a line can hold it."""
    try:
        text = str(value) if isinstance(value, Real) else repr(value)
    except ValueError:  # more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def _plainly(number: float) -> str:
    """A limit: whole numbers in full."""
    return str(number) if isinstance(number, int) else f"{number:.15g}"


def _either(choices: tuple[Any, ...]) -> str:
    if len(choices) > 3:
        return f"one of {', '.join(choices)}"
    *first, last = map(repr, choices)
    return f"{', '.join(first)} or {last}" if first else last
