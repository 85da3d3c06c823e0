"""The settings of a client's local training."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fedecho.core.ranges import Decay, Epsilon, Factor, Rate, at_least, check_ranges


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """K steps of SGD or AdamW, with a new optimizer state for every job.

    ``epochs`` counts passes over the client's data, including the last partial batch. ``num_local_steps`` (K), if given, counts
    steps instead. ``proximal`` adds proximal / 2 |y - x_s|^2 to the loss.

    With ``control_variates`` every step is corrected by c - c_i. With ``correct_once`` (set by FedAC) only the result is
    corrected: y -= lr (c - c_i), and c_i' = (x_s - y) / (E lr) - (c - c_i) for E passes over the data.

    ``corrected`` says what AdamW corrects. ``gradient``: y takes AdamW's step for g + c - c_i, and c_i' is the mean raw gradient.
    ``step``: y moves by lr (c - c_i) in addition, and c_i' is the mean step divided by lr, as for SGD. With ``gradient``, a
    parameter without a gradient of its own (a word that is not in the batch) moves by the full learning rate, however small
    c - c_i is; ``correct_unseen = False`` leaves it uncorrected in that step.
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
                "local.corrected and local.correct_unseen configure the correction of every step, but algorithm.correction=once "
                "corrects no step: leave them out"
            )
        if self.optimizer == "sgd" and self.corrected == "step":
            raise ValueError("local.corrected=step is for local.optimizer=adamw: SGD's step is its gradient. Leave it out")
        if self.optimizer == "sgd" and not self.correct_unseen:
            raise ValueError(
                "local.correct_unseen=false is for local.optimizer=adamw: SGD moves such parameters by lr (c - c_i) only. "
                "Leave it out"
            )
        if self.corrected == "step" and not self.correct_unseen:
            raise ValueError(
                "local.correct_unseen=false is for local.corrected=gradient: with corrected=step it changes nothing. Leave it out"
            )

    def num_corrected(self, num_examples: int) -> float:
        """Return the divisor of x_s - y in c_i', besides the rate: K steps, or E passes over the data with ``correct_once``."""
        num_steps = self.num_steps(num_examples)
        return num_steps / -(-num_examples // self.batch_size) if self.correct_once else num_steps

    def num_steps(self, num_examples: int) -> int:
        """Return K for a client with this many examples."""
        per_epoch = -(-num_examples // self.batch_size)
        return self.epochs * per_epoch if self.num_local_steps is None else self.num_local_steps
