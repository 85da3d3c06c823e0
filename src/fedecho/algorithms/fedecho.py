"""FedEcho. Wang, Ma and Chen, Stragglers Can Contribute More: Uncertainty-Aware Distillation for Asynchronous
Federated Learning, 2025."""

from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from fedecho.core.algorithm import (
    Algorithm,
    Demands,
    call_advance,
    call_init,
    call_ready,
    call_receive,
    check_algorithm,
    demands,
)
from fedecho.core.randomness import derive
from fedecho.core.ranges import Seed, check_ranges
from fedecho.core.types import Advance, Arrival, GlobalModel, Weights
from fedecho.distill.bank import Bank
from fedecho.distill.distiller import Adam, Distiller
from fedecho.distill.student import Student
from fedecho.distill.token_bank import TokenBank

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Echo(Generic[S]):
    """The inner method's state, the bank of latest logits and the distillation's Adam."""

    inner: S
    bank: Bank | TokenBank
    adam: Adam


@dataclass(frozen=True, kw_only=True)
class FedEcho(Generic[S]):
    """Any inner method, followed at each version by distillation from the mean of all clients' latest logits on U.

    ``seed`` is the experiment's unless it is given. ``student`` is the server's network and U; an experiment attaches it.
    """

    inner: Algorithm[S]
    distiller: Distiller = field(default_factory=Distiller)
    seed: Seed | None = None
    student: Student | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_algorithm(self.inner, "inner")
        check_ranges(self)

    @property
    def demands(self) -> Demands:
        return demands(self.inner)

    @property
    def buffer_size(self) -> int | None:
        """The inner method's, or None if it does not say."""
        told = getattr(self.inner, "buffer_size", None)
        return None if told is None else int(told)

    def attached(self, student: Student) -> "FedEcho[S]":
        return replace(self, student=student)

    def init(self, model: GlobalModel) -> Echo[S]:
        student = self._student
        return Echo(call_init(self.inner, model), student.bank(self.distiller), Adam.fresh(model.weights.params))

    def receive(self, state: Echo[S], arrival: Arrival) -> Echo[S]:
        """Lines 4 and 5: the client's own model, x_s + Delta with its own statistics, speaks on U once and is dropped."""
        update = arrival.update
        client_model = Weights(arrival.base.weights.params + update.delta, update.buffers)
        state.bank.put(update.client, self._student.infer(client_model), arrival.current.version)
        return replace(state, inner=call_receive(self.inner, state.inner, arrival))

    def ready(self, state: Echo[S]) -> bool:
        return call_ready(self.inner, state.inner)

    def advance(self, state: Echo[S], model: GlobalModel) -> Advance[Echo[S]]:
        """Lines 10 to 17: the inner step makes x_hat, distillation makes x_{t+1} of it."""
        inner = call_advance(self.inner, state.inner, model)
        bank = state.bank
        if self.distiller.max_teacher_age is not None:
            bank.forget_before(model.version - self.distiller.max_teacher_age)
        teachers: dict[str, Any] = {"num_teachers": len(bank), "teacher_age": bank.mean_age(model.version)}
        if bank.num_refused:
            teachers["refused_logits"] = bank.num_refused
        if isinstance(bank, Bank) and bank.num_dropped:
            teachers["dropped_teachers"] = bank.num_dropped
        if self.distiller.num_steps(self._student.num_unlabeled) == 0 or not len(bank):
            fresh = replace(state, inner=inner.state)
            return Advance(fresh, inner.weights, inner.correction, {**inner.metrics, **teachers})
        seed = derive(self.seed or 0, "distillation", model.version)
        adam, weights, metrics = self.distiller.distill(self._student, state.adam, inner.weights, state.bank.teacher(), seed)
        fresh = replace(state, inner=inner.state, adam=adam)
        return Advance(fresh, weights, inner.correction, {**inner.metrics, **teachers, **metrics})

    def without_corrections(self, state: Echo[S]) -> Echo[S]:
        inner: Any = self.inner
        return replace(state, inner=inner.without_corrections(state.inner))

    @property
    def _student(self) -> Student:
        if self.student is None:
            raise ValueError("FedEcho has no student yet: attach one, or run it through an experiment")
        return self.student


@dataclass(frozen=True, kw_only=True)
class FedEchoPlus(FedEcho[S]):
    """FedEcho with corrected teachers: each client's own label prior is divided out of its logits (``prior_correction``)."""

    distiller: Distiller = field(default_factory=lambda: Distiller(prior_correction=1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.distiller.prior_correction:
            raise ValueError(
                "fedecho+ is fedecho with distiller.prior_correction above 0 (1 is the full one): set it, or use fedecho"
            )
