"""The server log of a deployed run, and its history in Flower's ``Result``."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import isnan
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedecho.core.algorithm import buffer_size_of
from fedecho.core.loop import Moment
from fedecho.core.server import Receipt, Server
from fedecho.flower.wire import NUM_EXAMPLES
from fedecho.runs.folder import MODEL
from fedecho.runs.journal import Journal
from fedecho.runs.methods import is_weighted, method_of, num_unlabeled_of
from fedecho.runs.record import EVALUATION, INITIAL, OF_CLASS, JsonObject
from fedecho.runs.run_stats import RunState, clock
from fedecho.runs.summary import NOT_SCORES, Summary
from fedecho.version import __version__

IN_FULL = 3
"""The number of failures of each code that are logged individually."""
EVERY_S = 60.0
"""Minimum interval between two lines that count further failures."""


class RunLog:
    """Logs one run. Rejections and losses are counted by code, so that failing clients cannot fill the log."""

    def __init__(self, server: Server[Any], journal: Journal, say: Callable[[str], None]) -> None:
        self._server, self._journal, self._say = server, journal, say
        self._state = RunState(journal.identity.num_versions)
        self._failures = Counter[str]()
        self._counted: dict[str, tuple[int, float]] = {}
        """By code: the number of failures logged so far, and when."""

    def begin(self, past: Iterable[JsonObject], resumed: bool) -> None:
        """Log what the run is, or where it resumes. ``past`` is its record so far."""
        server, identity, folder = self._server, self._journal.identity, self._journal.folder
        for line in past:
            self._state.recall(line)
        if resumed:
            self._say(f"resuming the run in {folder} from version {server.model.version}")
        num_unlabeled = num_unlabeled_of(server.algorithm)
        size = buffer_size_of(server.algorithm)
        parts = [
            f"fedecho {__version__}: {method_of(server.algorithm)}",
            f"{server.num_clients} clients",
            f"{server.concurrency} at once",
            f"{identity.num_versions} versions" + ("" if size is None else f" of {size} updates"),
            *([] if num_unlabeled is None else [f"{num_unlabeled} unlabeled examples"]),
            *(["weighted by examples"] if is_weighted(server.algorithm) else []),
            f"seed {identity.seed}",
            "nothing is saved" if folder is None else f"folder {folder}",
        ]
        self._say(", ".join(parts))

    def see(self, moment: Moment, scores: Mapping[str, Any] | None) -> None:
        """Log a version or a failure."""
        self._state.see(moment, None if scores is None else dict(scores))
        if moment.receipt.status in ("rejected", "lost"):
            self._failed(moment.receipt, moment.time)
        if moment.step is not None:
            self._say(f"version {self._state.version}/{self._state.num_versions}  {self._state.text}")

    def _failed(self, receipt: Receipt, now: float) -> None:
        code = receipt.code
        self._failures[code] += 1
        number = self._failures[code]
        logged, since = self._counted.get(code, (0, now))
        text = f"client {receipt.client}: {receipt.status}, {receipt.reason}"
        if number <= IN_FULL:
            hint = f" (further '{code}' failures are only counted)" if number == IN_FULL else ""
            self._say(text + hint)
        elif now - since >= EVERY_S:
            duration = clock(now - since).strip()
            self._say(f"{number - logged} more '{code}' failures in {duration}, {number} in total; the last one: {text}")
        else:
            return
        self._counted[code] = (number, now)

    def stopped(self) -> None:
        """Log that the run ends early. The exception gives the reason."""
        self._say(f"stopped at version {self._server.model.version} of {self._journal.identity.num_versions}: {self._counts}")

    def end(self, summary: Summary) -> None:
        """Log the results."""
        self._say(f"finished: {summary.num_versions} versions in {clock(summary.real_s).strip()}, {self._counts}")
        scores = [f"{name} {value:.4g}" for name, value in summary.scores.items() if isinstance(value, int | float)]
        if not isnan(summary.last10_accuracy):
            scores.append(f"mean accuracy of the last ten evaluations {100 * summary.last10_accuracy:.2f} %")
        self._say(", ".join([*scores, f"mean staleness {summary.mean_staleness:.2f}"]))
        if self._journal.folder is not None:
            self._say(f"model saved to {self._journal.folder / MODEL}")

    @property
    def _counts(self) -> str:
        counts = self._server.counts
        text = f"{counts['accepted']} updates accepted, {counts['rejected']} rejected, {counts['lost']} lost"
        by_code = ", ".join(f"{code} {number}" for code, number in self._server.reasons.most_common())
        return f"{text} ({by_code})" if by_code else text


ARRIVAL_FIELDS = ("event", "time", "client", "status", "dispatch", "base", "staleness", "class", "norm")
"""Fields of an accepted update's record line that are not the client's metrics."""


class History:
    """Fills a ``Result``. A version's metrics are means weighted by examples; its staleness is the plain mean."""

    def __init__(self, result: Result) -> None:
        self._result = result
        self._updates: list[tuple[Mapping[str, float], int]] = []
        """Metrics and staleness of each update since the last version."""

    def see(self, moment: Moment) -> None:
        receipt = moment.receipt
        if receipt.status == "accepted":
            self._updates.append((receipt.metrics, receipt.staleness))
        if moment.step is not None:
            self._published(moment.step.model.version)

    def recall(self, lines: Iterable[JsonObject]) -> None:
        """Restore the versions before a resume from the record, to nine digits."""
        for line in lines:
            if line["event"] == "arrival" and line["status"] == "accepted":
                metrics = {name: value for name, value in line.items() if name not in ARRIVAL_FIELDS}
                self._updates.append((metrics, line["staleness"]))
            elif line["event"] == "version":
                self._published(line["version"])
            elif line["event"] in (EVALUATION, INITIAL):
                self._result.evaluate_metrics_serverapp[line["version"]] = MetricRecord(_scores(line))

    def _published(self, version: int) -> None:
        metrics = [metrics for metrics, _ in self._updates]
        shared = set.intersection(*map(set, metrics)) - {NUM_EXAMPLES} if metrics else set()
        counts = [one.get(NUM_EXAMPLES, 1.0) for one in metrics]
        means = {key: float(np.average([one[key] for one in metrics], weights=counts)) for key in sorted(shared)}
        if self._updates:
            means["staleness"] = float(np.mean([staleness for _, staleness in self._updates]))
        self._result.train_metrics_clientapp[version] = MetricRecord(dict(means))
        self._updates.clear()


def _scores(line: JsonObject) -> dict[str, Any]:
    of_class = {f"{OF_CLASS}{place}": score for place, score in enumerate(line.get("per_class", ()))}
    return {name: score for name, score in line.items() if name not in NOT_SCORES} | of_class
