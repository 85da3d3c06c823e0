"""Shell completion of recipes, methods, executors, sinks and settings."""

from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from fedecho.cli.catalog import ALGORITHMS, EXECUTORS, RECIPES
from fedecho.runs.resolve import resolved
from fedecho.tracking import SINKS
from fedecho.tracking.sinks import flat


def _from(names: Iterable[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


complete_algorithm, complete_executor, complete_sink = map(_from, (ALGORITHMS, EXECUTORS, SINKS))


def complete_source(incomplete: str) -> list[str]:
    files = [path.name for path in sorted(Path().glob("*.toml"))]
    return [name for name in (*RECIPES, *files) if name.startswith(incomplete)]


def complete_algorithms(incomplete: str) -> list[str]:
    """Complete the last of several comma-separated names, without those already given."""
    before, comma, last = incomplete.rpartition(",")
    left = [name for name in ALGORITHMS if name not in before.split(",")]
    return [f"{before}{comma}{name}" for name in left if name.startswith(last)]


def complete_setting(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the settings of the recipe or file given before."""
    try:
        tree = resolved(context.params.get("source") or "digits", algorithm=context.params.get("algorithm"))
    except ValueError:
        return []
    return [f"{key}=" for key in flat(tree) if key.startswith(incomplete)]
