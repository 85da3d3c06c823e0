"""Prior-corrected teachers: invariants, effect, and the bank's guarantees with them."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedecho import Distiller, load, resume, simulate
from fedecho.core.layout import Layout
from fedecho.distill import Bank
from fedecho.distill.bank_storage import BankStorage
from fedecho.distill.student import TokenStudent
from fedecho.distill.teachers import PriorCorrection
from fedecho.runs.run import Interrupted
from fedecho.storage.checkpoint import decode, encode

ROWS, CLASSES = 40, 4
CPU = torch.device("cpu")
FULL, SHARED = PriorCorrection(strength=1.0), PriorCorrection(strength=1.0, shared=1.0)
FORMS = {"full": FULL, "shared": SHARED, "half": PriorCorrection(strength=0.5, floor=0.2, shared=0.3)}
RULES = ("mean", "median", "trimmed", "entropy")


def logits(seed: int, leaning: float = 0.0) -> Tensor:
    """A client's word on U; one that leans has seen most of class ``seed`` modulo the classes."""
    word = 2 * torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(seed))
    word[:, seed % CLASSES] += leaning
    return word


def teacher_of(words: list[Tensor], **settings: Any) -> Tensor:
    bank = Bank(ROWS, CLASSES, CPU, **settings)
    for client, word in enumerate(words):
        bank.put(client, word, 0)
    return bank.teacher()


def expected(words: list[Tensor], correction: PriorCorrection) -> np.ndarray:
    """The formulas of the module's head, in float64, without the constants C."""
    evidence, priors = [], []
    for word in words:
        values = word.double().numpy()
        p = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
        prior = np.maximum(p.mean(axis=0), correction.floor / CLASSES)
        priors.append(prior / prior.sum())
        evidence.append(values - correction.strength * np.log(priors[-1]))
    return np.mean(evidence, axis=0) + correction.strength * correction.shared * np.log(np.mean(priors, axis=0))


def probabilities(values: Tensor | np.ndarray) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64).softmax(dim=1)


WORDS = [logits(seed, leaning=3.0) for seed in range(7)]


@pytest.mark.parametrize("form", FORMS)
def test_the_teacher_is_the_formula(form: str) -> None:
    ours = teacher_of(WORDS, correction=FORMS[form])
    torch.testing.assert_close(probabilities(ours), probabilities(expected(WORDS, FORMS[form])), rtol=0, atol=1e-6)
    assert (probabilities(ours) - probabilities(teacher_of(WORDS))).abs().max() > 0.01, "a correction must matter here"


@pytest.mark.parametrize("rule", RULES)
def test_no_correction_is_the_paper_to_the_last_bit(rule: str) -> None:
    off = teacher_of(WORDS, rule=rule, correction=Distiller().correction)
    assert torch.equal(off, teacher_of(WORDS, rule=rule))


