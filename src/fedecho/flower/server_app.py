"""The server of a deployment: a Flower ``ServerApp`` that runs an experiment on the connected nodes."""

from collections.abc import Callable, Mapping
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from fedecho.core.loop import Moment, drive
from fedecho.core.server import Server
from fedecho.core.task import scores_of
from fedecho.core.types import GlobalModel, Joined, Left
from fedecho.distill.student import student_for
from fedecho.flower.codec import Codec
from fedecho.flower.config import Settings
from fedecho.flower.config import experiment as from_run_config
from fedecho.flower.grid import Waiting
from fedecho.flower.journal import Identity, Journal
from fedecho.flower.run_log import RunLog
from fedecho.flower.transport import GridTransport
from fedecho.runs.build import bound_network, distiller_of, server_of, student_of, tensor_names_of
from fedecho.runs.config import ConfigError
from fedecho.runs.experiment import Experiment
from fedecho.runs.identity import config_of, name_of, notes_of, parts_of
from fedecho.runs.privacy_budget import check_accountant
from fedecho.runs.run_stats import FailureGuard, check_scores
from fedecho.runs.summary import Summary

Evaluate = Callable[[GlobalModel], dict[str, Any] | None]
Watch = Callable[[Moment], None]
Say = Callable[[str], None]


def federate(
    server: Server[Any],
    transport: GridTransport,
    journal: Journal,
    *,
    num_versions: int,
    evaluate: Evaluate = lambda model: None,
    eval_every: int = 1,
    evaluate_first: bool = False,
    dispatch_after_step: bool = False,
    watch: Watch = lambda moment: None,
    say: Say = lambda text: None,
) -> Summary:
    """Wait for nodes and run to the last version. ``evaluate_first`` also evaluates version 0, outside of all means."""
    if journal.finished is not None:
        return journal.finished
    log, failures = RunLog(server, journal, say), FailureGuard()

    def see(moment: Moment) -> None:
        scores = None
        if moment.step is not None and (moment.step.model.version % eval_every == 0 or server.model.version == num_versions):
            scores = evaluate(moment.step.model)
            check_scores(moment.step.model.version, scores or {})
        journal.moment(moment, scores)
        watch(moment)
        log.see(moment, scores)
        failures.see(moment.receipt, set(transport.roster.clients))

    log.begin()
    try:
        if evaluate_first and not journal.num_moments:
            journal.first_scores(evaluate(server.model))
        present = set(transport.gather())
        for moment in journal.lose_open_jobs():
            log.see(moment, None)
        for client in range(server.num_clients):
            if client not in present:
                server.receive(Left(client))  # not recorded: it has not connected yet
            elif client not in server.idle:
                server.receive(Joined(client))
        drive(server, transport, num_versions=num_versions, watch=see, dispatch_after_step=dispatch_after_step)
        summary = journal.finish()
    except Exception:
        log.stopped()
        raise
    log.end(summary)
    return summary


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
    say: Say = lambda text: None,
    other_software: bool = False,
    **options: Any,
) -> Summary:
    """Run an experiment with its clients on a grid. ``runtimes`` and ``faults`` apply to simulations only and are ignored."""
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

    named = tensor_names_of(experiment.task, network)
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
            f"attack.kind = {experiment.attack.kind!r} can only be simulated: remove the attack to deploy this experiment"
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
