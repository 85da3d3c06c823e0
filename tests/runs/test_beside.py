"""Jobs in parallel processes: failures, kills, stop requests and out-of-memory."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from fedecho.executors.worker_pool import WorkerError
from fedecho.runs import job_processes, signals
from fedecho.runs.job_processes import FAILED, Report, Say, run_job, run_jobs
from fedecho.runs.run import Interrupted
from fedecho.runs.run_stats import RunState
from fedecho.runs.signals import ShortageError, Stop, memory_shortage, stop_signals


class StubbornError(Exception):
    """One that does not travel."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def _work(number: int, report: Report, say: Say, stop: Stop) -> int:
    report(RunState(3, version=number))
    say(f"I am number {number}")
    return number * number


def _until_stopped(folder: Path, report: Report, say: Say, stop: Stop) -> None:
    """Lively, and in good order: asked to stop it has much to say, more than a pipe holds that nobody reads."""
    (folder / f"began-{os.getpid()}").touch()
    while not stop():
        report(RunState(3))
        time.sleep(0.02)
    say("x" * 1_000_000)
    (folder / f"kept-{os.getpid()}").touch()
    raise Interrupted("asked to stop")


def _once_they_work(folder: Path, number: int, then: Exception | signal.Signals, report: Report, say: Say, stop: Stop) -> None:
    while len(list(folder.glob("began-*"))) < number:
        time.sleep(0.02)
    if isinstance(then, Exception):
        raise then
    os.kill(os.getpid(), then)
    time.sleep(60)


def _for_want_of_memory(folder: Path, how: str, report: Report, say: Say, stop: Stop) -> str:
    """It fails for as long as another is at work."""
    if how == "for ever" or not (folder / "over").exists():
        (folder / "tried").touch()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError if how == "python" else ShortageError("others hold it")
    return "done"


def _at_work_until_another_tried(folder: Path, report: Report, say: Say, stop: Stop) -> str:
    while not (folder / "tried").exists():
        time.sleep(0.02)
    time.sleep(0.5)
    (folder / "over").touch()
    return "done"


def _too_large_for_two(folder: Path, report: Report, say: Say, stop: Stop) -> str:
    """Both fail together, and each fits alone."""
    (folder / f"tried-{os.getpid()}").touch()
    while len(list(folder.glob("tried-*"))) < 2:
        time.sleep(0.02)
    if len(list(folder.glob("tried-*"))) == 2:
        raise MemoryError
    return "done"


def _does_not_leave(report: Report, say: Say, stop: Stop) -> str:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return "done"


def _ignore(*_: object) -> None:
    """Who does not look and does not listen."""


def test_results_news_and_words_come_by_label() -> None:
    seen: dict[str, int] = {}
    said: list[str] = []
    works = {f"work {number}": partial(_work, number) for number in range(3)}
    got = run_jobs(works, jobs=2, see=lambda label, state: seen.update({label: state.version}), say=said.append)
    assert got == {"work 0": 0, "work 1": 1, "work 2": 4}
    assert seen == {"work 0": 0, "work 1": 1, "work 2": 2}
    assert sorted(said) == [f"work {number}: I am number {number}" for number in range(3)]


@pytest.mark.parametrize(
    ("then", "error", "words"),
    [
        (ValueError("a word of its own"), ValueError, "a word of its own"),
        pytest.param(StubbornError(1, 2), RuntimeError, "StubbornError: 1 and 2", marks=pytest.mark.slow),
        (
            signal.SIGSEGV,
            WorkerError,
            r"ends: its process ended unexpectedly \(SIGSEGV\); run the same command again to continue",
        ),
    ],
)
def test_one_that_fails_ends_the_others_in_good_order(
    tmp_path: Path, then: Exception | signal.Signals, error: type[Exception], words: str
) -> None:
    """Though they would go on for ever, and have more to say than anybody listens to."""
    others = {f"other {number}": partial(_until_stopped, tmp_path) for number in range(2)}
    works = others | {"ends": partial(_once_they_work, tmp_path, 2, _packed(then)), "never": _ignore}
    with pytest.raises(error, match=words) as raised:
        run_jobs(works, jobs=3, see=_ignore, say=_ignore)
    assert len(list(tmp_path.glob("kept-*"))) == 2
    if isinstance(then, Exception):
        assert "in _once_they_work" in str(raised.value.__cause__), "where it was is told to whom a traceback is shown"
        assert not hasattr(raised.value, "__notes__"), "and to nobody else"


