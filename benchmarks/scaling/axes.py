"""The six quantities that can grow, each with what is held fixed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.derived import rounded
from benchmarks.scaling.flow import Flow, echo, fill_bank, flow, python_bytes
from benchmarks.scaling.measure import Subject, interleaved
from benchmarks.scaling.workers import workers_axis
from benchmarks.slopes import halvings, power_law
from fedecho.algorithms import CA2FL, FADAS, FedBuff

SECONDS, VERSION, BYTES = "s per update", "s per version", "bytes"
Told = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How far each axis goes and how long is measured."""

    clients: list[float] = field(default_factory=lambda: halvings(100, 1_000_000, 10))
    banked: list[float] = field(default_factory=lambda: halvings(100, 100_000, 10))
    concurrency: list[float] = field(default_factory=lambda: halvings(4, 4096, 4))
    buffers: list[float] = field(default_factory=lambda: halvings(1, 1024, 4))
    params: list[float] = field(default_factory=lambda: [1e3, 1e4, 1e5, 3e5, 1e6, 3e6, 1e7])
    unlabeled: list[float] = field(default_factory=lambda: halvings(16, 16384, 4))
    workers: list[int] = field(default_factory=lambda: [1, 2, 4])
    rounds: int = 9
    worker_rounds: int = 4
    chunk_s: float = 0.06


FULL = Size()
QUICK = Size(
    clients=[100, 1000],
    banked=[100, 1000],
    concurrency=[4, 64],
    buffers=[1, 64],
    params=[1e3, 1e5],
    unlabeled=[16, 1024],
    workers=[],
    rounds=3,
    chunk_s=0.02,
)


@dataclass(frozen=True)
class Axis:
    """A name on the command line, the letter, and how it is measured."""

    title: str
    letter: str
    fixed: str
    measure: Callable[[Size, Told], list[dict[str, Any]]]


def series(name: str, unit: str, x: list[float], y: list[float], since: float = 0.0, **more: Any) -> dict[str, Any]:
    """A curve and the exponent it shows over the x from ``since`` on."""
    chosen = [(a, b) for a, b in zip(x, y, strict=True) if a >= since]
    line = power_law(*zip(*chosen, strict=True))
    fit = {"from": chosen[0][0], "to": chosen[-1][0], "exponent": round(line.exponent, 3)}
    fit |= {"scale": rounded(line.scale), "error": None if line.error is None else round(line.error, 3)}
    return {"name": name, "unit": unit, "x": x, "y": [rounded(value) for value in y], "fit": fit, **more}


def timed(named: dict[str, tuple[list[Subject], float]], unit: str, size: Size, told: Told, where: str) -> list[dict[str, Any]]:
    """All curves of an axis in the same rounds. The float beside a curve's subjects is where its line begins."""
    everything = [subject for subjects, _ in named.values() for subject in subjects]
    found = interleaved(everything, size.rounds, size.chunk_s, lambda: told(where))
    made, place = [], 0
    for name, (subjects, since) in named.items():
        mine, place = found[place : place + len(subjects)], place + len(subjects)
        quartiles = {"low": [rounded(one.low) for one in mine], "high": [rounded(one.high) for one in mine]}
        made.append(series(name, unit, [one.x for one in mine], [one.seconds for one in mine], since, **quartiles))
    return made


def subject(x: float, made: Flow, *, per: str = SECONDS, warm_up: int = 3) -> Subject:
    return Subject(x, made.work, made.buffer_size if per == SECONDS else 1, warm_up)


def clients(size: Size, told: Told) -> list[dict[str, Any]]:
    plain = [subject(n, flow(FedBuff(buffer_size=10), int(n), 64, 100)) for n in size.clients]
    echoes = {n: fill_bank(echo(int(n), 64, 740, 10, 20)) for n in size.banked}
    found = timed(
        {"FedBuff": (plain, 0), "FedEcho, every client heard": ([subject(n, made) for n, made in echoes.items()], 0)},
        SECONDS, size, told, "N",
    )  # fmt: skip
    banks = [float(made.server.state.bank.num_bytes) for made in echoes.values()]
    told("N")
    held = [float(python_bytes(int(n))) for n in size.clients]
    found.append(series("server, transport and runtimes", BYTES, size.clients, held, 10_000 if size is FULL else 0))
    found.append(series("FedEcho's bank, |U| = 20, C = 10", BYTES, size.banked, banks))
    return found


