"""What answers at once: help, completion, listings and reports do not import torch."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from fedecho import ALGORITHMS, RECIPES, TASKS, load, simulate
from fedecho.cli import app, catalog
from fedecho.cli.program import COMMANDS
from fedecho.runs.execution import EXECUTORS
from fedecho.runs.run import CHECKPOINT_S
from fedecho.simulation.runtimes import PROFILES

ROOT = Path(__file__).parents[2]
START = """
import sys
from fedecho.cli import main
sys.argv = ["fedecho", *{words!r}]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
assert "torch" not in sys.modules
"""


def output_without_torch(*words: str, **environment: str) -> str:
    command = [sys.executable, "-c", START.format(words=words)]
    settings = {**os.environ, "COLUMNS": "200", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def completions(line: str) -> list[str]:
    words = line.split(" ")
    place = str(len(words) - 1)
    return output_without_torch(_FEDECHO_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=place).split()


def test_the_overview_version_and_lists_do_not_import_torch() -> None:
    assert all(f"  {name} " in output_without_torch("--help") for name in COMMANDS)
    assert output_without_torch("--version").startswith("fedecho ")
    assert "fedbuff" in output_without_torch("list")
    assert "fedbuff" in output_without_torch("list", "--json")


@pytest.mark.parametrize("name", [*COMMANDS, "data fetch", "data synthesize"])
def test_the_help_of_a_command_does_not_import_torch(name: str) -> None:
    assert f"Usage: fedecho {name} " in output_without_torch(*name.split(), "--help")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fedecho re", ["resume", "report"]),
        ("fedecho run dig", ["digits"]),
        ("fedecho run digits --algorithm fedb", ["fedbuff"]),
        ("fedecho compare digits --algorithms fedbuff,fedas", ["fedbuff,fedasync"]),
        ("fedecho run digits --executor ", list(EXECUTORS)),
        ("fedecho run digits --track w", ["wandb"]),
        ("fedecho run digits --vers", ["--versions"]),
        ("fedecho data ", ["fetch", "synthesize"]),
        ("fedecho run cifar10 --algorithm fedac --set algorithm.beta", ["algorithm.beta1=", "algorithm.beta2="]),
        ("fedecho run --set num", ["num_versions="]),
    ],
)
def test_completion_does_not_import_torch(line: str, offered: list[str]) -> None:
    assert completions(line) == offered


def test_the_results_of_a_table_are_shown_without_torch() -> None:
    shown = output_without_torch("table", "cifar10", "--show", "--results", str(ROOT / "results"))
    assert "52.85 ± 7.76" in shown
    shown = output_without_torch("table", "mrpc", "--show", "--results", str(ROOT / "results"), "--format", "csv")
    assert "all-MiniLM-L6-v2 in place of bert-base-uncased" in shown


def test_a_report_does_not_import_torch(tmp_path: Path) -> None:
    for seed in (0, 1):
        simulate(load("digits", versions=2, seed=seed, settings=["local.num_local_steps=1"]), out=tmp_path / str(seed))
    assert "figures" in output_without_torch("report", str(tmp_path), "--out", str(tmp_path / "page.html"))


def test_the_catalog_has_the_real_names_and_defaults() -> None:
    assert list(catalog.RECIPES) == list(RECIPES)
    assert list(catalog.ALGORITHMS) == list(ALGORITHMS)
    assert list(catalog.TASKS) == list(TASKS)
    assert list(catalog.PROFILES) == list(PROFILES)
    assert catalog.EXECUTORS == EXECUTORS
    assert catalog.CHECKPOINT_S == CHECKPOINT_S


@pytest.mark.parametrize("name", COMMANDS)
def test_the_overview_shows_the_first_line_of_each_commands_help(name: str) -> None:
    program = typer.main.get_command(app)
    assert isinstance(program, click.Group)
    command = program.get_command(click.Context(program), name)
    assert command is not None
    assert command.help is not None
    assert COMMANDS[name].summary == command.help.splitlines()[0]


def test_a_misspelt_command_is_one_line_that_suggests_others_once() -> None:
    result = CliRunner().invoke(app, ["rum"])
    assert result.exit_code == 2
    assert result.stderr.count("Did you mean") == 1
