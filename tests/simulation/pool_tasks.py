"""A small task for worker processes, which must be able to import it."""

import signal
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedecho.learning.local import LocalTraining
from fedecho.tasks import DigitsTask
from fedecho.tasks.partition import IidPartitioner, Partitioner

MOODY = 3
LOCAL = LocalTraining(client_lr=0.05, num_local_steps=3, batch_size=16, control_variates=True)


@dataclass(frozen=True, kw_only=True)
class MoodyDigits(DigitsTask):
    """Digits with one client whose training fails."""

    num_clients: int = 6
    num_unlabeled: int = 10
    width: int = 2
    partition: Partitioner = field(default_factory=IidPartitioner)
    moody: int = MOODY

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if client == self.moody:
            raise ZeroDivisionError("not today")
        return super().batch(client, rows, generator)


@dataclass(frozen=True, kw_only=True)
class StuckDigits(MoodyDigits):
    """A client whose data never arrives, in a process that ignores SIGTERM."""

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if client == self.moody:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        return super().batch(client, rows, generator)
