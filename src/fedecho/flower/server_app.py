"""The server of a deployment: a Flower ``ServerApp`` that runs an experiment on the connected nodes."""

from collections.abc import Callable, Mapping
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from fedecho.flower.codec import Codec
from fedecho.flower.config import Settings
from fedecho.flower.config import experiment as from_run_config
from fedecho.flower.deployed_run import DeployedRun
from fedecho.flower.grid import Waiting
from fedecho.flower.transport import GridTransport
from fedecho.runs.build import bound_network, evaluation_of, server_of, tensor_names_of
from fedecho.runs.config import ConfigError
from fedecho.runs.experiment import Experiment
from fedecho.runs.identity import Identity
from fedecho.runs.privacy_budget import check_accountant
from fedecho.runs.summary import Summary


def make_server_app(experiment: Callable[[Mapping[str, Any]], Experiment] = from_run_config) -> ServerApp:
    """Make the ``ServerApp`` of an experiment.

    ``experiment`` turns the app's configuration into an ``Experiment``; by default it loads the recipe named there.
    """
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
    say: Callable[[str], None] = lambda text: None,
    other_software: bool = False,
    **options: Any,
) -> Summary:
    """Run an experiment with its clients on a grid. ``runtimes`` and ``faults`` apply to simulations only and are ignored."""
    _check(experiment)
    network = bound_network(experiment.task, experiment.seed)
    server = server_of(experiment, network)
    transport = GridTransport(
        grid=grid, codec=Codec(network.layout), num_clients=server.num_clients, waiting=waiting, say=say, **options
    )

    evaluate = evaluation_of(experiment.task, network)
    run = DeployedRun(
        Identity.of(experiment),
        server,
        transport,
        out,
        num_params=network.layout.num_params,
        named=tensor_names_of(experiment.task, network),
        privacy=experiment.privacy,
        say=say,
    )
    with run.opened(other_software=other_software):
        return run.complete(
            evaluate=lambda model: evaluate(model.weights),
            eval_every=experiment.eval_every,
            dispatch_after_step=experiment.dispatch_after_step,
        )


def _check(experiment: Experiment) -> None:
    if experiment.attack.kind != "none":
        raise ConfigError(
            f"attack.kind = {experiment.attack.kind!r} can only be simulated: remove the attack to deploy this experiment"
        )
    if experiment.privacy.on:
        check_accountant()


app = make_server_app()
