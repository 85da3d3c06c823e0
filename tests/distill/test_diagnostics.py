"""The diagnostics of distillation against their formulas in NumPy, and that they leave no trace in a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from echo_students import CLASSES, ROWS, TEACHER, U, network, start, student_of
from tiny_text import write_world
from torch import Tensor

from fedecho import load, simulate
from fedecho.core.types import Weights
from fedecho.distill import Bank
from fedecho.distill.bank_storage import BankStorage
from fedecho.distill.diagnostics import MOST_CLIENTS, agreement, relative_shift, teacher_kl
from fedecho.distill.student import Student
from fedecho.distill.teachers import PriorCorrection
from fedecho.runs.record import read_record
from fedecho.storage.checkpoint import decode, encode

CPU = torch.device("cpu")


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def words(num: int, seed: int = 0) -> list[Tensor]:
    """Logits of clients on U; client i has hardly seen class i modulo the classes."""
    drawn = 2 * torch.randn(num, ROWS, CLASSES, generator=torch.Generator().manual_seed(seed))
    for client in range(num):
        drawn[client, :, client % CLASSES] -= 4
    return list(drawn)


def numpy_predictions(weights: Weights) -> np.ndarray:
    """The logits of the small network with BatchNorm's running statistics, in float64."""
    module = network()
    tensors = student_of(module).network.layout.named(weights)
    value = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    hidden = U.double().numpy() @ value["0.weight"].T
    hidden = (hidden - value["1.running_mean"]) / np.sqrt(value["1.running_var"] + 1e-5) * value["1.weight"] + value["1.bias"]
    return np.maximum(hidden, 0) @ value["4.weight"].T + value["4.bias"]


def test_the_divergence_is_the_formula_on_statistics_at_rest() -> None:
    weights = start()
    weights.buffers.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(3))
    p, q = softmax(TEACHER.double().numpy()), softmax(numpy_predictions(weights))
    student = student_of(network(dropout=0.5))
    found = float(teacher_kl(student, weights, TEACHER))
    assert found == pytest.approx(float((p * np.log(p / q)).sum(axis=1).mean()), rel=1e-5)
    own = student.infer(weights)
    assert float(teacher_kl(student, weights, own)) == pytest.approx(0, abs=1e-6)


def test_measuring_moves_no_weights_statistics_or_random_numbers() -> None:
    weights, student = start(), student_of(network(dropout=0.5))
    params, buffers, state = weights.params.clone(), weights.buffers.clone(), torch.get_rng_state()
    teacher_kl(student, weights, TEACHER)
    assert torch.equal(weights.params, params)
    assert torch.equal(weights.buffers, buffers)
    assert torch.equal(student.network.weights.buffers, buffers)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("num", "sampled"), [(100, 64), (1000, 125), (3000, 256)])
def test_a_large_u_is_sampled_the_same_way_each_time(num: int, sampled: int) -> None:
    images = torch.randn(num, 5, generator=torch.Generator().manual_seed(4))
    module = network()
    students = [Student(student_of(module).network, lambda net, rows: net(images[rows]), num) for _ in range(2)]
    rows = [torch.cat(student.sample) for student in students]
    assert torch.equal(rows[0], rows[1])
    assert len(rows[0]) == len(set(rows[0].tolist())) == sampled
    teacher = torch.randn(num, CLASSES, generator=torch.Generator().manual_seed(5))
    p, q = (softmax(each[rows[0]].double().numpy()) for each in (teacher, students[0].infer(start())))
    found = float(teacher_kl(students[0], start(), teacher))
    assert found == pytest.approx(float((p * np.log(p / q)).sum(axis=1).mean()), rel=1e-5)


def test_the_shift_is_a_ratio_of_lengths() -> None:
    start_at, stepped = torch.zeros(3), torch.tensor([3.0, 4.0, 0.0])
    assert float(relative_shift(start_at, stepped, stepped + torch.tensor([0.0, 0.0, 1.0]))) == pytest.approx(0.2)
    assert float(relative_shift(start_at, stepped, stepped)) == 0
    assert float(relative_shift(start_at, stepped, start_at)) == pytest.approx(1)


