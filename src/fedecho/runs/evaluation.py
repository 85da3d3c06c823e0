"""When a run's model is evaluated, and where a run's real time goes."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedecho.core.loop import Transport
from fedecho.core.task import Stopped, watched
from fedecho.core.types import Dispatch, Message
from fedecho.runs.build import Simulation
from fedecho.runs.config import ConfigError
from fedecho.runs.run_stats import check_scores

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""``ru_maxrss`` is in bytes there and in kilobytes elsewhere."""


class TimedTransport:
    """A transport with a stopwatch beside it. Between a message and ``served()`` the server works, but for what it sends.

    A GPU works on after a call is over, so there the server's seconds are those of queueing its work.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._received_at = time.perf_counter()
        self._sending_s = 0.0
        self.clients_s = 0.0
        self.server_s = 0.0

    @property
    def now(self) -> float:
        return self._transport.now

    def send(self, dispatch: Dispatch) -> None:
        began = time.perf_counter()
        self._transport.send(dispatch)
        self._sending_s += time.perf_counter() - began

    def receive(self) -> Message:
        began = time.perf_counter()
        message = self._transport.receive()
        self._received_at = time.perf_counter()
        self.clients_s += self._received_at - began + self._sending_s
        self._sending_s = 0.0
        return message

    def served(self) -> None:
        """The server is done with the last message."""
        self.server_s += time.perf_counter() - self._received_at - self._sending_s

    def spent(self) -> dict[str, float]:
        return {"clients_s": self.clients_s, "server_s": self.server_s}

    def go_on(self, spent: Mapping[str, float]) -> None:
        self.clients_s, self.server_s = spent.get("clients_s", 0.0), spent.get("server_s", 0.0)

    def costs(self) -> dict[str, float]:
        """Seconds so far, and the most memory this process has held."""
        return {name: round(value, 3) for name, value in self.spent().items()} | _memory()


def _memory() -> dict[str, float]:
    """Nothing on a system that does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return {}
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT}


@dataclass
class Judge:
    """``broken_off``: the newest version has still to be judged, now or when the run goes on.

    A ``watch`` may have methods ``evaluating(done, total)`` and ``judged(version, time, scores)``, of what was made up for.
    """

    simulation: Simulation
    watch: Any
    stop: Callable[[], bool]
    broken_off: bool = False

    def is_due(self, version: int) -> bool:
        experiment = self.simulation.experiment
        return version % experiment.eval_every == 0 or version == experiment.num_versions

    def scores(self) -> dict[str, float] | None:
        """Of the current model; None if somebody asked to stop meanwhile. A loss that is not a number ends the run."""
        self.broken_off = True
        try:
            with watched(self._at):
                scores = self.simulation.evaluate()
        except Stopped:
            return None
        self.broken_off = False
        if "accuracy" not in scores:
            raise ConfigError(f"the task's evaluate() must give an accuracy; it gave {', '.join(scores) or 'nothing'}")
        check_scores(self.simulation.server.model.version, scores)
        return scores

    def made_up(self, version: int, now: float, scores: dict[str, float] | None) -> None:
        if scores is not None and hasattr(self.watch, "judged"):
            self.watch.judged(version, now, scores)

    def _at(self, done: int, total: int) -> None:
        if hasattr(self.watch, "evaluating"):
            self.watch.evaluating(done, total)
        if self.stop():
            raise Stopped
