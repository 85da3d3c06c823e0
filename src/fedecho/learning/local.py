"""The settings of a client's local training."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fedecho.core.ranges import Decay, Epsilon, Factor, Rate, at_least, check_ranges


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
    client_lr: Rate = 0.01
    epochs: Annotated[int, at_least(1, most=10**6)] = 2
    num_local_steps: Annotated[int, at_least(1, most=10**7)] | None = None
    batch_size: Annotated[int, at_least(1)] = 50
    weight_decay: Factor = 0.0
    proximal: Factor = 0.0
    control_variates: bool = False
    correct_once: bool = False
    corrected: Literal["gradient", "step"] = "gradient"
    correct_unseen: bool = True
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Epsilon = 1e-8

    def __post_init__(self) -> None:
        check_ranges(self, "local.")
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