@pytest.mark.parametrize("num", [1, 5, MOST_CLIENTS, MOST_CLIENTS + 1, 5 * MOST_CLIENTS])
def test_agreement_is_the_share_of_equal_best_classes(num: int) -> None:
    bank, said = Bank(ROWS, CLASSES, CPU), words(num)
    for client, word in enumerate(said):
        bank.put(client, word, client)
    rows = torch.arange(0, ROWS, 2)
    found = agreement(bank, TEACHER, rows)
    best = TEACHER.numpy()[rows].argmax(axis=1)
    wanted = [float((word.numpy()[rows].argmax(axis=1) == best).mean()) for word in said]
    assert len(found) <= MOST_CLIENTS
    every = -(-num // MOST_CLIENTS)
    np.testing.assert_allclose(found.numpy(), wanted[::every], rtol=1e-6)


SIZE = 8 * ROWS * CLASSES
BANKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half": {"keeping": BankStorage(half=True)},
    "file": {"keeping": BankStorage(place="file")},
    "budget": {"keeping": BankStorage(budget_mb=(SIZE + 3.5 * SIZE / 2) / 1e6)},
    "median": {"rule": "median"},
    "entropy": {"rule": "entropy"},
    "probabilities": {"average": "probabilities"},
    "corrected": {"correction": PriorCorrection(strength=1.0)},
    "shared": {"correction": PriorCorrection(strength=0.7, shared=0.5, floor=0.9)},
    "corrected probabilities": {"average": "probabilities", "correction": PriorCorrection(strength=1.0, floor=0.5)},
}


@pytest.mark.parametrize("kind", BANKS)
def test_coverage_counts_who_gives_a_class_half_its_uniform_share(kind: str) -> None:
    """Clients report again, are dropped for want of room, and the bank is restored from a checkpoint."""
    bank = Bank(ROWS, CLASSES, CPU, **BANKS[kind])
    said: dict[int, Tensor] = {}
    for number, word in enumerate(words(20)):
        bank.put(number * 7 % 9, word, number)
        said[number * 7 % 9] = word
        if number % 3 == 0:
            bank.coverage()
    again = decode(json.loads(json.dumps(encode(bank, held := {}))), held, Bank(ROWS, CLASSES, CPU, **BANKS[kind]))
    assert (len(bank) == 3) == (kind == "budget")
    means = [softmax(said[client].double().numpy()).mean(axis=0) for client in bank.heard_at]
    wanted = (np.array(means) >= 0.5 / CLASSES).sum(axis=0).tolist()
    assert bank.coverage() == again.coverage() == wanted
    assert min(wanted) < len(bank)
    bank.forget_before(19)
    wanted = (means[-1] >= 0.5 / CLASSES).astype(int).tolist()
    assert bank.coverage() == wanted


SMALL = ["task.width=2", "task.num_unlabeled=60", "local.num_local_steps=2"]


def versions_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_record(folder) if line["event"] == "version"]


@pytest.mark.parametrize("settings", [[], ["algorithm.distiller.teacher=median"], ["algorithm.distiller.prior_correction=1"]])
def test_every_version_of_a_run_records_them(settings: list[str], tmp_path: Path) -> None:
    simulate(load("digits", versions=5, settings=[*SMALL, *settings]), out=tmp_path / "run")
    for line in versions_of(tmp_path / "run"):
        assert line["distill_shift"] > 0
        assert min(line["teacher_kl_before"], line["teacher_kl_after"]) > 0
        assert 0 <= line["lowest_agreement"] <= line["teacher_agreement"] <= 1
        assert len(line["teacher_coverage"]) == 10
        assert line["least_coverage"] == min(line["teacher_coverage"])
        assert max(line["teacher_coverage"]) <= line["num_teachers"]


def test_without_distillation_there_is_nothing_to_measure(tmp_path: Path) -> None:
    settings = [*SMALL, "algorithm.distiller.num_distill_steps=0"]
    simulate(load("digits", versions=2, settings=settings), out=tmp_path / "run")
    assert not any("distill_shift" in line for line in versions_of(tmp_path / "run"))


def test_a_higher_rate_moves_the_model_further(tmp_path: Path) -> None:
    found = {}
    for rate in ("1e-6", "1e-4", "1e-2"):
        settings = [*SMALL, f"algorithm.distiller.distill_lr={rate}"]
        simulate(load("digits", versions=2, settings=settings), out=tmp_path / rate)
        found[rate] = versions_of(tmp_path / rate)[0]["distill_shift"]
    assert found["1e-6"] < 0.1 * found["1e-4"] < 0.01 * found["1e-2"]


def test_a_language_models_bank_has_shift_and_divergence_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDECHO_DATA", str(write_world(tmp_path / "world")))
    settings = ["task.model=tiny-llama", "task.train=gsm8k-train", "task.num_unlabeled=6", "task.num_clients=4"]
    settings += ["concurrency=2", "local.num_local_steps=1", "algorithm.inner.buffer_size=2", "task.lora_rank=2"]
    settings += ["task.max_new_tokens=2", "task.num_test=2"]
    simulate(load("mathinstruct", versions=2, settings=[*settings, "eval_every=2"]), out=tmp_path / "run")
    for line in versions_of(tmp_path / "run"):
        assert line["distill_shift"] > 0
        assert line["teacher_kl_after"] >= 0
        assert "teacher_agreement" not in line
        assert "teacher_coverage" not in line