@pytest.mark.parametrize("form", FORMS)
def test_a_client_whose_mean_prediction_is_uniform_is_unchanged(form: str) -> None:
    """Each class is rolled through all places equally often."""
    word = torch.cat([torch.randn(10, CLASSES, generator=torch.Generator().manual_seed(0))] * CLASSES)
    word = torch.stack([row.roll(place // 10) for place, row in enumerate(word)])
    torch.testing.assert_close(teacher_of([word], correction=FORMS[form]), word, rtol=0, atol=1e-6)


@given(st.integers(0, ROWS - 1), st.floats(-20, 20), st.sampled_from(sorted(FORMS)))
@settings(max_examples=30, deadline=None)
def test_a_shift_of_a_rows_logits_shifts_that_row_alone(row: int, shift: float, form: str) -> None:
    """Predictions do not know of it, so neither do priors."""
    moved = [word.clone() for word in WORDS]
    moved[2][row] += shift
    before, after = (teacher_of(words, correction=FORMS[form]) for words in (WORDS, moved))
    by = torch.zeros(ROWS, CLASSES)
    by[row] = shift / len(WORDS)
    torch.testing.assert_close(after - before, by, rtol=0, atol=2e-5)


@given(st.permutations(range(CLASSES)), st.sampled_from(sorted(FORMS)), st.sampled_from(RULES))
@settings(max_examples=30, deadline=None)
def test_permuted_classes_permute_the_teacher(order: list[int], form: str, rule: str) -> None:
    straight = teacher_of(WORDS, correction=FORMS[form], rule=rule)
    permuted = teacher_of([word[:, order] for word in WORDS], correction=FORMS[form], rule=rule)
    torch.testing.assert_close(permuted, straight[:, order], rtol=0, atol=2e-5)


def test_who_never_saw_a_class_no_longer_drowns_who_did() -> None:
    """One client of seven knows class 3; the others, far below zero there, see in its rows a little more of it than elsewhere."""
    others = torch.tensor([2.0, 2.0, 2.0, -8.0]).repeat(ROWS, 1)
    others[:10, 3] += 6.0
    knows = torch.tensor([0.0, 0.0, 0.0, 1.0]).repeat(ROWS, 1)
    knows[:10, 3] += 6.0
    words = [others.clone() for _ in range(6)] + [knows]
    assert (teacher_of(words).argmax(dim=1)[:10] != 3).all()
    corrected = teacher_of(words, correction=FULL).argmax(dim=1)
    assert (corrected[:10] == 3).all()
    assert (corrected[10:] != 3).all()


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_works_on_corrected_logits(rule: str) -> None:
    taken = [word - FULL.evidence(FULL.prior_of(word)) for word in WORDS]
    torch.testing.assert_close(teacher_of(WORDS, rule=rule, correction=FULL), teacher_of(taken, rule=rule), rtol=0, atol=1e-6)


KEEPINGS = {"half": BankStorage(half=True), "file": BankStorage(place="file"), "budget": BankStorage(budget_mb=0.0041)}


@pytest.mark.parametrize("keeping", [None, *KEEPINGS])
@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_a_reloaded_bank_goes_on_to_the_last_bit(keeping: str | None, average: str) -> None:
    def empty() -> Bank:
        return Bank(ROWS, CLASSES, CPU, average, keeping=KEEPINGS.get(keeping or ""), correction=SHARED)

    bank, held = empty(), {}
    for number in range(20):
        bank.put(number * 3 % 8, logits(number, leaning=2.0), number)
    again = decode(json.loads(json.dumps(encode(bank, held))), held, empty())
    for number in range(20, 30):
        for each in (bank, again):
            each.put(number * 5 % 9, logits(number, leaning=2.0), number)
    assert torch.equal(again.teacher(), bank.teacher())
    assert again.num_bytes == bank.num_bytes


def test_clients_given_up_for_want_of_room_leave_no_prior_behind() -> None:
    keeping = KEEPINGS["budget"]
    bank = Bank(ROWS, CLASSES, CPU, keeping=keeping, correction=SHARED)
    for client, word in enumerate(WORDS):
        bank.put(client, word, client)
    kept = len(bank)
    assert 1 < kept < len(WORDS)
    assert bank.num_bytes <= keeping.budget_mb * 1e6  # type: ignore[operator]
    wanted = probabilities(expected(WORDS[-kept:], SHARED))
    torch.testing.assert_close(probabilities(bank.teacher()), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_and_leaves_no_prior(bad: float) -> None:
    bank = Bank(ROWS, CLASSES, CPU, correction=SHARED)
    for client, word in enumerate(WORDS[:3]):
        bank.put(client, word, 0)
    before, broken = bank.teacher(), WORDS[3].clone()
    broken[5, 1] = bad
    bank.put(1, broken, 1)
    bank.put(9, broken, 1)
    assert (bank.num_refused, len(bank)) == (2, 3)
    assert torch.equal(bank.teacher(), before)


def test_thousands_of_words_leave_the_priors_of_the_latest() -> None:
    bank, latest = Bank(ROWS, CLASSES, CPU, correction=SHARED), {}
    for number in range(1000):
        client = number * 7 % 13
        latest[client] = logits(number, leaning=4.0)
        bank.put(client, latest[client], number)
    wanted = probabilities(expected(list(latest.values()), SHARED))
    torch.testing.assert_close(probabilities(bank.teacher()), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"prior_correction": 1.5}, "distiller.prior_correction must be between 0 and 1, got 1.5"),
        ({"prior_correction": 1.0, "shared_prior": -0.1}, "distiller.shared_prior must be between 0 and 1, got -0.1"),
        ({"prior_floor": 0.0}, "distiller.prior_floor must be above 0 and at most 1, got 0.0"),
        ({"shared_prior": 1.0}, "distiller.prior_correction is 0: set both"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Distiller(**wrong)  # type: ignore[arg-type]


def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Any) -> None:
    settings = ["task.width=2", "task.num_unlabeled=30", "local.num_local_steps=2"]
    settings += ["algorithm.distiller.prior_correction=1", "algorithm.distiller.shared_prior=0.5"]
    one, seen = load("digits", versions=8, settings=settings), 0

    def stop(moment: Any, scores: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 10:
            raise Interrupted("stopped")

    whole = simulate(one, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        simulate(one, out=tmp_path / "cut", checkpoint_s=0.0, watch=stop)
    assert resume(tmp_path / "cut").summary.model_sha256 == whole.summary.model_sha256
    plain = simulate(load("digits", versions=8, settings=settings[:3]))
    assert plain.summary.model_sha256 != whole.summary.model_sha256


def test_a_language_models_bank_refuses_it() -> None:
    network = nn.Linear(1, 1)
    student = TokenStudent(Layout.of(network).bind(network), lambda net, rows: rows, 3)
    with pytest.raises(ValueError, match=r"distiller\.prior_correction is for classifiers"):
        student.bank(Distiller(prior_correction=1.0))


def test_the_method_of_that_name_has_the_correction_on() -> None:
    """It is FedEcho with a setting, to the last bit."""
    small = ["task.width=2", "task.num_unlabeled=30", "local.num_local_steps=2"]
    on = [*small, "algorithm.distiller.prior_correction=1"]
    named, said = load("digits", algorithm="fedecho+", versions=4, settings=small), load("digits", versions=4, settings=on)
    assert simulate(named).summary.model_sha256 == simulate(said).summary.model_sha256
    with pytest.raises(ValueError, match=r"fedecho\+ is fedecho with distiller\.prior_correction above 0"):
        load("digits", algorithm="fedecho+", settings=["algorithm.distiller.prior_correction=0"])
