"""A smooth, non-convex federated problem for which every constant of the theorem is known exactly.

All clients see the same inputs a_1 .. a_n and label them differently (B_i, one-hot rows):

    F_i(W) = mean_n CE(W a_n, B_i[n]) + c sum_jk r(W_jk),     r(w) = w^2 / (1 + w^2)

* L. The Hessian of the first part is at most 1/2 times that of |W a|^2 / 2, and r'' lies between -1/2 and 2. So every F_i is
  L-smooth with L = lambda_max(A'A / n) / 2 + 2 c, and with two classes the Hessian at W = 0 has that very eigenvalue. Where
  |w| > 1/sqrt(3), r is concave.
* sigma_g. Labels enter the gradient linearly: grad F_i - grad f = -(B_i - mean B)'A / n at EVERY W. Its mean square is
  sigma_g^2, exactly.
* sigma_l. A stochastic gradient is the gradient plus Gaussian noise of total variance sigma_l^2.
* f_* is the one number found by computing: the lowest value that descents from many starts reach.

Clients share their curvature and differ in a constant: a mild kind of heterogeneity, the price of knowing sigma_g at every W.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedecho.core.randomness import numpy_rng

Floats = NDArray[np.float64]
CLASSES = 2


def regulariser(weights: Floats) -> float:
    """sum r(w): not convex, between 0 and the number of weights."""
    square = weights * weights
    return float((square / (1 + square)).sum())


def regulariser_gradient(weights: Floats) -> Floats:
    """r'(w) = 2 w / (1 + w^2)^2."""
    return 2 * weights / (1 + weights * weights) ** 2


@dataclass(frozen=True)
class Problem:
    """Inputs [n, p], labels by client [N, n, 2], U [rows, p] and the constants that were chosen. Weights are flat, [2 p]."""

    inputs: Floats
    labels: Floats
    unlabeled: Floats
    start: Floats
    concave: float
    noise: float
    """sigma_l."""

    @property
    def num_clients(self) -> int:
        return len(self.labels)

    @property
    def num_params(self) -> int:
        return CLASSES * self.inputs.shape[1]

    @cached_property
    def mean_labels(self) -> Floats:
        return np.asarray(self.labels.mean(axis=0))

    @cached_property
    def offsets(self) -> Floats:
        """grad F_i - grad f of every client, [N, 2 p]."""
        apart = self.labels - self.mean_labels
        by_client = -np.einsum("inc,np->icp", apart, self.inputs) / len(self.inputs)
        return np.asarray(by_client.reshape(self.num_clients, -1))

    @cached_property
    def smoothness(self) -> float:
        """L, of f and of every F_i."""
        gram = self.inputs.T @ self.inputs / len(self.inputs)
        return float(np.linalg.eigvalsh(gram)[-1]) / 2 + 2 * self.concave

    @cached_property
    def variance_between(self) -> float:
        """sigma_g^2."""
        return float((self.offsets**2).sum(axis=1).mean())

    @property
    def variance_within(self) -> float:
        """sigma_l^2."""
        return self.noise**2

    def value(self, weights: Floats, labels: Floats | None = None) -> float:
        """f, or F_i for the labels of one client."""
        target = self.mean_labels if labels is None else labels
        logits = self.inputs @ weights.reshape(CLASSES, -1).T
        top = logits.max(axis=1, keepdims=True)
        log_p = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        return float(-(target * log_p).sum(axis=1).mean()) + self.concave * regulariser(weights)

    def gradient(self, weights: Floats) -> Floats:
        """grad f; that of F_i is this plus ``offsets[i]``. With two classes, softmax is a sigmoid of the difference."""
        first, second = weights.reshape(CLASSES, -1)
        chance = 1 / (1 + np.exp(self.inputs @ (first - second)))
        data = (chance - self.mean_labels[:, 1]) @ self.inputs / len(self.inputs)
        return np.concatenate([-data, data]) + self.concave * regulariser_gradient(weights)

    @cached_property
    def lowest(self) -> float:
        """f_*: the least that descents with step 1 / L from 16 starts reach."""
        draws = numpy_rng(0, "theory", "descents")
        starts = [self.start, *(3 * draws.standard_normal(self.num_params) for _ in range(15))]
        return min(self._descended(point) for point in starts)

    def _descended(self, weights: Floats) -> float:
        for _ in range(1000):
            weights = weights - self.gradient(weights) / self.smoothness
        return self.value(weights)

    @property
    def gap(self) -> float:
        """F = f(x_1) - f_*."""
        return self.value(self.start) - self.lowest


def make_problem(
    *, num_clients: int = 4096, num_inputs: int = 32, num_features: int = 8, num_unlabeled: int = 64, noise: float = 1.0
) -> Problem:
    """Clients whose labels come from linear rules of their own, around one they share; U lies elsewhere than the inputs."""
    draws = numpy_rng(0, "theory", "problem")
    scales = np.geomspace(1.0, 0.1, num_features)  # weak features, along which the concave part decides
    inputs = draws.standard_normal((num_inputs, num_features)) * scales
    shared = draws.standard_normal(num_features) / scales
    own = draws.standard_normal((num_clients, num_features)) / scales
    chance = 1 / (1 + np.exp(-(shared + 2 * own) @ inputs.T / num_features**0.5))
    second = (draws.random((num_clients, num_inputs)) < chance).astype(np.float64)
    labels = np.stack([1 - second, second], axis=-1)
    unlabeled = draws.standard_normal((num_unlabeled, num_features)) * scales + 0.5 * scales
    start = np.where(draws.random(CLASSES * num_features) < 0.5, -2.0, 2.0)
    return Problem(inputs, labels, unlabeled, start, concave=0.1, noise=noise)
