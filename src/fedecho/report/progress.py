"""Live progress: a bar per run on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedecho.experiments.state import RunState


class LiveProgress:
    """``update`` may be called as often as one likes: it draws ten times a second, or prints a line every few seconds."""

    LINE_EVERY_S = 5.0

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._last_line: dict[str, float] = {}
        self._last_draw = 0.0
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} versions"),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )

    def __enter__(self) -> "LiveProgress":
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def update(self, run: str, state: RunState) -> None:
        done = state.version >= state.num_versions
        now = time.monotonic()
        if not self._console.is_terminal:
            self._print_line(run, state, now, done)
            return
        if run in self._tasks and not done and now - self._last_draw < 0.1:
            return
        self._last_draw = now
        if run not in self._tasks:
            self._tasks[run] = self._bars.add_task(run, total=state.num_versions, completed=state.version, state="")
        self._bars.update(self._tasks[run], completed=state.version, state=state.text)

    def _print_line(self, run: str, state: RunState, now: float, done: bool) -> None:
        if not done and now - self._last_line.setdefault(run, now) < self.LINE_EVERY_S:
            return
        self._last_line[run] = now
        self._console.print(f"{run}: version {state.version}/{state.num_versions}  {state.text}", soft_wrap=True)
