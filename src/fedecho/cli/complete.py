"""Shell completion of recipes, methods, executors, sinks and settings."""

from pathlib import Path

import typer

from fedecho.cli.catalog import ALGORITHMS, EXECUTORS, RECIPES
from fedecho.runs.resolve import Tree, resolved
from fedecho.tracking import SINKS


def complete_source(incomplete: str) -> list[str]:
    files = [path.name for path in sorted(Path().glob("*.toml"))]
    return [name for name in (*RECIPES, *files) if name.startswith(incomplete)]


def complete_algorithm(incomplete: str) -> list[str]:
    return [name for name in ALGORITHMS if name.startswith(incomplete)]


def complete_algorithms(incomplete: str) -> list[str]:
    """Complete the last of several comma-separated names, without those already given."""
    before, comma, last = incomplete.rpartition(",")
    left = [name for name in ALGORITHMS if name not in before.split(",")]
    return [f"{before}{comma}{name}" for name in left if name.startswith(last)]


def complete_executor(incomplete: str) -> list[str]:
    return [name for name in EXECUTORS if name.startswith(incomplete)]


def complete_sink(incomplete: str) -> list[str]:
    return [name for name in SINKS if name.startswith(incomplete)]


def complete_setting(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the settings of the recipe or file given before."""
    try:
        tree = resolved(context.params.get("source") or "digits", algorithm=context.params.get("algorithm"))
    except ValueError:
        return []
    return [f"{key}=" for key in _keys(tree) if key.startswith(incomplete)]


def _keys(tree: Tree, path: str = "") -> list[str]:
    keys: list[str] = []
    for key, value in tree.items():
        keys += _keys(value, f"{path}{key}.") if isinstance(value, dict) else [f"{path}{key}"]
    return keys
