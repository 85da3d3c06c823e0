"""When a run's model is judged. Long evaluations say how far they are, and a request to stop breaks them off."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedecho.core.breaks import Stopped, watched
from fedecho.experiments.build import Simulation
from fedecho.experiments.config import ConfigError
from fedecho.experiments.standstill import check_scores


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
