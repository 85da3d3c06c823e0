"""The forecast schedule is that of the run that trains."""

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from fedecho import FedBuff, load, simulate
from fedecho.cli import app
from fedecho.runs.config import ConfigError
from fedecho.runs.estimates import schedule_of
from fedecho.runs.record import read_record
from fedecho.simulation import forecast

QUICK = ("local.num_local_steps=1", "task.width=1", "task.num_unlabeled=20", "eval_every=40")


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("fedbuff", ()),
        ("fedavg", ()),
        ("fedasync", ()),
        ("fedecho", ("dispatch_after_step=true", "runtimes.profile=mild")),
        ("fadas", ("faults.dropout=0.3", "faults.available_s=100", "faults.unavailable_s=50")),
    ],
)
def test_it_is_what_the_record_of_the_run_says(algorithm: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    experiment = load("digits", algorithm=algorithm, versions=40, seed=3, settings=(*QUICK, *settings))
    found = schedule_of(experiment)
    simulate(experiment, out=tmp_path / "run")
    lines = list(read_record(tmp_path / "run"))
    version, first, reports, stale = 0, {}, Counter[str](), []
    for line in lines:
        if line["event"] == "arrival" and line["status"] == "accepted":
            first.setdefault(line["client"], version + 1)
            reports[line["class"]] += 1
            stale.append(line["staleness"])
        version = line["version"] if line["event"] == "version" else version
    assert found.first_versions == first
    assert {each.name: each.num_reports for each in found.classes if each.num_reports} == dict(reports)
    last = next(line["time"] for line in lines if line["event"] == "version" and line["version"] == 40)
    assert found.virtual_s == pytest.approx(last)
    assert max(each.max_staleness or 0 for each in found.classes) == max(stale)
    weighed = [(each.mean_staleness or 0) * each.num_reports for each in found.classes]
    assert sum(weighed) / len(stale) == pytest.approx(fmean(stale))


def test_classes_count_their_clients_and_who_is_not_heard() -> None:
    found = schedule_of(load("digits", algorithm="fedbuff", versions=5))
    assert [(each.name, each.num_clients) for each in found.classes] == [("short", 12), ("medium", 6), ("long", 2)]
    long = found.classes[-1]
    assert (long.num_reports, long.never_heard, long.first_version, long.mean_staleness) == (0, 2, None, None)
    for each in found.classes[:2]:
        assert 1 <= (each.first_version or 0) <= (each.last_first_version or 0) <= 5
    assert sum(each.num_clients - each.never_heard for each in found.classes) == len(found.first_versions)
    assert sum(each.num_reports for each in found.classes) == 5 * 3


@dataclass(frozen=True)
class NoBuffer:
    """A method of a user's own that does not say how many updates it waits for."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer_size", "inner", "distiller", "attached"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def test_a_method_without_a_buffer_size_and_clients_that_never_come() -> None:
    experiment = load("digits", algorithm="fedbuff", versions=5)
    with pytest.raises(ConfigError, match="NoBuffer has no buffer_size attribute"):
        schedule_of(replace(experiment, algorithm=NoBuffer(FedBuff(buffer_size=3))))


def test_nobody_reports_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "stall_limit", lambda num_clients: 50)
    experiment = load("digits", algorithm="fedbuff", settings=("faults.dropout=0.999",))
    with pytest.raises(ConfigError, match="no client reports after version 0 of 100"):
        schedule_of(experiment)


def said(*words: str) -> str:
    result = CliRunner().invoke(app, ["schedule", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_shows_each_seed() -> None:
    shown = said("digits", "--versions", "5", "--seeds", "0,1")
    assert shown.count("5 versions take") == 2
    rows = [line.split() for line in shown.splitlines() if line.strip().startswith(("short", "medium", "long"))]
    assert rows[2] == ["long", "2", "0", "-", "2", "-", "-"]
    assert "silent: clients that never report" in shown
    told = json.loads(said("digits", "--versions", "5", "--seeds", "0,1", "--json"))["schedules"]
    assert [each["seed"] for each in told] == [0, 1]
    assert rows[0][:3] == ["short", "12", str(told[0]["classes"][0]["num_reports"])]


def test_a_mistake_is_a_line() -> None:
    for words in (["digits", "--seeds", "x"], ["nosuch"], ["digits", "--versions", "0"]):
        result = CliRunner().invoke(app, ["schedule", *words])
        assert result.exit_code == 2
        assert len(result.stderr.strip().splitlines()) == 1
