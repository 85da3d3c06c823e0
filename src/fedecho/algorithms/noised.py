"""Server-side differential privacy: noise in the buffer of any buffered method."""

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from torch import Tensor

from fedecho.core.algorithm import Algorithm, Demands, call_advance, call_init, call_ready, call_receive, demands
from fedecho.core.randomness import derive
from fedecho.core.types import Advance, Arrival, GlobalModel
from fedecho.learning.privacy import Privacy

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class NoisedBuffer(Generic[S]):
    """The inner method's state and the number of updates in its buffer."""

    inner: S
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Noised(Generic[S]):
    """Clips every update and adds noise to the first one of each buffer, so that the buffer's sum contains it exactly once."""

    inner: Algorithm[S]
    privacy: Privacy
    seed: int
    variances: Tensor = field(compare=False, repr=False)

    @property
    def demands(self) -> Demands:
        return demands(self.inner)

    def init(self, model: GlobalModel) -> NoisedBuffer[S]:
        return NoisedBuffer(call_init(self.inner, model))

    def receive(self, state: NoisedBuffer[S], arrival: Arrival) -> NoisedBuffer[S]:
        seed = derive(self.seed, "buffer noise", arrival.current.version)
        noisy = state.size == 0
        update = self.privacy.sent(arrival.update, arrival.base, seed, self.variances, noisy=noisy)
        return NoisedBuffer(call_receive(self.inner, state.inner, replace(arrival, update=update)), state.size + 1)

    def ready(self, state: NoisedBuffer[S]) -> bool:
        return call_ready(self.inner, state.inner)

    def advance(self, state: NoisedBuffer[S], model: GlobalModel) -> Advance[NoisedBuffer[S]]:
        inner = call_advance(self.inner, state.inner, model)
        return Advance(NoisedBuffer(inner.state), inner.weights, inner.correction, inner.metrics)
