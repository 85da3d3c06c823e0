"""A worker in this process, and the shared memory it uses."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_pool import SHARED, shared_memory
from pool_tasks import LOCAL, MOODY, MoodyDigits

from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.executors.shared_memory import Segment, Segments, receive_segment
from fedecho.executors.worker import Done, Failed, JobOrder, Ready, work
from fedecho.runs.build import MakeTrainer

MAKE = MakeTrainer(MoodyDigits(), LOCAL, seed=0)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A worker takes over its process: here it must not end it, and what it sets is set back."""
    exits: list[int] = []
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(os, "_exit", exits.append)
    yield exits
    assert torch.get_num_threads() == 1
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, handler)


def base(version: int = 4) -> GlobalModel:
    network = MAKE().network
    generator = torch.Generator().manual_seed(version)
    params = network.weights.params + 0.01 * torch.randn(network.layout.num_params, generator=generator)
    correction = 0.1 * torch.randn(network.layout.num_params, generator=generator)
    return GlobalModel(version, Weights(params, network.weights.buffers.clone()), correction)


def sizes() -> list[int]:
    layout = MAKE().network.layout
    return [layout.num_params, layout.num_buffers, layout.num_params]


def through_a_worker(model: GlobalModel, clients: list[int], control: Any) -> list[tuple[Any, ClientUpdate]]:
    """Answers and the updates that lie in the result segments afterwards."""
    parts, ours_theirs = sizes(), Pipe()
    ours, theirs = ours_theirs
    model_segment = Segment(sum(parts))
    results = [Segment(sum(parts)) for _ in clients]
    params, buffers, correction = model_segment.vector.split(parts)
    params.copy_(model.weights.params)
    buffers.copy_(model.weights.buffers)
    if model.correction is not None:
        correction.copy_(model.correction)
    for number, (client, result) in enumerate(zip(clients, results, strict=True)):
        if control is not None:
            result.vector[-parts[2] :].copy_(control)
        has = model.correction is not None
        memory = (model_segment.number, result.number)
        ours.send(JobOrder(number, client, model.version, 70 + number, *memory, has, control is not None))
        for segment in (model_segment, result) if number == 0 else (result,):
            segment.send(ours)
    ours.send(None)
    work(theirs, MAKE)
    assert ours.recv() == Ready()
    found = []
    for client, result in zip(clients, results, strict=True):
        delta, out, change = (part.clone() for part in result.vector.split(parts))
        found.append((ours.recv(), ClientUpdate(client, model.version, delta, out, 0, 0, change)))
    del params, buffers, correction
    for segment in (model_segment, *results):
        segment.close()
    return found


@pytest.mark.parametrize("with_control", [False, True])
@pytest.mark.parametrize("with_correction", [False, True])
def test_a_worker_gives_the_bytes_of_a_trainer(quiet: list[int], with_control: bool, with_correction: bool) -> None:
    model = base() if with_correction else GlobalModel(4, base().weights)
    control = 0.05 * torch.ones(sizes()[0]) if with_control else None
    found = through_a_worker(model, [1, 0, 1], control)
    trainer = MAKE()
    for number, (answer, update) in enumerate(found):
        expected = trainer.train(Dispatch(number, update.client, model, 70 + number), control)
        assert answer == Done(number, expected.num_examples, expected.num_steps, True, dict(expected.metrics))
        assert torch.equal(update.delta, expected.delta)
        assert torch.equal(update.buffers, expected.buffers)
        assert torch.equal(update.correction, expected.correction)
    assert quiet == [0]


def test_a_failed_client_is_told_and_the_next_is_trained(quiet: list[int]) -> None:
    (failed, _), (done, update) = through_a_worker(base(), [MOODY, 2], None)
    assert isinstance(failed, Failed)
    assert (failed.number, failed.client) == (0, MOODY)
    assert failed.error.startswith("not today\nTraceback")
    assert "ZeroDivisionError" in failed.error
    assert isinstance(done, Done)
    assert torch.equal(update.delta, MAKE().train(Dispatch(1, 2, base(), 71)).delta)


def test_a_worker_ends_with_its_pipe(quiet: list[int]) -> None:
    ours, theirs = Pipe()
    ours.close()
    work(theirs, MAKE)
    assert quiet == [0]


@pytest.mark.parametrize("files", [0, 1])
def test_a_worker_whose_parent_dies_in_the_middle_of_an_order_ends_in_silence(quiet: list[int], files: int) -> None:
    ours, theirs = Pipe()
    segment = Segment(sum(sizes()))
    ours.send(JobOrder(0, 1, 0, 70, segment.number, -1, False, False))
    for _ in range(files):
        segment.send(ours)
    segment.close()
    ours.close()
    work(theirs, MAKE)
    assert quiet == [0]


def test_a_segment_is_shared_through_a_pipe_has_no_name_and_is_gone_with_its_last_view() -> None:
    before, named = shared_memory(), set(SHARED.iterdir())
    mine = Segment(5)
    ours, theirs = Pipe()
    mine.send(ours)
    other = receive_segment(theirs, 5)
    assert not {path for path in set(SHARED.iterdir()) - named if path.stat().st_ino == os.fstat(mine.number).st_ino}
    mine.vector.copy_(torch.arange(5.0))
    assert other.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    other[2] = -1.0
    assert mine.vector[2] == -1.0
    mine.close()
    assert len(shared_memory() - before) == 1
    assert other[2] == -1.0
    del other
    assert not shared_memory() - before


def test_a_closed_segment_leaves_no_open_file() -> None:
    files = len(list(Path("/proc/self/fd").iterdir()))
    segment = Segment(4)
    ours, theirs = Pipe()
    segment.send(ours)
    other = receive_segment(theirs, 4)
    ours.close()
    theirs.close()
    segment.close()
    del other
    assert len(list(Path("/proc/self/fd").iterdir())) <= files  # others may be closed meanwhile


def test_a_pipe_that_closes_before_the_segment_came_is_its_end() -> None:
    ours, theirs = Pipe()
    ours.close()
    with pytest.raises(EOFError):
        receive_segment(theirs, 4)


VIEW_AFTER_CLOSE = """
from fedecho.executors.shared_memory import Segment
segment = Segment(4)
view = segment.vector[1:]
segment.close()
view.fill_(3.0)
print(float(view.sum()))
"""


def test_a_view_of_a_closed_segment_does_not_end_the_process() -> None:
    """In a process of its own, because a mapping that is gone is no exception."""
    done = subprocess.run([sys.executable, "-c", VIEW_AFTER_CLOSE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "9.0\n")


def test_an_empty_segment_can_be_made() -> None:
    segment = Segment(0)
    assert segment.vector.shape == (0,)
    segment.close()


def test_segments_are_lent_again_and_all_removed_at_the_end() -> None:
    before = shared_memory()
    segments = Segments(3)
    first, second = segments.take(), segments.take()
    assert first.number != second.number
    segments.give_back(first)
    assert segments.take() is first
    assert len(shared_memory() - before) == 2
    segments.give_back(second)
    segments.close()
    assert not shared_memory() - before
