"""The persistent worker, as real processes: the same answers, access for its user alone, and an end with its node."""

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedecho.core.types import Dispatch, GlobalModel
from fedecho.flower import client_app as link
from fedecho.flower.codec import Codec
from fedecho.flower.wire import receive_frame, send_frame
from fedecho.flower.worker import experiment_of, serve, start_time_of, work
from fedecho.runs.build import bound_network

REFERENCE = "fedecho.flower.config:experiment"
CONFIG = {
    "algorithm": "fedac",
    "settings": "task.num_clients=4 concurrency=3 task.width=2 local.num_local_steps=2",
    "threads": 1,
}


@pytest.fixture
def node() -> Iterator[subprocess.Popen[bytes]]:
    """Stands for the process that starts clients."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def as_node(node: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    monkeypatch.setattr(os, "getppid", lambda: node.pid)
    return node


def order(number: int = 0) -> RecordDict:
    experiment = experiment_of(REFERENCE, CONFIG)
    network = bound_network(experiment.task, experiment.seed)
    weights = network.layout.pack(network.module)
    return Codec(network.layout).dispatch(Dispatch(number, 1, GlobalModel(0, weights, weights.params * 0), seed=7))


def plain(content: RecordDict) -> dict[str, object]:
    arrays = {name: {key: array.data for key, array in record.items()} for name, record in content.array_records.items()}
    return {"arrays": arrays, "metrics": {name: dict(record) for name, record in content.metric_records.items()}}


def gone(path: Path, seconds: float = 60.0) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if not path.exists():
            return True
        time.sleep(0.05)
    return False


def test_a_worker_gives_the_same_bytes_keeps_its_state_outside_and_ends_with_its_node(as_node: subprocess.Popen[bytes]) -> None:
    path = link.socket_path(as_node.pid, REFERENCE)
    state = RecordDict()
    expected_state = RecordDict()
    for number in range(2):
        answer, state = link.work_in_worker(REFERENCE, CONFIG, order(number), state)
        expected, expected_state = work(REFERENCE, CONFIG, order(number), expected_state)
        assert plain(answer) == plain(expected)
        assert plain(state) == plain(expected_state)
    assert "control" in state.array_records, "c_i travels with the context, not with the worker"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(link.WorkerFailedError, match=r"ValueError: record 'config' is missing; the message has no records"):
        link.work_in_worker(REFERENCE, CONFIG, RecordDict(), state)
    answer, _ = link.work_in_worker(REFERENCE, CONFIG, order(), RecordDict())
    assert plain(answer) == plain(work(REFERENCE, CONFIG, order(), RecordDict())[0]), "it goes on after a failed job"
    as_node.kill()
    as_node.wait()
    assert gone(path)
    assert gone(path.with_suffix(".log"))


def test_a_worker_that_nobody_asks_ends(tmp_path: Path) -> None:
    path = tmp_path / "worker.sock"
    thread = threading.Thread(target=serve, args=(path, os.getpid(), 2.0))
    thread.start()
    while not path.exists():
        time.sleep(0.01)
    with socket.socket(socket.AF_UNIX) as client, socket.socket(socket.AF_UNIX) as silent:
        client.connect(str(path))
        silent.connect(str(path))  # its turn comes after the other's
        silent.close()
        send_frame(client, {"reference": REFERENCE, "run_config": CONFIG}, order(), RecordDict())
        note, (answer, _) = receive_frame(client)
    assert note == {}
    assert plain(answer) == plain(work(REFERENCE, CONFIG, order(), RecordDict())[0])
    thread.join(60)
    assert not thread.is_alive()
    assert not path.exists()


def test_a_process_is_told_from_another_under_its_number(node: subprocess.Popen[bytes]) -> None:
    assert start_time_of(os.getpid()) == start_time_of(os.getpid())
    assert start_time_of(node.pid) != start_time_of(os.getpid())
    node.kill()
    node.wait()
    assert start_time_of(node.pid) is None


def test_what_a_killed_worker_left_behind_is_no_obstacle(as_node: subprocess.Popen[bytes]) -> None:
    path = link.socket_path(as_node.pid, REFERENCE)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    answer, _ = link.work_in_worker(REFERENCE, CONFIG, order(), RecordDict())
    assert answer.metric_records["metrics"]["num-steps"] == 2


def test_a_worker_that_cannot_start_is_an_error_that_says_where_to_look(
    as_node: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(link.WorkerFailedError, match=r"the worker exited with code 1; see .*\.log"):
        link.work_in_worker(REFERENCE, CONFIG, order(), RecordDict())


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = link.socket_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="only its owner may enter"):
        link.socket_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="only its owner may enter"):
        link.socket_folder()


def test_frames_carry_records_exactly() -> None:
    ours, theirs = socket.socketpair()
    content = RecordDict({"m": MetricRecord({"a": 0.1, "n": 2**60, "list": [1, 2]}), "c": ConfigRecord({"s": "x", "b": True})})
    content["a"] = order().array_records["arrays"]
    with ours, theirs:
        send_frame(ours, {"hello": 1}, content, RecordDict())
        note, (got, empty) = receive_frame(theirs)
        assert note == {"hello": 1}
        assert not empty
        assert plain(got) == plain(content)
        assert dict(got.config_records["c"]) == {"s": "x", "b": True}
        ours.close()
        with pytest.raises(ConnectionError, match="closed"):
            receive_frame(theirs)


def test_a_header_of_absurd_length_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\xff" * 8)
        with pytest.raises(ValueError, match="too long"):
            receive_frame(theirs)


def test_a_reference_must_give_an_experiment() -> None:
    with pytest.raises(TypeError, match=r"os:getcwdb must return|takes no arguments"):
        experiment_of("os:getcwdb", {})
    with pytest.raises(TypeError, match="builtins:dict must return an Experiment, got dict"):
        experiment_of("builtins:dict", {})