def _packed(then: Exception | signal.Signals) -> "Exception | signal.Signals | _Made":
    return _Made() if isinstance(then, StubbornError) else then


class _Made(Exception):  # noqa: N818
    """Travels as itself and arrives as the stubborn one: it must be raised over there."""

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return StubbornError, (1, 2)


def test_what_does_not_travel_does_not() -> None:
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(StubbornError(1, 2)))  # noqa: S301


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_request_to_all_processes_is_one(tmp_path: Path, number: signal.Signals) -> None:
    """In a session of its own, where one has done its work and waits for nothing any more."""
    here = Path(__file__)
    script = (
        f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem}; {here.stem}.two_long({str(tmp_path)!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    while len(list(tmp_path.glob("began-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, number)
    os.killpg(process.pid, number)  # as `timeout` does
    for path in tmp_path.glob("began-*"):  # as a batch system does
        os.kill(int(path.name.removeprefix("began-")), number)
    said, _ = process.communicate(timeout=300)
    assert said == "stopped; run the same command again to continue\n"
    assert len(list(tmp_path.glob("kept-*"))) == 2


def two_long(folder: str) -> None:
    works = {"short": partial(_work, 3), **{f"long {n}": partial(_until_stopped, Path(folder)) for n in range(2)}}
    try:
        run_jobs(works, jobs=3, see=_ignore, say=_ignore)
    except Interrupted as stopped:
        print(stopped)


@pytest.mark.parametrize("how", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("python", "gpu")), "killed"])
def test_what_finds_too_little_memory_is_put_back_and_fewer_go_on(tmp_path: Path, how: str) -> None:
    said: list[str] = []
    works = {"large": partial(_at_work_until_another_tried, tmp_path), "second": partial(_for_want_of_memory, tmp_path, how)}
    assert run_jobs(works, jobs=2, see=_ignore, say=said.append) == {"large": "done", "second": "done"}
    assert len(said) == 1
    assert said[0].startswith("second: ")
    assert said[0].endswith("will retry with 1 at a time")


@pytest.mark.slow
def test_what_finds_too_little_memory_alone_fails(tmp_path: Path) -> None:
    works = {
        "large": partial(_at_work_until_another_tried, tmp_path),
        "second": partial(_for_want_of_memory, tmp_path, "for ever"),
    }
    said: list[str] = []
    with pytest.raises(ShortageError, match="others hold it"):
        run_jobs(works, jobs=2, see=_ignore, say=said.append)
    assert said == ["second: others hold it: will retry with 1 at a time"]


@pytest.mark.slow
def test_two_that_fit_alone_are_done_one_after_the_other(tmp_path: Path) -> None:
    works = {name: partial(_too_large_for_two, tmp_path) for name in ("one", "two")}
    assert run_jobs(works, jobs=2, see=_ignore, say=_ignore) == {"one": "done", "two": "done"}


def test_a_process_that_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_processes, "EXIT_TIMEOUT_S", 0.5)
    assert run_jobs({"one": _does_not_leave}, jobs=1, see=_ignore, say=_ignore) == {"one": "done"}
    assert not multiprocessing.active_children()


def test_an_order_that_cannot_be_read_says_why() -> None:
    class Unreadable:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return open, ("/nowhere/at/all",)

    kind, (error, _) = run_job(pickle.dumps(Unreadable()), _ignore, lambda: False)
    assert kind == FAILED
    assert isinstance(error, FileNotFoundError)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory: allocation failed"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nand more"), "not enough memory: CUDA out of memory. Tried"),
        (RuntimeError("can't allocate memory: 9"), "not enough memory: can't allocate memory: 9"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED in x"), "not enough memory: CUBLAS_STATUS_ALLOC_FAILED in x"),
        (OSError(12, "Cannot allocate memory"), "not enough memory: [Errno 12] Cannot allocate memory"),
        (
            WorkerError("training of client 3 failed: MemoryError"),
            "not enough memory: training of client 3 failed: MemoryError",
        ),
        (WorkerError("client 3 lost 4 workers; out of memory? (exit code -11)"), ""),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), ""),
        (RuntimeError("shapes differ"), ""),
        (ValueError("memory must be cpu or file"), ""),
    ],
    ids=str,
)
def test_want_of_memory_is_told_from_other_faults(error: Exception, said: str) -> None:
    assert memory_shortage(error) == said


def test_the_second_request_ends_at_once_unless_it_comes_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with stop_signals(said.append) as asked:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert asked()
        assert len(said) == 1
        monkeypatch.setattr(signals, "AGAIN_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
