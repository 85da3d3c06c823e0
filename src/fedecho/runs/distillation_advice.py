"""Advice to a user whose distillation does next to nothing, or overrides the clients.

The measure is ``distill_shift``, the length of distillation's step relative to the buffer's own step; it is proportional to the
rate. docs/diagnostics.md has the measurements behind the limits. Only the first versions count: later the clients' updates
shrink, so the same rate gives a larger ratio and does no harm.
"""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from fedecho.core.loop import Moment
from fedecho.distill.distiller import Distiller
from fedecho.distill.student import distils
from fedecho.runs.record import Record, rounded

WINDOW = 20
"""The number of distilled versions whose median decides. A run with fewer gets no advice."""
LITTLE, MUCH = 0.02, 0.35
"""Below the first, distillation does next to nothing; above the second, it overrides the clients' updates."""
GOOD = 0.15
"""The shift at the best rate on digits, which a proposed lower rate aims at."""
EVENT = "advice"


class DistillationAdvice:
    """Follows the shift of a run's first versions and advises once. It is rebuilt from the record on resume."""

    def __init__(self, algorithm: Any) -> None:
        distiller: Distiller | None = algorithm.distiller if distils(algorithm) else None
        self._distill_lr = 0.0 if distiller is None else distiller.distill_lr  # some only observe, with no distiller
        self._shifts: list[float] = []

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Count the lines of a resumed run's record."""
        for line in lines:
            if line["event"] == "version":
                self._add(line)

    def see(self, moment: Moment, record: Record) -> str | None:
        """Return advice, and note it in the record, if this version completes the window and gives a reason."""
        step = moment.step
        if step is None or not self._add(step.metrics) or len(self._shifts) != WINDOW:
            return None
        text = _advice(median(self._shifts), self._distill_lr)
        if text is not None:
            record.write({"event": EVENT, "version": step.model.version, "time": rounded(moment.time), "text": text})
        return text

    def _add(self, metrics: Mapping[str, float]) -> bool:
        """Add a version's shift. False if it has none, or if the window is full."""
        if "distill_shift" not in metrics or len(self._shifts) == WINDOW:
            return False
        self._shifts.append(rounded(metrics["distill_shift"]))
        return True


def _advice(shift: float, rate: float) -> str | None:
    if not rate:  # a rate of 0 is a choice
        return None
    found = f"distillation moves the model by {100 * shift:.2g} % of the buffer's step (median of the first {WINDOW} versions)"
    setting = f"algorithm.distiller.distill_lr from {rate:g}"
    if shift < LITTLE:
        return f"{found}: it does next to nothing. Raise {setting}; {10 * rate:g} is a good first step"
    if shift > MUCH:
        lower = float(f"{rate * GOOD / shift:.0e}")
        return f"{found}: it may override the clients' updates. Lower {setting}, for example to {lower:g}"
    return None
