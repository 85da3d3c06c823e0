"""An hour of virtual traffic at this machine's highest rate: no leaks, and every update is counted exactly once.

    python -m benchmarks.soak --out soak                    an hour of traffic in about three minutes
    python -m benchmarks.soak --real-s 10 --virtual-s 60    a short one

Clients train nothing: their updates are ready-made, so all the time goes to the server, the clock and the border. Clients
join, leave, drop out, report twice, report what nobody asked for, and send updates that are wrong in a dozen ways. How fast the
machine is, is measured first; the clients' runtimes are then set so that the hour takes the real time asked for.
"""

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import at_least_one, positive
from fedecho import FedBuff
from fedecho.core.loop import Moment, drive
from fedecho.core.randomness import below, uniform
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Message, Weights
from fedecho.executors.executor import Job
from fedecho.simulation.faults import Faults
from fedecho.simulation.transport import VirtualTransport

NUM_PARAMS, NUM_BUFFERS = 1000, 10
BAD_SHARE, UNASKED_SHARE, DROPOUT = 0.05, 0.02, 0.05
SAMPLES = 200
MOST_GROWTH_MB = 10
FOREVER = 10**12


def bad(update: ClientUpdate, kind: int, value: float) -> ClientUpdate:
    """Wrong in one of a dozen ways; ``value`` makes no two of them alike."""
    huge = int(value * 1e15)
    ways: list[dict[str, Any]] = [
        {"delta": torch.full((NUM_PARAMS,), nan)},
        {"delta": torch.full((NUM_PARAMS,), inf)},
        {"delta": torch.full((NUM_PARAMS,), 1e9 * (1 + value))},
        {"delta": torch.zeros(1 + huge % NUM_PARAMS)},
        {"delta": torch.zeros(NUM_PARAMS, dtype=torch.float64)},
        {"delta": torch.zeros(NUM_PARAMS, device="meta")},
        {"buffers": torch.full((NUM_BUFFERS,), -inf)},
        {"buffers": torch.zeros(0)},
        {"num_examples": -huge},
        {"num_examples": 10**10 + huge},
        {"base_version": huge},
        {"metrics": {f"loss {huge}": nan}},
    ]
    return replace(update, **ways[kind % len(ways)])


@dataclass
class ReadyMade:
    """An executor that trains nothing: one delta of unit length for everybody, and a bad one now and then."""

    seed: int
    jobs: dict[int, Job] = field(default_factory=dict)
    delta: Any = field(default_factory=lambda: torch.full((NUM_PARAMS,), NUM_PARAMS**-0.5))
    buffers: Any = field(default_factory=lambda: torch.ones(NUM_BUFFERS))

    def submit(self, job: Job, due: float) -> None:
        self.jobs[job.dispatch.number] = job

    def result(self, number: int) -> ClientUpdate:
        dispatch = self.jobs.pop(number).dispatch
        update = ClientUpdate(dispatch.client, dispatch.model.version, self.delta, self.buffers, 7, 3, None, {"loss": 0.5})
        chance = uniform(self.seed, "bad", number)
        return bad(update, number, chance) if chance < BAD_SHARE else update

    def cancel(self, number: int) -> None:
        self.jobs.pop(number, None)

    def close(self) -> None:
        self.jobs.clear()


@dataclass
class Runtimes:
    """Uniform around a mean that is set once the machine's speed is known; one client in ten is ten times slower."""

    seed: int
    mean_s: float = 1.0

    def class_of(self, client: int) -> str:
        return "long" if client % 10 == 0 else "short"

    def draw(self, client: int, dispatch: int) -> float:
        return self.mean_s * (10 if client % 10 == 0 else 1) * (0.5 + uniform(self.seed, "runtime", dispatch))


