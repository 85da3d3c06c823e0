"""Corrected teachers: a client's own label distribution, as its predictions on U show it, divided out of its logits.

A client that never saw a class says so loudly: its logits for it are far below the others everywhere, and the mean of logits
follows them. By Bayes' rule log p(y|u) - log p_i(y) is the client's evidence for y, whatever it has seen most (logit adjustment:
Menon et al., ICLR 2021). The server does not know p_i: pi_i, the client's mean prediction on U, estimates it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PriorCorrection:
    """y^i - s log(C pi_i), with pi_i at least ``floor`` / C; and t s log(C mean pi_i) is given back to the teacher.

    ``strength`` is s: 0 is the paper, 1 the full correction. ``shared`` is t: 1 puts one prior, the mean of all clients', in
    place of each client's own, which is safer where U's own labels are skewed; 0 leaves none. The factors C change no prediction:
    with them a client whose mean prediction is uniform is left as it is.
    """

    strength: float = 0.0
    floor: float = 0.01
    shared: float = 0.0

    def __post_init__(self) -> None:
        if self.shared and not self.strength:
            raise ValueError("distiller.shared_prior gives back what distiller.prior_correction takes, which is 0: set both")

    def prior_of(self, logits: Float[Tensor, "unlabeled classes"]) -> Float[Tensor, " classes"]:
        """pi_i."""
        floored = logits.softmax(dim=-1).mean(dim=0).clamp_min(self.floor / logits.shape[-1])
        return floored / floored.sum()

    def evidence(self, prior: Float[Tensor, " classes"]) -> Float[Tensor, " classes"]:
        """What is taken from the logits of a client with this prior."""
        return self.strength * (prior * len(prior)).log()


class Priors:
    """pi_i of every client that is in the bank, and their sum, in float64 as that of the logits is."""

    def __init__(self, correction: PriorCorrection, num_classes: int, device: torch.device) -> None:
        self.correction = correction
        self.total = torch.zeros(num_classes, dtype=torch.float64, device=device)
        self.of: dict[int, Tensor] = {}

    @property
    def entry_bytes(self) -> int:
        return 4 * len(self.total)

    def put(self, client: int, prior: Float[Tensor, " classes"]) -> None:
        self.drop(client)
        self.of[client] = prior
        self.total.add_(prior)

    def drop(self, client: int) -> None:
        old = self.of.pop(client, None)
        if old is not None:
            self.total.sub_(old)

    def given_back(self) -> Float[Tensor, " classes"]:
        """What the shared prior adds to the teacher."""
        mean = (self.total / len(self.of)).float()
        return self.correction.shared * self.correction.evidence(mean)

    def to_tree(self) -> dict[str, Any]:
        return {"total": self.total, "of": self.of}

    def from_tree(self, tree: dict[str, Any]) -> "Priors":
        device = self.total.device
        self.total = tree["total"].to(device)
        self.of = {client: prior.to(device) for client, prior in tree["of"].items()}
        return self
