"""Comparison at equal virtual time: a run's accuracy is that of its latest evaluation, up to a common end."""

from collections.abc import Sequence
from typing import Any

GOAL = 0.9
FINAL_SHARE = 0.1
"""The final accuracy is the mean over the last tenth of the time."""


def scores_until(evaluations: Sequence[dict[str, Any]], end_s: float) -> dict[str, Any]:
    """Return final accuracy, the same on the slow clients' classes, area under the curve and minutes to 90 % accuracy.

    ``minutes_to_90`` is the whole time, and ``reached_90`` false, for a run that never gets there.
    """
    reached = next((line["time"] for line in evaluations if line["accuracy"] >= GOAL and line["time"] <= end_s), None)
    began = (1 - FINAL_SHARE) * end_s
    scores = {
        "accuracy": time_mean(evaluations, "accuracy", began, end_s),
        "area": time_mean(evaluations, "accuracy", 0.0, end_s),
        "minutes_to_90": (end_s if reached is None else reached) / 60,
        "reached_90": reached is not None,
    }
    if all("straggler_accuracy" in line for line in evaluations):
        scores["straggler_accuracy"] = time_mean(evaluations, "straggler_accuracy", began, end_s)
    return scores


def time_mean(evaluations: Sequence[dict[str, Any]], name: str, begin_s: float, end_s: float) -> float:
    """Return the mean of a score over a span of virtual time. It is 0 before the first evaluation."""
    times = [line["time"] for line in evaluations]
    total = 0.0
    for line, begins, ends in zip(evaluations, times, [*times[1:], end_s], strict=True):
        total += line[name] * max(0.0, min(ends, end_s) - max(begins, begin_s))
    return total / (end_s - begin_s)
