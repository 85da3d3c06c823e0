"""The problem's constants are right, and a run of it meets the theorem's assumptions."""

import json
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytest
import torch
from benchmarks.derived import filled
from benchmarks.theory.__main__ import PAGE, RESULTS
from benchmarks.theory.page import exponent, parts, rows_of
from benchmarks.theory.problem import CLASSES, Floats, Problem, make_problem
from benchmarks.theory.run import (
    FEDBUFF,
    FEDECHO,
    FIXED_AT,
    Setting,
    double_network,
    rates_of,
    run,
    the_problem,
    trained,
)
from benchmarks.theory.sweeps import FULL, Size, points, swept
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedecho.core.types import Dispatch, GlobalModel, Weights
from fedecho.distill import Distiller, Student, distillation_loss
from fedecho.distill.distiller import Adam
from fedecho.executors.executor import Job

PROBLEM, SMALL = make_problem(num_clients=200), make_problem(num_clients=30)


def loss_by_torch(problem: Problem, client: int, weights: Tensor) -> Tensor:
    """F_i as its docstring says it, from torch's own cross entropy."""
    logits = torch.from_numpy(problem.inputs) @ weights.view(CLASSES, -1).T
    square = weights**2
    return cross_entropy(logits, torch.from_numpy(problem.labels[client])) + problem.concave * (square / (1 + square)).sum()


def somewhere(seed: int, scale: float = 2.0) -> Floats:
    return scale * np.random.default_rng(seed).standard_normal(PROBLEM.num_params)


@pytest.mark.parametrize("client", [0, 7, 199])
def test_the_gradient_is_autograds(client: int) -> None:
    point = somewhere(client)
    weights = torch.from_numpy(point).requires_grad_()
    loss = loss_by_torch(PROBLEM, client, weights)
    loss.backward()
    assert PROBLEM.value(point, PROBLEM.labels[client]) == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(PROBLEM.gradient(point) + PROBLEM.offsets[client], weights.grad, rtol=1e-10, atol=1e-13)


@given(st.integers(0, 10**6), st.floats(1e-4, 5.0), st.floats(0.0, 4.0))
@settings(max_examples=200, deadline=None)
def test_gradients_are_lipschitz_with_l(seed: int, distance: float, scale: float) -> None:
    draws = np.random.default_rng(seed)
    here, direction = scale * draws.standard_normal(PROBLEM.num_params), draws.standard_normal(PROBLEM.num_params)
    there = here + distance * direction / np.linalg.norm(direction)
    apart = np.linalg.norm(PROBLEM.gradient(here) - PROBLEM.gradient(there))
    assert apart <= PROBLEM.smoothness * distance * (1 + 1e-9)


def test_l_is_reached_at_zero_and_the_start_is_not_convex() -> None:
    def curvatures(point: Floats) -> Tensor:
        hessian = torch.autograd.functional.hessian(lambda w: loss_by_torch(PROBLEM, 0, w), torch.from_numpy(point))
        return torch.linalg.eigvalsh(hessian)

    assert float(curvatures(np.zeros(PROBLEM.num_params))[-1]) == pytest.approx(PROBLEM.smoothness, rel=1e-10)
    assert float(curvatures(PROBLEM.start)[0]) < -0.01


@pytest.mark.parametrize("seed", [0, 1])
def test_sigma_g_is_the_same_everywhere(seed: int) -> None:
    point = torch.from_numpy(somewhere(seed))
    grads = [torch.func.grad(lambda w, c=c: loss_by_torch(SMALL, c, w))(point) for c in range(SMALL.num_clients)]
    apart = torch.stack(grads) - torch.stack(grads).mean(dim=0)
    assert float((apart**2).sum(dim=1).mean()) == pytest.approx(SMALL.variance_between, rel=1e-10)


def test_a_clients_noise_has_the_variance_sigma_l() -> None:
    model, client_lr = GlobalModel(0, Weights(torch.from_numpy(PROBLEM.start), torch.zeros(0))), 0.5
    true = PROBLEM.gradient(PROBLEM.start) + PROBLEM.offsets[3]
    deltas = [trained(PROBLEM, Job(Dispatch(k, 3, model, k)), client_lr, 1).delta.numpy() for k in range(3000)]
    noise = -np.array(deltas) / client_lr - true
    assert (noise**2).sum(axis=1).mean() == pytest.approx(PROBLEM.variance_within, rel=0.05)
    assert np.linalg.norm(noise.mean(axis=0)) < 4 * (PROBLEM.variance_within / 3000) ** 0.5


