"""A user's own Flower app, made asynchronous: its ClientApp knows nothing of FedEcho."""

import json
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from loop_grid import LoopGrid
from safetensors.torch import load_file
from torch import nn

from fedecho import CA2FL, Distiller, FedAC, FedAsync, FedAvg, FedBuff, FedEcho
from fedecho.core.admission import Admission
from fedecho.flower import AsyncStrategy, Waiting
from fedecho.flower.user_model import layout_of
from fedecho.report.load import find_runs, read_run
from fedecho.report.methods import methods_of
from fedecho.runs.config import ConfigError
from fedecho.runs.record import read_record

N = 4
SEEN: list[dict[str, Any]] = []
app = ClientApp()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Plain PyTorch, as in Flower's own tutorials."""
    SEEN.append(dict(message.content["config"]))
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    draw = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    points = torch.randn(16, 2, generator=draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points), (points[:, 0] > 0).long())
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": float(loss.detach()), "num-examples": 16})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class Blocking(LoopGrid):
    """The same nodes for Flower's own, synchronous strategies."""

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        numbers = list(self.push_messages(list(messages)))
        return [reply for number in numbers for reply in self.pull_messages([number])]


def loop(kind: type[LoopGrid] = LoopGrid, slow: float = 1.0) -> LoopGrid:
    SEEN.clear()
    return kind(app, N, lambda client, number: slow if client == 0 else 1.0, {})


def accuracy(version: int, arrays: ArrayRecord) -> MetricRecord:
    model = net()
    model.load_state_dict(arrays.to_torch_state_dict())
    points = torch.randn(200, 2, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        right = model.eval()(points).argmax(1) == (points[:, 0] > 0).long()
    return MetricRecord({"accuracy": float(right.float().mean())})


def strategy(algorithm: Any, **options: Any) -> AsyncStrategy:
    waiting = Waiting(min_nodes=N, poll_s=0, nodes_s=1e6)
    return AsyncStrategy(algorithm=algorithm, num_clients=N, waiting=waiting, **options)


def test_in_lockstep_it_is_flowers_own_fedavg() -> None:
    arrays = ArrayRecord(net().state_dict())
    flowers = FlowerFedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=N, min_train_nodes=N)
    theirs = flowers.start(loop(Blocking), arrays, num_rounds=3)
    ours = strategy(FedAvg(buffer_size=N)).start(loop(), arrays, num_rounds=3)
    for name, array in theirs.arrays.items():
        if name.endswith("num_batches_tracked"):
            continue
        np.testing.assert_allclose(ours.arrays[name].numpy(), array.numpy(), rtol=2e-5, atol=2e-6, err_msg=name)
    assert [config["server-round"] for config in SEEN] == [1] * N + [2] * N + [3] * N
    told = [dict(ours.train_metrics_clientapp[version]) for version in (1, 2, 3)]
    for version, metrics in enumerate(told, 1):
        assert metrics["train_loss"] == pytest.approx(theirs.train_metrics_clientapp[version]["train_loss"], rel=1e-4)
        assert metrics["staleness"] == 0


def test_asynchronous_with_a_straggler_and_an_evaluation() -> None:
    arrays = ArrayRecord(net().state_dict())
    result = strategy(FedBuff(buffer_size=2)).start(
        loop(slow=7.5), arrays, num_rounds=12, train_config=ConfigRecord({"lr": 0.1}), evaluate_fn=accuracy
    )
    assert all(config["lr"] == 0.1 for config in SEEN)
    assert list(result.evaluate_metrics_serverapp) == list(range(13))
    assert result.evaluate_metrics_serverapp[12]["accuracy"] > 0.9
    staleness = [metrics["staleness"] for metrics in result.train_metrics_clientapp.values()]
    assert max(staleness) >= 4, "the straggler's update is in"
    assert set(result.arrays) == set(arrays), "counters travel along"


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("1.running_var", -1.0, "variance"), ("1.running_var", 1e18, "statistics"), ("1.running_mean", -1e18, "statistics")],
)
def test_one_nodes_statistics_are_bounded_as_in_a_simulation(tmp_path: Path, name: str, value: float, code: str) -> None:
    """From the first report on, and without a module to know them by."""
    grid = loop()

    def spoil(order: Message, reply: Message) -> Message:
        if order.metadata.dst_node_id == 1001:
            arrays = dict(reply.content["arrays"])
            arrays[name] = Array(np.full(4, value, np.float32))
            reply.content["arrays"] = ArrayRecord(arrays)
        return reply

    grid.spoil = spoil
    method = strategy(FedBuff(buffer_size=2), folder=tmp_path)
    result = method.start(grid, ArrayRecord(net().state_dict()), num_rounds=12, evaluate_fn=accuracy)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["reasons"]) == {code}
    assert result.evaluate_metrics_serverapp[12]["accuracy"] > 0.9


