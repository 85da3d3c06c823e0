"""The server: a state machine with no clock, no thread and no socket."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedecho.core.admission import Admission, Fault, Norms, misfit, mistyped, said
from fedecho.core.algorithm import Algorithm, call_advance, call_init, call_ready, call_receive, check_algorithm, demands
from fedecho.core.clients import Idle
from fedecho.core.norm_monitor import Gate
from fedecho.core.randomness import below, derive
from fedecho.core.task import defines
from fedecho.core.types import (
    CLIENT_FAILED,
    UNREADABLE,
    Arrival,
    ClientUpdate,
    Dispatch,
    GlobalModel,
    Joined,
    Left,
    Lost,
    Message,
    Refused,
)
from fedecho.core.versions import Versions

S = TypeVar("S")
MOST_REASON = 300
"""Characters: texts may be a client's, who must not fill the server's record."""
MOST_CODE = 60
NONE = Norms(0.0)


class Open(NamedTuple):
    """A dispatch that has not been answered. A tuple, as there is one for every client at work: made in half the time."""

    number: int
    base_version: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one message: accepted, rejected, lost, joined, left or ignored. Reasons are counted by their ``code``."""

    status: str
    client: int
    reason: str = ""
    code: str = ""
    dispatch: int = -1
    base_version: int = -1
    staleness: int = -1
    norm: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """A version was published."""

    model: GlobalModel
    metrics: Mapping[str, float]


