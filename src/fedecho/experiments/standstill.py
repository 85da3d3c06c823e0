"""A run that gets nowhere is ended with a word: every update refused, or nobody reporting at all."""

from fedecho.core.server import Receipt
from fedecho.experiments.config import ConfigError
from fedecho.experiments.experiment import Experiment
from fedecho.simulation.forecast import most_fruitless

MAX_REFUSED = 100


class Standstill:
    """Counts the updates refused, and the messages without an update, since the last accepted one."""

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
        self.refused = 0 if receipt.status == "accepted" else self.refused + (receipt.status == "rejected")
        if self.refused >= self._most_refused:
            raise ConfigError(
                f"the last {self.refused} updates were all rejected, the last one because {receipt.reason}: "
                "if training has diverged, lower local.client_lr or algorithm.server_lr"
            )
