"""A run that gets nowhere is ended with a word: nearly every update refused, or nobody reporting at all."""

from fedecho.core.server import Receipt
from fedecho.experiments.config import ConfigError
from fedecho.experiments.experiment import Experiment
from fedecho.simulation.forecast import most_fruitless

MAX_REFUSED = 100
PER_ACCEPTED = 9
"""Refused updates that one accepted update makes up for."""


class DivergedError(ConfigError):
    """Of ten updates more than nine are refused, and it does not end."""


class Standstill:
    """Counts the updates refused beyond nine for each that is accepted, and the messages since the last accepted one."""

    def __init__(self, experiment: Experiment) -> None:
        self.refused = self.fruitless = 0
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
        self.refused += receipt.status == "rejected"
        if self.refused >= self._most_refused:
            raise DivergedError(
                f"nearly all of the last {self.refused} updates were rejected, the last one because {receipt.reason}: "
                "if training has diverged, lower local.client_lr or algorithm.server_lr"
            )
