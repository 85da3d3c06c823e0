"""Server-side distillation against torch's Adam and an ordinary loop."""

from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from echo_students import ROWS, TEACHER, Notes, Noting, U, distil, network, start, student_of
from torch import Tensor, nn

from fedecho.core.layout import Layout
from fedecho.distill import Distiller, distillation_loss
from fedecho.distill.distiller import Adam

LOOSE = Noting(distill_lr=0.01, batch_size=5, clip_norm=float("inf"))
NAN = float("nan")


def torchs_adam(params: Tensor, gradients: list[Tensor], **options: float) -> Tensor:
    """Where torch.optim.Adam goes with these gradients."""
    at = params.clone().requires_grad_()
    betas = (options.pop("beta1", 0.9), options.pop("beta2", 0.999))
    adam = torch.optim.Adam([at], betas=betas, **options)
    for gradient in gradients:
        at.grad = gradient.clone()
        adam.step()
    return at.detach()


@pytest.mark.parametrize("options", [{}, {"beta1": 0.5, "beta2": 0.9, "eps": 1e-4}, {"beta1": 0.0}, {"num_distill_steps": 12}])
def test_steps_are_those_of_torchs_adam_on_the_same_gradients(options: dict[str, float]) -> None:
    distiller = replace(LOOSE, gradients=[], **options)
    adam, weights, _ = distil(distiller, student_of(network()), start())
    options.pop("num_distill_steps", None)
    expected = torchs_adam(start().params, distiller.gradients, lr=0.01, **options)
    torch.testing.assert_close(weights.params, expected, rtol=0, atol=1e-6)
    assert adam.num_steps == len(distiller.gradients) in (5, 12)
    assert (weights.params - start().params).abs().max() > 0.02


@pytest.mark.parametrize("clip_norm", [0.05, 0.3, 5.0])
def test_a_pass_is_an_ordinary_loop_with_clip_grad_norm(clip_norm: float) -> None:
    """Gradients by autograd of an unbound copy, clip_grad_norm_, torch's Adam; statistics move as in training."""
    notes = Notes()
    distiller = Distiller(distill_lr=0.01, batch_size=5, clip_norm=clip_norm)
    _, weights, metrics = distil(distiller, student_of(network(), notes), start())
    plain, norms, losses = network().train(), [], []
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for rows in notes.rows:
        optimizer.zero_grad()
        loss = distillation_loss(plain(U[rows]), TEACHER[rows]).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)))
        losses.append(float(loss.detach()))
        optimizer.step()
    expected = Layout.of(plain).pack(plain)
    torch.testing.assert_close(weights.params, expected.params, rtol=0, atol=1e-4)
    torch.testing.assert_close(weights.buffers, expected.buffers, rtol=0, atol=1e-4)
    assert notes.training == [True] * 5
    assert metrics["distill_grad_norm"] == pytest.approx(sum(norms) / 5, rel=1e-3)
    assert metrics["distillation_loss"] == pytest.approx(sum(losses) / 5, rel=1e-4)
    assert metrics["clipped_share"] == pytest.approx(sum(norm > clip_norm for norm in norms) / 5)
    assert 0 <= metrics["teacher_entropy"] <= 1
    assert metrics["soft_weight"] == pytest.approx(0.2 + 0.6 * metrics["teacher_entropy"], rel=1e-5)


def test_clipped_gradients_have_the_norm_of_the_bound() -> None:
    distiller = replace(LOOSE, gradients=[], clip_norm=1e-3)
    distil(distiller, student_of(network()), start())
    for gradient in distiller.gradients:
        assert float(gradient.norm()) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize(
    ("batch_size", "num_steps", "sizes"),
    [
        (5, None, [5, 5, 5, 5, 2]),
        (50, None, [22]),
        (5, 3, [5, 5, 5]),
        (5, 7, [5, 5, 5, 5, 2, 5, 5]),
        (22, 2, [22, 22]),
        (5, 0, []),
    ],
)
def test_q_mini_batches_in_shuffled_passes(batch_size: int, num_steps: int | None, sizes: list[int]) -> None:
    notes = Notes()
    distiller = Distiller(batch_size=batch_size, num_distill_steps=num_steps)
    adam, _, metrics = distil(distiller, student_of(network(), notes), start())
    assert [len(rows) for rows in notes.rows] == sizes
    assert adam.num_steps == len(sizes) == distiller.num_steps(ROWS)
    first_pass = list(chain(*notes.rows[:5]))
    assert len(set(first_pass[:ROWS])) == len(first_pass[:ROWS])
    if len(first_pass) >= ROWS:
        assert sorted(first_pass[:ROWS]) == list(range(ROWS))
        assert first_pass[:ROWS] != list(range(ROWS)), "shuffled"
    assert (metrics == {}) == (not sizes)


def test_no_steps_give_back_the_weights_as_copies() -> None:
    student, weights = student_of(network()), start()
    adam, same, _ = distil(Distiller(num_distill_steps=0), student, weights)
    assert torch.equal(same.params, weights.params)
    assert torch.equal(same.buffers, weights.buffers)
    same.params.zero_()
    assert weights.params.any()
    assert student.network.weights.params.any()
    assert adam.num_steps == 0


def test_the_weights_that_came_in_are_not_written_to() -> None:
    weights = start()
    _, taught, _ = distil(LOOSE, student_of(network()), weights)
    assert torch.equal(weights.params, start().params)
    assert torch.equal(weights.buffers, start().buffers)
    assert not torch.equal(taught.params, weights.params)


