"""The student: its logits and its loss."""

import numpy as np
import pytest
import torch
from echo_students import CLASSES, ROWS, TEACHER, Notes, U, network, start, student_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.core.layout import Layout
from fedecho.core.types import Weights
from fedecho.distill import Student, distillation_loss, normalized_entropy, soft_weight
from fedecho.distill.loss import clip_factor


def other_weights() -> Weights:
    generator = torch.Generator().manual_seed(8)
    weights = start()
    return Weights(
        weights.params + 0.3 * torch.randn(len(weights.params), generator=generator),
        weights.buffers + torch.rand(len(weights.buffers), generator=generator),
    )


@pytest.mark.parametrize("chunk", [1, 5, 22, 500])
def test_logits_are_those_of_the_plain_module_in_eval_mode(chunk: int) -> None:
    notes, weights = Notes(), other_weights()
    student = student_of(network(), notes, chunk)
    student.network.module.train()
    found = student.infer(weights)
    plain = network()
    plain.load_state_dict(Layout.of(plain).named(weights), strict=False)
    torch.testing.assert_close(found, plain.eval()(U).detach(), rtol=0, atol=1e-6)
    assert [row for rows in notes.rows for row in rows] == list(range(ROWS))
    assert max(len(rows) for rows in notes.rows) == min(chunk, ROWS)
    assert not any(notes.training)
    assert not found.requires_grad


def test_inference_moves_neither_weights_nor_statistics() -> None:
    student, weights = student_of(network()), other_weights()
    kept = weights.clone()
    first = student.infer(weights)
    assert torch.equal(student.infer(weights), first)
    assert torch.equal(weights.buffers, kept.buffers)
    assert torch.equal(student.network.weights.buffers, kept.buffers)


def test_half_precision_logits_come_as_float32() -> None:
    student = student_of(network())
    half = Student(student.network, lambda net, rows: net(U[rows]).bfloat16(), ROWS)
    assert half.infer(start()).dtype == torch.float32


def test_the_number_of_classes_is_asked_of_the_model() -> None:
    student = student_of(network())
    assert student.num_classes() == CLASSES
    assert student.device == torch.device("cpu")


def test_a_task_without_unlabeled_data_is_refused() -> None:
    student = student_of(network())
    with pytest.raises(ValueError, match="needs an unlabeled set"):
        Student(student.network, student.logits, 0)
    assert Student(student.network, student.logits, 1).infer(start()).shape == (1, CLASSES)


rows = st.lists(st.lists(st.floats(-20, 20, width=32), min_size=4, max_size=4), min_size=1, max_size=5)


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@given(st.data(), rows, st.floats(0, 0.5), st.floats(0.5, 1))
@settings(max_examples=50, deadline=None)
def test_the_loss_is_the_formula_of_the_paper(data: st.DataObject, teacher: list[list[float]], low: float, high: float) -> None:
    """Written out in numpy in float64, with the terms of p = 0 left out."""
    row = st.lists(st.floats(-20, 20, width=32), min_size=4, max_size=4)
    student = data.draw(st.lists(row, min_size=len(teacher), max_size=len(teacher)))
    found = distillation_loss(torch.tensor(student), torch.tensor(teacher), low, high)
    p, q = softmax(np.array(teacher)), softmax(np.array(student))
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1).mean() / np.log(4)
    alpha = entropy * high + (1 - entropy) * low
    kl = (p * (np.log(np.maximum(p, 1e-300)) - np.log(q))).sum(axis=1).mean()
    hard = -np.log(q[np.arange(len(p)), np.argmax(np.array(teacher), axis=1)]).mean()
    assert float(found.entropy) == pytest.approx(entropy, abs=1e-5)
    assert float(found.soft_weight) == pytest.approx(alpha, abs=1e-5)
    assert float(found.loss) == pytest.approx(alpha * kl + (1 - alpha) * hard, rel=1e-4, abs=1e-4)


def test_no_gradient_flows_into_the_teacher() -> None:
    student, teacher = torch.randn(4, 3, requires_grad=True), TEACHER[:4].clone().requires_grad_()
    parts = distillation_loss(student, teacher)
    parts.loss.backward()
    assert teacher.grad is None
    assert student.grad is not None
    assert not parts.entropy.requires_grad
    assert not parts.soft_weight.requires_grad


def test_entropy_and_alpha_at_their_ends() -> None:
    uniform, certain = torch.zeros(2, 5), torch.tensor([[0.0, 200.0, 0.0], [200.0, 0.0, 0.0]])
    assert float(normalized_entropy(uniform)) == pytest.approx(1.0)
    assert float(normalized_entropy(certain)) == 0.0
    assert float(soft_weight(torch.tensor(1.0), 0.2, 0.8)) == pytest.approx(0.8)
    assert float(soft_weight(torch.tensor(0.0), 0.2, 0.8)) == pytest.approx(0.2)


def test_clipping_without_a_bound_or_a_gradient_does_nothing() -> None:
    assert float(clip_factor(torch.tensor(1e30), float("inf"))) == 1.0
    assert float(clip_factor(torch.tensor(0.0), 5.0)) == 1.0
    assert float(clip_factor(torch.tensor(10.0), 5.0)) == 0.5
