"""Settings resolved without torch are those of the experiments. ``python tests/runs/test_resolve.py`` writes settings.json anew."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from fedecho import ALGORITHMS, RECIPES, TASKS, Experiment, load
from fedecho.paper.text_tables import TABLES
from fedecho.runs import resolve
from fedecho.runs.config import CHOICES, to_config
from fedecho.runs.resolve import DATA, Tree, differences, resolved, with_defaults
from fedecho.runs.suggestions import ConfigError
from fedecho.tasks.partition import PARTITIONERS

KINDS: dict[str, Mapping[str, type[Any]]] = {"tasks": TASKS, "algorithms": ALGORITHMS, "partitions": PARTITIONERS}
DERIVED = {"task": {"seed"}, "algorithm": {"seed", "num_clients"}, "inner": {"seed", "num_clients"}}
"""Values that task and method get from the run."""


def defaults_of(cls: type[Any]) -> Tree:
    table: Tree = {}
    for f in fields(cls):
        default = f.default_factory() if f.default_factory is not MISSING else None if f.default is MISSING else f.default
        hint = get_type_hints(cls)[f.name]
        if f.repr and f.name not in CHOICES and isinstance(hint, type) and is_dataclass(hint):
            table[f.name] = defaults_of(hint)
        elif f.repr:
            table[f.name] = to_config(default) if is_dataclass(default) else default
    return table


def beyond(tree: Tree, defaults: Tree, derived: set[str], kinds: Tree) -> Tree:
    """The values of a table that are neither defaults nor derived."""
    left: Tree = {}
    for key, value in tree.items():
        if key in CHOICES:
            chosen = kinds[resolve.CHOICES[key]][value["name"]]
            left[key] = {"name": value["name"]} | beyond(value, chosen, DERIVED.get(key, set()), kinds)
        elif isinstance(value, dict):
            left |= {key: own} if (own := beyond(value, defaults[key], set(), kinds)) else {}
        elif key in defaults and key not in derived and value != defaults[key]:
            left[key] = value
    return left


def made() -> str:
    """What settings.json must hold, with one line for each class and each method of a recipe."""
    experiment = defaults_of(Experiment)
    kinds: Tree = {kind: {name: defaults_of(cls) for name, cls in choices.items()} for kind, choices in KINDS.items()}
    recipes = {
        name: {method: beyond(to_config(recipe.make(method)), experiment, set(), kinds) for method in ALGORITHMS}
        for name, recipe in RECIPES.items()
    }
    whole = {"experiment": written(experiment, 0)}
    whole |= {kind: written(kinds[kind], 1) for kind in KINDS} | {"recipes": written(recipes, 2)}
    return "{\n" + ",\n".join(f'"{key}": {text}' for key, text in whole.items()) + "\n}\n"


def written(tree: Tree, depth: int) -> str:
    if depth == 0:
        return json.dumps(tree)
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {written(value, depth - 1)}" for key, value in tree.items()) + "\n}"


def test_the_stored_settings_are_those_of_the_recipes_and_classes() -> None:
    assert DATA.read_text(encoding="utf-8") == made(), "run `python tests/runs/test_resolve.py`"


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        *((name, []) for name in RECIPES),
        ("digits", ["task.num_clients=40", "task.partition.name=iid", "runtimes.profile=mild"]),
        ("cifar10", ["task.partition.name=shards", "seed=5", "versions=7", "privacy.clip_norm=2.5"]),
        ("mrpc", ["task.unlabeled_size=all", "task.model=some/model", "task.partition.alpha=0.2"]),
    ],
)
def test_resolved_settings_are_the_experiments(recipe: str, settings: Sequence[str]) -> None:
    for method in ALGORITHMS:
        ours = resolved(recipe, algorithm=method, seed=3, settings=settings)
        assert json.dumps(ours) == json.dumps(to_config(load(recipe, algorithm=method, seed=3, settings=settings)))


def test_a_method_over_another_and_a_file_resolve_to_their_experiments(tmp_path: Path) -> None:
    over = ["algorithm.inner.name=ca2fl", "algorithm.inner.buffer_size=2", "algorithm.distiller.clip_norm=inf"]
    assert resolved("digits", settings=over) == to_config(load("digits", settings=over))
    file = tmp_path / "mine.toml"
    file.write_text(
        'concurrency = 4\nnum_versions = 3\ntask = {name = "digits", num_clients = 8}\nlocal = {client_lr = 0.1}\n'
        '[algorithm]\nname = "fedac"\nbuffer_size = 2\n'
    )
    for method in ("fedac", "fedecho", "fadas"):
        assert resolved(str(file), algorithm=method, seed=1) == to_config(load(str(file), algorithm=method, seed=1))


@pytest.mark.parametrize("name", TABLES)
def test_every_cells_resolved_settings_are_its_experiments(name: str) -> None:
    for cell in TABLES[name].cells((1,)):
        assert differences(cell.config(), to_config(cell.experiment())) == []


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"num_version": 3}, "unknown key 'num_version': did you mean 'num_versions'"),
        ({"task": {"name": "digitz"}}, "unknown task.name 'digitz': did you mean 'digits'"),
        ({"local": 3}, "local must be a table, got 3"),
        ({"algorithm": {"name": "fedbuff", "inner": {}}}, "unknown key 'algorithm.inner'"),
    ],
)
def test_a_table_that_is_none_of_an_experiment_is_an_error(tree: Tree, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_defaults(tree)


if __name__ == "__main__":
    DATA.write_text(made(), encoding="utf-8")
