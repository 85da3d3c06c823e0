"""Runs are grouped by their experiment without its seed, a seed counts once, and labels show the differences."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.hand_made import lines, write
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from fedecho import Advance, Distiller, Experiment, FedBuff, FedEcho, LocalTraining, Weights, load, resume, simulate
from fedecho.cli import app
from fedecho.report.inside import origin_section
from fedecho.report.load import find_runs, read_run
from fedecho.report.methods import Method, methods_of, repetitions
from fedecho.report.page import report_of
from fedecho.runs.experiment import attributes
from fedecho.runs.record import read_header


class Lines:
    """A user's own task, as a plain class: points on two lines."""

    num_clients, num_unlabeled = 4, 8

    def __init__(self, shift: float = 1.0) -> None:
        self.shift = shift
        points = torch.linspace(-1, 1, 16)
        self.labels = (points > 0).long()
        self.points = torch.stack([points, points * shift], dim=1)

    def network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(2, 2)

    def num_examples(self, client: int) -> int:
        return 4

    def batch(self, client: int, rows: torch.Tensor, generator: torch.Generator) -> Any:
        return self.points[rows + 4 * client], self.labels[rows + 4 * client]

    def loss(self, module: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(module(batch[0]), batch[1])

    def logits(self, module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return module(self.points[rows])

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        return {"accuracy": float((module(self.points).argmax(1) == self.labels).float().mean())}


@dataclass(frozen=True)
class State:
    total: torch.Tensor
    velocity: torch.Tensor
    size: int = 0


class Momentum:
    """A user's own method as a plain class, which has no fields that could be listed."""

    buffer_size = 2

    def __init__(self, momentum: float = 0.5) -> None:
        self.momentum = momentum

    def init(self, model: Any) -> State:
        return State(torch.zeros_like(model.weights.params), torch.zeros_like(model.weights.params))

    def receive(self, state: State, arrival: Any) -> State:
        return replace(state, total=state.total + arrival.update.delta, size=state.size + 1)

    def ready(self, state: State) -> bool:
        return state.size == self.buffer_size

    def advance(self, state: State, model: Any) -> Advance[State]:
        velocity = self.momentum * state.velocity + state.total / state.size
        moved = Weights(model.weights.params + velocity, model.weights.buffers)
        return Advance(State(torch.zeros_like(velocity), velocity), moved)


@dataclass(frozen=True)
class Recorded(Momentum):
    """The same as a dataclass."""

    momentum: float = 0.5
    buffer_size: int = 2


def own(algorithm: Any, *, client_lr: float = 0.1, versions: int = 3, seed: int = 0, task: Any = None) -> Experiment:
    local = LocalTraining(client_lr=client_lr, epochs=1, batch_size=4)
    return Experiment(task=task or Lines(), algorithm=algorithm, local=local, concurrency=3, num_versions=versions, seed=seed)


def shown(*places: Path) -> dict[str, list[int]]:
    return {method.label: [run.seed for run in method.runs] for method in methods(*places)}


def methods(*places: Path) -> list[Method]:
    return methods_of([read_run(folder) for folder in find_runs(places)])


def hand_made(folder: Path, seed: int = 0, change: Callable[[dict[str, Any]], Any] = lambda header: None) -> Path:
    told = lines(seed)
    config = {"task": {"name": "digits", "seed": seed}, "algorithm": {"name": "fedbuff", "buffer_size": 3}}
    told[0]["config"] = {**config, "local": {}, "concurrency": 5, "num_versions": 3, "name": "by-hand", "seed": seed}
    told[0]["algorithm"] = "fedbuff"
    change(told[0])
    return write(folder, told, finished=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    distiller = Distiller(distill_lr=1e-3, batch_size=4)
    for folder, experiment in {
        "fast-0": own(FedBuff(buffer_size=2), client_lr=0.5),
        "fast-1": own(FedBuff(buffer_size=2), client_lr=0.5, seed=1),
        "fast-0-again": own(FedBuff(buffer_size=2), client_lr=0.5),
        "slow": own(FedBuff(buffer_size=2), client_lr=0.01),
        "without": own(Momentum(0.0)),
        "with": own(Momentum(0.9)),
        "recorded-without": own(Recorded(momentum=0.0)),
        "recorded-with": own(Recorded(momentum=0.9)),
        "echo": own(FedEcho(inner=FedBuff(buffer_size=2), distiller=distiller), versions=2),
        "echo-own": own(FedEcho(inner=Recorded(), distiller=distiller), versions=4),
    }.items():
        simulate(experiment, out=root / folder)
    return root


def test_a_users_own_experiments_stand_apart_by_what_differs_and_a_seed_counts_once(runs: Path) -> None:
    assert shown(runs) == {
        "fedbuff (client_lr 0.5)": [0, 1],
        "fedbuff (client_lr 0.01)": [0],
        "Momentum (momentum 0)": [0],
        "Momentum (momentum 0.9)": [0],
        "Recorded (momentum 0)": [0],
        "Recorded (momentum 0.9)": [0],
        "fedecho (inner fedbuff, num_versions 2)": [0],
        "fedecho (inner Recorded, num_versions 4)": [0],
    }
    glance = report_of([runs]).sections[0]
    assert {row[0]: row[1] for row in glance.tables[0].rows}["fedbuff (client_lr 0.5)"] == "2"


def test_a_repeated_seed_is_said_on_the_page_and_by_the_command(runs: Path, tmp_path: Path) -> None:
    report = report_of([runs])
    assert report.subtitle == "8 methods, 10 runs (1 repeated run left out)"
    (said,) = report.sections[0].missing
    assert " repeats " in said
    assert "(fedbuff (client_lr 0.5), seed 0, same model); each seed counts once" in said
    assert "one run counts: one that finished, else the furthest" in report.sections[0].tables[0].note
    done = CliRunner().invoke(app, ["report", str(runs), "--out", str(tmp_path), "--json"])
    assert said in json.loads(done.stdout)["left_out"]
    assert "left out: " in CliRunner().invoke(app, ["report", str(runs), "--out", str(tmp_path)]).stdout
    assert [row[1] for row in report.sections[-1].tables[0].rows].count("0 (repeated)") == 1


def test_what_only_the_class_of_a_part_has_is_not_named_beside_it(runs: Path) -> None:
    (label, *_) = shown(runs / "echo", runs / "echo-own")
    assert label == "fedecho (inner fedbuff, num_versions 2)"
    assert list(shown(runs / "echo")) == ["fedecho"]


def test_a_resume_with_another_method_of_the_same_name_is_refused(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(own(Momentum(0.0)), out=tmp_path / "run", watch=stop)
    with pytest.raises(ValueError, match=r"algorithm\.momentum is 0\.0 there and 0\.9 here"):
        resume(tmp_path / "run", own(Momentum(0.9)))
    task = Lines()
    task.evaluations = 3  # a task may count
    assert resume(tmp_path / "run", own(Momentum(0.0), task=task)).summary.num_versions == 3


def test_the_run_counts_that_finished_then_that_came_furthest_then_the_latest(tmp_path: Path) -> None:
    def begun(hour: int) -> Callable[[dict[str, Any]], Any]:
        return lambda header: header.update(started=f"2026-01-01T{hour:02}:00:00+0000")

    hand_made(tmp_path / "a-finished", change=begun(1))
    hand_made(tmp_path / "b-finished-later", change=begun(2))
    hand_made(tmp_path / "c-finished-first", change=begun(0))
    for name, kept in (("d-going", 14), ("e-begun", 6)):
        going = hand_made(tmp_path / name, change=begun(5))
        record = (going / "run.jsonl").read_text().splitlines(keepends=True)
        (going / "run.jsonl").write_text("".join(record[:kept]))
        (going / "summary.json").unlink()
    (method,) = methods(tmp_path)
    assert [run.folder.name for run in method.runs] == ["b-finished-later"]
    assert len(repetitions([method])) == 4
    (method,) = methods(tmp_path / "e-begun", tmp_path / "d-going")
    assert [run.folder.name for run in method.runs] == ["d-going"]


def test_a_folder_that_is_named_twice_is_one_run(tmp_path: Path) -> None:
    folder = hand_made(tmp_path / "run")
    (tmp_path / "link").symlink_to(folder)
    assert find_runs([folder, folder / ".." / "run", tmp_path / "link"]) == [folder]


def test_how_and_where_a_run_was_computed_splits_no_group(tmp_path: Path) -> None:
    def elsewhere(header: dict[str, Any]) -> None:
        header["execution"] = {"executor": "pool", "workers": 4}
        header["software"] = {"torch": "3"}
        header["config"] |= {"client_memory": "file", "client_memory_dir": "/elsewhere", "record_every": 5}
        header["config"]["local"] = {"client_lr": 0.01}  # what it is by default
        header["config"]["faults"] = {"dropout": 0}  # 0 is 0.0

    hand_made(tmp_path / "a", 0)
    hand_made(tmp_path / "b", 1, elsewhere)
    assert shown(tmp_path) == {"fedbuff": [0, 1]}


@pytest.mark.parametrize(
    ("change", "label"),
    [
        (lambda header: header.update(num_versions=9), "fedbuff (num_versions 9)"),
        (lambda header: header["config"].update(concurrency=6), "fedbuff (concurrency 6)"),
        (lambda header: header["config"]["task"].update(partition={"name": "iid"}), "fedbuff (partition iid)"),
        (lambda header: header.update(inputs={"digits": f"{'ab' * 32} of a file"}), "fedbuff (digits abababab)"),
        (lambda header: header.update(notes={"model files": "sha256 12, two files"}), "fedbuff (model files sha256 12)"),
        (lambda header: header.update(clock="real"), "fedbuff (clock real)"),
    ],
)
def test_whatever_else_identifies_an_experiment_does(tmp_path: Path, change: Callable[[Any], Any], label: str) -> None:
    hand_made(tmp_path / "a")
    other = hand_made(tmp_path / "b", 1, change)
    found = shown(tmp_path / "a", other)
    assert len(found) == 2
    assert found[label] == [1]


def test_a_parts_seed_that_is_not_the_runs_own_is_a_setting(tmp_path: Path) -> None:
    for seed in range(3):
        hand_made(tmp_path / f"own-{seed}", seed)
        hand_made(tmp_path / f"fixed-{seed}", seed, lambda header: header["config"]["task"].update(seed=1))
    assert shown(*(tmp_path / f"fixed-{seed}" for seed in range(3))) == {"fedbuff": [0, 1, 2]}
    found = methods(tmp_path)
    assert {method.label: [run.seed for run in method.runs] for method in found} == {
        "fedbuff (task.seed 1)": [0, 2],
        "fedbuff (task.seed the run's)": [0, 1, 2],
    }
    assert len(repetitions(found)) == 1  # seed 1 with partition 1 is of both


def test_a_label_stays_short_and_the_page_names_all_that_differs(tmp_path: Path) -> None:
    changed = {"client_lr": 0.5, "epochs": 3, "batch_size": 7, "weight_decay": 0.1, "proximal": 0.2, "optimizer": "adamw"}
    hand_made(tmp_path / "a")
    hand_made(tmp_path / "b", 0, lambda header: header["config"].update(local=changed))
    found = methods(tmp_path)
    assert found[1].label == "fedbuff (optimizer adamw, client_lr 0.5, epochs 3, batch_size 7)"
    table = origin_section(found).tables[0]
    assert table.head == ("method", *dict.fromkeys(["optimizer", *changed]))
    assert table.rows[1] == [found[1].label, "adamw", "0.5", "3", "7", "0.1", "0.2"]
    for number, (first, second) in enumerate(((1, 2), (2, 1), (2, 2))):
        local = {"client_lr": first / 10, "epochs": second}
        hand_made(tmp_path / f"grid-{number}", 0, lambda header, local=local: header["config"].update(local=local))
    assert list(shown(*(tmp_path / f"grid-{number}" for number in range(3)))) == [
        "fedbuff (client_lr 0.1, epochs 2)",
        "fedbuff (client_lr 0.2, epochs 1)",
        "fedbuff (client_lr 0.2, epochs 2)",
    ]


def weighing(power: float) -> Callable[[int], float]:
    return lambda staleness: (1 + staleness) ** -power


@dataclass(frozen=True)
class Weighed(Recorded):
    LIMIT = 7
    weigh: Any = None

    @cached_property
    def costly(self) -> int:
        return 1


def test_what_a_users_own_parts_are_made_of_is_in_the_header(tmp_path: Path) -> None:
    method = Weighed(weigh=weighing(0.5))
    assert method.costly == 1
    assert attributes(own(method))["algorithm.weigh.power"] == 0.5
    bound = attributes(own(Weighed(weigh=partial(weighing, 2))))
    assert (bound["algorithm.weigh.func"], bound["algorithm.weigh.0"], bound["algorithm.LIMIT"]) == ("weighing", 2, 7)
    simulate(own(method, task=Lines(shift=2.0)), out=tmp_path)
    header = read_header(tmp_path)
    known = header["attributes"]
    assert known["task.shift"] == 2.0
    assert known["task.num_clients"] == 4
    assert "algorithm.momentum" not in known  # it is in the header's parts
    assert "algorithm.costly" not in known
    assert header["parts"]["algorithm"]["momentum"] == 0.5


def test_what_can_be_built_again_needs_no_more_than_its_configuration() -> None:
    for recipe in ("digits", "cifar10", "mrpc"):
        assert attributes(load(recipe)) == {}
