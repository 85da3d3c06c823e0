"""Summarize a race: medians over turns relative to the bare loop of the same turn, and the fastest turns.

On a machine that others share too a whole process may run at three quarters of its speed. Such noise only ever adds time, so the
fastest turn of each says more of small differences than the median does; both are given.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

Turn = list[dict[str, Any]]
FLOOR = "bare loop"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One contender in one job; ``error`` if it has no figures."""

    name: str
    error: str = ""
    note: str = ""
    versions: str = ""
    per_used_step: float = 0.0
    """Seconds for each step that was used, over the bare loop's."""
    fastest: float = 0.0
    """The same of its fastest turn, over the bare loop's fastest."""
    per_made_step: float = 0.0
    cpu: float = 0.0
    """Processor seconds for each step made, over the bare loop's; says less than time, but a busy machine hardly changes it."""
    beyond_ms: float = 0.0
    """Milliseconds an update takes beyond the bare loop's."""
    fastest_beyond_ms: float = 0.0
    start_s: float = 0.0
    run_s: float = 0.0
    turns: int = 0
    updates: int = 0
    """Of each turn."""
    updates_per_s: float = 0.0
    wasted: float = 0.0
    peak_mb: float = 0.0


def standings(race: dict[str, Any]) -> list[Standing]:
    names = [result["name"] for result in race["turns"][0]]
    return [_standing(name, race) for name in names]


def _standing(name: str, race: dict[str, Any]) -> Standing:
    pairs = [(_of(turn, name), _of(turn, FLOOR)) for turn in race["turns"]]
    done = [(mine, floor) for mine, floor in pairs if mine is not None and floor is not None and "error" not in mine]
    if not done:
        first = _of(race["turns"][0], name)
        return Standing(name=name, error="" if first is None else first["error"])
    mine_all = [mine for mine, _ in done]
    floors = [floor for _, floor in done]
    last, watched = done[-1][0], _of(race["watched"], name)
    peak = None if watched is None else watched.get("peak_bytes")
    versions = {package: version for package, version in last["versions"].items() if package != "torch"}
    return Standing(
        name=name,
        note=last["note"],
        versions=", ".join(f"{package} {version}" for package, version in versions.items()),
        per_used_step=_ratio(done, "run_s", "used_steps"),
        fastest=_least(mine_all, "used_steps") / _least(floors, "used_steps"),
        per_made_step=_ratio(done, "run_s", "steps"),
        cpu=_ratio(done, "cpu_s", "steps"),
        beyond_ms=median(1e3 * (_per(mine, "updates") - _per(floor, "updates")) for mine, floor in done),
        fastest_beyond_ms=1e3 * (_least(mine_all, "updates") - _least(floors, "updates")),
        start_s=median(mine["total_s"] - mine["run_s"] for mine, _ in done),
        run_s=median(mine["run_s"] for mine, _ in done),
        turns=len(done),
        updates=last["updates"],
        updates_per_s=median(1 / _per(mine, "updates") for mine, _ in done),
        wasted=1 - last["used_steps"] / last["steps"],
        peak_mb=0.0 if peak is None else peak / 1e6,
    )


def _of(turn: Turn, name: str) -> dict[str, Any] | None:
    return next((result for result in turn if result["name"] == name), None)


def _per(result: dict[str, Any], what: str) -> float:
    seconds: float = result["run_s"] / result[what]
    return seconds


def _least(results: list[dict[str, Any]], what: str) -> float:
    return min(_per(result, what) for result in results)


def _ratio(done: list[tuple[dict[str, Any], dict[str, Any]]], seconds: str, steps: str) -> float:
    return median((mine[seconds] / mine[steps]) / (floor[seconds] / floor[steps]) for mine, floor in done)
