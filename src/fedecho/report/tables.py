"""Tables of finished runs."""

from collections.abc import Iterable, Mapping
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedecho.experiments.summary import Summary


def percent(values: list[float]) -> str:
    """Mean and sample deviation over seeds, in percent."""
    mean = f"{100 * fmean(values):.1f}"
    return f"{mean} ± {100 * stdev(values):.1f}" if len(values) > 1 else mean


def comparison(summaries: Iterable[Summary], title: str, diverged: Mapping[str, int] | None = None) -> Table:
    """One row per method: accuracies over seeds, staleness, virtual and real time; ``diverged`` runs are counted beside them."""
    table = Table(
        title=Text(title),
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        title_justify="left",
        caption_justify="left",
        caption="accuracy in %, mean ± deviation over seeds; last 10: of a run's last ten evaluations, at most"
        + ("; where seeds are missing, the runs have diverged" if diverged else ""),
    )
    for heading in ("method", "seeds", "last 10", "final", "best", "stale", "virt. h", "real s"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    lost = dict(diverged or {})
    grouped: dict[str, list[Summary]] = {}
    for summary in summaries:
        grouped.setdefault(summary.algorithm, []).append(summary)
    for algorithm, runs in grouped.items():
        table.add_row(
            algorithm,
            _seeds(len(runs), lost.pop(algorithm, 0)),
            percent([run.last10_accuracy for run in runs]),
            percent([run.final_accuracy for run in runs]),
            percent([run.best_accuracy for run in runs]),
            f"{fmean(run.mean_staleness for run in runs):.1f}",
            f"{fmean(run.virtual_s for run in runs) / 3600:.2f}",
            f"{fmean(run.real_s for run in runs):.1f}",
        )
    for algorithm, num in lost.items():
        table.add_row(algorithm, _seeds(0, num))
    return table


def _seeds(finished: int, diverged: int) -> str:
    return f"{finished} of {finished + diverged}" if diverged else str(finished)
