"""Interleaved timing: points are measured in turn, so that a busy moment of the machine affects all of them alike."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np


@dataclass(frozen=True)
class Subject:
    """Something to time at one place of a curve. ``work(n)`` does n chunks; ``units`` is what one chunk counts for."""

    x: float
    work: Callable[[int], None]
    units: float = 1.0
    warm_up: int = 1


@dataclass(frozen=True)
class Timed:
    """Seconds a unit: the middle of all rounds, and the quartiles."""

    x: float
    seconds: float
    low: float
    high: float


def interleaved(subjects: Sequence[Subject], rounds: int, chunk_s: float, told: Callable[[], None]) -> list[Timed]:
    """Each round visits all subjects, every other round backwards. What counts is a subject's ratio to its round's mean."""
    chunks = [_chunks(subject, chunk_s) for subject in subjects]
    times = np.zeros((rounds, len(subjects)))
    for number in range(rounds):
        order = range(len(subjects)) if number % 2 == 0 else reversed(range(len(subjects)))
        for place in order:
            times[number, place] = _seconds(subjects[place], chunks[place])
        told()
    return summed_up([subject.x for subject in subjects], times)


def summed_up(x: Sequence[float], times: np.ndarray) -> list[Timed]:
    """Medians of the ratios to the round's geometric mean, times the median of that mean."""
    means = np.exp(np.log(times).mean(axis=1, keepdims=True))
    level = float(np.median(means))
    low, middle, high = np.quantile(times / means, [0.25, 0.5, 0.75], axis=0) * level
    return [Timed(*each) for each in zip(x, middle.tolist(), low.tolist(), high.tolist(), strict=True)]


def _seconds(subject: Subject, chunks: int) -> float:
    began = time.perf_counter()
    subject.work(chunks)
    return (time.perf_counter() - began) / (chunks * subject.units)


def _chunks(subject: Subject, chunk_s: float) -> int:
    """How many chunks last about ``chunk_s``, known from the warm-up."""
    subject.work(subject.warm_up)
    one = _seconds(subject, 1) * subject.units
    return max(1, min(100_000, round(exp(log(chunk_s) - log(max(one, 1e-7))))))
