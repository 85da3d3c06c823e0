"""What a setting is called, which methods have it, and what a word of another framework's means here."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedecho import ALGORITHMS, load
from fedecho.cli import app
from fedecho.runs import compare
from fedecho.runs.compare import ComparisonResult, PlannedRun, settings_of_methods
from fedecho.runs.config import ConfigError, to_config
from fedecho.runs.suggestions import KEYS, METHODS

SHORT = ["--seeds", "0", "--versions", "1", "--set", "local.num_local_steps=1", "--set", "task.num_unlabeled=20", "--jobs", "1"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fedecho(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def refused(*words: str) -> str:
    result = fedecho(*words)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr


def compared(*settings: str) -> list[str]:
    return ["compare", "digits", "--algorithms", "fedbuff,fedecho", *SHORT, "--out", "all", *settings]


def test_a_setting_of_one_method_goes_to_it_alone_and_the_comparison_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[PlannedRun] = []

    def only_planned(plan: list[PlannedRun], **how: object) -> ComparisonResult:
        planned.extend(plan)
        return ComparisonResult([], {})

    monkeypatch.setattr(compare, "run_all", only_planned)  # which would start a process for each
    result = fedecho(*compared("--set", "algorithm.distiller.clip_norm=3"))
    assert "--set algorithm.distiller.clip_norm=3 applies to fedecho only; not a setting of fedbuff" in result.stderr
    assert [plan.label for plan in planned] == ["fedbuff seed 0", "fedecho seed 0"]
    fedbuff, fedecho_ = (to_config(plan.experiment)["algorithm"] for plan in planned)
    assert fedecho_["distiller"]["clip_norm"] == 3.0
    assert fedbuff == to_config(load("digits", algorithm="fedbuff"))["algorithm"]


def test_a_setting_that_no_method_has_names_them_all() -> None:
    said = refused("compare", "digits", "--algorithms", "fedbuff,fadas", "--set", "algorithm.distiller.clip_norm=3")
    assert "--set algorithm.distiller.clip_norm=3: none of fedbuff, fadas has it" in said
    said = refused("cost", "digits", "--algorithms", "fedbuff,fedecho", "--set", "algorithm.bufer_size=3")
    assert "none of fedbuff, fedecho has it" in said
    assert "did you mean 'buffer_size'" in said
    assert not Path("runs").exists()


def test_an_error_of_one_method_names_it() -> None:
    assert "fedecho: unknown key 'algorithm.buffer_size': did you mean 'algorithm.inner.buffer_size'?" in refused(
        *compared("--set", "algorithm.buffer_size=2")
    )
    assert refused(*compared("--set", "algorithm.distiller.clip_norm=-1")).startswith("fedecho: algorithm.distiller.clip_norm")
    said = refused("table", "cifar10", "--set", "algorithm.distiller.clip_norm=3", "--results", "mine", "--dry-run")
    assert said.startswith("FedBuff, large Dir(0.1): unknown key 'algorithm.distiller'")


def test_a_buffer_may_be_set_under_both_of_its_names() -> None:
    both = ("algorithm.buffer_size=2", "algorithm.inner.buffer_size=2")
    assert settings_of_methods("digits", ["fedbuff", "fedecho"], both) == {"fedbuff": both[:1], "fedecho": both[1:]}


@pytest.mark.parametrize(("setting", "option"), [("seed=5", "--seeds"), ("algorithm.name=fadas", "--algorithms")])
def test_what_tells_runs_apart_is_not_set_for_all_of_them(setting: str, option: str) -> None:
    """Every run would have the same seed or method, under the names of the others."""
    assert f"use {option} instead" in refused(*compared("--set", setting))
    with pytest.raises(ConfigError, match=option):
        settings_of_methods("digits", ["fedbuff"], [setting])


def test_versions_and_num_versions_are_one_setting() -> None:
    Path("mine.toml").write_text('recipe = "digits"\nversions = 7\n')
    assert load("mine.toml").num_versions == 7
    assert load("digits", settings=["versions=8"]).num_versions == 8
    assert load("mine.toml", settings=["num_versions=9"]).num_versions == 9
    assert load("mine.toml", versions=6).num_versions == 6
    for option in ("--versions", "--num-versions"):
        told = json.loads(fedecho("schedule", "digits", option, "3", "--json").stdout)
        assert told["schedules"][0]["num_versions"] == 3
    Path("both.toml").write_text('recipe = "digits"\nversions = 7\nnum_versions = 8\n')
    assert "versions and num_versions are the same setting" in refused("run", "both.toml")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rounds", "num_versions"),
        ("num-server-rounds", "num_versions"),
        ("lr", "local.client_lr"),
        ("local.lr", "local.client_lr"),
        ("batch_size", "local.batch_size"),
        ("fraction_fit", "concurrency"),
        ("momentum", "local.optimizer"),
        ("proximal_mu", "local.proximal"),
        ("executor", "--executor on the command line"),
        ("num_clients", "task.num_clients"),
        ("epochs", "local.epochs"),
        ("alpha", "task.partition.alpha"),
    ],
)
def test_a_word_of_another_framework_points_to_ours(key: str, meant: str) -> None:
    said = refused("run", "digits", "--set", f"{key}=1")
    assert f"unknown key {key!r}" in said
    assert meant in said


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_not_here_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not included; ") as told:
        load("digits", algorithm=name)
    assert any(known in str(told.value) for known in ALGORITHMS)
    assert "did you mean" not in str(told.value)


def test_no_pointer_hides_a_name_of_ours() -> None:
    assert not METHODS.keys() & ALGORITHMS.keys()
    for key in KEYS:
        with pytest.raises(ConfigError, match=f"unknown key '{key}'"):
            load("digits", settings=[f"{key}=1"])


def test_a_method_or_a_set_in_the_place_of_a_recipe() -> None:
    assert "fedavg is a method, not a recipe: use a recipe (`fedecho list`) with --algorithm fedavg" in refused("run", "fedavg")
    assert "femnist is not included; available: cifar10" in refused("run", "femnist")
    assert "unknown algorithm 'fedxyz': it must be one of ca2fl" in refused("run", "digits", "--algorithm", "fedxyz")
