"""The benchmark of the paper's claim on embedded digits: who learns the classes that slow clients hold, and how soon."""

from itertools import product

from fedecho.paper.tables import Column, PaperTable, Row, Settings

LARGE_S, MILD_S = 6000.0, 2000.0
"""The virtual time over which methods are compared: each slow client reports at least eight times."""
MILD = ("runtimes.profile=mild", "num_versions=280", "eval_every=7")
MILD_BY_METHOD = (
    ("fedasync", ("num_versions=840", "eval_every=21")),
    ("fedavg", ("num_versions=60", "eval_every=1")),
)
LONE: Settings = ()
MIXED = ("task.partition.held_share=0.5",)
BY_SIZE = ("task.partition.name=dirichlet", "task.partition.alpha=0.03", "runtimes.rule=size")
SPLITS = {"lone": LONE, "mixed": MIXED, "by size": BY_SIZE}
COLUMNS = tuple(
    Column(f"{split}, {profile}", (*settings, *length), by_method)
    for profile, length, by_method in (("large", (), ()), ("mild", MILD, MILD_BY_METHOD))
    for split, settings in SPLITS.items()
)

POLYNOMIAL = ("algorithm.staleness=polynomial",)
AFTER_STEP = ("dispatch_after_step=true",)
CLIENT_LRS = tuple(f"local.client_lr={lr}" for lr in ("0.02", "0.05", "0.1"))


def _grid(*choices: tuple[str, ...]) -> tuple[Settings, ...]:
    return tuple(product(*choices))


def _each(name: str, *values: str) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for value in values)


STEP_LRS = _grid(CLIENT_LRS, _each("algorithm.server_lr", "0.5", "1.0"))
ADAPTIVE_LRS = _grid(CLIENT_LRS[1:], _each("algorithm.server_lr", "0.001", "0.003", "0.01"))
DISTILL_LRS = _grid(CLIENT_LRS[1:], _each("algorithm.distiller.distill_lr", "3e-05", "0.0001", "0.0003"))
CANDIDATES: dict[str, tuple[str, Settings, tuple[Settings, ...]]] = {
    "FedAvg": ("fedavg", (), _grid(CLIENT_LRS, _each("algorithm.buffer_size", "3", "10"))),
    "FedAsync": ("fedasync", (), _grid(CLIENT_LRS, _each("algorithm.mixing", "0.3", "0.6"))),
    "FedBuff": ("fedbuff", (), STEP_LRS),
    "FedBuff, polynomial weights": ("fedbuff", POLYNOMIAL, STEP_LRS),
    "FedBuff, dispatch after step": ("fedbuff", AFTER_STEP, STEP_LRS),
    "CA2FL": ("ca2fl", (), STEP_LRS),
    "FedAC": ("fedac", (), ADAPTIVE_LRS),
    "FADAS": ("fadas", (), ADAPTIVE_LRS),
    "FedEcho": ("fedecho", (), DISTILL_LRS),
    "FedEcho+": ("fedecho+", (), DISTILL_LRS),
}
"""Each method's fixed settings and the six settings that the search tries."""

SEARCH_SEED = 10
SEARCH_COLUMNS = tuple(
    Column(
        split,
        (*settings, "num_versions=300", "eval_every=10"),
        (("fedasync", ("num_versions=900", "eval_every=30")), ("fedavg", ("num_versions=25", "eval_every=1"))),
    )
    for split, settings in SPLITS.items()
)


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

STRAGGLER_TABLES = {
    "straggler-search": PaperTable(
        "straggler-search", "Search of rates for the benchmark of stragglers", "stragglers", SEARCH_ROWS, SEARCH_COLUMNS, {}
    ),
}
