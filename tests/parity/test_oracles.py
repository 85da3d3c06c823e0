"""Properties of the methods and the server: closed forms, limits and equalities between methods."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenarios import BUFFER_SIZE, NUM_CLIENTS

from fedecho.algorithms import CA2FL, FADAS, FedAC, FedAsync, FedAvg, FedBuff, FedEcho
from fedecho.core.algorithm import Demands
from fedecho.core.loop import Moment, drive
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Lost
from fedecho.distill.distiller import Distiller
from fedecho.simulation.events import Event, EventQueue

M, N = BUFFER_SIZE, NUM_CLIENTS
INNERS = {
    "fedavg": FedAvg(buffer_size=M),
    "fedasync": FedAsync(),
    "fedbuff": FedBuff(buffer_size=M),
    "ca2fl": CA2FL(buffer_size=M, num_clients=N),
    "fedac": FedAC(buffer_size=M, num_clients=N, server_lr=0.05),
    "fadas": FADAS(buffer_size=M, server_lr=0.05),
}


def sent(client: int, base: int, delta: float) -> oracle.Sent:
    """An update whose every parameter moved by ``delta``."""
    ones = np.ones(scenarios.NUM_PARAMS)
    return oracle.Sent(client, base, delta * ones, np.zeros(scenarios.FEATURES), 0 * ones)


def scalars(algorithm: Any, *rounds: list[oracle.Sent]) -> list[float]:
    """x_0, x_1, ... of a model that starts at 0 and has but one value."""
    first = oracle.Model(np.zeros(scenarios.NUM_PARAMS), np.zeros(scenarios.FEATURES), np.zeros(scenarios.NUM_PARAMS))
    models = scenarios.play(algorithm, first, rounds)
    assert all((model.weights.params == model.weights.params[0]).all() for model in models)
    return [float(model.weights.params[0]) for model in models]


def assert_equal(left: GlobalModel, right: GlobalModel) -> None:
    """Bit for bit."""
    assert torch.equal(left.weights.params, right.weights.params)
    assert torch.equal(left.weights.buffers, right.weights.buffers)
    assert (left.correction is None) == (right.correction is None)
    assert left.correction is None or torch.equal(left.correction, right.correction)


@pytest.mark.parametrize("delta", [0.5, -3.0])
def test_fadas_on_a_constant_delta_has_a_closed_form(delta: float) -> None:
    """Unbiased, m is Delta and v is Delta^2, so every step has the length eta; raw, both moments still fill up."""
    rounds = [[sent(0, t, delta)] for t in range(20)]
    step = delta / (abs(delta) + 1e-8)
    assert scalars(FADAS(buffer_size=1, server_lr=0.1), *rounds) == pytest.approx([0.1 * k * step for k in range(21)])
    raw = [(1 - 0.9**k) * delta / (np.sqrt(1 - 0.99**k) * abs(delta) + 1e-8) for k in range(1, 21)]
    published = FADAS(buffer_size=1, server_lr=0.1, bias_correction=False)
    assert scalars(published, *rounds) == pytest.approx([0.0, *(0.1 * np.cumsum(raw))])


def test_fedac_without_control_variates_asks_for_none_and_steps_as_with_corrections_of_zero() -> None:
    rounds = [[sent(0, t, 0.5), sent(1, max(t - 1, 0), -0.2)] for t in range(6)]
    with_them, without = (FedAC(buffer_size=2, num_clients=N, server_lr=0.05, control_variates=on) for on in (True, False))
    assert scalars(without, *rounds) == scalars(with_them, *rounds)
    assert not without.demands.control_variates
    first = oracle.Model(np.zeros(scenarios.NUM_PARAMS), np.zeros(scenarios.FEATURES), np.zeros(scenarios.NUM_PARAMS))
    assert all(model.correction is None for model in scenarios.play(without, first, rounds)[1:])


@pytest.mark.parametrize("weighted", [True, False])
def test_fedacs_c_is_the_mean_of_all_c_i_unless_it_is_weighted(weighted: bool) -> None:
    """c_i is the sum of what client i ever sent; clients that were never heard have 0."""
    algorithm = FedAC(buffer_size=M, num_clients=N, server_lr=0.05, weighted_correction=weighted)
    first, rounds = scenarios.first_model(), scenarios.draw_rounds(0, buffer_size=M)
    last = scenarios.play(algorithm, first, rounds)[-1].correction
    assert last is not None
    mean = sum(one.correction for arrivals in rounds for one in arrivals) / N
    assert np.allclose(last.numpy(), mean, rtol=1e-9, atol=1e-12) == (not weighted)


@pytest.mark.parametrize("tau_c", [0, 1, 4])
def test_fadas_slows_down_above_the_threshold_only(tau_c: int) -> None:
    """One buffer at tau_c, one whose stalest is at tau_c + 1, one at 0: eta, eta / (tau_c + 1) and eta again."""
    algorithm = FADAS(buffer_size=2, server_lr=0.1, delay_adaptive=True, staleness_threshold=tau_c)
    warm = [[sent(0, t, 1.0), sent(1, t, 1.0)] for t in range(tau_c + 1)]
    t = len(warm)
    rounds = [
        [sent(0, t - tau_c, 1.0), sent(1, t, 1.0)],
        [sent(0, t - tau_c, 1.0), sent(1, t + 1, 1.0)],
        [sent(0, t + 2, 1.0), sent(1, t + 2, 1.0)],
    ]
    x = scalars(algorithm, *warm, *rounds)[t:]
    assert np.diff(x) == pytest.approx([0.1, 0.1 / (tau_c + 1), 0.1], rel=1e-6)


def test_ca2fl_on_constant_deltas_steps_by_the_mean_of_all_clients() -> None:
    """Once all have reported, whoever reports: here client 0 alone."""
    deltas = [1.0, -2.0, 4.0, 0.5, 7.0, -1.0]
    all_report = [[sent(i, 0, deltas[i]), sent(i + 1, 0, deltas[i + 1])] for i in range(0, N, 2)]
    then = [[sent(0, t, deltas[0]), sent(0, t, deltas[0])] for t in range(3, 8)]
    x = scalars(CA2FL(buffer_size=2, num_clients=N), *all_report, *then)
    assert np.diff(x)[3:] == pytest.approx([np.mean(deltas)] * 5)


@given(st.lists(st.tuples(st.integers(0, N - 1), st.integers(-4, 4)), min_size=3, max_size=60))
@settings(max_examples=30, deadline=None)
def test_ca2fl_incremental_mean_is_the_recomputed_one(heard: list[tuple[int, int]]) -> None:
    algorithm = CA2FL(buffer_size=3, num_clients=N)
    models = [scenarios.published(scenarios.first_model())]
    state, last = algorithm.init(models[0]), dict.fromkeys(range(N), 0)
    for client, delta in heard:
        last[client] = delta
        update = scenarios.update_of(sent(client, 0, delta))
        state = algorithm.receive(state, scenarios.Arrival(update, models[0], models[0]))
        if algorithm.ready(state):
            state = algorithm.advance(state, models[0]).state
            assert state.mean[0].item() == pytest.approx(sum(last.values()) / N, abs=1e-12)


def test_first_step_of_ca2fl_is_fedbuff() -> None:
    first = scenarios.first_model()
    rng = np.random.default_rng(0)
    rounds = [[scenarios.draw_sent(rng, client, 0) for client in (4, 0, 5, 2)]]
    ca2fl = scenarios.play(INNERS["ca2fl"], first, rounds)
    fedbuff = scenarios.play(INNERS["fedbuff"], first, rounds)
    assert torch.allclose(ca2fl[1].weights.params, fedbuff[1].weights.params, rtol=0, atol=1e-15)
    assert torch.equal(ca2fl[1].weights.buffers, fedbuff[1].weights.buffers)


@pytest.mark.parametrize(
    "distiller", [Distiller(num_distill_steps=0), Distiller(distill_lr=0.0, batch_size=5)], ids=["Q=0", "lr=0"]
)
@pytest.mark.parametrize("name", INNERS)
def test_fedecho_without_distillation_is_its_inner(name: str, distiller: Distiller) -> None:
    """The linear model's statistics do not move in training, so that a learning rate of 0 must change nothing either."""
    inner, first = INNERS[name], scenarios.first_model()
    rounds = scenarios.draw_rounds(num_versions=8, buffer_size=getattr(inner, "buffer_size", 1), fresh=name == "fedavg")
    echo = FedEcho(inner=inner, distiller=distiller, student=scenarios.linear_student(scenarios.unlabeled()))
    for left, right in zip(scenarios.play(echo, first, rounds), scenarios.play(inner, first, rounds), strict=True):
        assert_equal(left, right)


