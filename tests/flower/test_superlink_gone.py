"""A lost SuperLink ends its ServerApp's run, which resumes when it is submitted again."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.app import ArrayRecord, Message
from flwr.supercore.run import RunNotRunningException
from flwr.superlink.grid import HttpGrid
from loop_grid import LoopGrid
from networks import DIGITS, arrivals, lines, server_processes, wait_until
from test_async_strategy import N, app, net

from fedecho import FedBuff
from fedecho.flower import AsyncStrategy, Waiting
from fedecho.flower.grid import SuperLinkGoneError
from fedecho.flower.local_federation import LocalFederation, free_port
from fedecho.runs.summary import Summary

GONE = [httpx.ConnectError("[Errno 111] Connection refused"), httpx.ReadTimeout("timed out"), RunNotRunningException()]


class Breaking(LoopGrid):
    """Fails for good at one of its calls, as Flower's grid does when it gives up."""

    def __init__(self, call: str, error: Exception) -> None:
        super().__init__(app, N, lambda client, number: 1.0, {})
        self.call, self.error, self.answers = call, error, 0

    def _fail(self, call: str) -> None:
        if self.answers >= 5 and call == self.call:
            raise self.error

    def get_node_ids(self) -> Iterable[int]:
        self._fail("get_node_ids")
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._fail("push_messages")
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._fail("pull_messages")
        self.answers += 1
        return super().pull_messages(message_ids)


def strategy(folder: Path, **waiting: Any) -> AsyncStrategy:
    told: dict[str, Any] = {"min_nodes": N, "poll_s": 0, "nodes_s": 0} | waiting
    return AsyncStrategy(algorithm=FedBuff(buffer_size=2), num_clients=N, waiting=Waiting(**told), folder=folder)


def test_flowers_own_grid_gives_up(tmp_path: Path) -> None:
    """By itself it would ask for ever."""
    grid = HttpGrid(f"127.0.0.1:{free_port()}", insecure=True, token="none")
    began = time.monotonic()
    with pytest.raises(SuperLinkGoneError, match=r"the SuperLink has not answered for 0.2 s .*: submit the app again"):
        strategy(tmp_path, gone_s=0.2).start(grid, ArrayRecord(net().state_dict()))
    assert time.monotonic() - began < 60
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("error", GONE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["get_node_ids", "push_messages", "pull_messages"])
def test_the_run_stops_and_goes_on(call: str, error: Exception, tmp_path: Path) -> None:
    arrays = ArrayRecord(net().state_dict())
    with pytest.raises(SuperLinkGoneError, match="submit the app again with the same run folder to resume"):
        strategy(tmp_path).start(Breaking(call, error), arrays, num_rounds=6)
    versions = len(lines(tmp_path, "version"))
    saved = arrivals(tmp_path)[: 2 * versions]
    assert versions
    assert not arrivals(tmp_path, "rejected"), "a silent SuperLink is no client's fault"
    strategy(tmp_path).start(Breaking("never", error), arrays, num_rounds=6)
    assert Summary.read(tmp_path).num_versions == 6
    assert arrivals(tmp_path)[: 2 * versions] == saved


@pytest.mark.network
def test_a_killed_superlink_that_is_still_listed_does_not_keep_its_serverapp(tmp_path: Path) -> None:
    """As in a container whose first process collects nobody: Flower's own programs believe that it lives."""
    settings = "task.num_clients=3 concurrency=2 task.width=4 task.num_unlabeled=60 local.num_local_steps=3 "
    config = {"out": str(tmp_path / "run"), "versions": 6, "min-nodes": 2}
    config |= {"settings": settings + "algorithm.inner.buffer_size=1 eval_every=1"}
    with LocalFederation(tmp_path / "logs") as federation:
        for client in (0, 2):
            federation.start_node(client, {"pause-s": 1.0})
        federation.control.submit(DIGITS, config)
        wait_until(lambda: len(lines(tmp_path / "run", "version")) >= 2, 90, "two versions")
        began = time.monotonic()
        federation.kill_superlink()  # and nobody waits for it
        wait_until(lambda: not server_processes(federation), 90, "the ServerApp ends")
        print({"seconds": time.monotonic() - began})
    with LocalFederation(tmp_path / "anew") as federation:
        for client in (0, 2):
            federation.start_node(client)
        federation.control.follow(federation.control.submit(DIGITS, config), every_s=1)
    assert Summary.read(tmp_path / "run").num_versions == 6