class Server(Generic[S]):
    """Algorithm 1 around any algorithm: admit, receive, refill, advance.

    ``refill`` and ``advance`` are apart so that a transport can start the new clients, who hold x_t, while x_{t+1} is made.
    ``variances`` says which of the buffers are variances (``Layout.variances``): a client's must not be below zero.
    """

    def __init__(
        self,
        *,
        algorithm: Algorithm[S],
        model: GlobalModel,
        num_clients: int,
        concurrency: int,
        seed: int,
        admission: Admission | None = None,
        variances: Tensor | None = None,
    ) -> None:
        if not 1 <= concurrency <= num_clients:
            raise ValueError(f"concurrency must be between 1 and num_clients = {num_clients}, got {concurrency}")
        check_algorithm(algorithm)
        self.algorithm = algorithm
        self.num_clients = num_clients
        self.concurrency = concurrency
        self.seed = seed
        self.admission = admission or Admission()
        self.gate = Gate(self.admission, self.num_clients)
        self.variances = variances
        self.demands = demands(algorithm)
        self.state = call_init(algorithm, model)
        self.versions = Versions(model)
        self.idle = Idle(range(num_clients), num_clients)
        self.open: dict[int, Open] = {}
        self.reported: list[int] = []
        self.departed: set[int] = set()
        self.num_dispatched = 0
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    @property
    def model(self) -> GlobalModel:
        return self.versions.current

    @property
    def ready(self) -> bool:
        return call_ready(self.algorithm, self.state)

    def refill(self) -> list[Dispatch]:
        """Give x_t to idle clients, chosen uniformly, until Mc are at work or nobody is idle."""
        dispatches = []
        if not (self.open or len(self.idle)) and len(self.reported) < self.concurrency:
            self._readmit(all_of_them=True)  # better a client that was set aside than a server that waits for ever
        while len(self.open) + len(self.reported) < self.concurrency and len(self.idle):
            number = self.num_dispatched
            client = self.idle[below(len(self.idle), self.seed, "select", number)]
            self.idle.remove(client)
            model = self.versions.acquire()
            self.open[client] = Open(number, model.version)
            self.num_dispatched += 1
            dispatches.append(Dispatch(number, client, model, derive(self.seed, "job", number)))
        return dispatches

    def receive(self, message: Message) -> Receipt:
        """Take one message of the transport. Bad ones change nothing but the slot they held."""
        if type(message.client) is not int or not 0 <= message.client < self.num_clients:
            known = message.client if type(message.client) is int and abs(message.client) < 2**63 else -1
            receipt = Receipt("rejected", known, f"client {said(message.client)} is unknown", "unknown client")
        elif isinstance(message, ClientUpdate):
            receipt = self._admit(message)
        elif isinstance(message, Joined):
            receipt = self._join(message.client)
        elif isinstance(message, Left):
            receipt = self._leave(message)
        elif isinstance(message, Refused):
            receipt = self._unreadable(message)
        else:
            receipt = self._lose(message)
        if receipt.reason:
            receipt = replace(receipt, reason=one_line(receipt.reason), code=one_line(receipt.code, MOST_CODE))
        self.counts[receipt.status] += 1
        if receipt.status in ("rejected", "lost"):
            self.reasons[receipt.code] += 1
        return receipt

    def advance(self) -> Step:
        """Make and publish x_{t+1}."""
        advance = call_advance(self.algorithm, self.state, self.model)
        self.state = advance.state
        model = GlobalModel(self.model.version + 1, advance.weights, advance.correction)
        self.versions.publish(model)
        for client in self.reported:
            if client not in self.departed:
                self.idle.add(client)
        self.departed.clear()
        self.reported.clear()
        self._readmit()
        return Step(model, advance.metrics)

    def _readmit(self, *, all_of_them: bool = False) -> None:
        for client in self.gate.returning(self.model.version, all_of_them=all_of_them):
            self.idle.add(client)

    def _admit(self, update: ClientUpdate) -> Receipt:
        work = self.open.get(update.client)
        if work is None:
            return Receipt("rejected", update.client, "update was not asked for", "not asked for")
        base = self._close(update.client, work)
        staleness = self.model.version - base.version
        try:
            fault, norms = self._fault(update, base)
        except Exception as error:  # an update is untrusted: whatever goes wrong in looking at it is its own fault
            fault, norms = Fault(UNREADABLE, f"update cannot be looked at: {type(error).__name__}"), NONE
        if fault is not None:
            return self._refuse(update.client, work, staleness, fault)
        self.gate.accepted(update.client, norms)
        if self.demands.synchronous:
            self.reported.append(update.client)
        else:
            self.idle.add(update.client)
        self.state = call_receive(self.algorithm, self.state, Arrival(update, base, self.model))
        known = (work.number, work.base_version, staleness, norms.delta)
        return Receipt("accepted", update.client, "", "", *known, update.metrics)

    def _fault(self, update: ClientUpdate, base: GlobalModel) -> tuple[Fault | None, Norms]:
        """What is wrong with an update to a job from ``base``, if anything, and how far it goes."""
        wrong = mistyped(update)
        if wrong is not None:
            return wrong, NONE
        if update.base_version != base.version:
            text = f"update is based on version {said(update.base_version)}, not {base.version}"
            return Fault("wrong base", text), NONE
        fault = self.admission.too_large(update) or misfit(update, base)
        if fault is not None:
            return fault, NONE
        norms = Norms.of(update, base)
        if not all(map(isfinite, norms)):
            return self.admission.fault(update, norms, None, None, self.demands.control_variates), norms
        usual = self.gate.usual(update.client, norms, base)
        self.gate.hear(update.client, norms)
        return self.admission.fault(update, norms, usual, self.variances, self.demands.control_variates), norms

    def _refuse(self, client: int, work: Open, staleness: int, fault: Fault, status: str = "rejected") -> Receipt:
        text = fault.text
        if self.gate.refused(client, self.model.version):
            text = one_line(text, MOST_REASON - 65) + f"; the client is set aside until version {self.gate.set_aside[client]}"
        else:
            self.idle.add(client)
        return Receipt(status, client, text, fault.code, work.number, work.base_version, staleness)

    def _unreadable(self, refused: Refused) -> Receipt:
        work = self.open.get(refused.client)
        if work is None:
            return Receipt("ignored", refused.client, refused.reason)
        staleness = self.model.version - self._close(refused.client, work).version
        return self._refuse(refused.client, work, staleness, Fault(refused.code, refused.reason))

    def _close(self, client: int, work: Open) -> GlobalModel:
        del self.open[client]
        return self.versions.release(work.base_version)

    def _lose(self, lost: Lost | Left) -> Receipt:
        work = self.open.get(lost.client)
        if work is None:
            return Receipt("ignored", lost.client, lost.reason)
        staleness = self.model.version - self._close(lost.client, work).version
        if lost.code == CLIENT_FAILED:  # else one that raises at once would get every free slot, for ever
            return self._refuse(lost.client, work, staleness, Fault(lost.code, lost.reason), "lost")
        self.idle.add(lost.client)
        return Receipt("lost", lost.client, lost.reason, lost.code, work.number, work.base_version, staleness)

    def _join(self, client: int) -> Receipt:
        if client in self.open or (client in self.reported and client not in self.departed):
            return Receipt("ignored", client, "joined while at work")
        if self.gate.joined(client):
            return Receipt("ignored", client, f"set aside until version {self.gate.set_aside[client]}")
        if client in self.departed:
            self.departed.remove(client)  # idle again after the step: nobody is heard twice in a round
        else:
            self.idle.add(client)
        return Receipt("joined", client)

    def _leave(self, left: Left) -> Receipt:
        client, receipt = left.client, self._lose(left)
        self.idle.remove(client)
        self.gate.left(client)
        if client in self.reported:
            self.departed.add(client)  # its update stays in the round, so its slot does too
        return receipt if receipt.status == "lost" else Receipt("left", client)

    def forget_corrections(self) -> None:
        """c = 0, for clients that come back without their c_i: c stands for their mean, and c - c_i corrects every step."""
        if not self.demands.control_variates:
            return
        algorithm: Any = self.algorithm
        if not defines(algorithm, "without_corrections"):
            raise ValueError(
                f"{type(algorithm).__name__} asks for control variates, which clients have lost: give it without_corrections(state)"
            )
        self.state = algorithm.without_corrections(self.state)
        if self.model.correction is not None:
            self.versions.current = replace(self.model, correction=torch.zeros_like(self.model.correction))

    def snapshot(self) -> dict[str, Any]:
        """Everything a resumed server needs, as a tree of plain values, tensors and the algorithm's own state."""
        return {
            "state": self.state,
            "current": self.model.version,
            "models": {m.version: m for m in (*self.versions.models.values(), self.model)},
            "references": self.versions.references,
            "peak_alive": self.versions.peak_alive,
            "idle": self.idle.ordered(),
            "open": {client: [work.number, work.base_version] for client, work in self.open.items()},
            "reported": self.reported,
            "departed": sorted(self.departed),
            "num_dispatched": self.num_dispatched,
            "counts": dict(self.counts),
            "reasons": dict(self.reasons),
            "gate": self.gate.to_tree(),
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Become the server of a decoded snapshot."""
        self.state = tree["state"]
        models, references = tree["models"], dict(tree["references"])
        alive = {version: models[version] for version in references}
        self.versions = Versions(models[tree["current"]], alive, references, tree["peak_alive"])
        self.idle = Idle(tree["idle"], self.num_clients)
        self.open = {client: Open(*work) for client, work in tree["open"].items()}
        self.reported = list(tree["reported"])
        self.departed = set(tree["departed"])
        self.num_dispatched = tree["num_dispatched"]
        self.counts = Counter(tree["counts"])
        self.reasons = Counter(tree["reasons"])
        self.gate = Gate(self.admission, self.num_clients).from_tree(tree["gate"])


def one_line(text: str, most: int = MOST_REASON) -> str:
    """Without control characters, and not longer than ``most``."""
    plain = "".join(character if character.isprintable() else " " for character in text[: 2 * most])
    return plain if len(plain) <= most else plain[: most - 3] + "..."
