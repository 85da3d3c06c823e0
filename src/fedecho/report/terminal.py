"""Result tables and live progress in the terminal."""

import time
from collections.abc import Iterable, Mapping
from statistics import fmean, stdev
from types import TracebackType
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedecho.runs.summary import STRAGGLER_ACCURACY, Summary

if TYPE_CHECKING:
    from fedecho.runs.run_stats import RunState


def percent(values: list[float]) -> str:
    """Mean and sample standard deviation over seeds, in percent."""
    mean = f"{100 * fmean(values):.1f}"
    return f"{mean} ± {100 * stdev(values):.1f}" if len(values) > 1 else mean


def comparison(summaries: Iterable[Summary], title: str, diverged: Mapping[str, int] | None = None) -> Table:
    """A table with one row per method. ``diverged`` is the number of diverged runs by method, which have no summary."""
    summaries = list(summaries)
    slow = bool(summaries) and all(STRAGGLER_ACCURACY in summary.scores for summary in summaries)
    table = Table(
        title=Text(title),
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        title_justify="left",
        caption_justify="left",
        caption="accuracy in %, mean ± standard deviation over seeds; last 10: mean of a run's last ten evaluations"
        + ("; slow: final, on the classes of slow clients" if slow else "")
        + ("; missing seeds diverged" if diverged else ""),
    )
    # 80 columns are too few for both.
    headings = ["method", "seeds", "last 10", "final", "slow" if slow else "best", "stale", "virt. h", "real s"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    num_diverged = dict(diverged or {})
    grouped: dict[str, list[Summary]] = {}
    for summary in summaries:
        grouped.setdefault(summary.algorithm, []).append(summary)
    for algorithm, runs in grouped.items():
        table.add_row(
            algorithm,
            _seeds(len(runs), num_diverged.pop(algorithm, 0)),
            percent([run.last10_accuracy for run in runs]),
            percent([run.final_accuracy for run in runs]),
            percent([run.scores[STRAGGLER_ACCURACY] if slow else run.best_accuracy for run in runs]),
            f"{fmean(run.mean_staleness for run in runs):.1f}",
            f"{fmean(run.virtual_s for run in runs) / 3600:.2f}",
            f"{fmean(run.real_s for run in runs):.1f}",
        )
    for algorithm, num in num_diverged.items():
        table.add_row(algorithm, _seeds(0, num))
    return table


def _seeds(finished: int, diverged: int) -> str:
    return f"{finished} of {finished + diverged}" if diverged else str(finished)


WIDE = 120
"""The terminal width, in columns, from which arrivals are shown."""


class LiveProgress:
    """Progress bars, redrawn ten times a second at most. Without a terminal: one line per run every few seconds."""

    LINE_EVERY_S = 5.0

    def __init__(self, console: Console, *, silent: bool = False) -> None:
        self._console = console
        self._silent = silent
        self._drawn = False
        self._tasks: dict[str, TaskID] = {}
        self._last_line: dict[str, float] = {}
        self._last_draw: dict[str, float] = {}
        wide = console.width >= WIDE
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if wide else 12),
            TextColumn("{task.completed:.0f}/{task.total:.0f}" + (" versions" if wide else "")),
            TextColumn("{task.fields[state]}"),
            *([TextColumn("[dim]{task.fields[arrivals]}")] if wide else []),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("[dim]{task.fields[left]}"),
            console=console,
            expand=False,
        )

    def __enter__(self) -> "LiveProgress":
        self._drawn = self._console.is_terminal and not self._silent
        if self._drawn:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._drawn:  # stopping bars that were never started would print a newline
            self._bars.stop()

    def update(self, run: str, state: "RunState") -> None:
        if self._silent:
            return
        now = time.monotonic()
        if not self._console.is_terminal:
            self._print_line(run, state, now)
            return
        if run in self._tasks and not state.done and now - self._last_draw.get(run, 0.0) < 0.1:
            return
        self._last_draw[run] = now
        if run not in self._tasks:
            done = state.version
            self._tasks[run] = self._bars.add_task(
                run, total=state.num_versions, completed=done, state="", arrivals="", left=""
            )
        left = "" if state.done else "left"
        self._bars.update(self._tasks[run], completed=state.version, state=state.text, arrivals=state.arrivals, left=left)

    def _print_line(self, run: str, state: "RunState", now: float) -> None:
        if not state.done and now - self._last_line.setdefault(run, now) < self.LINE_EVERY_S:
            return
        self._last_line[run] = now
        arrivals = f"  {state.arrivals}" if state.arrivals else ""
        self._console.print(
            f"{run}: version {state.version}/{state.num_versions}  {state.text}{arrivals}", soft_wrap=True, markup=False
        )