def test_an_evaluation_that_is_not_a_number_ends_a_deployed_run() -> None:
    def lost(version: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": 0.5, "test_loss": float("nan") if version == 2 else 1.0})

    with pytest.raises(ConfigError, match="the evaluation of version 2 gave test_loss = nan"):
        strategy(FedBuff(buffer_size=2)).start(loop(), ArrayRecord(net().state_dict()), num_rounds=3, evaluate_fn=lost)


def test_fedecho_distils_on_the_server(tmp_path: Path) -> None:
    points = torch.randn(60, 2, generator=torch.Generator().manual_seed(4))
    method = FedEcho(inner=FedBuff(buffer_size=2), distiller=Distiller(distill_lr=1e-3, batch_size=20))
    echo = strategy(method, module=net(), unlabeled=points, folder=tmp_path / "run", concurrency=3)
    result = echo.start(loop(slow=3.5), ArrayRecord(net().state_dict()), num_rounds=6, evaluate_fn=accuracy)
    lines = [json.loads(line) for line in (tmp_path / "run" / "run.jsonl").read_text().splitlines()]
    assert all(line["distillation_loss"] > 0 for line in lines if line["event"] == "version")
    assert result.evaluate_metrics_serverapp[6]["accuracy"] > 0.8
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["accepted"] == 12


def test_without_an_evaluation_a_record_has_no_accuracy(tmp_path: Path) -> None:
    strategy(CA2FL(buffer_size=2, num_clients=N), folder=tmp_path).start(loop(), ArrayRecord(net().state_dict()), num_rounds=2)
    assert isnan(json.loads((tmp_path / "summary.json").read_text())["final_accuracy"])


def test_a_proximal_term_is_asked_for_as_fedprox_does() -> None:
    strategy(FedAsync(proximal=0.25)).start(loop(), ArrayRecord(net().state_dict()), num_rounds=2)
    assert {config["proximal-mu"] for config in SEEN} == {0.25}


def test_a_report_tells_runs_apart_by_what_nodes_are_asked_to_do(tmp_path: Path) -> None:
    for lr in (0.5, 0.01):
        one = strategy(FedBuff(buffer_size=2), folder=tmp_path / str(lr))
        config = ConfigRecord({"lr": lr})
        one.start(loop(), ArrayRecord(net().state_dict()), num_rounds=1, train_config=config, evaluate_fn=accuracy)
    found = methods_of([read_run(folder) for folder in find_runs([tmp_path])])
    assert [method.label for method in found] == ["fedbuff (lr 0.01)", "fedbuff (lr 0.5)"]


def test_what_cannot_work_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="FedAC needs clients that keep control variates"):
        strategy(FedAC(buffer_size=2, num_clients=N))
    with pytest.raises(ValueError, match="FedEcho needs AsyncStrategy"):
        strategy(FedEcho(inner=FedBuff(buffer_size=2)))
    with pytest.raises(ValueError, match="use evaluate_fn"):
        strategy(FedBuff(buffer_size=2)).start(loop(), ArrayRecord(net().state_dict()), evaluate_config=ConfigRecord({"a": 1}))
    with pytest.raises(ValueError, match="must be float32, but 'w' is float64"):
        layout_of(ArrayRecord({"w": Array(np.zeros(2))}), None)
    with pytest.raises(ValueError, match=r"initial_arrays lack '0.bias'"):
        layout_of(ArrayRecord({"0.weight": Array(np.zeros((4, 2), np.float32))}), net())


