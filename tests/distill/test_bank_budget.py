"""A bounded bank against a mean computed from scratch over the entries it should have kept."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedecho import Distiller, load, resume, simulate
from fedecho.distill import Bank
from fedecho.distill.bank_storage import BankStorage
from fedecho.runs.run import Interrupted
from fedecho.storage.checkpoint import decode, encode

ROWS, CLASSES = 5, 3
CPU = torch.device("cpu")
TOTAL, ENTRY = 8 * ROWS * CLASSES, 4 * ROWS * CLASSES
puts = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**31)), min_size=1, max_size=60)


def of(clients: int, half: bool = False) -> float:
    """The budget, in MB, of so many clients."""
    return (TOTAL + clients * (ENTRY // 2 if half else ENTRY)) / 1e6


KEEPINGS = {
    "half": BankStorage(half=True),
    "cpu": BankStorage(place="cpu"),
    "file": BankStorage(place="file"),
    "half file": BankStorage(half=True, place="file"),
    "four": BankStorage(budget_mb=of(4)),
    "one": BankStorage(budget_mb=of(1)),
    "four in a file": BankStorage(place="file", budget_mb=of(4)),
    "four halves": BankStorage(half=True, budget_mb=of(4, half=True)),
}


def logits(seed: int) -> Tensor:
    return 3 * torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(seed))


class Oracle:
    """The latest words in the order they were last heard; too many, and the first goes."""

    def __init__(self, keeping: BankStorage) -> None:
        self.latest: OrderedDict[int, tuple[np.ndarray, int]] = OrderedDict()
        self.dtype = np.float16 if keeping.half else np.float32
        size = ENTRY // 2 if keeping.half else ENTRY
        self.most = 10**9 if keeping.budget_mb is None else int((keeping.budget_mb * 1e6 - TOTAL) // size)
        self.dropped = 0

    def put(self, client: int, values: Tensor, version: int) -> None:
        if client not in self.latest and len(self.latest) == self.most:
            self.latest.popitem(last=False)
            self.dropped += 1
        self.latest[client] = values.numpy().astype(self.dtype).astype(np.float64), version
        self.latest.move_to_end(client)

    def check(self, bank: Bank, version: int) -> None:
        assert (len(bank), bank.num_dropped) == (len(self.latest), self.dropped)
        assert list(bank.heard_at) == list(self.latest)
        mean = np.mean([entry for entry, _ in self.latest.values()], axis=0)
        np.testing.assert_allclose(bank.total.numpy() / len(bank), mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(bank.teacher().numpy(), mean, rtol=1e-6, atol=1e-6)
        assert bank.mean_age(version) == pytest.approx(np.mean([version - at for _, at in self.latest.values()]))


@pytest.mark.parametrize("name", KEEPINGS)
@given(puts)
@settings(max_examples=20, deadline=None)
def test_the_teacher_is_the_mean_over_what_is_kept(name: str, puts: list[tuple[int, int]]) -> None:
    keeping = KEEPINGS[name]
    bank, oracle = Bank(ROWS, CLASSES, CPU, keeping=keeping), Oracle(keeping)
    for version, (client, seed) in enumerate(puts):
        bank.put(client, logits(seed), version)
        oracle.put(client, logits(seed), version)
        oracle.check(bank, version)
    if keeping.budget_mb is not None:
        assert bank.num_bytes <= keeping.budget_mb * 1e6 < bank.bytes_with(10) + ENTRY


@pytest.mark.parametrize("name", ["half", "half file", "four", "four in a file"])
def test_thousands_of_words_do_not_drift(name: str) -> None:
    """Of large ones too, which are summed anew when they are taken out."""
    keeping = KEEPINGS[name]
    bank, oracle, rng = Bank(ROWS, CLASSES, CPU, keeping=keeping), Oracle(keeping), np.random.default_rng(0)
    for version in range(4000):
        client, scale = int(rng.integers(30)), 1e4 if version % 50 else (6e4 if keeping.half else 1e12)
        word = torch.from_numpy(rng.uniform(-scale, scale, (ROWS, CLASSES)).astype(np.float32))
        bank.put(client, word, version)
        oracle.put(client, word, version)
    for client in range(30):
        bank.put(client, logits(client), 4000)
        oracle.put(client, logits(client), 4000)
    mean = np.mean([entry for entry, _ in oracle.latest.values()], axis=0)
    np.testing.assert_allclose(bank.total.numpy() / len(bank), mean, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", KEEPINGS)
def test_a_reloaded_bank_goes_on_to_the_last_bit(name: str) -> None:
    keeping, held = KEEPINGS[name], {}
    bank = Bank(ROWS, CLASSES, CPU, keeping=keeping)
    for number in range(25):
        bank.put(number * 7 % 10, logits(number), number)
    again = decode(json.loads(json.dumps(encode(bank, held))), held, Bank(ROWS, CLASSES, CPU, keeping=keeping))
    for number in range(25, 45):
        for each in (bank, again):
            each.put(number * 3 % 11, logits(number), number)
        assert torch.equal(again.total, bank.total)
    assert list(again.heard_at.items()) == list(bank.heard_at.items())
    assert (again.num_dropped, again.mean_age(50)) == (bank.num_dropped, bank.mean_age(50))
    assert all(torch.equal(again.entries[client], bank.entries[client]) for client in bank.entries)


def test_what_half_precision_cannot_hold_is_refused_and_the_former_word_stays() -> None:
    bank = Bank(ROWS, CLASSES, CPU, keeping=BankStorage(half=True))
    bank.put(0, logits(1), 0)
    before = bank.total.clone()
    bank.put(0, torch.full((ROWS, CLASSES), 65505.0), 1)
    assert (bank.num_refused, bank.heard_at[0]) == (1, 0)
    assert torch.equal(bank.total, before)
    sure = Bank(ROWS, CLASSES, CPU, "probabilities", keeping=BankStorage(half=True))
    sure.put(0, torch.full((ROWS, CLASSES), 65505.0), 1)
    assert sure.num_refused == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bank_budget_mb": 0.0}, r"distiller.bank_budget_mb must be above 0, got 0.0"),
        ({"bank_memory": "disk"}, r"distiller.bank_memory must be 'device', 'cpu' or 'file', got 'disk'"),
        ({"bank_dir": "/"}, r"distiller.bank_dir is only used with distiller.bank_memory = 'file'"),
    ],
)
def test_bounds_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distiller(**settings)


def test_a_budget_for_not_even_one_client_says_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"bank_budget_mb = 0.0001 is too small for one client: it must be at least 0.00018"):
        Bank(ROWS, CLASSES, CPU, keeping=BankStorage(budget_mb=0.0001))


SMALL = ["task.width=1", "local.num_local_steps=1", "task.num_unlabeled=20", "eval_every=10"]
BOUNDS = {
    "all": [],
    "half": ["half_bank=true"],
    "file": ["bank_memory=file"],
    "six": ["bank_budget_mb=0.0064"],
    "six in half, in a file": ["half_bank=true", "bank_memory=file", "bank_budget_mb=0.004"],
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    chosen = [*SMALL, *(f"algorithm.distiller.{setting}" for setting in BOUNDS[name])]
    experiment, seen = load("digits", algorithm="fedecho", versions=12, settings=chosen), []
    whole = simulate(experiment).summary

    def stop(moment: Any, scores: Any) -> None:
        seen.append(moment)
        if len(seen) == 20:
            raise Interrupted("here")

    with pytest.raises(Interrupted):
        simulate(experiment, out=tmp_path / "run", checkpoint_s=0.0, watch=stop)
    found = resume(tmp_path / "run").summary
    assert (found.model_sha256, found.arrivals_sha256) == (whole.model_sha256, whole.arrivals_sha256)
    assert found.bank_bytes == whole.bank_bytes
    unbounded = simulate(load("digits", algorithm="fedecho", versions=12, settings=SMALL)).summary
    assert (found.model_sha256 == unbounded.model_sha256) == (name in ("all", "file"))