class Noisy(VirtualTransport):
    """Beside what it should bring, it brings updates twice, of clients that were not asked, and of clients nobody knows."""

    again: Message | None = None
    received = 0

    def send(self, dispatch: Dispatch) -> None:
        """A stray message has ended the client's job at the server; at the client the new one ends the old."""
        before = self.open.get(dispatch.client)
        if before is not None:
            self.executor.cancel(before.number)
        super().send(dispatch)

    def receive(self) -> Message:
        self.received += 1
        if self.again is not None:
            message, self.again = self.again, None
            return message
        message = super().receive()
        if isinstance(message, ClientUpdate) and uniform(self.seed, "unasked", self.received) < UNASKED_SHARE:
            strangers = (
                message.client,
                below(self.num_clients, self.seed, "stranger", self.received),
                -1,
                10**9 + self.received,
            )
            self.again = replace(message, client=strangers[self.received % 4])
        return message


class Books:
    """Every dispatch is in flight from the moment it is sent until the one message that ends it; kept apart from the server's."""

    def __init__(self, server: Server[Any], jobs: dict[int, Job]) -> None:
        self.server, self.jobs = server, jobs
        self.in_flight: set[int] = set()
        self.ended: Counter[str] = Counter()
        self.unasked = self.moments = self.sent = 0

    def send(self, dispatch: Dispatch) -> None:
        assert dispatch.number == self.sent, "dispatches are numbered one by one"
        self.in_flight.add(dispatch.number)
        self.sent += 1

    def see(self, moment: Moment) -> None:
        """Checked at every message: accepted + rejected + lost + in flight = dispatched, by their books and by ours."""
        receipt, server = moment.receipt, self.server
        self.moments += 1
        if receipt.dispatch >= 0:
            self.in_flight.remove(receipt.dispatch)  # a KeyError if it had ended before
            self.ended[receipt.status] += 1
        else:
            self.unasked += receipt.status == "rejected"
        counts = server.counts
        asked = counts["accepted"] + counts["rejected"] - self.unasked + counts["lost"]
        assert asked == self.ended.total()
        assert server.num_dispatched == self.sent == asked + len(server.open)
        assert len(server.open) <= server.concurrency
        assert server.versions.num_alive <= server.concurrency + 1

    def check_in_flight(self) -> None:
        """The numbers themselves, not only how many: costs as much as there are."""
        assert self.in_flight == {work.number for work in self.server.open.values()}
        assert len(self.jobs) <= 2 * self.server.concurrency, "jobs that nobody waits for pile up"


