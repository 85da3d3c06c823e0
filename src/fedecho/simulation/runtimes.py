"""Client runtimes in virtual seconds: a class per client, a draw per dispatch, or a user's trace."""

import csv
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedecho.core.randomness import below, numpy_rng, uniform
from fedecho.core.ranges import Factor, check_ranges, positive, share
from fedecho.storage.user_files import GIB, FileError, open_regular

UNKNOWN = 255
"""Code of a client whose class has not been drawn yet."""


class Classes:
    """The class name of each client. With ``draw``, a client's class is drawn when it is first looked up."""

    def __init__(self, names: tuple[str, ...], codes: bytearray, draw: Callable[[int], int] | None = None) -> None:
        self.names = names
        self._codes = codes
        self._draw = draw

    @classmethod
    def drawn(cls, names: tuple[str, ...], num_clients: int, draw: Callable[[int], int]) -> "Classes":
        return cls(names, bytearray([UNKNOWN]) * num_clients, draw)

    def __getitem__(self, client: int) -> str:
        code = self._codes[client]
        if code == UNKNOWN and self._draw is not None:
            code = self._codes[client] = self._draw(client)
        return self.names[code]

    def counts(self) -> dict[str, int] | None:
        """Return the number of clients per class, or None if that would require drawing all of them."""
        if self._draw is not None:
            return None
        return {name: self._codes.count(code) for code, name in enumerate(self.names)}


SHORT, MEDIUM, LONG = NAMES = ("short", "medium", "long")
UNIT_S = 10.0
"""The paper's table is in units of 10 seconds."""

PROFILES: dict[str, dict[str, tuple[float, float]]] = {
    "large": {SHORT: (1, 2), MEDIUM: (3, 5), LONG: (50, 80)},
    "mild": {SHORT: (1, 2), MEDIUM: (3, 5), LONG: (10, 20)},
    "equal": {SHORT: (1, 1), MEDIUM: (1, 1), LONG: (1, 1)},
}


