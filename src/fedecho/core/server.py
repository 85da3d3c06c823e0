"""The server: a state machine with no clock, no thread and no socket."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedecho.core.admission import Admission, Norms, Rejection, brief, check_tensors, check_types
from fedecho.core.algorithm import (
    Algorithm,
    call_advance,
    call_init,
    call_ready,
    call_receive,
    check_algorithm,
    corrects,
    demands,
)
from fedecho.core.clients import Idle
from fedecho.core.norm_monitor import NormMonitor
from fedecho.core.randomness import below, derive
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
    Status,
)
from fedecho.core.versions import Versions

S = TypeVar("S")
MAX_REASON = 300
"""Maximum length of a reason. Clients may supply the text and must not fill the server's record."""
MAX_CODE = 60
UNMEASURED = Norms(0.0)


class OpenJob(NamedTuple):
    """A dispatch without an answer so far. A tuple, which is created in half the time of a dataclass."""

    number: int
    base_version: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """How the server handled one message. Rejections and losses are counted by ``code``."""

    status: Status
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
    """A newly published version."""

    model: GlobalModel
    metrics: Mapping[str, float]


class Server(Generic[S]):
    """Algorithm 1 for any algorithm: admit, receive, refill, advance.

    ``refill`` and ``advance`` are separate so that a transport can start the new clients, which train from x_t, while x_{t+1} is
    computed. ``variances`` is a mask of the buffers that are variances (``Layout.variances``), which must not be negative.
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
        self.norm_monitor = NormMonitor(self.admission, self.num_clients)
        self.variances = variances
        self.demands = demands(algorithm)
        self.state = call_init(algorithm, model)
        self.versions = Versions(model)
        self.idle = Idle(range(num_clients), num_clients)
        self.open: dict[int, OpenJob] = {}
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
        """Dispatch x_t to uniformly chosen idle clients until Mc are at work or none is idle."""
        dispatches = []
        if not (self.open or len(self.idle)) and len(self.reported) < self.concurrency:
            self._readmit(all_of_them=True)  # to avoid a deadlock
        while len(self.open) + len(self.reported) < self.concurrency and len(self.idle):
            number = self.num_dispatched
            client = self.idle[below(len(self.idle), self.seed, "select", number)]
            self.idle.remove(client)
            model = self.versions.acquire()
            self.open[client] = OpenJob(number, model.version)
            self.num_dispatched += 1
            dispatches.append(Dispatch(number, client, model, derive(self.seed, "job", number)))
        return dispatches

    def receive(self, message: Message) -> Receipt:
        """Process one message of the transport.

        A rejected message frees the client's slot and adds a strike. It leaves the model and the algorithm's state unchanged.
        """
        if type(message.client) is not int or not 0 <= message.client < self.num_clients:
            client = message.client if type(message.client) is int and abs(message.client) < 2**63 else -1
            receipt = Receipt(Status.REJECTED, client, f"client {brief(message.client)} is unknown", "unknown client")
        elif isinstance(message, ClientUpdate):
            receipt = self._admit(message)
        elif isinstance(message, Joined):
            receipt = self._join(message.client)
        elif isinstance(message, Left):
            receipt = self._leave(message)
        else:
            receipt = self._lose(message)
        if receipt.reason:
            receipt = replace(receipt, reason=one_line(receipt.reason), code=one_line(receipt.code, MAX_CODE))
        self.counts[receipt.status] += 1
        if receipt.status in (Status.REJECTED, Status.LOST):
            self.reasons[receipt.code] += 1
        return receipt

    def advance(self) -> Step:
        """Compute and publish x_{t+1}."""
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
        for client in self.norm_monitor.returning(self.model.version, all_of_them=all_of_them):
            self.idle.add(client)

    def _admit(self, update: ClientUpdate) -> Receipt:
        job = self.open.get(update.client)
        if job is None:
            return Receipt(Status.REJECTED, update.client, "update was not asked for", "not asked for")
        base = self._close(update.client, job)
        staleness = self.model.version - base.version
        try:
            rejection, norms = self._check(update, base)
        except Exception as error:  # an update is untrusted, so any error while checking it is a reason to reject it
            rejection, norms = Rejection(UNREADABLE, f"update cannot be checked: {type(error).__name__}"), UNMEASURED
        if rejection is not None:
            return self._reject(update.client, job, staleness, rejection, Status.REJECTED)
        self.norm_monitor.accepted(update.client, norms)
        if self.demands.synchronous:
            self.reported.append(update.client)
        else:
            self.idle.add(update.client)
        self.state = call_receive(self.algorithm, self.state, Arrival(update, base, self.model))
        details = (job.number, job.base_version, staleness, norms.delta, update.metrics)
        return Receipt(Status.ACCEPTED, update.client, "", "", *details)

    def _check(self, update: ClientUpdate, base: GlobalModel) -> tuple[Rejection | None, Norms]:
        """Return why an update to a job from ``base`` is rejected, or None, and its norms."""
        wrong_type = check_types(update)
        if wrong_type is not None:
            return wrong_type, UNMEASURED
        if update.base_version != base.version:
            text = f"update is based on version {brief(update.base_version)}, not {base.version}"
            return Rejection("wrong base", text), UNMEASURED
        rejection = self.admission.check_size(update) or check_tensors(update, base)
        if rejection is not None:
            return rejection, UNMEASURED
        norms = Norms.of(update, base)
        if not all(map(isfinite, norms)):
            return self.admission.check(update, norms, None, None, self.demands.control_variates), norms
        usual = self.norm_monitor.usual(update.client, norms, base)
        self.norm_monitor.observe(update.client, norms)
        return self.admission.check(update, norms, usual, self.variances, self.demands.control_variates), norms

    def _reject(self, client: int, job: OpenJob, staleness: int, rejection: Rejection, status: Status) -> Receipt:
        text = rejection.text
        if self.norm_monitor.rejected(client, self.model.version):
            until = self.norm_monitor.set_aside[client]
            text = one_line(text, MAX_REASON - 65) + f"; the client is set aside until version {until}"
        else:
            self.idle.add(client)
        return Receipt(status, client, text, rejection.code, job.number, job.base_version, staleness)

    def _close(self, client: int, job: OpenJob) -> GlobalModel:
        del self.open[client]
        return self.versions.release(job.base_version)

    def _lose(self, message: Lost | Left | Refused) -> Receipt:
        client = message.client
        job = self.open.get(client)
        if job is None:
            return Receipt(Status.IGNORED, client, message.reason)
        staleness = self.model.version - self._close(client, job).version
        if isinstance(message, Refused) or message.code == CLIENT_FAILED:
            # A failure is a strike too: otherwise a client that fails at once would be given every free slot.
            status = Status.REJECTED if isinstance(message, Refused) else Status.LOST
            return self._reject(client, job, staleness, Rejection(message.code, message.reason), status)
        self.idle.add(client)
        return Receipt(Status.LOST, client, message.reason, message.code, job.number, job.base_version, staleness)

    def _join(self, client: int) -> Receipt:
        if client in self.open or (client in self.reported and client not in self.departed):
            return Receipt(Status.IGNORED, client, "joined while at work")
        if self.norm_monitor.joined(client):
            return Receipt(Status.IGNORED, client, f"set aside until version {self.norm_monitor.set_aside[client]}")
        if client in self.departed:
            self.departed.remove(client)  # idle again after the step, so that no client reports twice for one version
        else:
            self.idle.add(client)
        return Receipt(Status.JOINED, client)

    def _leave(self, left: Left) -> Receipt:
        client, receipt = left.client, self._lose(left)
        self.idle.remove(client)
        self.norm_monitor.left(client)
        if client in self.reported:
            self.departed.add(client)  # its update stays in the buffer, so its slot stays taken
        return receipt if receipt.status == Status.LOST else Receipt(Status.LEFT, client)

    def forget_corrections(self) -> None:
        """Set c = 0 after clients have lost their c_i: c is the clients' mean, and c - c_i corrects every step."""
        if not self.demands.control_variates:
            return
        algorithm = self.algorithm
        if not corrects(algorithm):
            raise ValueError(
                f"clients have lost the control variates of {type(algorithm).__name__}: give it a method without_corrections(state)"
            )
        self.state = algorithm.without_corrections(self.state)
        if self.model.correction is not None:
            self.versions.current = replace(self.model, correction=torch.zeros_like(self.model.correction))

    def snapshot(self) -> dict[str, Any]:
        """Return the complete state as a tree of plain values, tensors and the algorithm's own state, for a checkpoint."""
        return {
            "state": self.state,
            "current": self.model.version,
            "models": {m.version: m for m in (*self.versions.models.values(), self.model)},
            "references": self.versions.references,
            "peak_alive": self.versions.peak_alive,
            "idle": self.idle.ordered(),
            "open": {client: [job.number, job.base_version] for client, job in self.open.items()},
            "reported": self.reported,
            "departed": sorted(self.departed),
            "num_dispatched": self.num_dispatched,
            "counts": dict(self.counts),
            "reasons": dict(self.reasons),
            "gate": self.norm_monitor.to_tree(),
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from a decoded snapshot."""
        self.state = tree["state"]
        models, references = tree["models"], dict(tree["references"])
        alive = {version: models[version] for version in references}
        self.versions = Versions(models[tree["current"]], alive, references, tree["peak_alive"])
        self.idle = Idle(tree["idle"], self.num_clients)
        self.open = {client: OpenJob(*job) for client, job in tree["open"].items()}
        self.reported = list(tree["reported"])
        self.departed = set(tree["departed"])
        self.num_dispatched = tree["num_dispatched"]
        self.counts = Counter(tree["counts"])
        self.reasons = Counter(tree["reasons"])
        self.norm_monitor = NormMonitor(self.admission, self.num_clients).from_tree(tree["gate"])


def one_line(text: str, most: int = MAX_REASON) -> str:
    """Replace control characters by spaces and shorten the text to ``most`` characters."""
    plain = "".join(character if character.isprintable() else " " for character in text[: 2 * most])
    return plain if len(plain) <= most else plain[: most - 3] + "..."
