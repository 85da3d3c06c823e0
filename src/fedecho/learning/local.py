"""The settings of a client's local training."""

from dataclasses import dataclass
from math import inf
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """K steps of SGD or AdamW, fresh for every job.

    ``epochs`` counts passes over the client's data, the last partial batch kept; ``num_local_steps`` (K), if given, counts
    steps instead. ``proximal`` adds proximal / 2 |y - x_s|^2; with ``control_variates`` every step is corrected by c - c_i, or,
    where FedAC asks for ``correct_once``, the end alone: y -= lr (c - c_i), and c_i' = (x_s - y) / (E lr) - (c - c_i), E passes.

    AdamW corrects its ``gradient`` (y goes by AdamW's step for g + c - c_i, and c_i' is the mean raw gradient) or its ``step``
    (y goes by lr (c - c_i) more, and c_i' is the mean step in units of lr, as SGD has it). Corrected in its gradient, a parameter
    that has none of its own (a word that is not in the batch) goes by the whole rate, however small c - c_i is;
    ``correct_unseen = False`` does not correct it in that step.
    """

    optimizer: Literal["sgd", "adamw"] = "sgd"
    client_lr: float = 0.01
    epochs: int = 2
    num_local_steps: int | None = None
    batch_size: int = 50
    weight_decay: float = 0.0
    proximal: float = 0.0
    control_variates: bool = False
    correct_once: bool = False
    corrected: Literal["gradient", "step"] = "gradient"
    correct_unseen: bool = True
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"local.{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if not self.eps > 0:
            raise ValueError(f"local.eps must be above 0, got {self.eps}")
        if self.optimizer not in ("sgd", "adamw"):
            raise ValueError(f"local.optimizer must be 'sgd' or 'adamw', got {self.optimizer!r}")
        if not 0 < self.client_lr < inf:
            raise ValueError(f"local.client_lr must be above 0 and finite, got {self.client_lr}")
        if self.num_local_steps is not None and self.num_local_steps < 1:
            raise ValueError(f"local.num_local_steps must be at least 1, got {self.num_local_steps}")
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"local.{name} must be at least 1, got {getattr(self, name)}")
        self._check_corrections()
        for name in ("weight_decay", "proximal"):
            if getattr(self, name) < 0:
                raise ValueError(f"local.{name} must be at least 0, got {getattr(self, name)}")

    def _check_corrections(self) -> None:
        if self.corrected not in ("gradient", "step"):
            raise ValueError(f"local.corrected must be 'gradient' or 'step', got {self.corrected!r}")
        if self.correct_once and (self.corrected != "gradient" or not self.correct_unseen):
            raise ValueError(
                "local.corrected and local.correct_unseen say how every step is corrected, and algorithm.correction=once corrects "
                "none of them: leave them out"
            )
        if self.optimizer == "sgd" and self.corrected == "step":
            raise ValueError("local.corrected=step is for local.optimizer=adamw: SGD's step is its gradient, leave it out")
        if self.optimizer == "sgd" and not self.correct_unseen:
            raise ValueError(
                "local.correct_unseen=false is for local.optimizer=adamw: SGD moves what has no gradient by lr (c - c_i)"
            )
        if self.corrected == "step" and not self.correct_unseen:
            raise ValueError(
                "local.correct_unseen=false is for local.corrected=gradient; with step nothing goes by the whole rate, leave it out"
            )

    def num_corrected(self, num_examples: int) -> float:
        """What x_s - y is divided by, beside the rate, for c_i': K steps, or, corrected once, E passes over the data."""
        num_steps = self.num_steps(num_examples)
        return num_steps / -(-num_examples // self.batch_size) if self.correct_once else num_steps

    def num_steps(self, num_examples: int) -> int:
        """K for a client with this many examples."""
        per_epoch = -(-num_examples // self.batch_size)
        return self.epochs * per_epoch if self.num_local_steps is None else self.num_local_steps
