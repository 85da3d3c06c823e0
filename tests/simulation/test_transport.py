"""The virtual transport with given runtimes and faults, and exact times."""

import json
from typing import Any

import pytest
import torch
from toy_world import NotingExecutor, Table, dispatch, message_of, model, toy_update

from fedecho.core.types import ClientUpdate, Joined, Left, Lost
from fedecho.executors.executor import Job
from fedecho.simulation.faults import Faults
from fedecho.simulation.transport import VirtualTransport


class Spells(Faults):
    """Spells that are written down: client -> lengths; other clients stay for ever."""

    def __init__(self, spells: dict[int, list[float]], drops: dict[int, float] | None = None) -> None:
        super().__init__(available_s=1.0, unavailable_s=1.0)
        object.__setattr__(self, "lengths", spells)
        object.__setattr__(self, "drops", drops or {})

    def spell(self, seed: int, client: int, number: int) -> float:
        mine = self.lengths.get(client, [])
        return mine[number] if number < len(mine) else 1e9

    def drop_after(self, runtime: float, seed: int, dispatch: int) -> float | None:
        return self.drops.get(dispatch)


def make(*runtimes: float, faults: Faults | None = None, executor: Any = None, **options: Any) -> VirtualTransport:
    return VirtualTransport(
        executor=executor or NotingExecutor(), runtimes=Table(*runtimes), num_clients=8, seed=0, faults=faults, **options
    )


def test_answers_come_in_the_order_of_virtual_time() -> None:
    transport = make(30.0, 10.0, 20.0)
    for number in range(3):
        transport.send(dispatch(number, client=5 - number))
    assert transport.now == 0.0
    got = [(message_of(transport.receive()), transport.now) for _ in range(3)]
    assert got == [(("ClientUpdate", 4), 10.0), (("ClientUpdate", 3), 20.0), (("ClientUpdate", 5), 30.0)]


def test_ties_come_in_the_order_of_dispatch() -> None:
    transport = make(10.0)
    for number, client in enumerate((7, 2, 5)):
        transport.send(dispatch(number, client))
    assert [transport.receive().client for _ in range(3)] == [7, 2, 5]


def test_a_runtime_counts_from_the_moment_of_dispatch() -> None:
    transport = make(10.0, 4.0, 7.0)
    transport.send(dispatch(0, 0))
    transport.receive()
    transport.send(dispatch(1, 1))
    transport.send(dispatch(2, 0))
    assert [(transport.receive().client, transport.now) for _ in range(2)] == [(1, 14.0), (0, 17.0)]


def test_a_result_is_that_of_the_job() -> None:
    transport = make(1.0)
    sent = dispatch(0, 3)
    transport.send(sent)
    got, expected = transport.receive(), toy_update(Job(sent))
    assert isinstance(got, ClientUpdate)
    assert torch.equal(got.delta, expected.delta)
    assert torch.equal(got.buffers, expected.buffers)


def test_the_executor_is_told_when_a_job_is_due() -> None:
    transport = make(10.0, 4.0)
    transport.send(dispatch(0, 2))
    transport.receive()
    transport.send(dispatch(1, 6))
    assert transport.executor.log == [("submit", 0, 2, 10.0), ("submit", 1, 6, 14.0)]


def test_a_dropout_is_told_at_its_moment_and_never_computed() -> None:
    transport = make(10.0, 20.0, faults=Spells({}, drops={1: 5.0}))
    transport.send(dispatch(0, 0))
    transport.send(dispatch(1, 1))
    assert transport.receive() == Lost(1, "client dropped out", "client dropped out")
    assert transport.now == 5.0
    assert message_of(transport.receive()) == ("ClientUpdate", 0)
    assert transport.executor.log == [("submit", 0, 0, 10.0)]


