"""Work beside other work, and what is said when memory does not suffice."""

import os
import signal
import time
from functools import partial

import pytest
import torch

from fedecho.experiments.beside import Say, Tell, beside
from fedecho.experiments.run import Interrupted
from fedecho.experiments.shortage import shortage
from fedecho.experiments.signals import stop_signals
from fedecho.experiments.state import RunState


def _work(number: int, tell: Tell, say: Say) -> int:
    tell(RunState(3, version=number))
    say(f"I am number {number}")
    return number * number


def _killed(tell: Tell, say: Say) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wrong(tell: Tell, say: Say) -> None:
    raise ValueError("a word of its own")


def _until_stopped(tell: Tell, say: Say) -> None:
    """Asked to stop it has much to say, more than a pipe holds that nobody reads."""

    with stop_signals(say) as asked:
        while not asked():
            tell(RunState(3))
            time.sleep(0.1)
    say("x" * 1_000_000)
    raise Interrupted("asked to stop")


def _ignore(*_: object) -> None:
    """Who does not look and does not listen."""


def test_results_news_and_words_come_by_label() -> None:
    seen: dict[str, int] = {}
    said: list[str] = []
    works = {f"work {number}": partial(_work, number) for number in range(3)}
    got = beside(works, jobs=2, see=lambda label, state: seen.update({label: state.version}), say=said.append)
    assert got == {"work 0": 0, "work 1": 1, "work 2": 4}
    assert seen == {"work 0": 0, "work 1": 1, "work 2": 2}
    assert sorted(said) == [f"work {number}: I am number {number}" for number in range(3)]


def test_a_process_that_is_killed_ends_all_with_a_word() -> None:
    with pytest.raises(Interrupted, match=r"ended without a word.*the same command goes on"):
        beside({"one": _killed, "two": _killed}, jobs=1, see=_ignore, say=_ignore)


def test_an_error_stops_the_others_and_is_told_at_once() -> None:
    """Though one that began before it would go on for ever."""
    with pytest.raises(ValueError, match="a word of its own"):
        beside({"endless": _until_stopped, "wrong": _wrong}, jobs=2, see=_ignore, say=_ignore)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory: no more could be had"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nand more"), "not enough memory: CUDA out of memory. Tried"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            "not enough memory: DefaultCPUAllocator: can't allocate memory",
        ),
        (RuntimeError("shapes differ"), ""),
        (ValueError("memory must be cpu or file"), ""),
    ],
)
def test_want_of_memory_is_told_from_other_faults(error: Exception, said: str) -> None:
    assert shortage(error) == said
