"""Pools whose workers fail or die, and closing a pool."""

import time
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from hand_pool import LAYOUT, HandPool, job, shared_memory

from fedecho.executors import pool as pool_module
from fedecho.executors.pool import AHEAD, PoolExecutor, WorkerError
from fedecho.executors.worker import Ready
from fedecho.executors.worker_pool import MAX_LOSSES


def test_a_failure_names_the_client(pool: HandPool) -> None:
    pool.submit(job(0, client=42), 0.0)
    pool.fail(pool.orders()[0])
    with pytest.raises(WorkerError, match=r"training of client 42 failed: division by zero"):
        pool.result(0)


def test_the_failure_of_a_cancelled_job_is_ignored(pool: HandPool) -> None:
    pool.submit(job(0, client=42), 0.0)
    pool.submit(job(1), 1.0)
    pool.cancel(0)
    first, second = pool.orders()
    pool.fail(first)
    pool.answer(second)
    assert pool.result(1).metrics == {"number": 1.0}


@pytest.mark.parametrize("mid_message", [False, True], ids=["between answers", "in the middle of one"])
def test_a_dead_workers_jobs_go_to_its_replacement(pool: HandPool, mid_message: bool) -> None:
    pool.submit(job(0, client=1, control=torch.ones(4)), 0.0)
    pool.submit(job(1, client=2), 1.0)
    pool.orders()
    pool.kill(mid_message=mid_message)
    pool.turn()
    assert pool.processes[0].joined
    again = pool.orders(worker=1)
    assert [order.number for order in again] == [0, 1]
    for order in again:
        pool.answer(order, worker=1)
    assert pool.result(0).correction.tolist() == [10.0] * 4
    assert pool.result(1).metrics == {"number": 1.0}
    assert pool.num_trained == 2


def test_a_worker_that_died_unnoticed_is_replaced_at_the_next_order(pool: HandPool) -> None:
    """The parent distils for seconds at a time; a worker may be gone when the next job is submitted."""
    pool.submit(job(0), 0.0)
    pool.orders()
    pool.kill()
    pool.submit(job(1), 1.0)
    if len(pool.ends) == 1:  # it may be found out at once, or by the next look
        pool.turn()
    assert sorted(pool.numbers(worker=1)) == [0, 1]


def test_a_requested_job_goes_to_the_replacement_despite_many_waiting_results(pool: HandPool) -> None:
    """The idle worker died while the limit of waiting results was reached: no other order would ever be sent."""
    for number in range(2 * AHEAD):
        pool.submit(job(number), 100.0 - number)
    answered: list[int] = []
    while len(answered) < 2 * AHEAD:
        answered += pool.answer_all()
    pool.kill()
    pool.submit(job(50), 200.0)
    assert len(pool.ends) == 1, "the limit is reached, so no order is sent"

    def answer_as_replacement() -> None:
        while len(pool.ends) == 1:
            time.sleep(0.001)
        pool.answer(pool.next_order(1), 1)

    thread = Thread(target=answer_as_replacement)
    thread.start()
    assert pool.result(50).metrics == {"number": 50.0}
    thread.join()


def test_a_job_due_before_results_that_wait_may_start_beyond_the_bound(pool: HandPool) -> None:
    for number in range(AHEAD):
        pool.submit(job(number), 100.0)
    answered: list[int] = []
    while len(answered) < AHEAD:
        answered += pool.answer_all()
    pool.submit(job(20), 101.0)
    assert pool.numbers() == []
    pool.submit(job(21), 5.0)
    assert pool.numbers() == [21]


def test_a_few_deaths_of_many_jobs_do_not_end_a_long_run(pool: HandPool) -> None:
    for number in range(2 * MAX_LOSSES):
        pool.submit(job(number), float(number))
        pool.kill(number)
        pool.turn()
        (order,) = pool.orders(number + 1)
        pool.answer(order, number + 1)
        assert pool.result(number).metrics == {"number": float(number)}


def test_idle_workers_that_die_now_and_then_do_not_end_it_either(pool: HandPool) -> None:
    for number in range(2 * MAX_LOSSES):
        pool.kill(number)
        pool.turn()
        pool.submit(job(number), float(number))
        (order,) = pool.orders(number + 1)
        pool.answer(order, number + 1)
        assert pool.result(number).metrics == {"number": float(number)}


def test_workers_that_keep_dying_end_the_run(pool: HandPool) -> None:
    pool.submit(job(0), 0.0)
    for worker in range(MAX_LOSSES):
        pool.kill(worker)
        pool.turn()
    pool.kill(MAX_LOSSES)
    with pytest.raises(WorkerError, match=r"4 workers died while training client 0; out of memory\? \(exit code -9\)"):
        pool.result(0)


def test_workers_that_die_during_start_up_end_the_run_and_no_client_is_blamed() -> None:
    """Orders have already been sent to them."""
    pool = HandPool(2, ready=False)
    for number in range(4):
        pool.submit(job(number), float(number))
    for worker in range(2 * MAX_LOSSES):
        pool.kill(worker)
        pool.turn()
    pool.kill(2 * MAX_LOSSES)
    with pytest.raises(WorkerError, match=r"workers keep dying before they have started: exit code -9"):
        pool.turn()
    pool.close()


def test_a_successful_start_resets_the_count_of_failed_ones() -> None:
    pool = HandPool(1, ready=False)
    for worker in range(3 * MAX_LOSSES):
        if worker % MAX_LOSSES == 2:
            pool.ends[worker].send(Ready())
            pool.turn()
        pool.kill(worker)
        pool.turn()
    pool.close()


def test_a_cancelled_job_that_kills_workers_does_not_end_the_run(pool: HandPool) -> None:
    pool.submit(job(0), 0.0)
    for worker in range(MAX_LOSSES):
        pool.kill(worker)
        pool.turn()
    pool.cancel(0)
    pool.kill(MAX_LOSSES)
    pool.turn()
    with pytest.raises(KeyError, match="never submitted"):
        pool.result(0)


class Stuck:
    """A process that ends only when killed; joining it advances the clock."""

    now = 0.0

    def __init__(self) -> None:
        self.exitcode: int | None = None

    def join(self, timeout: float | None = None) -> None:
        Stuck.now += timeout or 0.0

    def kill(self) -> None:
        self.exitcode = -9


def test_stuck_processes_share_one_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: Stuck.now))
    stuck = [Stuck() for _ in range(3)]
    pool_module._join_or_kill(stuck)  # type: ignore[arg-type]
    assert Stuck.now == pool_module.GRACE_S
    assert [one.exitcode for one in stuck] == [-9] * 3


def test_closing_stops_busy_workers_and_removes_the_shared_memory() -> None:
    before = shared_memory()
    pool = HandPool(2)
    pool.submit(job(0), 0.0)
    pool.orders()
    assert len(shared_memory() - before) == 2
    pool.vectors.clear()
    pool.close()
    assert [process.terminated for process in pool.processes] == [True, False]
    assert all(process.joined for process in pool.processes)
    assert not shared_memory() - before
    pool.close()
    assert all(end.poll() for end in pool.ends), "their ends of the pipes are closed"


def test_no_workers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"workers must be at least 1, got 0"):
        PoolExecutor(num_workers=0, layout=LAYOUT, make_trainer=lambda: None)  # type: ignore[arg-type,return-value]
