"""The benchmark of the paper's claim on embedded digits: who learns the classes that slow clients hold, and how soon."""

from itertools import product

from fedecho.paper.tables import Column, PaperTable, Row, Settings

SPLITS: dict[str, Settings] = {
    "lone": (),
    "mixed": ("task.partition.held_share=0.5",),
    "by size": ("task.partition.name=dirichlet", "task.partition.alpha=0.03", "runtimes.rule=size"),
}
"""Slow clients alone hold two classes; they hold half of them; any classes, and the larger a client the slower, as in the paper."""
LARGE_S, MILD_S, SEARCH_S = 6000.0, 2000.0, 2200.0
"""The virtual time at which runs are compared. In the first two, each slow client reports at least eight times."""
LARGE_LENGTHS = (("fedavg", ("num_versions=40",)),)
MILD = ("runtimes.profile=mild", "num_versions=280", "eval_every=7")
MILD_LENGTHS = (("fedasync", ("num_versions=840", "eval_every=21")), ("fedavg", ("num_versions=40", "eval_every=1")))
SEARCH = ("num_versions=300", "eval_every=10")
SEARCH_LENGTHS = (("fedasync", ("num_versions=900", "eval_every=30")), ("fedavg", ("num_versions=25", "eval_every=1")))
COLUMNS = (
    *(Column(f"{split}, large", settings, LARGE_LENGTHS, LARGE_S) for split, settings in SPLITS.items()),
    *(Column(f"{split}, mild", (*settings, *MILD), MILD_LENGTHS, MILD_S) for split, settings in SPLITS.items()),
)
SEARCH_COLUMNS = tuple(Column(split, (*settings, *SEARCH), SEARCH_LENGTHS, SEARCH_S) for split, settings in SPLITS.items())
SEARCH_SEED = 10

POLYNOMIAL = ("algorithm.staleness=polynomial",)
AFTER_STEP = ("dispatch_after_step=true",)
SGD = ("algorithm.distiller.optimizer=sgd",)


def _grid(client_lrs: tuple[str, ...], name: str, values: tuple[str, ...]) -> tuple[Settings, ...]:
    return tuple((f"local.client_lr={lr}", f"algorithm.{name}={value}") for lr, value in product(client_lrs, values))


HIGH, LOW = ("0.05", "0.1", "0.2"), ("0.02", "0.05", "0.1")
SERVER_LRS, ADAPTIVE_LRS = ("0.25", "0.5", "1.0"), ("0.001", "0.003", "0.01")
CANDIDATES: dict[str, tuple[str, Settings, tuple[Settings, ...]]] = {
    "FedAvg": ("fedavg", (), _grid(HIGH, "buffer_size", ("3", "5", "10"))),
    "FedAsync": ("fedasync", (), _grid(HIGH, "mixing", ("0.3", "0.6", "0.9"))),
    "FedBuff": ("fedbuff", (), _grid(HIGH, "server_lr", SERVER_LRS)),
    "FedBuff, polynomial weights": ("fedbuff", POLYNOMIAL, _grid(HIGH, "server_lr", SERVER_LRS)),
    "FedBuff, dispatch after step": ("fedbuff", AFTER_STEP, _grid(HIGH, "server_lr", SERVER_LRS)),
    "CA2FL": ("ca2fl", (), _grid(LOW, "server_lr", SERVER_LRS)),
    "FedAC": ("fedac", (), _grid(LOW, "server_lr", ADAPTIVE_LRS)),
    "FADAS": ("fadas", (), _grid(HIGH, "server_lr", ADAPTIVE_LRS)),
    "FedEcho": ("fedecho", (), _grid(LOW, "distiller.distill_lr", ("1e-05", "3e-05", "0.0001"))),
    "FedEcho, SGD": ("fedecho", SGD, _grid(LOW, "distiller.distill_lr", ("0.001", "0.003", "0.01"))),
    "FedEcho+": ("fedecho+", (), _grid(LOW, "distiller.distill_lr", ("3e-05", "0.0001", "0.0003"))),
}
"""Each method's fixed settings and the nine settings that the search tries: three of each rate, around its best."""


