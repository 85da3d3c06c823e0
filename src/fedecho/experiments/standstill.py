"""A run that gets nowhere is ended with a word: nearly every update refused, most not finite, or nobody reporting at all."""

from fedecho.core.admission import NOT_FINITE
from fedecho.core.server import Receipt
from fedecho.experiments.config import ConfigError
from fedecho.experiments.experiment import Experiment
from fedecho.simulation.forecast import most_fruitless

MAX_REFUSED = 100
PER_ACCEPTED = 9
"""Refused updates that one accepted update makes up for."""
PER_ACCEPTED_NOT_FINITE = 2
"""The same for updates that are not finite: where most clients send such, it is the model that is lost."""


class DivergedError(ConfigError):
    """More than nine in ten updates are refused, or more than two in three are not finite, and it does not end."""


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
