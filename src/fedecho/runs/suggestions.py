"""Suggestions for unknown names: misspelled keys, and terms of other frameworks."""

from collections.abc import Iterable
from difflib import get_close_matches

VERSIONS = "rounds are called versions here: set num_versions"
CLIENTS = "set task.num_clients"
AT_ONCE = (
    "there are no rounds with a fraction of the clients: concurrency clients train at once, and every buffer_size updates make "
    "a version"
)
BATCH = "set local.batch_size, or algorithm.distiller.batch_size for the server's"
RATES = "set local.client_lr for the clients, algorithm.server_lr (fedecho: algorithm.inner.server_lr) for the server"
SERVER_RATE = "set algorithm.server_lr (fedecho: algorithm.inner.server_lr)"
OPTION = "it is not part of the experiment: use --{} on the command line"

KEYS: dict[str, str] = {
    **dict.fromkeys(("rounds", "num_rounds", "n_rounds", "num_server_rounds", "server_rounds", "comm_rounds"), VERSIONS),
    **dict.fromkeys(("communication_rounds", "global_rounds", "global_epochs", "global_steps", "max_rounds"), VERSIONS),
    **dict.fromkeys(("clients", "n_clients", "num_users", "num_nodes", "num_supernodes", "num_parties"), CLIENTS),
    **dict.fromkeys(("clients_per_round", "num_clients_per_round", "fraction_fit", "fraction_train", "frac"), AT_ONCE),
    **dict.fromkeys(("sample_fraction", "participation", "min_fit_clients", "min_train_nodes", "cohort_size"), AT_ONCE),
    **dict.fromkeys(("num_epochs", "local_epochs", "client_epochs", "n_epochs"), "set local.epochs"),
    **dict.fromkeys(("local_steps", "num_steps"), "set local.num_local_steps"),
    **dict.fromkeys(("batch", "batch_size", "bs", "local_batch_size", "train_batch_size"), BATCH),
    **dict.fromkeys(("lr", "learning_rate"), RATES),
    **dict.fromkeys(("local_lr", "client_learning_rate", "local_learning_rate"), "set local.client_lr"),
    **dict.fromkeys(("server_learning_rate", "global_lr", "eta"), SERVER_RATE),
    **dict.fromkeys(("mu", "proximal_mu", "prox_mu"), "set local.proximal"),
    **dict.fromkeys(("momentum", "client_momentum"), "clients train with plain SGD or AdamW (local.optimizer)"),
    **dict.fromkeys(("strategy", "method", "aggregator"), "set algorithm.name, or use --algorithm"),
    **dict.fromkeys(("dataset", "data"), "set task.name (`fedecho list` shows the choices)"),
    **dict.fromkeys(("dirichlet_alpha", "dir_alpha", "concentration"), "set task.partition.alpha"),
    **dict.fromkeys(("evaluate_every", "eval_frequency", "eval_interval", "test_every"), "set eval_every"),
    **dict.fromkeys(("random_seed", "random_state"), "set seed"),
    **{
        name: OPTION.format(name.replace("_", "-"))
        for name in (
            "executor",
            "workers",
            "device",
            "address",
            "precision",
            "deterministic",
            "checkpoint_every",
            "track",
            "jobs",
        )
    },
}
"""Hints for unknown settings, in any table."""

NOT_HERE = "{} is not included; "
ADAPTIVE = NOT_HERE + "for adaptive server steps use fadas"
VARIATES = NOT_HERE + "for client control variates use fedac"
ROBUST = NOT_HERE + "for robust aggregation set algorithm.combine of fedbuff, fadas, fedavg or fedac"
DISTILLED = NOT_HERE + "for distillation on unlabeled data use fedecho"
METHODS: dict[str, str] = {
    "fedprox": NOT_HERE + "its proximal term is a setting for any method: --algorithm fedavg --set local.proximal=0.01",
    "fedsgd": NOT_HERE + "use fedavg with one local step: --algorithm fedavg --set local.num_local_steps=1",
    "fedavgm": NOT_HERE + "server momentum is part of fedac and fadas",
    **dict.fromkeys(("fedopt", "fedadam", "fedadagrad", "fedyogi", "fedadamw"), ADAPTIVE),
    "scaffold": VARIATES,
    **dict.fromkeys(("krum", "multikrum", "fedmedian", "fedtrimmedavg", "bulyan"), ROBUST),
    **dict.fromkeys(("feddf", "fedmd", "fedgkt", "fedgen", "fedgems"), DISTILLED),
    **dict.fromkeys(
        ("fednova", "feddyn", "fedbn", "fedper", "fedrep", "ditto", "moon", "qfedavg", "fedmom"),
        NOT_HERE + "the methods are {}",
    ),
}
"""Hints for methods of other frameworks."""

OTHER_TASK = NOT_HERE + "available: {}; to add your own task see docs/your_own_task.md"
TASKS: dict[str, str] = {
    **dict.fromkeys(("mnist", "fashion_mnist", "fmnist", "emnist", "femnist", "cinic10", "svhn", "celeba"), OTHER_TASK),
    **dict.fromkeys(("imagenet", "tiny_imagenet", "shakespeare", "stackoverflow", "reddit", "sent140"), OTHER_TASK),
}


class ConfigError(ValueError):
    """Invalid input from a user, described in one line."""


def unknown(name: str, choices: Iterable[str], what: str) -> str:
    """One line about a name that is not among ``choices``, with a hint. ``what`` is the kind of name, such as "key"."""
    names, last = list(choices), name.rpartition(".")[2]
    word = last.strip().lower().replace("-", "_")
    listed = ", ".join(sorted(names))
    if what == "key" and word in KEYS:
        return f"unknown key {name!r}: {KEYS[word]}"
    elsewhere = METHODS if what.startswith("algorithm") else TASKS if what in ("recipe", "task.name") else {}
    if word in elsewhere:
        return f"unknown {what} {name!r}: {elsewhere[word].format(name, listed)}"
    # Method names resemble each other ("fed..."), so only close typos count.
    close = get_close_matches(last, names, n=1, cutoff=0.8 if what.startswith("algorithm") else 0.6)
    return f"unknown {what} {name!r}: " + (f"did you mean {close[0]!r}?" if close else f"it must be one of {listed}")
