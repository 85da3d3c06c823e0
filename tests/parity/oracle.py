"""A second, slow implementation of every method, in numpy float64, that shares no code and no idea with the package.

Nothing here is incremental. A method is a function of the whole past, ``step(versions, rounds)``: all models x_0 ... x_t, and
the lists of arrivals that filled the buffers of versions 1 ... t + 1. Moments are explicit sums over all steps, CA2FL's h is
the mean of what every client said last, FedEcho's teacher is the mean over the clients heard so far.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Model(NamedTuple):
    """x_t: the parameters, the running statistics and FedAC's c."""

    params: Array
    buffers: Array
    correction: Array


class Sent(NamedTuple):
    """One arrival: Delta measured from version ``base``."""

    client: int
    base: int
    delta: Array
    buffers: Array
    correction: Array
    examples: int = 1


Versions = Sequence[Model]
Rounds = Sequence[Sequence[Sent]]
Step = Callable[[Versions, Rounds], Model]


def run(step: Step, first: Model, rounds: Rounds) -> list[Model]:
    """All versions x_0 ... x_T."""
    versions = [first]
    for t in range(len(rounds)):
        versions.append(step(versions, rounds[: t + 1]))
    return versions


def one() -> Callable[[int], float]:
    return lambda tau: 1.0


def power(p: float) -> Callable[[int], float]:
    return lambda tau: (1.0 + tau) ** -p


def hinge(k: float, b: int) -> Callable[[int], float]:
    return lambda tau: 1.0 if tau <= b else 1.0 / (k * (tau - b) + 1.0)


def mean_buffers(arrivals: Sequence[Sent]) -> Array:
    return np.mean([a.buffers for a in arrivals], axis=0)


def moved(versions: Versions, arrivals: Sequence[Sent], by: Array, correction: Array | None = None) -> Model:
    """x_t + by, with the plain mean of the buffered clients' statistics."""
    x = versions[-1]
    return Model(x.params + by, mean_buffers(arrivals), x.correction if correction is None else correction)


def fedavg(eta: float = 1.0) -> Step:
    return lambda versions, rounds: moved(versions, rounds[-1], eta * np.mean([a.delta for a in rounds[-1]], axis=0))


def fedasync(a: float, s: Callable[[int], float]) -> Step:
    def step(versions: Versions, rounds: Rounds) -> Model:
        (sent,) = rounds[-1]
        x, t = versions[-1].params, len(versions) - 1
        y = versions[sent.base].params + sent.delta
        share = a * s(t - sent.base)
        return moved(versions, rounds[-1], (1 - share) * x + share * y - x)

    return step


def fedbuff(eta: float, w: Callable[[int], float]) -> Step:
    def step(versions: Versions, rounds: Rounds) -> Model:
        t = len(versions) - 1
        weighted = [w(t - a.base) * a.delta for a in rounds[-1]]
        return moved(versions, rounds[-1], eta * sum(weighted) / len(weighted))

    return step


def by_examples(eta: float, w: Callable[[int], float]) -> Step:
    """FedBuff and FedAvg with every client drawn as often as it has examples: a plain mean over all examples of the buffer."""

    def step(versions: Versions, rounds: Rounds) -> Model:
        t = len(versions) - 1
        everyone = [a for a in rounds[-1] for _ in range(a.examples)]
        return moved(versions, everyone, eta * np.mean([w(t - a.base) * a.delta for a in everyone], axis=0))

    return step


def said_last(arrivals: Sequence[Sent], client: int, size: int) -> Array:
    """h_i: what a client said last among these arrivals, 0 if nothing."""
    said = [a.delta for a in arrivals if a.client == client]
    return said[-1] if said else np.zeros(size)


