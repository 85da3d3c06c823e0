"""Which worker gets which order and when, what travels through shared memory, and what happens to cancelled jobs."""

import tracemalloc
from threading import Thread
from typing import Any

import pytest
import torch
from hand_pool import HandPool, job, model, shared_memory

from fedecho.executors.pool import AHEAD, DEPTH


def finish(pool: HandPool, number: int) -> Any:
    """Answer all orders and return this result."""
    for order in pool.orders():
        pool.answer(order)
    return pool.result(number)


def answered_meanwhile(pool: HandPool, number: int) -> Any:
    """Request a result that no worker is computing; the worker answers its next order while we wait."""
    thread = Thread(target=lambda: pool.answer(pool.next_order()))
    thread.start()
    found = pool.result(number)
    thread.join()
    return found


def test_a_worker_holds_a_few_orders_and_the_next_are_the_most_urgent(pool: HandPool) -> None:
    for number, due in enumerate([50.0, 40.0, 30.0, 10.0, 20.0]):
        pool.submit(job(number), due)
    first = pool.orders()
    assert [order.number for order in first] == [0, 1]
    assert DEPTH == 2
    pool.answer(first[0])
    pool.result(0)
    assert pool.numbers() == [3]
    pool.answer(first[1])
    pool.result(1)
    assert pool.numbers() == [4]


def test_the_least_busy_worker_gets_the_order() -> None:
    two = HandPool(2)
    for number in range(5):
        two.submit(job(number), float(number))
    assert (two.numbers(0), two.numbers(1)) == ([0, 2], [1, 3])
    two.close()


def test_waiting_results_are_bounded_until_one_is_requested(pool: HandPool) -> None:
    for number in range(12):
        pool.submit(job(number), float(number))
    sent: list[int] = []
    for _ in range(12):
        sent += pool.answer_all()
    assert sent == list(range(AHEAD + 1)), "four wait, and one more was under way"
    for number in range(3):
        pool.result(number)
    assert pool.numbers() == [5, 6]


def test_an_urgent_job_goes_before_the_bound(pool: HandPool) -> None:
    for number in range(AHEAD):
        pool.submit(job(number), 0.0)
    answered: list[int] = []
    while len(answered) < AHEAD:
        answered += pool.answer_all()
    pool.submit(job(99), 5.0)
    assert pool.numbers() == []
    assert answered_meanwhile(pool, 99).metrics == {"number": 99.0}


def test_jobs_past_the_end_are_trained_only_on_request() -> None:
    pool = HandPool(wanted=frozenset({0, 2}))
    for number in range(4):
        pool.submit(job(number), float(number))
    assert pool.numbers() == [0, 2]
    pool.close()
    assert pool.num_trained == 0
    later = HandPool(wanted=frozenset())
    later.submit(job(7), 1.0)
    assert later.numbers() == []
    assert answered_meanwhile(later, 7).metrics == {"number": 7.0}
    assert later.num_trained == 1
    later.close()


def test_weights_and_control_variates_travel_through_shared_memory(pool: HandPool) -> None:
    control = torch.tensor([0.5, 1.0, 1.5, 2.0])
    pool.submit(job(3, client=5, version=2, control=control), 1.0)
    (order,) = pool.orders()
    assert (order.client, order.version, order.seed) == (5, 2, 3)
    assert (order.has_control, order.has_correction) == (True, False)
    pool.answer(order)
    update = pool.result(3)
    assert torch.equal(update.delta, 2 * model(2).weights.params)
    assert torch.equal(update.buffers, model(2).weights.buffers + 1)
    assert torch.equal(update.correction, 10 * control)
    assert (update.client, update.base_version, update.num_examples, update.num_steps) == (5, 2, 5, 3)
    assert control.tolist() == [0.5, 1.0, 1.5, 2.0]


def test_results_are_copies_that_the_next_job_does_not_touch(pool: HandPool) -> None:
    pool.submit(job(0, version=1), 0.0)
    first = finish(pool, 0)
    kept = first.delta.clone()
    for number in range(1, 6):
        pool.submit(job(number, version=number + 5), 0.0)
        finish(pool, number)
    assert torch.equal(first.delta, kept)


def test_shared_memory_is_used_again(pool: HandPool) -> None:
    """Fifty jobs from fifty versions need one segment for the model and one for the result."""
    before = shared_memory()
    for number in range(50):
        pool.submit(job(number, version=number), 0.0)
        assert torch.equal(finish(pool, number).delta, 2 * model(number).weights.params)
    pool.vectors[0].clear()  # the worker's views of the same segments
    assert len(shared_memory() - before) == 2


def test_jobs_from_one_version_share_its_segment(pool: HandPool) -> None:
    pool.submit(job(0, version=4), 0.0)
    pool.submit(job(1, version=4), 0.0)
    one, other = pool.orders()
    assert one.model == other.model
    assert one.result != other.result


def test_a_cancelled_pending_job_is_never_trained(pool: HandPool) -> None:
    for number in range(4):
        pool.submit(job(number), float(number))
    pool.cancel(2)
    sent: list[int] = []
    while 3 not in sent:
        sent += pool.answer_all()
    assert sent == [0, 1, 3]


def test_the_result_of_a_cancelled_running_job_is_discarded(pool: HandPool) -> None:
    pool.submit(job(0), 0.0)
    pool.submit(job(1), 1.0)
    pool.cancel(0)
    assert finish(pool, 1).metrics == {"number": 1.0}
    assert pool.num_trained == 2
    with pytest.raises(KeyError, match="never submitted"):
        pool.result(0)


def test_a_cancelled_result_is_discarded(pool: HandPool) -> None:
    pool.submit(job(0), 0.0)
    pool.submit(job(1), 1.0)
    finish(pool, 1)
    assert pool.num_trained == 2
    pool.cancel(0)
    with pytest.raises(KeyError, match="never submitted"):
        pool.result(0)


def test_cancelling_what_was_never_submitted_is_forgotten(pool: HandPool) -> None:
    """A dropout has no job, and a run may have millions of them."""
    tracemalloc.start()
    for number in range(10_000):
        pool.cancel(number)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 10_000
    pool.submit(job(17), 0.0)
    assert finish(pool, 17).metrics == {"number": 17.0}
