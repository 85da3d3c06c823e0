"""The server log of a deployed run: its configuration, failures and results."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Error, Message
from test_async_strategy import accuracy, loop, net, strategy
from test_resume_over_grid import KilledError, grid_for, killed_after, run
from test_wire_equals_simulator import small

from fedecho import FedBuff, FedEcho
from fedecho.runs.config import ConfigError


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines of Flower's own logger, where an app's words go."""
    said: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, logger = Lines(), logging.getLogger("flwr")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def refusing(grid: Any, every: int = 1) -> Any:
    """Each ``every``-th job ends in an exception of the client's."""
    jobs = 0

    def spoil(order: Message, reply: Message) -> Message:
        nonlocal jobs
        if order.metadata.message_type != "train":
            return reply
        jobs += 1
        return Message(Error(2, "<class 'KeyError'>:<'img'>"), reply_to=order) if jobs % every == 0 else reply

    grid.spoil = spoil
    return grid


def test_a_run_says_what_it_is_and_what_it_came_to(logged: list[str], tmp_path: Path) -> None:
    method = FedEcho(inner=FedBuff(buffer_size=2))
    echo = strategy(method, module=net(), unlabeled=torch.zeros(30, 2), folder=tmp_path / "run", concurrency=3, seed=5)
    echo.start(loop(), ArrayRecord(net().state_dict()), num_rounds=4, evaluate_fn=accuracy)
    first, last = logged[0], logged[-3:]
    assert re.fullmatch(
        r"fedecho \S+: fedecho over fedbuff, 4 clients, 3 at once, 4 versions of 2 updates, 30 unlabeled examples, "
        rf"weighted by examples, seed 5, folder {tmp_path / 'run'}",
        first,
    )
    assert re.fullmatch(r"finished: 4 versions in .* min, 8 updates accepted, 0 rejected, 0 lost", last[0])
    assert re.fullmatch(r"accuracy [\d.]+, mean accuracy of the last ten evaluations [\d.]+ %, mean staleness [\d.]+", last[1])
    assert last[2] == f"model saved to {tmp_path / 'run' / 'model.safetensors'}"
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_an_app_of_ours_says_the_same() -> None:
    said: list[str] = []
    experiment = replace(small("fedecho"), num_versions=2)
    run(experiment, grid_for(experiment), None, say=said.append)
    assert "fedecho over fedbuff, 8 clients, 5 at once, 2 versions of 3 updates, 40 unlabeled examples, seed 0" in said[0]
    assert said[0].endswith("nothing is saved")
    assert said[-2].startswith("finished: 2 versions in")
    assert "accuracy" in said[-1]


def test_failures_are_told_a_few_times_and_then_counted(logged: list[str]) -> None:
    """Every second job fails; the log's minute is a real one, which does not pass here."""
    grid = refusing(loop(), every=2)
    result = strategy(FedBuff(buffer_size=2)).start(grid, ArrayRecord(net().state_dict()), num_rounds=20)
    assert len(result.train_metrics_clientapp) == 20
    told = [line for line in logged if "lost, its app raised: <class 'KeyError'>:<'img'>" in line]
    assert len(told) == 3
    assert told[-1].endswith("(further 'client failed' failures are only counted)")
    lost = int(re.search(r"(\d+) lost \(client failed \1\)", logged[-2])[1])
    assert lost >= 20


def test_further_failures_are_counted_once_a_minute() -> None:
    said: list[str] = []
    experiment = replace(small("fedbuff"), num_versions=12)
    grid = refusing(grid_for(experiment), every=2)
    grid.runtime = lambda client, dispatch: 40.0 + client
    run(experiment, grid, None, say=said.append, clock=lambda: grid.now)
    words = r"(\d+) more 'client failed' failures in .*, (\d+) in total; the last one: client \d"
    counted = [re.match(words, line) for line in said]
    found = [(int(match[1]), int(match[2])) for match in counted if match]
    assert found, said
    assert found[0] == (found[0][0], 3 + found[0][0])
    failures = sum("lost, its app raised" in line for line in said)
    assert failures == 3 + len(found) < found[-1][1]


def test_where_every_client_crashes_the_run_ends_and_says_why(logged: list[str], tmp_path: Path) -> None:
    grid = refusing(loop())
    words = (
        r"none of the last (\d+) jobs returned an update: every connected client failed in the same way \(client failed\); "
        r"the last one: its app raised: <class 'KeyError'>:<'img'>$"
    )
    with pytest.raises(ConfigError, match=words) as caught:
        strategy(FedBuff(buffer_size=2), folder=tmp_path).start(grid, ArrayRecord(net().state_dict()), num_rounds=100)
    jobs = int(re.search(words, str(caught.value))[1])
    assert 10 <= jobs <= 25
    assert logged[-1] == f"stopped at version 0 of 100: 0 updates accepted, 0 rejected, {jobs} lost (client failed {jobs})"
    assert not (tmp_path / ".lock").exists()


def test_one_good_client_keeps_a_run_going() -> None:
    grid = loop()
    grid.spoil = lambda order, reply: (
        reply if order.metadata.dst_node_id == 1001 else Message(Error(2, "no data"), reply_to=order)
    )
    result = strategy(FedBuff(buffer_size=2)).start(grid, ArrayRecord(net().state_dict()), num_rounds=5)
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4, 5]


def test_a_resumed_run_counts_what_was_before(tmp_path: Path) -> None:
    experiment = small("fedbuff")
    grid = grid_for(experiment)
    killed_after(grid, 10)
    with pytest.raises(KilledError):
        run(experiment, grid, tmp_path)
    said: list[str] = []
    run(experiment, grid_for(experiment), tmp_path, say=said.append)
    assert said[0] == f"resuming the run in {tmp_path} from version 3"
    assert "8 versions of 3 updates" in said[1]
    assert re.search(r"24 updates accepted, 0 rejected, \d+ lost", said[-3])