def megabytes() -> tuple[float, float]:
    """Resident now, and what of it is the process's own: under pressure the kernel drops pages of programs and libraries."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["VmRSS"].split()[0]) / 1024, int(rows["RssAnon"].split()[0]) / 1024


@dataclass
class Soak:
    """The traffic, and what is measured of it."""

    server: Server[Any]
    transport: Noisy
    books: Books
    began: float = field(default_factory=time.perf_counter)
    samples: list[tuple[float, float, float, float, int]] = field(default_factory=list)
    """Real seconds, virtual hours, resident MB, own MB, versions alive."""

    def run(self, until_virtual_s: float, sample_every_s: float) -> None:
        step, start = until_virtual_s / 10_000, self.transport.now
        due = [start, start]

        def watch(moment: Moment) -> bool:
            self.books.see(moment)
            if moment.time >= due[0]:
                due[0] += step
                self.books.check_in_flight()
            if moment.time >= due[1]:
                due[1] += sample_every_s
                self.sample()
            return moment.time >= until_virtual_s

        drive(self.server, self.transport, num_versions=FOREVER, watch=watch)
        self.sample()

    def sample(self) -> None:
        alive = self.server.versions.num_alive
        self.samples.append((time.perf_counter() - self.began, self.transport.now / 3600, *megabytes(), alive))


def traffic(seed: int, num_clients: int, concurrency: int, mean_s: float) -> Soak:
    model = GlobalModel(0, Weights(torch.zeros(NUM_PARAMS), torch.zeros(NUM_BUFFERS)))
    server: Server[Any] = Server(
        algorithm=FedBuff(buffer_size=10), model=model, num_clients=num_clients, concurrency=concurrency, seed=seed
    )
    faults = Faults(dropout=DROPOUT, available_s=300 * mean_s, unavailable_s=100 * mean_s)
    executor = ReadyMade(seed)
    transport = Noisy(executor=executor, runtimes=Runtimes(seed, mean_s), num_clients=num_clients, seed=seed, faults=faults)
    books = Books(server, executor.jobs)
    send = transport.send

    def sent(dispatch: Dispatch) -> None:
        books.send(dispatch)
        send(dispatch)

    transport.send = sent  # type: ignore[method-assign]
    return Soak(server, transport, books)


def messages_per_s(seed: int, num_clients: int, concurrency: int, messages: int = 20_000) -> tuple[float, float]:
    """How many messages this machine takes per real second, and per virtual second at a mean runtime of one."""
    soak = traffic(seed, num_clients, concurrency, 1.0)
    began = time.perf_counter()

    def watch(moment: Moment) -> bool:
        soak.books.see(moment)
        return soak.books.moments >= messages

    drive(soak.server, soak.transport, num_versions=FOREVER, watch=watch)
    return messages / (time.perf_counter() - began), messages / soak.transport.now


def plot(soak: Soak, folder: Path) -> str:
    try:
        import matplotlib as mpl
    except ImportError:
        return "no plot: pip install matplotlib draws one"
    mpl.use("Agg")
    from matplotlib import pyplot

    _, hours, resident, own, alive = zip(*soak.samples, strict=True)
    figure, (above, below_it) = pyplot.subplots(2, sharex=True, figsize=(8, 5), layout="constrained")
    above.plot(hours, resident, label="resident")
    above.plot(hours, own, label="of which its own")
    above.legend(loc="lower right")
    above.set(ylabel="memory, MB", ylim=(0, 1.2 * max(resident)), title=f"{soak.books.moments:,} messages")
    below_it.plot(hours, alive)
    bound = soak.server.concurrency + 1
    below_it.axhline(bound, linestyle="--", color="grey")
    below_it.text(0, bound, "the bound, Mc + 1", va="bottom")
    below_it.set(ylabel="versions alive", xlabel="virtual hours", ylim=(0, 1.2 * bound))
    figure.savefig(folder / "soak.png", dpi=120)
    pyplot.close(figure)
    return f"the plot is {folder / 'soak.png'}"


def report(soak: Soak) -> None:
    real, hours, resident, own, alive = zip(*soak.samples, strict=True)
    books, server = soak.books, soak.server
    ended, counts, bound = books.ended, server.counts, server.concurrency + 1
    rate = books.moments / real[-1]
    settled = len(own) // 10
    for line in (
        f"soak: {hours[-1]:.2f} virtual hours in {real[-1]:.0f} s: {books.moments:,} messages, {rate:,.0f} a second",
        f"  {books.sent:,} dispatches = {ended['accepted']:,} accepted + {ended['rejected']:,} rejected + {ended['lost']:,} lost "
        f"+ {len(books.in_flight):,} in flight; checked at every message",
        f"  beside them {books.unasked:,} updates nobody asked for, {counts['joined']:,} joins, {counts['left']:,} leaves",
        f"  {server.model.version:,} versions, at most {server.versions.peak_alive} alive of {bound}",
        f"  {len(server.reasons)} reasons counted: {dict(server.reasons.most_common())}",
        f"  resident MB: first {resident[0]:.1f}, last {resident[-1]:.1f}, max {max(resident):.1f}",
        f"  of which its own: first {own[0]:.1f}, after a tenth {own[settled]:.1f}, last {own[-1]:.1f}, max {max(own):.1f}",
    ):
        print(line)
    assert max(alive) <= bound
    assert own[-1] - own[settled] < MOST_GROWTH_MB, "memory grows"


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual-s", type=positive, default=3600.0)
    parser.add_argument("--real-s", type=positive, default=180.0, help="how long it may take, about")
    parser.add_argument("--num-clients", type=at_least_one, default=2000)
    parser.add_argument("--concurrency", type=at_least_one, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a folder for the plot")
    options = parser.parse_args()
    size = (options.seed, options.num_clients, options.concurrency)
    real_rate, virtual_rate = messages_per_s(*size)
    mean_s = virtual_rate * options.virtual_s / (real_rate * options.real_s)
    soak = traffic(*size, mean_s)
    soak.run(options.virtual_s, options.virtual_s / SAMPLES)
    report(soak)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        print(f"  {plot(soak, options.out)}")


if __name__ == "__main__":
    main()
