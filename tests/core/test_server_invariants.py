"""Invariants of the server under any sequence of valid and invalid messages."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_server import answer, contents, good_update, make_server

from fedecho.algorithms import FedAC, FedAvg, FedBuff
from fedecho.core.admission import Admission
from fedecho.core.server import Receipt
from fedecho.core.types import Joined, Left, Lost

clients = st.integers(0, 5)


BOUNDS = Admission(max_strikes=2, set_aside_versions=2)


class Federation(RuleBasedStateMachine):
    """A server beside a plain book of who was sent what, who went away and what became of each dispatch."""

    @initialize(num_clients=st.integers(1, 6), data=st.data(), method=st.sampled_from(["fedbuff", "fedavg", "fedac"]))
    def begin(self, num_clients: int, data: st.DataObject, method: str) -> None:
        self.concurrency = data.draw(st.integers(1, num_clients))
        size = data.draw(st.integers(1, self.concurrency))
        algorithm: Any = {
            "fedbuff": lambda: FedBuff(buffer_size=size),
            "fedavg": lambda: FedAvg(buffer_size=self.concurrency),
            "fedac": lambda: FedAC(buffer_size=size, num_clients=num_clients),
        }[method]()
        self.server = make_server(num_clients=num_clients, concurrency=self.concurrency, algorithm=algorithm, admission=BOUNDS)
        self.num_clients, self.synchronous = num_clients, method == "fedavg"
        self.away: set[int] = set()
        self.sent: dict[int, tuple[int, int]] = {}
        self.closed: dict[int, str] = {}
        self.go_on()

    def go_on(self) -> None:
        """What ``drive`` does after a message."""
        for attempt in range(2):
            for dispatch in self.server.refill():
                assert dispatch.client not in self.away
                assert dispatch.client not in self.at_work()
                assert dispatch.number == len(self.sent)
                assert dispatch.model.version == self.server.model.version
                self.sent[dispatch.number] = (dispatch.client, dispatch.model.version)
            if attempt == 0 and self.server.ready:
                version = self.server.model.version
                assert self.server.advance().model.version == version + 1

    def at_work(self) -> dict[int, int]:
        return {client: number for number, (client, _) in self.sent.items() if number not in self.closed}

    def tell(self, message: Any) -> Receipt:
        receipt = self.server.receive(message)
        if receipt.dispatch >= 0:
            assert receipt.dispatch not in self.closed
            assert self.sent[receipt.dispatch] == (message.client, receipt.base_version)
            assert receipt.staleness == self.server.model.version - receipt.base_version
            self.closed[receipt.dispatch] = receipt.status
        return receipt

    @precondition(lambda self: self.server.open)
    @rule(which=st.integers(0, 5), value=st.floats(-2, 2, width=32).filter(lambda value: value == 0 or abs(value) > 0.05))
    def answers(self, which: int, value: float) -> None:
        client = sorted(self.server.open)[which % len(self.server.open)]
        receipt = self.tell(answer(self.server, client, value))
        assert receipt.status == "accepted"
        assert receipt.staleness == 0 or not self.synchronous
        self.go_on()

    @precondition(lambda self: self.server.open)
    @rule(which=st.integers(0, 5), field=st.sampled_from(["num_steps", "num_examples", "base_version"]))
    def answers_badly(self, which: int, field: str) -> None:
        client = sorted(self.server.open)[which % len(self.server.open)]
        before = contents(self.server.state)
        assert self.tell(answer(self.server, client, **{field: -1})).status == "rejected"
        assert contents(self.server.state) == before
        self.go_on()

    @rule(client=clients)
    def answers_unasked(self, client: int) -> None:
        if client not in self.server.open:
            receipt = self.tell(good_update(client, self.server.model.version))
            assert (receipt.status, receipt.dispatch) == ("rejected", -1)
            self.go_on()

    @rule(client=clients)
    def is_lost(self, client: int) -> None:
        known, at_work = client < self.num_clients, client in self.server.open
        expected = "rejected" if not known else "lost" if at_work else "ignored"
        assert self.tell(Lost(client, "gone")).status == expected
        self.go_on()

    @rule(client=clients)
    def leaves(self, client: int) -> None:
        expected = "rejected" if client >= self.num_clients else "lost" if client in self.server.open else "left"
        assert self.tell(Left(client)).status == expected
        if client < self.num_clients:
            self.away.add(client)
        self.go_on()

    @rule(client=clients)
    def joins(self, client: int) -> None:
        self.tell(Joined(client))
        self.away.discard(client)
        self.go_on()

    @invariant()
    def every_client_is_in_one_place(self) -> None:
        """At work, idle, set aside or waiting for its round to end; or away, which is none of the first two."""
        idle, busy = self.server.idle.ordered(), set(self.server.open)
        reported = [client for client in self.server.reported if client >= 0]
        assert len(set(idle)) == len(idle)
        assert len(set(reported)) == len(reported)
        assert not set(idle) & busy
        assert not (set(idle) | busy) & set(reported)
        aside = set(self.server.norm_monitor.set_aside)
        assert not (set(idle) | busy) & (self.away | aside)
        assert self.server.norm_monitor.absent == aside & self.away
        assert set(idle) | busy | set(reported) | self.away | aside == set(range(self.num_clients))
        assert self.synchronous or not self.server.reported

    @invariant()
    def concurrency_is_kept(self) -> None:
        taken = len(self.server.open) + len(self.server.reported)
        assert taken <= self.concurrency
        assert taken == self.concurrency or len(self.server.idle) == 0

    @invariant()
    def versions_alive_are_those_somebody_trains_from(self) -> None:
        versions = self.server.versions
        wanted = Counter(work.base_version for work in self.server.open.values())
        assert versions.references == wanted
        assert set(versions.models) == set(wanted)
        assert all(version == model.version for version, model in versions.models.items())
        assert versions.num_alive == len(set(wanted) | {versions.current.version})
        assert versions.num_alive <= versions.peak_alive <= self.concurrency + 1

    @invariant()
    def every_dispatch_is_accounted_for_once(self) -> None:
        numbers = [work.number for work in self.server.open.values()]
        assert sorted([*numbers, *self.closed]) == list(range(self.server.num_dispatched))
        for client, work in self.server.open.items():
            assert self.sent[work.number] == (client, work.base_version)
        ends = Counter(self.closed.values())
        assert self.server.counts["accepted"] == ends["accepted"]
        assert self.server.counts["lost"] == ends["lost"]
        assert self.server.counts["rejected"] >= ends["rejected"]
        assert sum(self.server.reasons.values()) == self.server.counts["rejected"] + self.server.counts["lost"]


Federation.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestFederation = Federation.TestCase
