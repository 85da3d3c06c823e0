"""Ends a run that gets nowhere: nearly every update refused, most not finite, nobody reporting, everybody failing, or a
model without a score."""

from collections import Counter
from collections.abc import Mapping, Set
from math import isnan
from typing import Any

from fedecho.core.admission import NOT_FINITE
from fedecho.core.server import Receipt
from fedecho.core.types import CLIENT_FAILED
from fedecho.experiments.config import ConfigError
from fedecho.experiments.experiment import Experiment
from fedecho.simulation.forecast import most_fruitless

MAX_REFUSED = 100
PER_ACCEPTED = 9
"""Refused updates that one accepted update makes up for."""
PER_ACCEPTED_NOT_FINITE = 2
"""The same for updates that are not finite: where most clients send such, it is the model that is lost."""


ALIKE, ALIKE_EACH = 10, 2
"""Failures of one kind in a row that end a deployed run: in all, and of every client that is connected."""
MOST_FAILED = 100
"""The same for failures of any kinds, of which each connected client has at least one."""


class DivergedError(ConfigError):
    """More than nine in ten updates are refused, more than two in three are not finite, or the model's loss is not a number."""


def check_scores(version: int, scores: Mapping[str, Any]) -> None:
    """A model whose loss or accuracy is NaN has diverged, though its weights may all be finite. Other scores may be undefined."""
    for name, value in scores.items():
        if name.endswith(("loss", "accuracy")) and isinstance(value, float) and isnan(value):
            raise DivergedError(
                f"training has diverged: the evaluation of version {version} gave {name} = nan; "
                "lower local.client_lr or algorithm.server_lr"
            )


class Standstill:
    """Counts the updates refused beyond what the accepted ones make up for, and the messages since the last accepted one."""

    def __init__(self, experiment: Experiment) -> None:
        self.refused = self.not_finite = self.fruitless = 0
        self._most_fruitless = most_fruitless(experiment.task.num_clients)
        self._most_refused = max(MAX_REFUSED, 10 * experiment.concurrency)

    def see(self, receipt: Receipt) -> None:
        self.fruitless = 0 if receipt.status == "accepted" else self.fruitless + 1
        if self.fruitless > self._most_fruitless:
            raise ConfigError(
                f"not one update in the last {self.fruitless} messages: clients are lost before they finish; see [faults]"
            )
        if receipt.status == "accepted":
            self.refused = max(0, self.refused - PER_ACCEPTED)
            self.not_finite = max(0, self.not_finite - PER_ACCEPTED_NOT_FINITE)
        self.refused += receipt.status == "rejected"
        self.not_finite += receipt.code == NOT_FINITE
        if max(self.refused, self.not_finite) >= self._most_refused:
            raise DivergedError(
                f"most of the last updates were rejected, the last one because {receipt.reason}: if training has diverged, "
                "lower local.client_lr or algorithm.server_lr"
            )


class Failures:
    """Ends a deployed run in which every connected client fails. A client that might still answer is waited for.

    A few failures of one kind end it if they are the clients' own: a refused update or an app that raised. Lost connections,
    missed deadlines and the like pass, so of those it takes many more.
    """

    def __init__(self) -> None:
        self._failed, self._own = Counter[int](), Counter[int]()
        """By client, since the last accepted update: all failures, and those that are the client's own."""
        self._codes = set[str]()

    def see(self, receipt: Receipt, present: Set[int]) -> None:
        if receipt.status == "accepted":
            for seen in (self._failed, self._own, self._codes):
                seen.clear()
        elif receipt.status in ("rejected", "lost"):
            self._failed[receipt.client] += 1
            if receipt.status == "rejected" or receipt.code == CLIENT_FAILED:
                self._own[receipt.client] += 1
                self._codes.add(receipt.code)
            self._check(receipt, present)

    def _check(self, last: Receipt, present: Set[int]) -> None:
        num = self._failed.total()
        if len(self._codes) == 1 and _all_have(self._own, present, ALIKE_EACH, ALIKE):
            raise ConfigError(
                f"not one of the last {num} jobs gave an update: every connected client failed in the same way "
                f"({last.code}); the last one: {last.reason}"
            )
        if _all_have(self._failed, present, 1, MOST_FAILED):
            raise ConfigError(f"not one of the last {num} jobs gave an update; the last one: {last.reason}")


def _all_have(failed: Counter[int], present: Set[int], each: int, in_all: int) -> bool:
    return failed.total() >= in_all and bool(present) and all(failed[client] >= each for client in present)
