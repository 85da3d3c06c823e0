"""The server of a FedEcho deployment: a Flower ``ServerApp`` that runs an experiment over whoever is connected."""

from collections.abc import Callable, Mapping
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from fedecho.core.task import scores_of
from fedecho.core.types import GlobalModel
from fedecho.distill.token_student import student_for
from fedecho.experiments.accounting import check_accountant
from fedecho.experiments.build import bound_network, distiller_of, named_by, server_of, student_of
from fedecho.experiments.config import ConfigError
from fedecho.experiments.experiment import Experiment
from fedecho.experiments.identity import config_of, name_of, notes_of, parts_of
from fedecho.experiments.summary import Summary
from fedecho.flower.codec import Codec
from fedecho.flower.federate import federate
from fedecho.flower.journal import Identity, Journal
from fedecho.flower.run_config import Settings
from fedecho.flower.run_config import experiment as from_run_config
from fedecho.flower.transport import GridTransport
from fedecho.flower.waiting import Waiting

Say = Callable[[str], None]


def make_server_app(experiment: Callable[[Mapping[str, Any]], Experiment] = from_run_config) -> ServerApp:
    """``experiment`` makes the experiment of the app's configuration; by default a recipe that the configuration names."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = Settings.of(context.run_config)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        waiting = Waiting(min_nodes=settings.min_nodes, timeout_s=settings.timeout_s)
        out = Path(settings.out) if settings.out else None
        run_experiment(
            grid,
            experiment(context.run_config),
            waiting,
            out,
            lambda text: log(INFO, "%s", text),
            other_software=settings.other_software,
        )

    return app


def run_experiment(
    grid: Grid,
    experiment: Experiment,
    waiting: Waiting | None = None,
    out: Path | None = None,
    say: Say = lambda text: None,
    other_software: bool = False,
    **options: Any,
) -> Summary:
    """The experiment with its clients on a grid; ``runtimes`` and ``faults`` are the simulator's and play no part."""
    _check(experiment)
    network = bound_network(experiment.task, experiment.seed)
    student = student_of(experiment, lambda: student_for(network, experiment.task, distiller_of(experiment)))
    server = server_of(experiment, network, student)
    transport = GridTransport(
        grid=grid, codec=Codec(network.layout), num_clients=server.num_clients, waiting=waiting, say=say, **options
    )

    def evaluate(model: GlobalModel) -> dict[str, Any]:
        network.load(model.weights)
        return scores_of(experiment.task, network.module)

    named = named_by(experiment.task, network)
    journal = Journal(_identity(experiment, other_software), server, transport, network.layout, out, say, named)
    try:
        return federate(
            server,
            transport,
            journal,
            num_versions=experiment.num_versions,
            evaluate=evaluate,
            eval_every=experiment.eval_every,
            dispatch_after_step=experiment.dispatch_after_step,
            say=say,
        )
    finally:
        journal.close()


def _check(experiment: Experiment) -> None:
    if experiment.attack.kind != "none":
        raise ConfigError(
            f"attack.kind = {experiment.attack.kind!r} is the simulator's: a deployment has no attackers of its own"
        )
    if experiment.privacy.on:
        check_accountant()


def _identity(experiment: Experiment, other_software: bool) -> Identity:
    task, config = experiment.task, config_of(experiment)
    return Identity(
        name=experiment.name,
        algorithm=name_of(experiment.algorithm),
        seed=experiment.seed,
        num_versions=experiment.num_versions,
        config=config,
        header={**parts_of(experiment, config), "num_unlabeled": task.num_unlabeled, "notes": notes_of(task)},
        privacy=experiment.privacy,
        other_software=other_software,
    )


app = make_server_app()