def ca2fl(eta: float, num_clients: int) -> Step:
    def step(versions: Versions, rounds: Rounds) -> Model:
        before = [a for arrivals in rounds[:-1] for a in arrivals]
        size = versions[0].params.size
        h = np.mean([said_last(before, i, size) for i in range(num_clients)], axis=0)
        surprise = []
        for place, a in enumerate(rounds[-1]):
            earlier = before + list(rounds[-1][:place])  # a client that comes twice is compared with its first arrival
            surprise.append(a.delta - said_last(earlier, a.client, size))
        return moved(versions, rounds[-1], eta * (h + sum(surprise) / len(surprise)))

    return step


def decayed_sum(terms: Sequence[Array], beta: float) -> Array:
    """An exponential moving average from 0, written out: (1 - beta) sum_k beta^(n-k) term_k."""
    n = len(terms)
    return sum((1 - beta) * beta ** (n - 1 - k) * term for k, term in enumerate(terms))


def fadas(
    eta: float,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    *,
    unbias: bool = True,
    tau_c: int | None = None,
    weighted: bool = False,
) -> Step:
    """``tau_c`` None is the plain method, a number the delay-adaptive one; ``weighted``: clients count by their examples."""

    def step(versions: Versions, rounds: Rounds) -> Model:
        if weighted:
            rounds = [[a for a in arrivals for _ in range(a.examples)] for arrivals in rounds]
        means = [np.mean([a.delta for a in arrivals], axis=0) for arrivals in rounds]
        k, t = len(means), len(versions) - 1
        m = decayed_sum(means, b1)
        vh = np.max([decayed_sum([d**2 for d in means[:n]], b2) for n in range(1, k + 1)], axis=0)
        if unbias:
            m, vh = m / (1 - b1**k), vh / (1 - b2**k)
        tau_max = max(t - a.base for a in rounds[-1])
        rate = eta if tau_c is None or tau_max <= tau_c else eta / tau_max
        return moved(versions, rounds[-1], rate * m / (np.sqrt(vh) + eps))

    return step


def agreement(versions: Versions, t: int, sent: Sent, floor: float) -> float:
    """r_i of FedAC, at the moment when x_t is the current model."""
    if sent.base == t:
        return 1.0
    way = versions[t].params - versions[sent.base].params
    return max(float(way @ sent.delta / (np.linalg.norm(way) * np.linalg.norm(sent.delta))), floor)


def fedac(
    eta: float,
    num_clients: int,
    b1: float = 0.6,
    b2: float = 0.9,
    eps: float = 1e-8,
    floor: float = 0.1,
    weighted_c: bool = True,
) -> Step:
    def weights(versions: Versions, t: int, arrivals: Sequence[Sent]) -> Array:
        r = np.array([agreement(versions, t, a, floor) for a in arrivals])
        return r / r.sum()

    def step(versions: Versions, rounds: Rounds) -> Model:
        shares = [weights(versions, t, arrivals) for t, arrivals in enumerate(rounds)]
        d = [sum(w * a.delta for w, a in zip(ws, arrivals, strict=True)) for ws, arrivals in zip(shares, rounds, strict=True)]
        m, v = decayed_sum(d, b1), decayed_sum([one_d**2 for one_d in d], b2)
        ahead = b1 * m + (1 - b1) * d[-1]
        c = versions[0].correction
        for ws, arrivals in zip(shares, rounds, strict=True):
            if weighted_c:
                c = c + len(arrivals) / num_clients * sum(w * a.correction for w, a in zip(ws, arrivals, strict=True))
            else:
                c = c + np.mean([a.correction for a in arrivals], axis=0) * (len(arrivals) / num_clients)
        return moved(versions, rounds[-1], eta * ahead / (np.sqrt(v) + eps), c)

    return step


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def entropy(p: Array) -> float:
    """H: the mean entropy of the rows over its largest value ln C; 0 log 0 is 0."""
    logs = np.log(np.where(p > 0, p, 1.0))
    return float(np.mean(-np.sum(p * logs, axis=1)) / np.log(p.shape[1]))


