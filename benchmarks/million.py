"""A million clients: arrivals per second through the real server, transport and clock, memory, and the cost of N.

    python -m benchmarks.million                                            all tables, some three minutes
    python -m benchmarks.million rate --num-clients 10000000                one of: rate, clients, model, simulate
    python -m benchmarks.million --num-clients 100000 --arrivals 30000      a smaller one

Clients train nothing: their updates are ready-made, so all the time is the server's, the clock's and the transport's. The time of
``rate`` is that of everything from the first dispatch to the last message, the 10,000 first dispatches included. ``clients``
compares N at the same Mc (500, because Mc cannot be above N) and has a line for the large Mc too; its worlds stand side by side and
take turns, some thousand messages each, so that a busy machine hurts all alike. ``model`` is what an arrival takes by the model's
size. ``simulate`` is a whole run, with its record sampled and its folder, checkpoints, summary and report.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.arguments import at_least_one
from benchmarks.verdict import verdict
from fedecho import Experiment, FedBuff, LocalTraining, simulate
from fedecho.core.loop import Moment, drive
from fedecho.core.randomness import global_rng
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, GlobalModel, Weights
from fedecho.executors.executor import Job, SerialExecutor
from fedecho.runs import build
from fedecho.simulation.runtimes import Runtimes
from fedecho.simulation.transport import VirtualTransport
from fedecho.storage.checkpoint import save_checkpoint

NUM_PARAMS, NUM_BUFFERS = 1000, 10
FOREVER = 10**12
TURN = 2000
MOST_RATIO, MOST_MB, LEAST_RATE = 1.3, 2000, 20_000


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass
class ReadyMade:
    """One update of unit length for everybody."""

    delta: Tensor = field(default_factory=lambda: torch.full((NUM_PARAMS,), NUM_PARAMS**-0.5))
    buffers: Tensor = field(default_factory=lambda: torch.ones(NUM_BUFFERS))

    def __call__(self, job: Job) -> ClientUpdate:
        dispatch = job.dispatch
        return ClientUpdate(dispatch.client, dispatch.model.version, self.delta, self.buffers, 7, 3, None, {"train_loss": 0.5})


@dataclass
class World:
    """A federation that trains nothing, and a stopwatch."""

    num_clients: int
    concurrency: int
    buffer_size: int = 100
    num_params: int = NUM_PARAMS
    seed: int = 0

    def __post_init__(self) -> None:
        began = time.perf_counter()
        model = GlobalModel(0, Weights(torch.zeros(self.num_params), torch.zeros(NUM_BUFFERS)))
        ready_made = ReadyMade(torch.full((self.num_params,), self.num_params**-0.5))
        runtimes = Runtimes().assign(range(self.num_clients), self.seed)
        self.server: Server[Any] = Server(
            algorithm=FedBuff(buffer_size=self.buffer_size),
            model=model,
            num_clients=self.num_clients,
            concurrency=self.concurrency,
            seed=self.seed,
        )
        self.transport = VirtualTransport(
            executor=SerialExecutor(ready_made), runtimes=runtimes, num_clients=self.num_clients, seed=self.seed
        )
        self.setup_s = time.perf_counter() - began

    def run(self, messages: int) -> tuple[float, float]:
        """So many messages; seconds by the wall and of this process."""
        left = messages

        def watch(moment: Moment) -> bool:
            nonlocal left
            left -= 1
            return left == 0

        wall, cpu = time.perf_counter(), time.process_time()
        drive(self.server, self.transport, num_versions=FOREVER, watch=watch)
        return time.perf_counter() - wall, time.process_time() - cpu


def rate(num_clients: int, concurrency: int, arrivals: int, buffer_size: int = 100) -> None:
    concurrency = min(concurrency, num_clients)
    world = World(num_clients, concurrency, buffer_size)
    wall, cpu = world.run(arrivals)
    server = world.server
    assert server.counts["accepted"] == arrivals == server.num_dispatched - len(server.open)
    assert len(server.open) == concurrency
    print(f"N = {num_clients:,}, Mc = {concurrency:,}, M = {server.algorithm.buffer_size}: {arrivals:,} arrivals")
    print(
        f"  {arrivals / wall:,.0f} a second ({arrivals / cpu:,.0f} a second of this process), after {world.setup_s:.1f} s to set up"
    )
    print(f"  {server.model.version:,} versions, at most {server.versions.peak_alive:,} alive; peak memory {peak_mb():,.0f} MB")
    size, seconds = _checkpoint(world)
    print(f"  a checkpoint has {size / 1e6:,.0f} MB and takes {seconds:.1f} s; peak memory with it {peak_mb():,.0f} MB")
    if num_clients == 1_000_000:
        verdict("arrivals a second", arrivals / wall, LEAST_RATE, at_least=True)
        verdict("peak memory, MB", peak_mb(), MOST_MB)


def _checkpoint(world: World) -> tuple[int, float]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        state = {"server": world.server.snapshot(), "transport": world.transport.snapshot()}
        path = save_checkpoint(Path(folder), 1, state)
        return path.stat().st_size, time.perf_counter() - began


def against_n(sizes: list[tuple[int, int]], turns: int) -> None:
    """Time per arrival, the worlds taking turns; ratios to the first, of medians over turns."""
    worlds = [World(num_clients, concurrency) for num_clients, concurrency in sizes]
    for world in worlds:
        world.run(max(2 * world.concurrency, TURN))  # until the first clients have come back
    seconds: list[list[float]] = [[] for _ in worlds]
    for turn in range(turns):
        shift = turn % len(worlds)  # nobody always goes first
        for place in [*range(shift, len(worlds)), *range(shift)]:
            seconds[place].append(worlds[place].run(TURN)[1] / TURN)
    medians = [median(each) for each in seconds]
    print("time per arrival, microseconds of this process:")
    for world, each in zip(worlds, medians, strict=True):
        what = f"N = {world.num_clients:>9,}, Mc = {world.concurrency:>6,}"
        print(f"  {what}: {1e6 * each:6.1f}   {each / medians[0]:.2f} of the first")
    verdict("the largest ratio", max(medians) / medians[0], MOST_RATIO)


def against_model(num_clients: int, sizes: list[int]) -> None:
    """Time per arrival by the model's size, each at M = 100 and Mc = 100."""
    print("time per arrival by parameters, microseconds of this process:")
    for num_params in sizes:
        world = World(num_clients, 100, num_params=num_params)
        world.run(100)
        messages = max(100, min(TURN, 2 * 10**9 // num_params))
        print(f"  {num_params:>12,}: {1e6 * world.run(messages)[1] / messages:12,.1f}", flush=True)


@dataclass(frozen=True)
class NothingTask:
    """A model of a thousand numbers and nothing to learn it from."""

    num_clients: int
    num_unlabeled: int = 0

    def network(self, seed: int) -> nn.Module:
        with global_rng(torch.device("cpu"), seed, "initial weights"):
            return nn.Linear(NUM_PARAMS - 1, 1)

    def num_examples(self, client: int) -> int:
        return 1 + client % 97

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> Tensor:
        raise NotImplementedError("nobody trains here")

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        raise NotImplementedError("nobody trains here")

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        raise NotImplementedError("there is no U")

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"accuracy": 0.0}


class NoTrainer:
    """Stands in for the trainer of a run: the same update at once."""

    def __init__(self, *parts: Any) -> None:
        self._make = ReadyMade(buffers=torch.zeros(0))

    def train(self, dispatch: Any, control: Any = None) -> ClientUpdate:
        return self._make(Job(dispatch))


def whole(num_clients: int, concurrency: int, arrivals: int, every: int) -> None:
    """`simulate` with a folder, then a report of it."""
    build.Trainer = NoTrainer  # type: ignore[assignment, misc]
    experiment = Experiment(
        task=NothingTask(num_clients),
        algorithm=FedBuff(buffer_size=100),
        local=LocalTraining(client_lr=0.1),
        concurrency=concurrency,
        num_versions=max(arrivals // 100, 1),
        eval_every=max(arrivals // 1000, 1),
        record_every=every,
    )
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        summary = simulate(experiment, out=Path(folder) / "run", checkpoint_s=5.0).summary
        wall = time.perf_counter() - began
        size = (Path(folder) / "run" / "run.jsonl").stat().st_size
        print(f"simulate, with setting up, checkpoints and a record of every {every:,}th job:")
        print(
            f"  {summary.accepted:,} arrivals in {wall:.1f} s, {summary.accepted / wall:,.0f} a second; record {size / 1e6:.2f} MB"
        )
        began = time.perf_counter()
        told = _page(Path(folder) / "run")
        print(f"  {told} in {time.perf_counter() - began:.1f} s; peak memory of all this {peak_mb():,.0f} MB")


def _page(folder: Path) -> str:
    try:
        from fedecho.report.page import page, report_of

        return f"its report: {len(page(report_of([folder]))) / 1e6:.1f} MB"
    except ImportError as error:
        return f"no report ({error})"


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=["rate", "clients", "model", "simulate"], help="only one of them")
    parser.add_argument("--num-clients", type=at_least_one, default=1_000_000)
    parser.add_argument("--concurrency", type=at_least_one, default=10_000)
    parser.add_argument("--arrivals", type=at_least_one, default=500_000)
    parser.add_argument("--buffer-size", type=at_least_one, default=100, help="M of the first table")
    parser.add_argument("--turns", type=at_least_one, default=15)
    parser.add_argument("--every", type=at_least_one, default=100, help="of the record of the third table")
    options = parser.parse_args()
    few = min(500, options.concurrency)
    pairs = [(1000, few), (options.num_clients, few), (options.num_clients, options.concurrency)]
    tables: dict[str, Callable[[], None]] = {
        "rate": lambda: rate(options.num_clients, options.concurrency, options.arrivals, options.buffer_size),
        "clients": lambda: against_n(pairs, options.turns),
        "model": lambda: against_model(options.num_clients, [10**3, 10**4, 10**5, 10**6, 11_173_962]),
        "simulate": lambda: whole(options.num_clients, options.concurrency, options.arrivals, options.every),
    }
    for name, make in tables.items():
        if options.table in (None, name):
            make()


if __name__ == "__main__":
    main()