class ClientRuntimes(Protocol):
    """The runtimes of one federation: a class per client, a draw per dispatch."""

    def class_of(self, client: int) -> str: ...

    def draw(self, client: int, dispatch: int) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Runtimes:
    """Runtime classes as in section 5 of the paper, or a trace of a user's own clients.

    ``rule = "size"``: score = size rank in [0, 1] + gamma u; the top ``long_share`` are Long, the next ``medium_share`` Medium.
    With gamma 0 only the size counts; a large gamma makes the classes random. ``rule = "order"``: clients 0, 1, ... are Long, the
    next Medium. ``rule = "fadas"``: argmax of a Dirichlet(3s, 2s, s) draw with s = ``spread``. ``trace`` is a CSV file with
    columns client,runtime_s; every dispatch draws one of its client's rows.
    """

    profile: Literal["large", "mild", "equal"] = "large"
    rule: Literal["size", "fadas", "order"] = "size"
    runtime_gamma: Factor = 1.0
    long_share: Annotated[float, share()] = 0.10
    medium_share: Annotated[float, share()] = 0.29
    spread: Annotated[float, positive()] = 1.0
    trace: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "runtimes.")
        if self.long_share + self.medium_share > 1:
            raise ValueError(
                f"long_share and medium_share must add up to at most 1, got {self.long_share} and {self.medium_share}"
            )

    def assign(self, sizes: Sequence[int] | NDArray[np.int64], seed: int) -> ClientRuntimes:
        """Assign a class, or the rows of the trace, to every client."""
        if self.trace is not None:
            return TracedRuntimes(read_trace(Path(self.trace), len(sizes)), seed)
        classes = self._by_dirichlet(len(sizes), seed) if self.rule == "fadas" else self._by_rank(sizes, seed)
        return ClassRuntimes(PROFILES[self.profile], classes, seed)

    def _by_rank(self, sizes: Sequence[int] | NDArray[np.int64], seed: int) -> Classes:
        num_clients = len(sizes)
        slowest_first = np.arange(num_clients) if self.rule == "order" else self._largest_first(sizes, seed)
        num_long = int(self.long_share * num_clients + 1e-9)
        num_medium = min(round(self.medium_share * num_clients), num_clients - num_long)
        codes = np.zeros(num_clients, np.uint8)
        codes[slowest_first[: num_long + num_medium]] = NAMES.index(MEDIUM)
        codes[slowest_first[:num_long]] = NAMES.index(LONG)
        return Classes(NAMES, bytearray(codes.tobytes()))

    def _largest_first(self, sizes: Sequence[int] | NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        num_clients = len(sizes)
        rank = np.argsort(np.argsort(sizes, kind="stable"), kind="stable") / max(num_clients - 1, 1)
        jitter = np.fromiter((uniform(seed, "runtime class", client) for client in range(num_clients)), np.float64, num_clients)
        return np.argsort(-(rank + self.runtime_gamma * jitter), kind="stable")

    def _by_dirichlet(self, num_clients: int, seed: int) -> Classes:
        """Draw lazily, on first lookup: a Dirichlet draw takes twenty times as long as ``uniform``."""
        shape = np.array([3.0, 2.0, 1.0]) * self.spread
        rng = partial(numpy_rng, seed, "runtime class")
        return Classes.drawn(NAMES, num_clients, lambda client: int(rng(client).dirichlet(shape).argmax()))


@dataclass(frozen=True)
class ClassRuntimes:
    """Runtimes from U(low, high) of the client's class, in units of 10 s."""

    profile: dict[str, tuple[float, float]]
    classes: Sequence[str] | Classes
    seed: int

    def class_of(self, client: int) -> str:
        return self.classes[client]

    def draw(self, client: int, dispatch: int) -> float:
        low, high = self.profile[self.classes[client]]
        return UNIT_S * (low + (high - low) * uniform(self.seed, "runtime", dispatch))


@dataclass(frozen=True)
class Trace:
    """The observed runtimes of all clients, concatenated; client i's are ``runtimes[starts[i]:starts[i + 1]]``."""

    runtimes: Sequence[float]
    starts: Sequence[int]

    def of(self, client: int) -> list[float]:
        return list(self.runtimes[self.starts[client] : self.starts[client + 1]])


@dataclass(frozen=True)
class TracedRuntimes:
    """Runtimes drawn from the client's own observations."""

    trace: Trace
    seed: int

    def class_of(self, client: int) -> str:
        return "traced"

    def draw(self, client: int, dispatch: int) -> float:
        start, end = self.trace.starts[client], self.trace.starts[client + 1]
        return self.trace.runtimes[start + below(end - start, self.seed, "runtime", dispatch)]


def read_trace(path: Path, num_clients: int) -> Trace:
    """Read a trace file. Errors name the file and the line."""
    clients, runtimes = array("q"), array("d")
    try:
        with TextIOWrapper(open_regular(path, GIB), encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            if not {"client", "runtime_s"} <= set(reader.fieldnames or ()):
                raise ValueError(f"{path}: the header must contain the columns client,runtime_s, got {reader.fieldnames}")
            for row in reader:
                client, runtime = _trace_row(path, reader.line_num, row, num_clients)
                clients.append(client)
                runtimes.append(runtime)
    except FileError as error:
        raise ValueError(f"cannot read the trace {path}: {error.reason}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot read the trace {path}: {error}") from None
    client_of = np.array(clients, dtype=np.int64)
    counts = np.bincount(client_of, minlength=num_clients)
    if not counts.all():
        missing = np.flatnonzero(counts == 0)
        raise ValueError(f"{path}: no runtime for client {missing[0]} ({len(missing)} of {num_clients} clients have none)")
    by_client = np.array(runtimes)[np.argsort(client_of, kind="stable")]
    return Trace(array("d", by_client.tobytes()), array("q", np.concatenate([[0], counts.cumsum()]).astype(np.int64).tobytes()))


def _trace_row(path: Path, line: int, row: dict[str, str], num_clients: int) -> tuple[int, float]:
    if None in row:
        raise ValueError(f"{path}, line {line}: more columns than in the header (is a comma used as the decimal point?)")
    try:
        client, runtime = int(row["client"]), float(row["runtime_s"])
    except (TypeError, ValueError):
        raise ValueError(f"{path}, line {line}: client and runtime_s must be numbers, got {row}") from None
    if not 0 <= client < num_clients:
        raise ValueError(f"{path}, line {line}: client must be between 0 and {num_clients - 1}, got {client}")
    if not (isfinite(runtime) and runtime > 0):
        raise ValueError(f"{path}, line {line}: runtime_s must be above 0, got {runtime}")
    return client, runtime