def _tried(label: str, algorithm: str, fixed: Settings, candidate: Settings) -> Row:
    # A synchronous server's clients are as many as its buffer holds.
    size = tuple(f"concurrency={each.partition('=')[2]}" for each in candidate if each.startswith("algorithm.buffer_size"))
    named = (each.partition("=") for each in candidate)
    short = " ".join(f"{name.rpartition('.')[2]}={value}" for name, _, value in named)
    return Row(f"{label}, {short}", algorithm, (*fixed, *candidate, *size))


SEARCH_ROWS = tuple(
    _tried(label, algorithm, fixed, candidate)
    for label, (algorithm, fixed, candidates) in CANDIDATES.items()
    for candidate in candidates
)

# The recipe has the best rates of each method; those of SGD are of another size than Adam's.
SEARCHED: dict[str, Settings] = {"FedEcho, SGD": ("algorithm.distiller.distill_lr=0.001",)}
ROWS = tuple(Row(label, algorithm, (*fixed, *SEARCHED.get(label, ()))) for label, (algorithm, fixed, _) in CANDIDATES.items())

OVER_CA2FL = (
    "algorithm.inner.name=ca2fl",
    "algorithm.inner.buffer_size=3",
    "algorithm.inner.num_clients=20",
    "algorithm.inner.server_lr=0.5",
    "algorithm.distiller.distill_lr=3e-05",
)
"""The best of four pairs (client_lr .02 and .05, distill_lr 3e-5 and 1e-4), on the search's splits `lone` and `by size`."""
AGE = "algorithm.distiller.max_teacher_age"
ALPHA = ("algorithm.distiller.alpha_min={0}", "algorithm.distiller.alpha_max={0}")
ABLATION_ROWS = (
    Row("FedEcho", "fedecho"),
    *(Row(f"FedEcho, {num} samples", "fedecho", (f"task.num_unlabeled={num}",)) for num in (30, 100)),
    *(Row(f"FedEcho, alpha={a}", "fedecho", tuple(each.format(a) for each in ALPHA)) for a in (0, 1, 0.5)),
    *(Row(f"FedEcho, nu={nu}", "fedecho", (f"algorithm.distiller.clip_norm={nu}",)) for nu in (1, "inf")),
    Row("FedEcho, teachers at most 30 versions old", "fedecho", (f"{AGE}=30",)),
    Row("FedEcho, teachers of the current buffer", "fedecho", (f"{AGE}=0",)),
    Row("FedEcho+", "fedecho+"),
    Row("FedEcho+, shared prior", "fedecho+", ("algorithm.distiller.shared_prior=1",)),
    Row("FedEcho+, half the correction", "fedecho+", ("algorithm.distiller.prior_correction=0.5",)),
    Row("FedEcho+ over CA2FL", "fedecho+", OVER_CA2FL),
    Row("FedEcho+, teachers at most 30 versions old", "fedecho+", (f"{AGE}=30",)),
    Row("FedEcho+, teachers of the current buffer", "fedecho+", (f"{AGE}=0",)),
)
"""The paper's ablations, and those of its claim: without old teachers, and with the correction in other strengths."""

SEEDS = (11, 12, 13, 14, 15)
"""Used in no choice: neither of the rates (seed 10) nor of the correction's form (0 to 3)."""
SCORES = (("straggler_accuracy", "stragglers"), ("area", "area"), ("minutes_to_90", "min to 90 %"))


def _table(name: str, title: str, rows: tuple[Row, ...], columns: tuple[Column, ...], seeds: tuple[int, ...]) -> PaperTable:
    return PaperTable(name, title, "stragglers", rows, columns, {}, scores=SCORES, seeds=seeds, executor="serial")


STRAGGLER_TABLES = {
    each.name: each
    for each in (
        _table("stragglers", "Digits, 20 clients, two of them slow", ROWS, COLUMNS, SEEDS),
        _table("straggler-ablations", "FedEcho's parts on these digits", ABLATION_ROWS, (COLUMNS[0], COLUMNS[2]), SEEDS[:3]),
        _table("straggler-search", "Search of the rates for this table", SEARCH_ROWS, SEARCH_COLUMNS, (SEARCH_SEED,)),
    )
}
