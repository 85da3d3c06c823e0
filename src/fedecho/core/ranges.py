"""Ranges of settings: declared in a field's annotation, checked by ``check_ranges``.

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

MAX_COUNT = 2**31 - 1
"""The default upper limit of a count: the libraries that receive one use 32 bits."""
MAX_FACTOR = 1e9
"""The default upper limit of a float. Products of a few such numbers still fit into float32 (3.4e38)."""
MAX_FLOAT32 = 3.4e38
"""Just below the largest float32."""
TINY = 1.2e-38
"""The smallest normal float32. Smaller numbers may be rounded to 0."""
MAX_SHOWN = 40
"""How many characters of a value an error message shows."""


class SettingError(ValueError):
    """A setting out of its range. ``name`` is the field; ``told`` says what it must be and what it is."""

    def __init__(self, prefix: str, name: str, told: str) -> None:
        super().__init__(f"{prefix}{name} {told}")
        self.prefix, self.name, self.told = prefix, name, told

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prefix, self.name, self.told)


@dataclass(frozen=True)
class Range:
    """From ``least`` to ``most``; ``above`` and ``below`` exclude the ends. ``note`` explains a special value."""

    least: float
    most: float
    above: bool = False
    below: bool = False
    both_ends: bool = False
    """Whether every message states both ends of the range."""
    note: str = ""

    def fault(self, value: Any) -> str | None:
        """Return what ``value`` must be and what to do, or None if it is in the range."""
        too_small = value <= self.least if self.above else value < self.least
        too_large = value >= self.most if self.below else value > self.most
        if not (too_small or too_large or isnan(value)):
            if self.above and self.least == 0 and value < TINY:
                return f"must be above 0{self.note}, got {format_value(value)}, which float32 may round to 0"
            return None
        if self.both_ends or self.most == inf:
            return f"must be {self}{self.note}, got {format_value(value)}"
        limit = self._upper if too_large else self._lower
        return f"must be {limit}{self.note}, got {format_value(value)}: choose a value {self}"

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
            word = ("between", "and") if self.both_ends else ("from", "to")
            return f"{word[0]} {_plainly(self.least)} {word[1]} {_plainly(self.most)}"
        return f"{self._lower} and {self._upper}"


def at_least(least: float, most: float = MAX_COUNT, note: str = "") -> Range:
    return Range(least, most, note=note)


def positive(most: float = MAX_FACTOR, note: str = "") -> Range:
    return Range(0, most, above=True, note=note)


def between(least: float, most: float) -> Range:
    return Range(least, most, both_ends=True)


def share(*, above: bool = False, below: bool = False) -> Range:
    """Return the range of a fraction, from 0 to 1; ``above`` excludes 0 and ``below`` excludes 1."""
    return Range(0, 1, above, below, both_ends=True)


SEEDS = Range(-(2**63), 2**63 - 1)
"""Signed 64-bit integers, the limit of torch and of Flower's messages."""
Seed = Annotated[int, SEEDS]
NumClients = Annotated[int, at_least(1, most=10**8)]
"""At most a hundred million: the server keeps a few bytes per client."""
VERSIONS = at_least(1, most=10**7)
"""At most ten million: the record has a line per version."""
Versions = Annotated[int, VERSIONS]
InFlight = Annotated[int, at_least(1, most=10**6)]
"""At most a million clients at once: each has an open job and may have an update in the buffer."""
Rate = Annotated[float, positive(most=1e30)]
"""A learning rate. Large ones may make a run diverge on purpose, but near 1e38 a step overflows float32."""
Decay = Annotated[float, share(below=True)]
"""The decay rate of a moment in Adam-like optimizers."""
Epsilon = Annotated[float, positive(most=1.0)]
"""The constant that Adam-like optimizers add to the denominator."""
Factor = Annotated[float, at_least(0, most=MAX_FACTOR)]


class Declared(NamedTuple):
    """The values a field allows: a number in a range, one of a few strings, or None."""

    allowed: Range | None
    is_whole: bool
    choices: tuple[Any, ...]
    optional: bool

    def fault(self, value: Any) -> str | None:
        if (value is None and self.optional) or (type(value) is str and value in self.choices):
            return None
        if self.allowed is None:
            return f"must be {_either(self.choices)}, got {format_value(value)}"
        kind: type[Any] = Integral if self.is_whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return f"must be {'a whole number' if self.is_whole else 'a number'}{self.allowed.note}, got {format_value(value)}"
        return self.allowed.fault(value)


def check_ranges(settings: object, prefix: str = "") -> None:
    """Raise a ``SettingError`` for the first field out of its declared range. ``prefix`` precedes the field's name."""
    cls: Any = type(settings)
    for name, declared in ranges_of(cls).items():
        if (fault := declared.fault(getattr(settings, name))) is not None:
            raise SettingError(prefix, name, fault)


@cache
def ranges_of(cls: type[object]) -> dict[str, Declared]:
    """Return the ranges that the annotations of a class declare. String annotations, as in a user's subclass, are ignored."""
    ranges: dict[str, Declared] = {}
    for base in reversed(cls.__mro__):
        for name, hint in get_annotations(base).items():
            if (declared := declared_by(hint)) is not None:
                ranges[name] = declared
    return ranges


def declared_by(hint: Any) -> Declared | None:
    """Return what an annotation declares, or None if it declares no range and no choices."""
    parts = list(_parts(hint))
    ranges = [part for part in parts if isinstance(part, Range)]
    choices = tuple(choice for part in parts if get_origin(part) is Literal for choice in get_args(part))
    if not ranges and not choices:
        return None
    return Declared(ranges[0] if ranges else None, int in parts, choices, type(None) in parts)


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the alternatives of a type hint and their annotations."""
    if get_origin(hint) is Annotated:
        yield from _parts(get_args(hint)[0])
        yield from hint.__metadata__
    elif get_origin(hint) in (Union, UnionType):
        for option in get_args(hint):
            yield from _parts(option)
    else:
        yield hint


def format_value(value: Any) -> str:
    """Format a value for an error message of one line."""
    try:
        text = str(value) if isinstance(value, Real) else repr(value)
    except ValueError:  # more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def _plainly(number: float) -> str:
    """Format a limit; whole numbers in full."""
    return str(number) if isinstance(number, int) else f"{number:.15g}"


def _either(choices: tuple[Any, ...]) -> str:
    if len(choices) > 3:
        return f"one of {', '.join(choices)}"
    *first, last = map(repr, choices)
    return f"{', '.join(first)} or {last}" if first else last