def test_frozen_batch_norm_keeps_its_statistics_and_uses_them() -> None:
    """In train mode the same student moves them; a dropout layer stays in train mode either way."""
    frozen = replace(LOOSE, gradients=[], batch_norm="frozen")
    _, weights, _ = distil(frozen, student_of(network()), start())
    assert torch.equal(weights.buffers, start().buffers)
    _, moved, _ = distil(replace(LOOSE, gradients=[]), student_of(network()), start())
    assert not torch.equal(moved.buffers, start().buffers)
    plain = network().train()
    plain[1].eval()
    rows = Distiller(batch_size=5)._batches(student_of(network()), 0)[0]
    params = [plain.get_parameter(part.name) for part in Layout.of(plain).params]
    gradient = torch.autograd.grad(distillation_loss(plain(U[rows]), TEACHER[rows]).loss, params)
    torch.testing.assert_close(frozen.gradients[0], torch.cat([part.reshape(-1) for part in gradient]), rtol=1e-4, atol=1e-6)
    student = student_of(network(dropout=0.5))
    distil(replace(frozen, gradients=[]), student, start())
    assert student.network.module[3].training
    assert not student.network.module[1].training


def test_a_student_frozen_once_is_thawed_by_the_next_train_mode() -> None:
    student = student_of(network())
    distil(replace(LOOSE, gradients=[], batch_norm="frozen"), student, start())
    _, weights, _ = distil(replace(LOOSE, gradients=[]), student, start())
    assert not torch.equal(weights.buffers, start().buffers)


def test_carried_moments_go_on_where_they_were() -> None:
    """Two versions of one pass each, with torch's one Adam over all ten gradients."""
    distiller = replace(LOOSE, gradients=[])
    student = student_of(network())
    adam, weights, _ = distil(distiller, student, start())
    adam, weights, _ = distil(distiller, student, weights, adam, seed=1)
    assert adam.num_steps == 10
    torch.testing.assert_close(weights.params, torchs_adam(start().params, distiller.gradients, lr=0.01), rtol=0, atol=1e-6)


def test_fresh_moments_start_anew_at_each_version() -> None:
    distiller = replace(LOOSE, gradients=[], moments="fresh")
    student = student_of(network())
    adam, first, _ = distil(distiller, student, start())
    assert adam.first.abs().max() > 0
    adam, second, _ = distil(distiller, student, first, adam, seed=1)
    assert adam.num_steps == 5
    expected = torchs_adam(first.params, distiller.gradients[5:], lr=0.01)
    torch.testing.assert_close(second.params, expected, rtol=0, atol=1e-6)


def test_same_seed_same_bytes_and_another_seed_others() -> None:
    """Shuffling and dropout draw from the seed alone."""
    student, distiller = student_of(network(dropout=0.3)), Distiller(distill_lr=0.01, batch_size=5)
    results = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        results.append(distil(distiller, student, start(), seed=seed)[1].params)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_teacher_that_is_the_student_leaves_the_soft_part_at_rest() -> None:
    """With alpha 1 and the student's own predictions for a teacher, the gradient is 0 to rounding."""
    student, distiller = student_of(network()), replace(LOOSE, gradients=[], alpha_min=1.0, alpha_max=1.0, batch_norm="frozen")
    own = student.infer(start())
    distiller.distill(student, Adam.fresh(start().params), start(), own, 0)
    assert float(distiller.gradients[0].norm()) < 1e-6
    other = deepcopy(own).flip(0)
    distiller.distill(student, Adam.fresh(start().params), start(), other, 0)
    assert float(distiller.gradients[5].norm()) > 1e-2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"distill_lr": -1e-6}, r"distill_lr must be at least 0, got -1e-06"),
        ({"batch_size": 0}, r"distiller.batch_size must be at least 1, got 0"),
        ({"num_distill_steps": -1}, r"num_distill_steps must be at least 0, got -1"),
        ({"clip_norm": 0.0}, r"clip_norm must be above 0 \(inf for none\), got 0.0"),
        ({"clip_norm": NAN}, r"clip_norm must be above 0 \(inf for none\), got nan"),
        ({"alpha_min": -0.1}, r"distiller.alpha_min must be between 0 and 1, got -0.1"),
        ({"alpha_max": 1.1}, r"distiller.alpha_max must be between 0 and 1, got 1.1"),
        ({"alpha_min": 0.9}, r"must satisfy 0 <= alpha_min <= alpha_max <= 1, got 0.9 and 0.8"),
        ({"batch_norm": "off"}, r"batch_norm must be 'train' or 'frozen', got 'off'"),
        ({"moments": "kept"}, r"moments must be 'carried' or 'fresh', got 'kept'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distiller(**wrong)  # type: ignore[arg-type]


def test_defaults_are_those_of_the_paper() -> None:
    paper = Distiller()
    assert (paper.distill_lr, paper.beta1, paper.beta2, paper.eps) == (3e-6, 0.9, 0.999, 1e-8)
    assert (paper.clip_norm, paper.alpha_min, paper.alpha_max, paper.num_steps(2000)) == (5.0, 0.2, 0.8, 40)
    assert (paper.batch_norm, paper.moments, paper.average) == ("train", "carried", "logits")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"optimizer": "lion"}, "optimizer must be 'adam' or 'sgd', got 'lion'"),
        ({"max_teacher_age": -1}, "distiller.max_teacher_age must be at least 0"),
    ],
)
def test_optimizer_and_age_out_of_range_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Distiller(**wrong)
