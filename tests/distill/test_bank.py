"""The bank of latest logits against a mean computed from scratch."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedecho.distill import Bank
from fedecho.storage.checkpoint import decode, encode

ROWS, CLASSES = 7, 3
CPU = torch.device("cpu")
puts = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2**31)), min_size=1, max_size=40)


def logits(seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(seed))


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@given(puts)
@settings(max_examples=50, deadline=None)
def test_the_running_mean_is_the_mean_over_the_latest_of_each_client(puts: list[tuple[int, int]]) -> None:
    bank, latest = Bank(ROWS, CLASSES, CPU), {}
    for version, (client, seed) in enumerate(puts):
        bank.put(client, logits(seed), version)
        latest[client] = logits(seed).double().numpy()
        assert len(bank) == len(latest)
        expected = np.mean(list(latest.values()), axis=0)
        np.testing.assert_allclose(bank.teacher().numpy(), expected, rtol=1e-6, atol=1e-6)


def test_thousands_of_puts_of_large_logits_do_not_drift() -> None:
    """Sums of 1e6 would lose their last digits one by one in float32."""
    bank, generator, latest = Bank(ROWS, CLASSES, CPU), np.random.default_rng(0), {}
    for version in range(5000):
        client = int(generator.integers(20))
        scale = 1e6 if version < 4900 else 1.0
        latest[client] = torch.from_numpy(generator.normal(0, scale, (ROWS, CLASSES)).astype(np.float32))
        bank.put(client, latest[client], version)
    for client in range(20):
        latest[client] = logits(client)
        bank.put(client, latest[client], 5000)
    expected = torch.stack(list(latest.values())).double().mean(dim=0)
    assert (bank.teacher().double() - expected).abs().max() < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_refused_and_the_former_ones_stay(bad: float) -> None:
    bank = Bank(ROWS, CLASSES, CPU)
    bank.put(0, logits(0), 0)
    bank.put(1, logits(1), 1)
    before, odd = bank.teacher().clone(), logits(2)
    odd[1, 0] = bad
    bank.put(1, odd, 2)
    bank.put(5, odd, 2)
    assert torch.equal(bank.teacher(), before)
    assert len(bank) == 2


def test_a_mean_of_probabilities_comes_back_as_its_logarithm() -> None:
    bank = Bank(ROWS, CLASSES, CPU, "probabilities")
    for client in range(4):
        bank.put(client, logits(client), 0)
    bank.put(2, logits(77), 1)
    expected = np.mean([softmax(logits(seed).double().numpy()) for seed in (0, 1, 77, 3)], axis=0)
    np.testing.assert_allclose(bank.teacher().exp().numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(bank.teacher().softmax(dim=1).numpy(), expected, rtol=1e-5)


def test_a_probability_of_zero_has_a_finite_logarithm() -> None:
    bank = Bank(1, 2, CPU, "probabilities")
    bank.put(0, torch.tensor([[0.0, 500.0]]), 0)
    assert torch.isfinite(bank.teacher()).all()
    assert bank.teacher().softmax(dim=1).tolist() == [[pytest.approx(0.0, abs=1e-30), 1.0]]


def test_a_bank_that_heard_nobody_has_no_teacher() -> None:
    with pytest.raises(ValueError, match="no client has reported yet"):
        Bank(ROWS, CLASSES, CPU).teacher()


def test_an_unknown_average_is_refused() -> None:
    with pytest.raises(ValueError, match=r"average must be 'logits' or 'probabilities', got 'votes'"):
        Bank(ROWS, CLASSES, CPU, "votes")  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=30))
@settings(max_examples=50, deadline=None)
def test_the_mean_age_is_that_of_the_latest_words(heard: list[tuple[int, int]]) -> None:
    bank, latest, version = Bank(ROWS, CLASSES, CPU), {}, 0
    for client, gap in heard:
        version += gap
        bank.put(client, logits(client), version)
        latest[client] = version
    expected = np.mean([version + 2 - at for at in latest.values()]) if latest else 0.0
    assert bank.mean_age(version + 2) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=30), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_forgotten_clients_are_as_if_never_heard(heard: list[tuple[int, int]], age: int) -> None:
    bank, latest, version = Bank(ROWS, CLASSES, CPU), {}, 0
    for client, gap in heard:
        version += gap
        bank.put(client, logits(client), version)
        latest[client] = version
    bank.forget_before(version - age)
    young = [logits(client).double() for client, at in latest.items() if version - at <= age]
    assert len(bank) == len(young) >= 1
    torch.testing.assert_close(bank.teacher().double(), torch.stack(young).mean(dim=0), rtol=0, atol=1e-6)
    assert bank.mean_age(version) <= age
    bank.put(0, logits(99), version)
    assert bank.num_dropped == 0, "only a budget drops"


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_a_reloaded_bank_goes_on_to_the_last_bit(average: str) -> None:
    bank, tensors = Bank(ROWS, CLASSES, CPU, average), {}
    for client in (3, 0, 3, 5):
        bank.put(client, logits(client + 10), client)
    tree = json.loads(json.dumps(encode(bank, tensors)))
    again = decode(tree, tensors, Bank(ROWS, CLASSES, CPU, average))
    for each in (bank, again):
        each.put(0, logits(99), 7)
        each.put(8, logits(98), 8)
    assert torch.equal(again.teacher(), bank.teacher())
    assert torch.equal(again.total, bank.total)
    assert list(again.entries) == list(bank.entries)
    assert again.mean_age(9) == bank.mean_age(9)
    assert again.total.dtype == torch.float64


def test_bytes_are_those_of_the_entries_and_the_sum() -> None:
    bank = Bank(ROWS, CLASSES, CPU)
    assert bank.num_bytes == 8 * ROWS * CLASSES
    for client in (0, 1, 0):
        bank.put(client, logits(client), 0)
    assert bank.num_bytes == 8 * ROWS * CLASSES + 2 * 4 * ROWS * CLASSES
