"""FedEcho. Wang, Ma and Chen, Stragglers Can Contribute More: Uncertainty-Aware Distillation for Asynchronous
Federated Learning, 2025."""

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from fedecho.core.algorithm import (
    Algorithm,
    Demands,
    buffer_size_of,
    call_advance,
    call_init,
    call_ready,
    call_receive,
    check_algorithm,
    corrects,
    demands,
)
from fedecho.core.randomness import derive
from fedecho.core.ranges import Seed, check_ranges
from fedecho.core.types import Advance, Arrival, GlobalModel, Weights
from fedecho.distill.bank import Bank
from fedecho.distill.diagnostics import diagnose, teacher_kl
from fedecho.distill.distiller import Adam, Distiller
from fedecho.distill.student import Student
from fedecho.distill.token_bank import TokenBank

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class FedEchoState(Generic[S]):
    """The inner method's state, the bank of latest logits and the state of the distillation's Adam."""

    inner: S
    bank: Bank | TokenBank
    adam: Adam


@dataclass(frozen=True, kw_only=True)
class FedEcho(Generic[S]):
    """Any inner method, followed at each version by distillation from the mean of all clients' latest logits on U.

    ``seed`` defaults to the experiment's. ``student`` is the server's network with U; an experiment attaches it.
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
        """The inner method's buffer size, or None if it declares none."""
        return buffer_size_of(self.inner)

    def attached(self, student: Student) -> "FedEcho[S]":
        """Return this method with the student it distils into."""
        return replace(self, student=student)

    def init(self, model: GlobalModel) -> FedEchoState[S]:
        student = self._student
        return FedEchoState(call_init(self.inner, model), student.bank(self.distiller), Adam.fresh(model.weights.params))

    def receive(self, state: FedEchoState[S], arrival: Arrival) -> FedEchoState[S]:
        """Lines 4 and 5: run the client's own model, x_s + Delta with its statistics, on U and store its logits."""
        update = arrival.update
        client_model = Weights(arrival.base.weights.params + update.delta, update.buffers)
        state.bank.put(update.client, self._student.infer(client_model), arrival.current.version)
        return replace(state, inner=call_receive(self.inner, state.inner, arrival))

    def ready(self, state: FedEchoState[S]) -> bool:
        return call_ready(self.inner, state.inner)

    def advance(self, state: FedEchoState[S], model: GlobalModel) -> Advance[FedEchoState[S]]:
        """Lines 10 to 17: compute x_hat by the inner step and distil it into x_{t+1}."""
        inner = call_advance(self.inner, state.inner, model)
        bank = state.bank
        if self.distiller.max_teacher_age is not None:
            bank.forget_before(model.version - self.distiller.max_teacher_age)
        teachers: dict[str, float] = {"num_teachers": len(bank), "teacher_age": bank.mean_age(model.version)}
        if bank.num_refused:
            teachers["refused_logits"] = bank.num_refused
        if isinstance(bank, Bank) and bank.num_dropped:
            teachers["dropped_teachers"] = bank.num_dropped
        if self.distiller.num_steps(self._student.num_unlabeled) == 0 or not len(bank):
            return Advance(replace(state, inner=inner.state), inner.weights, inner.correction, {**inner.metrics, **teachers})
        student, teacher = self._student, bank.teacher()
        kl_before = teacher_kl(student, inner.weights, teacher)
        seed = derive(self.seed or 0, "distillation", model.version)
        adam, weights, metrics = self.distiller.distill(student, state.adam, inner.weights, teacher, seed)
        models = {"start": model.weights, "stepped": inner.weights, "distilled": weights}
        metrics |= diagnose(student, bank, teacher, **models, kl_before=kl_before).as_metrics()
        new_state = replace(state, inner=inner.state, adam=adam)
        return Advance(new_state, weights, inner.correction, {**inner.metrics, **teachers, **metrics})

    def without_corrections(self, state: FedEchoState[S]) -> FedEchoState[S]:
        """Return the state with c = 0, for clients that have lost their c_i."""
        if not corrects(self.inner):
            raise ValueError(f"{type(self.inner).__name__} has no method without_corrections(state)")
        return replace(state, inner=self.inner.without_corrections(state.inner))

    @property
    def _student(self) -> Student:
        if self.student is None:
            raise ValueError("FedEcho has no student: call attached(student), or run it in an experiment")
        return self.student


@dataclass(frozen=True, kw_only=True)
class FedEchoPlus(FedEcho[S]):
    """FedEcho with corrected teachers: each client's label prior is divided out of its logits (``prior_correction``)."""

    distiller: Distiller = field(default_factory=lambda: Distiller(prior_correction=1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.distiller.prior_correction:
            raise ValueError(
                "fedecho+ is fedecho with distiller.prior_correction above 0 (1 is the full correction): set it, or use fedecho"
            )
