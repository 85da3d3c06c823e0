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
from torch import nn

from fedecho import CA2FL, Distiller, FedAC, FedAsync, FedAvg, FedBuff, FedEcho
from fedecho.core.admission import Admission
from fedecho.experiments.config import ConfigError
from fedecho.flower import AsyncStrategy, Waiting
from fedecho.flower.strategy import layout_of

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
    grid = kind(app, N, lambda client, number: slow if client == 0 else 1.0, {})
    grid._runtime = lambda order: slow if order.metadata.dst_node_id == 1001 else 1.0  # type: ignore[method-assign]
    return grid


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


def test_what_cannot_work_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="FedAC's clients keep control variates"):
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
    with pytest.raises(ValueError, match="a buffer_size of 5 is more than a concurrency of 4"):
        strategy(FedBuff(buffer_size=5))
    with pytest.raises(ValueError, match=r"algorithm.num_clients is 9"):
        strategy(CA2FL(buffer_size=2, num_clients=9))
    with pytest.raises(ValueError, match="concurrency must equal buffer_size = 2"):
        strategy(FedAvg(buffer_size=2), concurrency=3)
    assert strategy(FedAvg(buffer_size=2))._concurrency == 2
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