def concurrency(size: Size, told: Told) -> list[dict[str, Any]]:
    made = {mc: flow(FedBuff(buffer_size=10), 20_000, int(mc), 100) for mc in size.concurrency}
    # 20 Mc updates pass before anything is timed: then slow clients have come home, and versions as old as they are alive.
    subjects = [subject(mc, one, warm_up=max(3, 2 * int(mc))) for mc, one in made.items()]
    found = timed({"FedBuff": (subjects, 0)}, SECONDS, size, told, "Mc")
    alive = [float(one.server.versions.peak_alive * 4 * 100) for one in made.values()]
    found.append(series("models alive, d = 100", BYTES, size.concurrency, alive))
    return found


def buffers(size: Size, told: Told) -> list[dict[str, Any]]:
    late = 16 if size is FULL else 0
    plain = [flow(FedBuff(buffer_size=int(m)), 5000, 100, 100_000) for m in size.buffers]
    taught = [echo(5000, 100, 4736, int(m), 200) for m in size.buffers]
    named = {
        name: ([subject(m, one, per=VERSION) for m, one in zip(size.buffers, mine, strict=True)], late)
        for name, mine in {"FedBuff, d = 100,000": plain, "FedEcho, d = 4,736, |U| = 200": taught}.items()
    }
    return timed(named, VERSION, size, told, "M")


def params(size: Size, told: Told) -> list[dict[str, Any]]:
    late = 1e5 if size is FULL else 0
    made = {
        "FedBuff": [flow(FedBuff(buffer_size=4), 20, 4, int(d)) for d in size.params],
        "FADAS": [flow(FADAS(buffer_size=4), 20, 4, int(d)) for d in size.params],
        "CA2FL, N = 20": [flow(CA2FL(buffer_size=4, num_clients=20), 20, 4, int(d)) for d in size.params],
        "FedEcho, |U| = 50": [echo(20, 4, int(d), 4, 50) for d in size.params],
    }
    held = {name: [_bytes_after(one, 5) for one in mine] for name, mine in made.items()}
    named = {
        name: ([subject(d, one, warm_up=1) for d, one in zip(size.params, mine, strict=True)], late)
        for name, mine in made.items()
    }
    found = timed(named, SECONDS, size, told, "d")
    return found + [series(name, BYTES, size.params, mine, late) for name, mine in held.items()]


def _bytes_after(made: Flow, num_versions: int) -> float:
    made.work(num_versions)
    return float(made.tensor_bytes)


def unlabeled(size: Size, told: Told) -> list[dict[str, Any]]:
    late = 256 if size is FULL else 0
    quiet = {u: echo(20, 10, 4736, 10, int(u), steps=0) for u in size.unlabeled}
    named = {
        "logits into the bank": ([subject(u, made) for u, made in quiet.items()], late),
        "the same, and one pass of distillation": (
            [subject(u, echo(20, 10, 4736, 10, int(u))) for u in size.unlabeled],
            late,
        ),
    }
    found = timed(named, SECONDS, size, told, "|U|")
    each = [made.server.state.bank.num_bytes / len(made.server.state.bank) for made in quiet.values()]
    found.append(series("bank, by client (20 of them)", BYTES, size.unlabeled, each))
    return found


AXES = {
    "clients": Axis("Clients", "N", "Mc = 64, M = 10, d = 100 (FedEcho: 740)", clients),
    "concurrency": Axis("Concurrency", "Mc", "N = 20,000, M = 10, d = 100", concurrency),
    "buffer": Axis("Buffer", "M", "N = 5,000, Mc = 100", buffers),
    "model": Axis("Model size", "d", "N = 20, Mc = 4, M = 4", params),
    "unlabeled": Axis("Unlabeled set", "|U|", "N = 20, Mc = 10, M = 10, d = 4,736, C = 10, batches of 50", unlabeled),
    "workers": Axis("Workers", "workers", "digits, N = 20, Mc = 10, M = 3", workers_axis),
}
