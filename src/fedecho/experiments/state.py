"""The figures of a run that people watch while it goes on."""

from fedecho.core.drive import Moment


class RunState:
    """Small and plain: it goes through a pipe in a comparison."""

    def __init__(self, num_versions: int, version: int = 0) -> None:
        self.num_versions = num_versions
        self.version = version
        self.time = 0.0
        self.accuracy: float | None = None
        self.staleness_sum = 0
        self.accepted = 0
        self.rejected = 0
        self.lost = 0

    def see(self, moment: Moment, scores: dict[str, float] | None) -> None:
        self.time = moment.time
        receipt = moment.receipt
        if receipt.status == "accepted":
            self.accepted += 1
            self.staleness_sum += receipt.staleness
        self.rejected += receipt.status == "rejected"
        self.lost += receipt.status == "lost"
        if moment.step is not None:
            self.version = moment.step.model.version
        if scores is not None:
            self.accuracy = scores.get("accuracy")

    @property
    def text(self) -> str:
        accuracy = "" if self.accuracy is None else f"accuracy {100 * self.accuracy:5.1f} %"
        staleness = f"staleness {self.staleness_sum / max(self.accepted, 1):4.1f}"
        faults = "".join(f"  {name} {count}" for name, count in (("rejected", self.rejected), ("lost", self.lost)) if count)
        return f"{accuracy}  clock {self.time / 3600:5.2f} h  {staleness}{faults}"
