"""The history of a run in Flower's ``Result``: what clients reported for each version, and what the server's evaluations gave."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedecho.core.drive import Moment
from fedecho.experiments.record import EVALUATION, INITIAL, OF_CLASS, Line
from fedecho.experiments.summary import NOT_SCORES
from fedecho.flower.keys import NUM_EXAMPLES

OF_AN_ANSWER = ("event", "time", "client", "status", "dispatch", "base", "staleness", "class", "norm")
"""What the line of an accepted update says beside the client's metrics."""


class History:
    """Fills a ``Result``. A version's metrics are means by the clients' examples, its staleness the plain mean."""

    def __init__(self, result: Result) -> None:
        self._result = result
        self._seen: list[tuple[Mapping[str, float], int]] = []
        """Metrics and staleness of the updates since the last version."""

    def see(self, moment: Moment) -> None:
        receipt = moment.receipt
        if receipt.status == "accepted":
            self._seen.append((receipt.metrics, receipt.staleness))
        if moment.step is not None:
            self._published(moment.step.model.version)

    def recall(self, lines: Iterable[Line]) -> None:
        """The versions before a resume, from the record: to nine digits."""
        for line in lines:
            if line["event"] == "arrival" and line["status"] == "accepted":
                metrics = {name: value for name, value in line.items() if name not in OF_AN_ANSWER}
                self._seen.append((metrics, line["staleness"]))
            elif line["event"] == "version":
                self._published(line["version"])
            elif line["event"] in (EVALUATION, INITIAL):
                self._result.evaluate_metrics_serverapp[line["version"]] = MetricRecord(_scores(line))

    def _published(self, version: int) -> None:
        metrics = [metrics for metrics, _ in self._seen]
        shared = set.intersection(*map(set, metrics)) - {NUM_EXAMPLES} if metrics else set()
        counts = [one.get(NUM_EXAMPLES, 1.0) for one in metrics]
        means = {key: float(np.average([one[key] for one in metrics], weights=counts)) for key in sorted(shared)}
        if self._seen:
            means["staleness"] = float(np.mean([staleness for _, staleness in self._seen]))
        self._result.train_metrics_clientapp[version] = MetricRecord(dict(means))
        self._seen.clear()


def _scores(line: Line) -> dict[str, Any]:
    of_class = {f"{OF_CLASS}{place}": score for place, score in enumerate(line.get("per_class", ()))}
    return {name: score for name, score in line.items() if name not in NOT_SCORES} | of_class