def test_a_client_that_goes_away_loses_its_job() -> None:
    transport = make(10.0, faults=Spells({4: [6.0, 3.0, 100.0]}))
    transport.send(dispatch(0, 4))
    assert transport.receive() == Left(4)
    assert transport.now == 6.0
    assert transport.executor.log == [("submit", 0, 4, 10.0), ("cancel", 0)]
    assert transport.receive() == Joined(4)
    assert transport.now == 9.0
    transport.send(dispatch(1, 4))
    assert message_of(transport.receive()) == ("ClientUpdate", 4)
    assert transport.now == 19.0, "the finish of the lost job, at 10, is nobody's"


def test_a_dropout_of_a_client_that_went_away_first_is_told_once() -> None:
    transport = make(10.0, faults=Spells({4: [2.0, 1.0]}, drops={0: 5.0}))
    transport.send(dispatch(0, 4))
    got = [transport.receive() for _ in range(2)]
    assert got == [Left(4), Joined(4)]
    transport.send(dispatch(1, 4))
    assert message_of(transport.receive()) == ("ClientUpdate", 4)
    assert transport.now == 13.0


def test_spells_alternate_for_ever() -> None:
    transport = make(10.0, faults=Spells({2: [1.0, 2.0, 3.0, 4.0, 5.0]}))
    got = [(transport.receive(), transport.now) for _ in range(5)]
    assert got == [(Left(2), 1.0), (Joined(2), 3.0), (Left(2), 6.0), (Joined(2), 10.0), (Left(2), 15.0)]


def test_an_idle_client_that_goes_away_cancels_nothing() -> None:
    transport = make(10.0, faults=Spells({2: [1.0]}))
    assert transport.receive() == Left(2)
    assert transport.executor.log == []


@pytest.mark.parametrize("place", ["device", "cpu", "file"])
def test_control_variates_are_kept_between_the_jobs_of_a_client(place: Any) -> None:
    """c_i <- c_i + dc_i, by hand; a client that was never heard has none."""
    controls: list[Any] = []

    class Listening(NotingExecutor):
        def submit(self, job: Job, due: float) -> None:
            controls.append(None if job.control is None else job.control.clone())
            super().submit(job, due)

    transport = make(1.0, executor=Listening(), client_memory=place)
    expected = torch.zeros(3)
    for number in range(4):
        transport.send(dispatch(number, client=6))
        update = transport.receive()
        assert isinstance(update, ClientUpdate)
        expected = expected + update.correction
        transport.send(dispatch(10 + number, client=number))
        transport.receive()
    assert controls[0] is None
    assert controls[1] is None
    transport.send(dispatch(20, client=6))
    assert torch.equal(controls[-1], expected)


def test_a_lost_job_leaves_the_control_variate_alone() -> None:
    transport = make(10.0, faults=Spells({6: [15.0, 1.0]}))
    transport.send(dispatch(0, 6))
    first = transport.receive()
    assert isinstance(first, ClientUpdate)
    transport.send(dispatch(1, 6))
    assert transport.receive() == Left(6)
    transport.receive()
    transport.send(dispatch(2, 6))
    assert torch.equal(transport.executor._jobs[2].control, first.correction)


def test_a_restored_transport_submits_again_what_was_open() -> None:
    faults = Spells({5: [4.0, 100.0]}, drops={1: 6.0})
    transport = make(10.0, 20.0, 30.0, 40.0, faults=faults)
    for number in range(4):
        transport.send(dispatch(number, client=(0, 1, 2, 5)[number], version=number % 2))
    assert transport.receive() == Left(5)
    tree = json.loads(json.dumps(transport.snapshot()))
    tree["open"] = {int(client): work for client, work in tree["open"].items()}
    again = make(10.0, 20.0, 30.0, 40.0, faults=faults)
    again.restore(tree, {0: model(0), 1: model(1)})
    assert again.now == 4.0
    assert again.executor.log == [("submit", 0, 0, 10.0), ("submit", 2, 2, 30.0)], "not the dropout, not who went away"
    assert {client: (d.number, d.model.version, d.seed) for client, d in again.open.items()} == {
        0: (0, 0, 100),
        1: (1, 1, 101),
        2: (2, 0, 102),
    }
    assert [message_of(again.receive()) for _ in range(3)] == [message_of(transport.receive()) for _ in range(3)]
    assert again.now == transport.now == 30.0
