"""Robust teachers against NumPy and SciPy, and the influence of one bad client on each."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import entropy, trim_mean
from torch import Tensor

from fedecho.distill import teachers as robust
from fedecho.distill.bank import Bank
from fedecho.distill.distiller import Distiller
from fedecho.distill.teachers import TeacherRule, robust_teacher

LOGITS = st.integers(1, 9).flatmap(lambda num: arrays(np.float64, (num, 5, 3), elements=st.floats(-20, 20)))


def by_numpy(logits: np.ndarray, rule: TeacherRule) -> np.ndarray:
    if rule == "median":
        return np.median(logits, axis=0)
    if rule == "trimmed":
        return trim_mean(logits, 0.2, axis=0)
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    certainty = 1 - entropy(shifted, axis=-1) / np.log(logits.shape[-1])
    weight = np.maximum(certainty, 1e-6)[..., None] ** 2
    return (weight * logits).sum(axis=0) / weight.sum(axis=0)


@pytest.mark.parametrize("rule", ["median", "trimmed", "entropy"])
@pytest.mark.parametrize("chunk", [1, 2**24])
@given(logits=LOGITS)
@settings(max_examples=30, deadline=None)
def test_the_teacher_is_numpys(logits: np.ndarray, rule: TeacherRule, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust, "CHUNK_VALUES", chunk)
        ours = robust_teacher(list(torch.from_numpy(logits)), rule, 0.2)
    np.testing.assert_allclose(ours.numpy(), by_numpy(logits, rule), atol=1e-7)


def filled(rule: TeacherRule, *, poison: float) -> Tensor:
    bank, rng = Bank(4, 3, torch.device("cpu"), rule=rule), torch.Generator().manual_seed(0)
    for client in (5, 0, 3, 9, 7):
        bank.put(client, torch.randn(4, 3, generator=rng), 0)
    bank.put(3, torch.full((4, 3), poison), 1)
    return bank.teacher()


@pytest.mark.parametrize("rule", ["median", "trimmed", "entropy"])
def test_entries_in_half_precision_are_combined_in_float32(rule: TeacherRule) -> None:
    """Sums of large ones overflow in float16, and the weight of those who are all unsure is 0 there."""
    entries = [torch.full((1, 3), 60_000.0).half(), torch.full((1, 3), 49_984.0).half()]
    assert torch.equal(robust_teacher(entries, rule, 0.2), torch.full((1, 3), 54_992.0))


def test_certainty_of_probabilities_is_that_of_their_logits() -> None:
    logits = torch.tensor([[[4.0, 0.0, -1.0]], [[0.1, 0.0, 0.3]]])
    shares = logits.softmax(dim=-1)
    weight = torch.tensor([(1 - entropy(share[0].numpy()) / np.log(3)) ** 2 for share in shares])
    wanted = (weight[:, None, None] * shares).sum(dim=0) / weight.sum()
    torch.testing.assert_close(robust_teacher(list(shares), "entropy", 0.2, probabilities=True), wanted, check_dtype=False)


@pytest.mark.parametrize(("rule", "moves"), [("mean", True), ("entropy", False), ("median", False), ("trimmed", False)])
def test_one_loud_client_moves_the_mean_alone(rule: TeacherRule, moves: bool) -> None:
    moved = (filled(rule, poison=1e5) - filled(rule, poison=5.0)).abs().max()
    assert (float(moved) > 1e3) == moves


@pytest.mark.parametrize("rule", ["median", "trimmed", "entropy"])
def test_the_order_in_which_clients_were_heard_changes_no_bit(rule: TeacherRule) -> None:
    entries = {client: torch.randn(6, 4, generator=torch.Generator().manual_seed(client)) for client in range(7)}
    teachers = []
    for order in (range(7), reversed(range(7))):
        bank = Bank(6, 4, torch.device("cpu"), rule=rule)
        for client in order:
            bank.put(client, entries[client], 0)
        teachers.append(bank.teacher())
    assert torch.equal(*teachers)


@pytest.mark.parametrize(
    ("changes", "message"), [({"teacher": "best"}, "teacher must be one of"), ({"trim": 0.5}, "trim must be")]
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distiller(**changes)  # type: ignore[arg-type]
