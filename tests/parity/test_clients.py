"""Local training of every method against K local steps in NumPy: proximal term, weight decay, control variates, AdamW."""

from dataclasses import dataclass

import numpy as np
import pytest
import scenarios
import torch
from torch import Tensor, nn

from fedecho.core.types import Dispatch, GlobalModel, Weights
from fedecho.learning import LocalTraining, Trainer

SLOPE, GOAL = np.array([0.5, 2.0, 1.0]), np.array([1.0, -1.0, 3.0])
START, CONTROL, SHARED = np.array([2.0, 0.5, -1.0]), np.array([0.3, -0.2, 0.1]), np.array([-0.1, 0.4, 0.2])
"""x_s, c_i and c."""


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(3))


@dataclass(frozen=True)
class Bowl:
    """Loss 1/2 sum slope (w - goal)^2 on every batch, so that the gradient is slope (w - goal)."""

    def num_examples(self, client: int) -> int:
        return 7

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> Tensor:
        return rows

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        return (scenarios.tensor(SLOPE) * (module.at - scenarios.tensor(GOAL)).square()).sum() / 2


def gradient(y: np.ndarray) -> np.ndarray:
    return SLOPE * (y - GOAL)


def train(
    local: LocalTraining, control: np.ndarray | None, shared: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Delta, dc and K as the package has them."""
    weights = Weights(scenarios.tensor(START), scenarios.tensor(np.zeros(0)))
    model = GlobalModel(3, weights, None if shared is None else scenarios.tensor(shared))
    trainer = Trainer(Bowl(), local, scenarios.bound(Point))
    update = trainer.train(Dispatch(0, 0, model, seed=1), None if control is None else scenarios.tensor(control))
    return update.delta.numpy(), None if update.correction is None else update.correction.numpy(), update.num_steps


def test_sgd_with_proximal_term_and_weight_decay() -> None:
    """FedAsync's clients: y -= lr (g + wd y + rho (y - x_s)); batches of 3, 3 and 1, twice, make K = 6."""
    delta, correction, steps = train(
        LocalTraining(client_lr=0.1, epochs=2, batch_size=3, weight_decay=0.05, proximal=0.5), None, None
    )
    y = START
    for _ in range(6):
        y = y - 0.1 * (gradient(y) + 0.05 * y + 0.5 * (y - START))
    assert steps == 6
    assert correction is None
    assert np.allclose(delta, y - START, rtol=0, atol=1e-12)


@pytest.mark.parametrize("control", [CONTROL, None], ids=["c_i", "no c_i"])
@pytest.mark.parametrize("shared", [SHARED, None], ids=["c", "no c"])
def test_fedac_client_with_sgd(control: np.ndarray | None, shared: np.ndarray | None) -> None:
    """Every step is corrected; c_i' = c_i - c + (x_s - y) / (K lr), which is the mean raw gradient on the way."""
    local = LocalTraining(client_lr=0.1, num_local_steps=5, batch_size=3, control_variates=True)
    delta, moved, steps = train(local, control, shared)
    c_i, c = np.zeros(3) if control is None else control, np.zeros(3) if shared is None else shared
    y, seen = START, []
    for _ in range(5):
        seen.append(gradient(y))
        y = y - 0.1 * (seen[-1] + c - c_i)
    new = c_i - c + (START - y) / (5 * 0.1)
    assert steps == 5
    assert np.allclose(delta, y - START, rtol=0, atol=1e-12)
    assert np.allclose(moved, new - c_i, rtol=0, atol=1e-12)
    assert np.allclose(c_i + moved, np.mean(seen, axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("control", [CONTROL, None], ids=["c_i", "no c_i"])
@pytest.mark.parametrize("shared", [SHARED, None], ids=["c", "no c"])
def test_fedac_client_corrected_once(control: np.ndarray | None, shared: np.ndarray | None) -> None:
    """Plain SGD, then y -= lr (c - c_i); c_i' = (x_s - y) / (E lr) - (c - c_i). Batches of 3, 3 and 1, twice: K = 6, E = 2."""
    local = LocalTraining(client_lr=0.1, epochs=2, batch_size=3, weight_decay=0.05, control_variates=True, correct_once=True)
    delta, moved, steps = train(local, control, shared)
    c_i, c = np.zeros(3) if control is None else control, np.zeros(3) if shared is None else shared
    y = START
    for _ in range(6):
        y = y - 0.1 * (gradient(y) + 0.05 * y)
    y = y - 0.1 * (c - c_i)
    new = (START - y) / (2 * 0.1) - (c - c_i)
    assert steps == 6
    assert np.allclose(delta, y - START, rtol=0, atol=1e-12)
    assert np.allclose(moved, new - c_i, rtol=0, atol=1e-12)


def test_a_pass_that_is_cut_short_counts_as_its_share_of_a_pass() -> None:
    local = LocalTraining(client_lr=0.1, num_local_steps=4, batch_size=3, control_variates=True, correct_once=True)
    delta, moved, _ = train(local, CONTROL, SHARED)
    assert np.allclose(moved, -delta / (4 / 3 * 0.1) - (SHARED - CONTROL) - CONTROL, rtol=0, atol=1e-12)


@pytest.mark.parametrize("control", [CONTROL, None], ids=["c_i", "no c_i"])
def test_fedac_client_with_adamw(control: np.ndarray | None) -> None:
    """c - c_i is added to the gradient that AdamW sees; c_i' is the mean of the raw ones."""
    local = LocalTraining(
        optimizer="adamw",
        client_lr=0.1,
        num_local_steps=5,
        weight_decay=0.2,
        control_variates=True,
        beta1=0.8,
        beta2=0.9,
        eps=1e-4,
    )
    delta, moved, _ = train(local, control, SHARED)
    c_i = np.zeros(3) if control is None else control
    y, seen, m, v = START, [], np.zeros(3), np.zeros(3)
    for k in range(1, 6):
        seen.append(gradient(y))
        g = seen[-1] + SHARED - c_i
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        y = y - 0.1 * 0.2 * y - 0.1 * (m / (1 - 0.8**k)) / (np.sqrt(v / (1 - 0.9**k)) + 1e-4)
    assert np.allclose(delta, y - START, rtol=0, atol=1e-12)
    assert np.allclose(moved, np.mean(seen, axis=0) - c_i, rtol=0, atol=1e-12)
