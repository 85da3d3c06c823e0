"""Whole runs against a transport of a few lines, the same run cut in two, and the forecast against what then happens."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_world import NUM_CLIENTS, NotingExecutor, make_server, run, toy_update

from fedecho.algorithms import FedAC, FedAsync, FedAvg, FedBuff
from fedecho.core.algorithm import demands
from fedecho.core.loop import drive
from fedecho.core.types import Dispatch, GlobalModel, Joined, Left, Lost, Message, Weights
from fedecho.executors.executor import Job
from fedecho.simulation.faults import Faults
from fedecho.simulation.forecast import forecast
from fedecho.simulation.runtimes import ClientRuntimes, Runtimes
from fedecho.simulation.transport import VirtualTransport
from fedecho.storage.checkpoint import decode, encode

SIZES = [5, 9, 2, 7, 7, 1, 30, 4]
NO_FAULTS = Faults()
ALL_FAULTS = Faults(dropout=0.25, available_s=60.0, unavailable_s=25.0)
FAULTS = {"none": NO_FAULTS, "dropouts": Faults(dropout=0.3), "spells": Faults(available_s=60.0, unavailable_s=25.0)}
FAULTS["all"] = ALL_FAULTS
METHODS: dict[str, Any] = {
    "fedbuff": FedBuff(buffer_size=3),
    "fedasync": FedAsync(),
    "fedac": FedAC(buffer_size=3, num_clients=NUM_CLIENTS, server_lr=0.05),
    "fedavg": FedAvg(buffer_size=4),
}


def runtimes(profile: Any, seed: int) -> ClientRuntimes:
    return Runtimes(profile=profile, long_share=0.2).assign(SIZES, seed)


class PlainTransport:
    """The same world as a bare list that is searched for its earliest entry. Clients keep no memory."""

    def __init__(self, times: ClientRuntimes, faults: Faults, seed: int) -> None:
        self.times, self.faults, self.seed, self.now = times, faults, seed, 0.0
        self.entries: list[tuple[float, Any]] = []
        self.jobs: dict[int, Dispatch] = {}
        if faults.has_spells:
            self.entries = [(faults.spell(seed, client, 0), (client, 0)) for client in range(NUM_CLIENTS)]

    def send(self, dispatch: Dispatch) -> None:
        runtime = self.times.draw(dispatch.client, dispatch.number)
        drop = self.faults.drop_after(runtime, self.seed, dispatch.number)
        self.jobs[dispatch.client] = dispatch
        self.entries.append((self.now + (runtime if drop is None else drop), (dispatch, drop)))

    def receive(self) -> Message:
        while True:
            # min takes the first of equals, and entries are in the order they were made
            entry = min(self.entries, key=lambda each: each[0])
            self.entries.remove(entry)
            self.now, (what, more) = entry
            if isinstance(what, int):
                self.entries.append((self.now + self.faults.spell(self.seed, what, more + 1), (what, more + 1)))
                if more % 2:
                    return Joined(what)
                self.jobs.pop(what, None)
                return Left(what)
            if self.jobs.get(what.client) is what:
                del self.jobs[what.client]
                return toy_update(Job(what)) if more is None else Lost(what.client, "client dropped out")


def virtual(times: ClientRuntimes, faults: Faults, seed: int, executor: Any = None) -> VirtualTransport:
    return VirtualTransport(
        executor=executor or NotingExecutor(), runtimes=times, num_clients=NUM_CLIENTS, seed=seed, faults=faults
    )


class Forgetful(NotingExecutor):
    """Clients without memory, as those of the plain transport."""

    def submit(self, job: Job, due: float) -> None:
        super().submit(Job(job.dispatch), due)


@pytest.mark.parametrize("profile", ["large", "mild", "equal"])
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("method", ["fedbuff", "fedavg"])
def test_a_run_is_that_of_a_bare_list_of_events(profile: str, faults: str, method: str) -> None:
    times = runtimes(profile, 3)
    log = run(make_server(METHODS[method], seed=3), virtual(times, FAULTS[faults], 3, Forgetful()), 25)
    plain = run(make_server(METHODS[method], seed=3), PlainTransport(times, FAULTS[faults], 3), 25)
    assert log == plain
    assert sum(bool(entry[-1]) for entry in log) == 25
    assert [entry[0] for entry in log] == sorted(entry[0] for entry in log)
    if faults != "none":
        assert any(entry[1] == "lost" for entry in log)


def through_a_file(value: Any, template: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return decode(encode(value, tensors), tensors, template)


@pytest.mark.parametrize("method", METHODS)
@given(stop=st.integers(1, 60), seed=st.integers(0, 5), after=st.booleans())
@settings(max_examples=8, deadline=None)
def test_a_run_cut_in_two_is_the_whole_run(method: str, stop: int, seed: int, after: bool) -> None:
    """Server and transport are saved after any message and go on in new objects, control variates included."""
    algorithm, times = METHODS[method], runtimes("large", seed)
    whole = run(make_server(algorithm, seed=seed), virtual(times, ALL_FAULTS, seed), 15, dispatch_after_step=after)
    server, transport = make_server(algorithm, seed=seed), virtual(times, ALL_FAULTS, seed)
    seen: list[Any] = []
    drive(
        server,
        transport,
        num_versions=15,
        dispatch_after_step=after,
        watch=lambda moment: bool(seen.append(moment)) or len(seen) == stop,
    )
    empty = GlobalModel(0, Weights(torch.zeros(3), torch.zeros(1)))
    fresh, again = make_server(algorithm, seed=seed), virtual(times, ALL_FAULTS, seed)
    snapshot = server.snapshot()
    tree = through_a_file(
        {"server": snapshot, "transport": transport.snapshot()},
        {"server": {"state": fresh.state, "models": dict.fromkeys(snapshot["models"], empty)}},
    )
    fresh.restore(tree["server"])
    again.restore(tree["transport"], tree["server"]["models"])
    assert run(fresh, again, 15, dispatch_after_step=after) == whole[len(seen) :]


@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 50), faults=st.sampled_from(sorted(FAULTS)), after=st.booleans(), num_versions=st.integers(1, 20))
@settings(max_examples=10, deadline=None)
def test_the_forecast_is_what_a_real_run_then_does(method: str, seed: int, faults: str, after: bool, num_versions: int) -> None:
    algorithm, times = METHODS[method], runtimes("large", seed)
    ahead = forecast(
        buffer_size=algorithm.buffer_size,
        demands=demands(algorithm),
        num_clients=NUM_CLIENTS,
        concurrency=4,
        seed=seed,
        num_versions=num_versions,
        dispatch_after_step=after,
        make_transport=lambda executor: virtual(times, FAULTS[faults], seed, executor),
    )
    server = make_server(algorithm, seed=seed)
    log = run(server, virtual(times, FAULTS[faults], seed), num_versions, dispatch_after_step=after)
    accepted = [entry[3] for entry in log if entry[1] == "accepted"]
    assert ahead.answered == set(accepted)
    assert ahead.peak_alive == server.versions.peak_alive
    assert len(ahead.answered) == len(accepted) == num_versions * algorithm.buffer_size


def test_a_serial_executor_trains_only_what_is_asked_for() -> None:
    trained: list[int] = []

    class Counting(NotingExecutor):
        def result(self, number: int) -> Any:
            trained.append(number)
            return super().result(number)

    executor = Counting()
    server = make_server(METHODS["fedbuff"])
    run(server, virtual(runtimes("large", 0), ALL_FAULTS, 0, executor), 10)
    assert len(trained) == 10 * 3
    assert server.num_dispatched > len(trained)
    executor.close()
    with pytest.raises(KeyError):
        executor.result(server.num_dispatched - 1)


def test_a_synchronous_run_sees_no_stale_update() -> None:
    """FedAvg waits for all of its clients, also where some drop out or go away and come back."""
    log = run(make_server(METHODS["fedavg"], seed=1), virtual(runtimes("large", 1), ALL_FAULTS, 1), 30)
    assert {entry[4] for entry in log if entry[1] == "accepted"} == {0}
