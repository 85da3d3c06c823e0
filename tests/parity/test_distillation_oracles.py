"""What must hold of FedEcho's distillation: bounds, the gradient in closed form, and agreement with an ordinary training loop."""

from copy import deepcopy
from typing import Any

import numpy as np
import oracle
import pytest
import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, one_hot

from fedecho.algorithms import FedBuff, FedEcho
from fedecho.core.layout import Layout
from fedecho.core.types import Arrival, ClientUpdate, GlobalModel
from fedecho.distill.bank import Bank
from fedecho.distill.distiller import Distiller
from fedecho.distill.loss import clip_factor, distillation_loss, normalized_entropy, soft_weight
from fedecho.distill.student import Student

CLASSES, ROWS, FEATURES = 4, 5, 3
LOGITS = arrays(np.float64, (ROWS, CLASSES), elements=st.floats(-50, 50))


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(LOGITS)
@settings(max_examples=30, deadline=None)
def test_entropy_lies_between_0_and_1(logits: np.ndarray) -> None:
    entropy = normalized_entropy(torch.from_numpy(logits))
    assert 0 <= entropy <= 1
    assert float(entropy) == pytest.approx(min(oracle.entropy(oracle.softmax(logits)), 1.0), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_alpha_is_at_its_ends_for_uniform_and_one_hot_teachers(classes: int, dtype: torch.dtype) -> None:
    uniform, certain = torch.full((4, classes), 3.0, dtype=dtype), 1e4 * torch.eye(4, classes, dtype=dtype)
    for teacher, entropy, alpha in ((uniform, 1.0, 0.8), (certain[:2], 0.0, 0.2)):
        parts = distillation_loss(torch.zeros_like(teacher), teacher, 0.2, 0.8)
        assert float(parts.entropy) == pytest.approx(entropy, abs=1e-6)
        assert float(parts.soft_weight) == pytest.approx(alpha, abs=1e-6)
    half = torch.tensor(0.5, dtype=dtype)
    assert float(soft_weight(half, 0.2, 0.8)) == pytest.approx(0.5)


@given(LOGITS, LOGITS, st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted))
@settings(max_examples=30, deadline=None)
@scenarios.one_thread()
def test_gradient_identity(student: np.ndarray, teacher: np.ndarray, alphas: list[float]) -> None:
    """dL/dz = [softmax(z) - (alpha p + (1 - alpha) onehot)] / |B|: alpha only sharpens the target."""
    z, y = torch.from_numpy(student).requires_grad_(), torch.from_numpy(teacher).requires_grad_()
    parts = distillation_loss(z, y, *alphas)
    parts.loss.backward()
    hard = one_hot(y.argmax(dim=1), CLASSES)
    target = parts.soft_weight * y.detach().softmax(dim=1) + (1 - parts.soft_weight) * hard
    expected = (z.detach().softmax(dim=1) - target) / ROWS
    assert torch.allclose(z.grad, expected, rtol=0, atol=1e-12)
    assert y.grad is None, "the teacher, H and alpha are constants"


@scenarios.one_thread()
def test_distillation_gradient_is_a_difference_of_gradients() -> None:
    """The paper's appendix: grad f(x | x_1 ... x_N) = grad f(x) - mean_i grad f(x_i), for a mean of probabilities and alpha = 1.

    f is the cross-entropy of a linear softmax model. It holds for any labels, as they cancel.
    """
    inputs, labels = normal(ROWS, FEATURES), torch.arange(ROWS) % CLASSES
    weights = [normal(CLASSES, FEATURES, seed=seed) for seed in range(6)]

    def gradient(weight: Tensor) -> Tensor:
        leaf = weight.clone().requires_grad_()
        cross_entropy(inputs @ leaf.T, labels).backward()
        return leaf.grad

    bank = Bank(ROWS, CLASSES, torch.device("cpu"), "probabilities")
    for client, weight in enumerate(weights[1:]):
        bank.put(client, inputs @ weight.T, version=0)
    student = weights[0].clone().requires_grad_()
    distillation_loss(inputs @ student.T, bank.teacher(), 1.0, 1.0).loss.backward()
    expected = gradient(weights[0]) - torch.stack([gradient(weight) for weight in weights[1:]]).mean(dim=0)
    # 1e-6: the bank's teacher is float32.
    assert torch.allclose(student.grad, expected, rtol=0, atol=1e-6)


@given(st.floats(1e-6, 1e6), st.floats(1e-3, 1e3))
@settings(max_examples=50, deadline=None)
def test_clipping_bounds_the_norm_and_leaves_small_gradients_alone(norm: float, bound: float) -> None:
    factor = float(clip_factor(torch.tensor(norm, dtype=torch.float64), bound))
    assert factor * norm == pytest.approx(min(norm, bound))
    assert factor == 1.0 or norm > bound * (1 - 1e-12)


@pytest.mark.parametrize(("num_unlabeled", "batch_size", "wanted"), [(2000, 50, 40), (23, 5, 5), (3, 50, 1)])
def test_one_pass_visits_every_row_once(num_unlabeled: int, batch_size: int, wanted: int) -> None:
    student = scenarios.linear_student(np.zeros((num_unlabeled, scenarios.FEATURES)))
    batches = Distiller(batch_size=batch_size)._batches(student, seed=0)
    assert len(batches) == wanted
    assert sorted(torch.cat(batches).tolist()) == list(range(num_unlabeled))


