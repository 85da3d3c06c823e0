"""The numbers of docs/theory.md, made from the results."""

from typing import Any

import numpy as np

from benchmarks.derived import table
from benchmarks.slopes import Interval, interval, power_law
from benchmarks.theory.run import FEDBUFF, FEDECHO, FIXED_LOCAL, STRONG_ECHO

Results = dict[str, Any]
Row = dict[str, Any]


def rows_of(results: Results, sweep: str, method: str) -> list[Row]:
    return [row for row in results["rows"] if row["sweep"] == sweep and row["method"] == method]


def exponent(rows: list[Row], what: str = "mean_square") -> Interval:
    """One slope a seed, then Student's interval over the seeds."""
    x = [row["x"] for row in rows]
    seeds = range(len(rows[0][what]))
    return interval([power_law(x, [row[what][seed] for row in rows]).exponent for seed in seeds])


def parts(results: Results) -> dict[str, str]:
    return {
        "constants": constants(results),
        "slopes": slopes(results),
        "echo": echo(results),
        "staleness": staleness(results),
        "machine": made_on(results),
    }


def constants(results: Results) -> str:
    known = results["problem"]
    rows = [
        ["N, weights", f"{known['clients']:,}, {known['params']}"],
        ["L", f"{known['smoothness']:.4f}"],
        ["σ_l²", f"{known['variance_within']:.4f}"],
        ["σ_g²", f"{known['variance_between']:.4f}"],
        ["F = f(x_1) − f_*", f"{known['gap']:.4f}"],
        ["K, Q, ν", f"{known['local_steps']}, {known['distill_steps']}, {known['clip_norm']:g}"],
        ["8 K L η_l at the smallest T (the lemma asks for at most 1)", f"{known['largest_condition']:.2f}"],
    ]
    return table(["constant", "value"], rows)


def slopes(results: Results) -> str:
    lines = []
    for sweep, methods, theorem in (
        ("T", (FEDBUFF, FEDECHO, FIXED_LOCAL, STRONG_ECHO), ("−1/2", "−1/2", "—", "—")),
        ("M", (FEDBUFF, FEDECHO), ("−1/2", "−1/2")),
    ):
        for method, rate in zip(methods, theorem, strict=True):
            rows = rows_of(results, sweep, method)
            over = f"{sweep} = {rows[0]['x']:g} … {rows[-1]['x']:g}"
            ends = f"{np.mean(rows[0]['mean_square']):.4f} → {np.mean(rows[-1]['mean_square']):.4f}"
            found = (exponent(rows), exponent(rows[-2:]), exponent(rows, "last_half"))
            lines.append([method, over, ends, *map(str, found), rate])
    head = ["method", "over", "mean square", "slope", "between the last two", "last half of each run", "theorem"]
    return table(head, [[cell.replace("-", "−") for cell in line] for line in lines])


def echo(results: Results) -> str:
    """FedEcho beside FedBuff at the same seeds: the same schedule and the same noise, so the difference is the distillation's."""
    lines = []
    pairs = zip(rows_of(results, "T", FEDBUFF), rows_of(results, "T", FEDECHO), strict=True)
    for buff, taught in pairs:
        apart = [100 * (b / a - 1) for a, b in zip(buff["mean_square"], taught["mean_square"], strict=True)]
        found = interval(apart)
        lines.append([f"{buff['x']:g}", f"{found.mean:+.2f} ± {found.half_width:.2f} %"])
    return table(["T", "FedEcho above FedBuff"], lines)


def staleness(results: Results) -> str:
    lines = []
    for sweep, name in (("slow", "slow tenth × {:g}"), ("Mc", "Mc = {:g}")):
        for buff, taught in zip(rows_of(results, sweep, FEDBUFF), rows_of(results, sweep, FEDECHO), strict=True):
            known = [f"{buff['mean_staleness']:.1f}", f"{buff['max_staleness']}", f"{buff['average_max']:.1f}"]
            squares = [_figures(interval(row["mean_square"])) for row in (buff, taught)]
            lines.append([name.format(buff["x"]), *known, *squares])
    return table(["", "mean τ", "τ_max", "τ_avg", "FedBuff", "FedEcho"], lines)


def _figures(found: Interval) -> str:
    return f"{found.mean:.4f} ± {found.half_width:.4f}"


def made_on(results: Results) -> str:
    made, seeds = results["made"], results["problem"]["seeds"]
    where = f"{made['cores']}, Python {made['python']}, torch {made['torch']}"
    return f"`python -m benchmarks.theory`: {seeds} seeds, {made['seconds']} s in {made['workers']} processes on {where}."