def test_the_distillers_step_is_the_plain_clipped_one() -> None:
    """Equation (2) of the paper in five lines of torch, compared with the library's SGD."""
    unlabeled, teacher = (
        torch.from_numpy(PROBLEM.unlabeled),
        torch.randn(64, CLASSES, generator=torch.Generator().manual_seed(0)),
    )
    network = double_network(PROBLEM.inputs.shape[1])
    student = Student(network, lambda module, rows: module(unlabeled[rows]), 64)
    distiller = Distiller(distill_lr=0.1, optimizer="sgd", num_distill_steps=3, batch_size=16, clip_norm=0.05)
    start = Weights(torch.from_numpy(PROBLEM.start.copy()), torch.zeros(0, dtype=torch.float64))
    batches = [torch.arange(16) + 16 * k for k in range(3)]
    _, taught, _ = student.teach(distiller, Adam.fresh(start.params), start, teacher, batches)
    weights = start.params.clone().requires_grad_()
    for rows in batches:
        loss = distillation_loss(unlabeled[rows] @ weights.view(CLASSES, -1).T, teacher[rows]).loss
        (grad,) = torch.autograd.grad(loss, weights)
        weights = (weights - 0.1 * grad * min(1.0, 0.05 / float(grad.norm()))).detach().requires_grad_()
    torch.testing.assert_close(taught.params, weights.detach(), rtol=1e-7, atol=1e-9)
    assert float((taught.params - start.params).norm()) > 0.01


@dataclass(frozen=True)
class Quadratic:
    """f(x) = curvature |x|^2 / 2, the same for all clients, with the attributes of a ``Problem``."""

    curvature: float
    noise: float
    num_params: int
    num_clients: int = 10

    @cached_property
    def start(self) -> Floats:
        return np.ones(self.num_params)

    @cached_property
    def offsets(self) -> Floats:
        return np.zeros((self.num_clients, self.num_params))

    @property
    def inputs(self) -> Floats:
        return np.zeros((1, 1))

    @property
    def gap(self) -> float:
        return self.curvature * self.num_params / 2

    variance_between = 0.0

    @property
    def variance_within(self) -> float:
        return self.noise**2

    def gradient(self, weights: Floats) -> Floats:
        return self.curvature * weights


@pytest.mark.parametrize("noise", [13.0, 60.0])
def test_fedbuff_on_a_quadratic_is_its_closed_form(noise: float) -> None:
    """M = Mc = 1: every update but the first is one version late, so x_{t+1} = x_t + eta (q - 1) x_{t-1} + noise.

    The second moments of (x_t, x_{t-1}) then follow an exact linear recursion.
    """
    setting = Setting(method=FEDBUFF, num_versions=300, buffer_size=1, concurrency=1, num_local_steps=2, slow=1.0)
    problem = Quadratic(curvature=0.5, noise=noise, num_params=4000)
    client_lr = rates_of(problem, setting).client_lr  # type: ignore[arg-type]
    shrink = 1 - client_lr * problem.curvature
    one_step = np.array([[1.0, shrink**2 - 1], [1.0, 0.0]])
    variance = client_lr**2 * (1 + shrink**2) * noise**2 / problem.num_params
    moments, expected = np.ones((2, 2)), []
    for _ in range(setting.num_versions):
        expected.append(problem.curvature**2 * problem.num_params * moments[0, 0])
        moments = one_step @ moments @ one_step.T
        moments[0, 0] += variance
    found = run(problem, setting)  # type: ignore[arg-type]
    assert found.mean_square == pytest.approx(np.mean(expected), rel=0.03)
    assert found.last_half == pytest.approx(np.mean(expected[150:]), rel=0.04)
    assert (found.max_staleness, setting.num_versions * found.mean_staleness) == (1, setting.num_versions - 1)


@pytest.mark.slow
def test_a_quick_sweep_decays_over_t_and_over_m() -> None:
    size = Size([64, 256], [1, 4], 128, [1.0, 16.0], [4, 8], 2)
    results = swept(size, workers=1)
    for sweep in ("T", "M"):
        for method in (FEDBUFF, FEDECHO):
            assert -0.8 < exponent(rows_of(results, sweep, method)).mean < -0.2, (sweep, method)
    for row in rows_of(results, "M", FEDBUFF):
        assert row["mean_staleness"] == pytest.approx(4, rel=0.1)  # Mc / M, by Little's law
    slow, slower = rows_of(results, "slow", FEDBUFF)
    assert slower["max_staleness"] > 3 * slow["max_staleness"]
    assert all(part for part in parts(results).values())


def test_a_run_is_a_function_of_its_setting() -> None:
    setting = Setting(method=FEDECHO, num_versions=30, seed=5)
    assert run(PROBLEM, setting) == run(PROBLEM, setting)
    assert run(PROBLEM, setting) != run(PROBLEM, replace(setting, seed=6))
    assert run(PROBLEM, setting) != run(PROBLEM, replace(setting, method=FEDBUFF))


def test_the_full_size_stays_within_the_lemmas_condition() -> None:
    settings_ = [place.setting for place in points(FULL)]
    worst = max(8 * s.num_local_steps * the_problem().smoothness * rates_of(the_problem(), s).client_lr for s in settings_)
    assert worst <= 1
    assert min(s.num_versions for s in settings_) >= FIXED_AT


def test_the_page_is_made_of_the_results() -> None:
    page = PAGE.read_text()
    assert filled(page, parts(json.loads(RESULTS.read_text()))) == page, "run: python -m benchmarks.theory --page"
    for name in ("theory-rates", "theory-staleness"):
        assert (PAGE.parent / "pictures" / f"{name}.svg").is_file()