def batch_norm_network() -> nn.Module:
    """No bias before BatchNorm: its gradient is 0 but for rounding, which Adam would blow up to full steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))


def locally_trained(module: nn.Module, client: int) -> nn.Module:
    """A client's real final model: five ordinary steps in train mode, which move the running statistics too."""
    module = deepcopy(module).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    for step in range(5):
        inputs = normal(8, FEATURES, seed=10 * client + step).float() + client
        optimizer.zero_grad()
        cross_entropy(module(inputs), torch.arange(8) % CLASSES).backward()
        optimizer.step()
    return module


def update_from(layout: Layout, start: nn.Module, end: nn.Module, client: int, base: int) -> ClientUpdate:
    delta = layout.pack(end).params - layout.pack(start).params
    return ClientUpdate(client, base, delta, layout.pack(end).buffers, num_examples=8, num_steps=5)


def echo_over(module: nn.Module, inputs: Tensor, **distiller: Any) -> FedEcho[Any]:
    network = Layout.of(module).bind(deepcopy(module))
    student = Student(network, lambda net, rows: net(inputs[rows]), len(inputs), chunk=3)
    return FedEcho(inner=FedBuff(buffer_size=2), distiller=scenarios.Recording(**distiller), student=student)


@scenarios.one_thread()
def test_teacher_is_the_clients_real_final_model() -> None:
    """With its own statistics, in eval mode, and from the version it started at, though the global model has moved on."""
    start, current, inputs = batch_norm_network(), locally_trained(batch_norm_network(), 9), normal(ROWS, FEATURES).float()
    layout = Layout.of(start)
    base, newest = GlobalModel(0, layout.pack(start)), GlobalModel(4, layout.pack(current))
    algorithm = echo_over(start, inputs)
    state = algorithm.init(base)
    final = [locally_trained(start, client) for client in (0, 1)]
    for client, module in enumerate(final):
        state = algorithm.receive(state, Arrival(update_from(layout, start, module, client, 0), base, newest))
    with torch.no_grad():
        logits = [module.eval()(inputs) for module in final]
    for client in (0, 1):
        # x_s + (y - x_s) is y up to the last place of float32.
        assert torch.allclose(state.bank.entries[client], logits[client], rtol=0, atol=1e-5)
    assert torch.allclose(state.bank.teacher(), (logits[0] + logits[1]) / 2, rtol=0, atol=1e-5)


def plain_loop(student: nn.Module, teacher: Tensor, inputs: Tensor, batches: list[np.ndarray], lr: float, nu: float) -> None:
    """Algorithm 1, lines 12 to 16, as anybody would write them with torch.optim."""
    student.train()
    optimizer = torch.optim.Adam(student.parameters(), lr=lr)
    for rows in batches:
        z, p = student(inputs[rows]), teacher[rows].softmax(dim=1)
        h = -(p * p.log()).sum(dim=1).mean() / np.log(CLASSES)
        alpha = h * 0.8 + (1 - h) * 0.2
        soft = kl_div(z.log_softmax(dim=1), p, reduction="batchmean")
        optimizer.zero_grad()
        (alpha * soft + (1 - alpha) * cross_entropy(z, teacher[rows].argmax(dim=1))).backward()
        nn.utils.clip_grad_norm_(student.parameters(), nu)
        optimizer.step()


@pytest.mark.parametrize("nu", [0.2, 5.0])
@scenarios.one_thread()
def test_step_with_batch_norm_is_an_ordinary_training_loop(nu: float) -> None:
    """The inner step, then a student in train mode, whose running statistics go on from the clients' mean."""
    start, inputs = batch_norm_network(), normal(40, FEATURES).float()
    layout = Layout.of(start)
    base, algorithm = GlobalModel(0, layout.pack(start)), echo_over(start, inputs, distill_lr=0.01, batch_size=8, clip_norm=nu)
    state = algorithm.init(base)
    final = [locally_trained(start, client) for client in (0, 1)]
    for client, module in enumerate(final):
        state = algorithm.receive(state, Arrival(update_from(layout, start, module, client, 0), base, base))
    with torch.no_grad():
        teacher = torch.stack([module.eval()(inputs) for module in final]).mean(dim=0)
    advance = algorithm.advance(state, base)

    student, states = deepcopy(start), [module.state_dict() for module in final]
    student.load_state_dict({name: torch.stack([s[name].float() for s in states]).mean(dim=0) for name in states[0]})
    averaged = layout.pack(student)
    (batches,) = algorithm.distiller.seen
    plain_loop(student, teacher, inputs, batches, lr=0.01, nu=nu)
    expected = layout.pack(student)
    assert torch.allclose(advance.weights.params, expected.params, rtol=0, atol=1e-5)
    assert torch.allclose(advance.weights.buffers, expected.buffers, rtol=0, atol=1e-5)
    assert not torch.allclose(averaged.buffers, expected.buffers, rtol=0, atol=1e-2), "the student moves its statistics"