def test_statistics_are_told_from_parameters_by_their_names_or_by_the_module() -> None:
    arrays = ArrayRecord(net().state_dict())
    for module in (None, net()):
        layout, fixed = layout_of(arrays, module)
        assert {part.name for part in layout.buffers} == {"1.running_mean", "1.running_var"}
        assert set(fixed) == {"1.num_batches_tracked"}
        assert layout.num_params == sum(p.numel() for p in net().parameters())


def test_the_checks_of_an_experiment_hold_here_too() -> None:
    with pytest.raises(ValueError, match="buffer_size is 5, but only 4 clients train at once"):
        strategy(FedBuff(buffer_size=5))
    with pytest.raises(ValueError, match=r"algorithm.num_clients is 9"):
        strategy(CA2FL(buffer_size=2, num_clients=9))
    with pytest.raises(ValueError, match="concurrency must equal buffer_size = 2"):
        strategy(FedAvg(buffer_size=2), concurrency=3)
    echo = strategy(FedEcho(inner=FedBuff(buffer_size=2)), module=net(), unlabeled=torch.zeros(3, 2), seed=7)
    assert echo.algorithm.seed == 7  # type: ignore[attr-defined]


def test_a_run_of_another_configuration_is_not_gone_on_with(tmp_path: Path) -> None:
    class KilledError(BaseException):
        pass

    def kill(version: int, arrays: ArrayRecord) -> MetricRecord | None:
        if version == 2:
            raise KilledError
        return None

    arrays = ArrayRecord(net().state_dict())
    with pytest.raises(KilledError):
        strategy(FedBuff(buffer_size=2), folder=tmp_path).start(loop(), arrays, num_rounds=4, evaluate_fn=kill)
    for other in (
        strategy(FedBuff(buffer_size=2, server_lr=0.5), folder=tmp_path),
        strategy(FedBuff(buffer_size=2), folder=tmp_path, concurrency=3),
        strategy(FedBuff(buffer_size=2), folder=tmp_path, admission=Admission(max_norm=3.0)),
    ):
        with pytest.raises(ConfigError, match="another configuration"):
            other.start(loop(), arrays, num_rounds=4)
    result = strategy(FedBuff(buffer_size=2), folder=tmp_path).start(loop(), arrays, num_rounds=4)
    assert max(result.train_metrics_clientapp) == 4


@pytest.mark.parametrize("evaluate", [accuracy, None])
def test_zero_rounds_evaluate_the_initial_model_as_flower_does(evaluate: Any, tmp_path: Path) -> None:
    arrays = ArrayRecord(net().state_dict())
    grid = loop()
    result = strategy(FedBuff(buffer_size=2), folder=tmp_path / "run").start(grid, arrays, num_rounds=0, evaluate_fn=evaluate)
    assert list(result.evaluate_metrics_serverapp) == ([0] if evaluate else [])
    assert result.train_metrics_clientapp == {}
    assert {name: array.data for name, array in result.arrays.items()} == {name: array.data for name, array in arrays.items()}
    assert not grid.orders
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rounds", [-1, 2.0, True, float("nan"), "3", None])
def test_num_rounds_is_a_whole_number(rounds: Any) -> None:
    with pytest.raises(ValueError, match="num_rounds must be a whole number of at least 0, got"):
        strategy(FedBuff(buffer_size=2)).start(loop(), ArrayRecord(net().state_dict()), num_rounds=rounds)