@given(st.integers(1, 8), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=80), st.data())
@settings(max_examples=60, deadline=None)
def test_version_references_return_to_zero(
    num_clients: int, buffer_size: int, answers: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """At most Mc + 1 versions are alive; one reference per open dispatch; none when all have reported or were lost."""
    concurrency = data.draw(st.integers(1, num_clients))
    model = scenarios.published(scenarios.first_model())
    server = Server(
        algorithm=FedBuff(buffer_size=buffer_size), model=model, num_clients=num_clients, concurrency=concurrency, seed=0
    )
    for which, lost in answers:
        server.refill()
        versions = server.versions
        assert sum(versions.references.values()) == len(server.open) == concurrency
        assert set(versions.models) == set(versions.references) == {work.base_version for work in server.open.values()}
        assert versions.num_alive <= concurrency + 1
        client = sorted(server.open)[which % concurrency]
        update = scenarios.update_of(sent(client, server.open[client].base_version, 1.0))
        server.receive(Lost(client, "gone") if lost else update)
        if server.ready:
            server.advance()
    for client in list(server.open):
        server.receive(Lost(client, "gone"))
    assert not server.versions.references
    assert not server.versions.models
    assert server.versions.num_alive == 1
    assert server.versions.peak_alive <= concurrency + 1


class Clockwork:
    """A virtual clock with one runtime per client; notes every dispatch and every finish."""

    def __init__(self, runtimes: list[float]) -> None:
        self.runtimes, self.queue, self.jobs, self.log = runtimes, EventQueue(), {}, []

    @property
    def now(self) -> float:
        return self.queue.now

    def send(self, dispatch: Dispatch) -> None:
        self.log.append(("sent", dispatch.number, dispatch.client, dispatch.seed))
        self.jobs[dispatch.client] = dispatch
        self.queue.put(self.now + self.runtimes[dispatch.client], Event("finish", dispatch.client, dispatch.number))

    def receive(self) -> ClientUpdate:
        dispatch = self.jobs.pop(self.queue.pop().client)
        self.log.append(("finished", dispatch.number, dispatch.client, self.now))
        rng = np.random.default_rng(dispatch.seed)
        return scenarios.update_of(scenarios.draw_sent(rng, dispatch.client, dispatch.model.version), torch.float32)


@scenarios.one_thread()
def simulate(algorithm: Any, runtimes: list[float], concurrency: int, num_versions: int) -> tuple[list[GlobalModel], list[Any]]:
    models = [scenarios.published(scenarios.first_model(), torch.float32)]
    server = Server(algorithm=algorithm, model=models[0], num_clients=N, concurrency=concurrency, seed=7)
    transport = Clockwork(runtimes)

    def watch(moment: Moment) -> None:
        if moment.step is not None:
            models.append(moment.step.model)

    drive(server, transport, num_versions=num_versions, watch=watch)
    return models, transport.log


@dataclass(frozen=True, kw_only=True)
class SynchronousFedBuff(FedBuff):
    """FedBuff behind a barrier: slots are refilled after the step only."""

    @property
    def demands(self) -> Demands:
        return Demands(synchronous=True)


def test_fedbuff_behind_a_barrier_is_fedavg() -> None:
    """Mc = M and equal runtimes, in float32, bit for bit."""
    fedbuff, schedule = simulate(SynchronousFedBuff(buffer_size=M, staleness="polynomial"), [1.0] * N, M, 30)
    fedavg, same_schedule = simulate(FedAvg(buffer_size=M), [1.0] * N, M, 30)
    assert schedule == same_schedule
    assert len(fedbuff) == len(fedavg) == 31
    for left, right in zip(fedbuff, fedavg, strict=True):
        assert_equal(left, right)


def test_all_methods_see_one_schedule() -> None:
    """At one seed the same clients get the same work at the same time; FedAsync makes more versions of it, FedAvg waits."""
    runtimes = [1.0, 1.5, 2.0, 7.0, 1.2, 30.0]
    asynchronous = {name: inner for name, inner in INNERS.items() if name != "fedavg"}
    asynchronous["fedecho"] = FedEcho(
        inner=INNERS["fadas"], distiller=Distiller(), student=scenarios.linear_student(scenarios.unlabeled(), torch.float32)
    )
    versions = {name: 20 * M if name == "fedasync" else 20 for name in asynchronous}
    logs = {name: simulate(method, runtimes, 4, versions[name])[1] for name, method in asynchronous.items()}
    assert sum(entry[0] == "finished" for entry in logs["fedbuff"]) == 20 * M
    for name, log in logs.items():
        assert log == logs["fedbuff"], name