@dataclass
class Linear:
    """z = (U - shift) W^T + b: params are W by rows, then b; the buffers are the shift, so whose buffers are used shows."""

    unlabeled: Array
    classes: int

    def logits(self, params: Array, buffers: Array) -> Array:
        features = self.unlabeled.shape[1]
        w = params[: self.classes * features].reshape(self.classes, features)
        return (self.unlabeled - buffers) @ w.T + params[self.classes * features :]

    def pull_back(self, dz: Array, rows: Array, buffers: Array) -> Array:
        """dL/dparams from dL/dz on some rows."""
        return np.concatenate([(dz.T @ (self.unlabeled[rows] - buffers)).ravel(), dz.sum(axis=0)])


@dataclass
class FedEcho:
    """The inner method, then Q steps. ``orders[t]`` are the mini-batches on the way to version t + 1: given, not tested."""

    inner: Step
    linear: Linear
    orders: Sequence[Sequence[Array]]
    lr: float = 3e-6
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    nu: float = 5.0
    alpha_min: float = 0.2
    alpha_max: float = 0.8
    average: str = "logits"
    carried: bool = True
    correction: float = 0.0
    floor: float = 0.01
    shared: float = 0.0
    max_age: int | None = None
    sgd: bool = False
    grads: list[Array] = field(default_factory=list)

    def teacher(self, versions: Versions, rounds: Rounds) -> tuple[Array, Array]:
        """The teacher's probabilities and hard labels on all of U."""
        latest = {}
        oldest = 0 if self.max_age is None else max(len(rounds) - 1 - self.max_age, 0)
        for sent in (a for arrivals in rounds[oldest:] for a in arrivals):
            latest[sent.client] = self.linear.logits(versions[sent.base].params + sent.delta, sent.buffers)
        priors = [self.prior(z) for z in latest.values()]
        evidence = [z - self.correction * np.log(prior) for z, prior in zip(latest.values(), priors, strict=True)]
        given_back = self.correction * self.shared * np.log(np.mean(priors, axis=0))
        if self.average == "probabilities":
            p = np.mean([softmax(z) for z in evidence], axis=0) * np.exp(given_back)
            return p / p.sum(axis=1, keepdims=True), p.argmax(axis=1)
        z = np.mean(evidence, axis=0) + given_back
        return softmax(z), z.argmax(axis=1)

    def prior(self, z: Array) -> Array:
        """A client's label prior as its mean prediction on U shows it, no class below floor / C."""
        pi = np.maximum(softmax(z).mean(axis=0), self.floor / z.shape[1])
        return pi / pi.sum()

    def gradient(self, params: Array, buffers: Array, rows: Array, p: Array, hard: Array) -> Array:
        """alpha KL(p || q) + (1 - alpha) CE(q, hard), differentiated by hand term by term, then clipped."""
        q = softmax(self.linear.logits(params, buffers)[rows])
        h = entropy(p)
        alpha = h * self.alpha_max + (1 - h) * self.alpha_min
        soft = (q - p) / len(rows)
        sharp = q.copy()
        sharp[np.arange(len(rows)), hard] -= 1.0
        grad = self.linear.pull_back(alpha * soft + (1 - alpha) * sharp / len(rows), rows, buffers)
        norm = float(np.sqrt(np.sum(grad**2)))
        return grad * (self.nu / norm) if norm > self.nu else grad

    def __call__(self, versions: Versions, rounds: Rounds) -> Model:
        x = self.inner(versions, rounds)
        p, hard = self.teacher(versions, rounds)
        params, grads = x.params, (self.grads if self.carried else [])
        for rows in self.orders[len(rounds) - 1]:
            grads.append(self.gradient(params, x.buffers, rows, p[rows], hard[rows]))
            k = len(grads)
            m = decayed_sum(grads, self.b1) / (1 - self.b1**k)
            v = decayed_sum([g**2 for g in grads], self.b2) / (1 - self.b2**k)
            params = params - self.lr * (grads[-1] if self.sgd else m / (np.sqrt(v) + self.eps))
        return Model(params, x.buffers, x.correction)
