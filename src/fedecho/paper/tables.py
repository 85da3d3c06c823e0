"""The paper's tables as data: what a cell runs, and what the paper reports for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedecho.runs.resolve import Tree, resolved
from fedecho.runs.suggestions import ConfigError

if TYPE_CHECKING:
    from fedecho.runs.experiment import Experiment

Settings = tuple[str, ...]
Values = dict[tuple[str, str], tuple[float, float | None]]
METHODS = {"FedBuff": "fedbuff", "CA2FL": "ca2fl", "FedAC": "fedac", "FADAS": "fadas"}


@dataclass(frozen=True)
class Row:
    """A method with its settings. ``control`` rows are not in the paper; ``untrained`` ones evaluate the initial model."""

    label: str
    algorithm: str
    settings: Settings = ()
    control: bool = False
    untrained: bool = False


@dataclass(frozen=True)
class Column:
    """A condition of all rows. ``by_method`` adds settings for single methods, such as their number of versions.

    With ``until_s``, all runs are compared at this virtual time.
    """

    label: str
    settings: Settings = ()
    by_method: tuple[tuple[str, Settings], ...] = ()
    until_s: float | None = None

    def settings_for(self, algorithm: str) -> Settings:
        return (*self.settings, *dict(self.by_method).get(algorithm, ()))


@dataclass(frozen=True)
class Cell:
    """One experiment of a table with one seed, and the user's own settings on top."""

    table: str
    row: Row
    column: Column
    seed: int
    recipe: str
    own: Settings = ()

    @property
    def slug(self) -> str:
        words = f"{self.row.label} {self.column.label} seed{self.seed}".lower().replace("+", " plus ")
        return "-".join("".join(c if c.isalnum() or c in ".=" else " " for c in words).split())

    @property
    def settings(self) -> Settings:
        return (*self.column.settings_for(self.row.algorithm), *self.row.settings, *self.own)

    def experiment(self) -> "Experiment":
        from fedecho.runs.config import load  # needs torch, which the tables as data do not

        try:
            return load(self.recipe, algorithm=self.row.algorithm, seed=self.seed, settings=self.settings)
        except ValueError as error:
            raise ConfigError(f"{self.row.label}, {self.column.label}: {error}") from None

    def config(self) -> Tree:
        """The experiment's table of settings. Only ``experiment`` checks their values."""
        return resolved(self.recipe, algorithm=self.row.algorithm, seed=self.seed, settings=self.settings)


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    ``values[row label, column label]`` is the paper's mean and its deviation, or None if the paper has none. ``scores`` are
    further columns: the name in the record or summary, and the heading. ``names_stand_ins`` shows in every row which model or
    data replaced the paper's. ``seeds`` and ``executor`` are what ``fedecho table`` uses unless told otherwise.
    """

    name: str
    title: str
    recipe: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    values: Values
    scores: tuple[tuple[str, str], ...] = ()
    names_stand_ins: bool = False
    own: Settings = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    executor: str = "cuda"

    def cell(self, row: Row, column: Column, seed: int) -> Cell:
        return Cell(self.name, row, column, seed, self.recipe, self.own)

    def cells(self, seeds: tuple[int, ...]) -> Iterator[Cell]:
        """All cells, by seed. Untrained rows only have a cell for the first seed: they are the same for all."""
        for seed in seeds:
            for column in self.columns:
                for row in self.rows:
                    if seed == seeds[0] or not row.untrained:
                        yield self.cell(row, column, seed)


def _echo(label: str, unlabeled: str) -> Row:
    return Row(f"FedEcho ({label})", "fedecho", (f"task.unlabeled={unlabeled}",))


def _columns(first: float, second: float) -> tuple[Column, ...]:
    return tuple(
        Column(f"{profile} Dir({alpha})", (f"runtimes.profile={profile}", f"task.partition.alpha={alpha}"))
        for profile in ("large", "mild")
        for alpha in (first, second)
    )


def values_of(rows: tuple[Row, ...], columns: tuple[Column, ...], figures: str) -> Values:
    """Parse figures: one line per row, ``mean/deviation`` or ``mean`` per column."""
    table: Values = {}
    for row, line in zip((row for row in rows if not row.control), figures.strip().splitlines(), strict=True):
        for column, figure in zip(columns, line.split(), strict=True):
            mean, _, deviation = figure.partition("/")
            table[row.label, column.label] = (float(mean), float(deviation) if deviation else None)
    return table


STEP = "algorithm.correction=step"
CONTROLS = (
    Row("control: BatchNorm on U alone", "fedecho", ("algorithm.distiller.distill_lr=0",), control=True),
    Row("control: BatchNorm frozen", "fedecho", ("algorithm.distiller.batch_norm=frozen",), control=True),
    Row("control: FedAC corrected in every step", "fedac", (STEP,), control=True),
    Row("control: FedAC without control variates", "fedac", (STEP, "algorithm.control_variates=false"), control=True),
    Row("control: FedAC, c the mean of c_i", "fedac", (STEP, "algorithm.weighted_correction=false"), control=True),
    Row("FedEcho+ (CIFAR-100)", "fedecho+", ("task.unlabeled=cifar100",), control=True),
    Row("FedEcho+ (STL10)", "fedecho+", ("task.unlabeled=stl10",), control=True),
    Row("FedEcho+ (synthetic)", "fedecho+", ("task.unlabeled=synthetic",), control=True),
    Row("FedEcho+, shared prior", "fedecho+", ("algorithm.distiller.shared_prior=1",), control=True),
    Row(
        "control: FedEcho, teachers of the current buffer", "fedecho", ("algorithm.distiller.max_teacher_age=0",), control=True
    ),
    # Separates the effect of a seed's partition from that of its training.
    Row("control: FADAS, seed 1's partition", "fadas", ("task.seed=1",), control=True),
    Row("control: FADAS, seed 0's partition", "fadas", ("task.seed=0",), control=True),
)
PLAIN = tuple(Row(label, name) for label, name in METHODS.items())

CIFAR10_ROWS = (
    *PLAIN,
    _echo("CIFAR-100", "cifar100"),
    _echo("STL10", "stl10"),
    _echo("synthetic", "synthetic"),
    *CONTROLS,
)
CIFAR10_COLUMNS = _columns(0.1, 0.3)
CIFAR100_ROWS = (*PLAIN, _echo("CIFAR-10", "cifar10"), _echo("STL10", "stl10"), _echo("synthetic", "synthetic"))
CIFAR100_COLUMNS = _columns(0.03, 0.1)

ONE = CIFAR10_COLUMNS[:1]
SAMPLE_ROWS = tuple(Row(f"{num} samples", "fedecho", (f"task.num_unlabeled={num}",)) for num in (500, 1000, 2000, 5000))
ALPHA_ROWS = (
    *(
        Row(f"alpha={a}", "fedecho", (f"algorithm.distiller.alpha_min={a}", f"algorithm.distiller.alpha_max={a}"))
        for a in (0, 1, 0.5)
    ),
    Row("dynamic alpha", "fedecho"),
)
CLIP_ROWS = tuple(Row(f"nu={nu}", "fedecho", (f"algorithm.distiller.clip_norm={nu}",)) for nu in (1, 5, "inf"))

ACCURACIES = (("final_accuracy", "final"), ("best_accuracy", "best"))
"""Shown as well, because the paper does not say which evaluations its figures come from."""

TABLES: dict[str, PaperTable] = {
    "cifar10": PaperTable(
        "cifar10",
        "CIFAR-10, ResNet-18, 500 versions",
        "cifar10",
        CIFAR10_ROWS,
        CIFAR10_COLUMNS,
        values_of(
            CIFAR10_ROWS,
            CIFAR10_COLUMNS,
            """
            52.85/7.76 51.44/8.74 42.57/5.00 41.60/5.10
            55.33/7.87 50.37/7.27 42.99/7.93 57.31/7.03
            62.06/3.16 74.67/1.95 69.54/1.43 76.23/1.14
            61.25/1.16 75.43/2.77 65.51/2.04 74.85/1.30
            75.39/2.93 84.11/1.49 79.69/0.68 83.74/0.96
            77.81/0.48 84.96/0.86 77.99/0.94 83.98/0.67
            74.93/1.75 80.68/1.35 72.95/5.20 81.27/1.71
            """,
        ),
        scores=ACCURACIES,
    ),
    "cifar100": PaperTable(
        "cifar100",
        "CIFAR-100, ResNet-18, 1,000 versions",
        "cifar100",
        CIFAR100_ROWS,
        CIFAR100_COLUMNS,
        values_of(
            CIFAR100_ROWS,
            CIFAR100_COLUMNS,
            """
            30.58/1.13 44.28/0.49 32.24/1.70 45.41/0.58
            37.32/0.49 43.88/0.24 35.02/2.25 45.03/0.16
            50.09/0.64 58.07/0.52 51.09/0.47 58.61/0.29
            48.22/0.70 57.95/0.40 49.29/0.37 58.22/0.32
            53.74/0.29 61.54/0.14 55.55/0.26 63.05/0.21
            53.94/0.18 62.30/0.09 55.26/0.21 59.68/0.10
            48.04/0.55 57.58/0.13 49.23/0.45 62.04/0.20
            """,
        ),
        scores=ACCURACIES,
    ),
    "samples": PaperTable(
        "samples",
        "CIFAR-10, number of distillation samples",
        "cifar10",
        SAMPLE_ROWS,
        ONE,
        values_of(SAMPLE_ROWS, ONE, "61.86/6.05\n67.91/6.22\n75.39/2.93\n77.03/0.43"),
        scores=ACCURACIES,
    ),
    "alpha": PaperTable(
        "alpha",
        "CIFAR-10, mixing weight",
        "cifar10",
        ALPHA_ROWS,
        ONE,
        values_of(ALPHA_ROWS, ONE, "71.01/2.79\n74.86/3.14\n74.92/2.54\n75.39/2.93"),
        scores=ACCURACIES,
    ),
    "clip": PaperTable(
        "clip",
        "CIFAR-10, clipping threshold",
        "cifar10",
        CLIP_ROWS,
        ONE,
        values_of(CLIP_ROWS, ONE, "74.38/2.67\n75.39/2.93\n74.14/2.07"),
        scores=ACCURACIES,
    ),
}