@pytest.mark.parametrize("timeout", [-1, 0, float("nan"), float("-inf"), "60", True])
def test_a_timeout_is_a_positive_number(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be a number of seconds above 0, or None for no deadline, got"):
        strategy(FedBuff(buffer_size=2)).start(loop(), ArrayRecord(net().state_dict()), timeout=timeout)


@pytest.mark.parametrize("timeout", [None, float("inf"), 1e300, 5])
def test_without_a_timeout_answers_are_awaited(timeout: float | None) -> None:
    """Flower's grid takes None too. A message must end at some date, which is far away then."""
    grid = loop()
    result = strategy(FedBuff(buffer_size=2)).start(grid, ArrayRecord(net().state_dict()), num_rounds=2, timeout=timeout)
    assert list(result.train_metrics_clientapp) == [1, 2]
    years = grid.orders[0].metadata.ttl / (365 * 86400)
    assert years == 10 if timeout != 5 else years < 1e-4


def test_a_timeout_of_the_waiting_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match=r"Waiting\(timeout_s=60\) has no effect here: pass start\(timeout=60\)"):
        AsyncStrategy(algorithm=FedBuff(buffer_size=2), num_clients=N, waiting=Waiting(timeout_s=60))


def test_a_finished_run_names_the_setting_that_the_user_has(tmp_path: Path) -> None:
    arrays = ArrayRecord(net().state_dict())
    strategy(FedBuff(buffer_size=2), folder=tmp_path).start(loop(), arrays, num_rounds=2)
    with pytest.raises(ConfigError, match=r"already holds a finished run: choose another folder \(folder\)$"):
        strategy(FedBuff(buffer_size=2), folder=tmp_path).start(loop(), arrays, num_rounds=2)


class KilledError(BaseException):
    """As a power cut: nobody catches it."""


def killing(version: int) -> Any:
    def evaluate(now: int, arrays: ArrayRecord) -> MetricRecord:
        if now == version:
            raise KilledError
        return accuracy(now, arrays)

    return evaluate


def close(ours: dict[int, MetricRecord], theirs: dict[int, MetricRecord]) -> bool:
    """A record has nine digits."""
    return {version: dict(metrics) for version, metrics in ours.items()} == {
        version: pytest.approx(dict(metrics), rel=1e-8) for version, metrics in theirs.items()
    }


def identical_clients() -> LoopGrid:
    grid = loop()
    for context in grid.contexts.values():
        context.node_config["partition-id"] = 0
    return grid


def test_the_result_of_a_resumed_run_has_all_versions(tmp_path: Path) -> None:
    """How many arrivals a checkpoint between two versions holds depends on real time. A resumed run asks other clients for the
    rest, and adds in another order; with identical clients it still gives the result of a run that was never killed."""
    arrays = ArrayRecord(net().state_dict())
    whole = strategy(FedAvg(buffer_size=N)).start(identical_clients(), arrays, num_rounds=5, evaluate_fn=accuracy)
    for version in (2, 4):
        with pytest.raises(KilledError):
            strategy(FedAvg(buffer_size=N), folder=tmp_path).start(
                identical_clients(), arrays, num_rounds=5, evaluate_fn=killing(version)
            )
    result = strategy(FedAvg(buffer_size=N), folder=tmp_path).start(
        identical_clients(), arrays, num_rounds=5, evaluate_fn=accuracy
    )
    assert list(result.evaluate_metrics_serverapp) == [0, 1, 2, 3, 4, 5]
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4, 5]
    assert close(result.evaluate_metrics_serverapp, whole.evaluate_metrics_serverapp)
    assert close(result.train_metrics_clientapp, whole.train_metrics_clientapp)
    assert json.loads((tmp_path / "summary.json").read_text())["accepted"] == 5 * N
    evaluated = [line["version"] for line in read_record(tmp_path) if line["event"] == "evaluation"]
    assert evaluated == [1, 2, 3, 4, 5], "version 0 is in no mean"


@pytest.mark.parametrize("left", ["checkpoint-00000001.safetensors", ".lock"])
def test_a_run_killed_between_its_summary_and_the_clean_up_can_be_submitted_again(left: str, tmp_path: Path) -> None:
    arrays = ArrayRecord(net().state_dict())
    first = strategy(FedBuff(buffer_size=2), folder=tmp_path).start(loop(), arrays, num_rounds=3, evaluate_fn=accuracy)
    (tmp_path / left).write_bytes(b"")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != left}
    with pytest.raises(ConfigError, match="another configuration"):
        strategy(FedBuff(buffer_size=2, server_lr=0.5), folder=tmp_path).start(loop(), arrays, num_rounds=3)
    (tmp_path / left).write_bytes(b"")
    grid = loop()
    again = strategy(FedBuff(buffer_size=2), folder=tmp_path).start(grid, arrays, num_rounds=3, evaluate_fn=accuracy)
    assert not grid.orders
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert {name: array.data for name, array in again.arrays.items()} == {n: a.data for n, a in first.arrays.items()}
    assert close(again.evaluate_metrics_serverapp, first.evaluate_metrics_serverapp)
    assert close(again.train_metrics_clientapp, first.train_metrics_clientapp)


class Everything(nn.Module):
    """Frozen and tied parameters, a counter, a mask, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 4)
        self.stem.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 2)
        self.register_buffer("mask", torch.tensor([True, True, False, True]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.relu(self.first(self.norm(self.stem(rows)) * self.mask))))


everything = ClientApp()


@everything.train()
def train_everything(message: Message, context: Context) -> Message:
    """Knows the arrays by their order alone, as clients with lists of numpy arrays do."""
    torch.manual_seed(1)
    model = Everything()
    values = message.content["arrays"].to_numpy_ndarrays()
    names = list(model.state_dict())
    model.load_state_dict({name: torch.tensor(value) for name, value in zip(names, values, strict=True)})
    points = torch.randn(16, 2, generator=torch.Generator().manual_seed(int(context.node_config["partition-id"])))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = nn.functional.cross_entropy(model(points), (points[:, 0] > 0).long())
    loss.backward()
    optimizer.step()
    metrics = MetricRecord({"train_loss": float(loss.detach()), "num-examples": 16})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@pytest.mark.parametrize("kind", ["without a module", "with it", "fedecho"])
def test_the_final_model_loads_strictly_and_what_is_frozen_is_the_arrays_own(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    start = Everything()
    other = Everything()  # its frozen weights are not those that are sent
    frozen = {name: value.clone() for name, value in start.state_dict().items() if name.startswith("stem") or name == "mask"}
    method: Any = FedBuff(buffer_size=2)
    options: dict[str, Any] = {} if kind == "without a module" else {"module": other}
    if kind == "fedecho":
        method = FedEcho(inner=method, distiller=Distiller(distill_lr=1e-3, batch_size=20))
        options["unlabeled"] = torch.randn(40, 2, generator=torch.Generator().manual_seed(4))
    untouched = {name: value.clone() for name, value in other.state_dict().items()}
    grid = LoopGrid(everything, N, lambda client, number: 1.0, {})
    result = strategy(method, folder=tmp_path, **options).start(grid, ArrayRecord(start.state_dict()), num_rounds=4)
    for state in (result.arrays.to_torch_state_dict(), load_file(tmp_path / "model.safetensors")):
        assert list(result.arrays) == list(start.state_dict())
        loaded = Everything()
        loaded.load_state_dict(state, strict=True)
        for name, value in frozen.items():
            torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=0)
        assert loaded.second.weight is loaded.first.weight
        torch.testing.assert_close(state["second.weight"], state["first.weight"], rtol=0, atol=0)
        assert not torch.equal(state["first.weight"], start.state_dict()["first.weight"]), "it was trained"
    assert all(torch.equal(value, untouched[name]) for name, value in other.state_dict().items()), "the user's module is his"


def test_the_server_distils_with_the_frozen_weights_that_are_sent() -> None:
    """Two modules that differ in what is frozen alone give one model, for the arrays say what it is."""
    torch.manual_seed(5)
    start, models = Everything(), []
    for module in (start, Everything()):
        method = FedEcho(inner=FedBuff(buffer_size=2), distiller=Distiller(distill_lr=1e-2, batch_size=20))
        grid = LoopGrid(everything, N, lambda client, number: 1.0, {})
        unlabeled = torch.randn(40, 2, generator=torch.Generator().manual_seed(4))
        made = strategy(method, module=module, unlabeled=unlabeled)
        models.append(made.start(grid, ArrayRecord(start.state_dict()), num_rounds=3).arrays["head.weight"].numpy())
    np.testing.assert_array_equal(*models)
