"""Records of huge runs: a sample of the jobs, the same run, and pages that say so."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedecho import load, resume, simulate
from fedecho.learning.privacy import Privacy
from fedecho.report.load import read_run
from fedecho.report.page import report_of
from fedecho.runs import identity
from fedecho.runs import privacy_budget as accounting
from fedecho.runs.record import RECORD, read_header, read_record
from fedecho.runs.run import Interrupted
from fedecho.runs.summary import Summary

SETTINGS = ["task.width=1", "local.num_local_steps=1", "eval_every=5"]
FAULTS = ["faults.dropout=0.2", "faults.available_s=200.0", "faults.unavailable_s=100.0"]
EVERY = 3


def experiment(every: int | None, *more: str, algorithm: str = "fedbuff", versions: int = 25) -> Any:
    chosen = [*SETTINGS, *more, *([] if every is None else [f"record_every={every}"])]
    return load("digits", algorithm=algorithm, versions=versions, settings=chosen)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The whole record of a run with all that can happen, and the sampled one of the same."""
    folder = tmp_path_factory.mktemp("sampled")
    simulate(experiment(None, *FAULTS), out=folder / "whole")
    simulate(experiment(EVERY, *FAULTS), out=folder / "sampled")
    return folder / "whole", folder / "sampled"


def told(folder: Path) -> list[dict[str, Any]]:
    """All but the header and the evaluations, which have real time in them."""
    return [line for line in read_record(folder) if line["event"] not in ("header", "evaluation")]


def test_a_sample_is_every_so_many_jobs_and_all_versions(runs: tuple[Path, Path]) -> None:
    whole, expected, others = told(runs[0]), [], 0
    for line in whole:
        if line["event"] == "version" or line.get("dispatch", -1) >= 0:
            kept = line["event"] == "version" or line["dispatch"] % EVERY == 0
        else:
            kept = others % EVERY == 0
            others += 1
        if kept:
            expected.append(line)
    assert others > 10, "clients came and went"
    assert told(runs[1]) == expected
    assert len(expected) < len(whole) / 2


def test_the_run_is_the_same_and_the_summary_counts_all_of_it(runs: tuple[Path, Path]) -> None:
    whole, sampled = (Summary.read(folder) for folder in runs)
    for name in (
        "model_sha256",
        "accepted",
        "lost",
        "reasons",
        "mean_staleness",
        "max_staleness",
        "last10_accuracy",
        "virtual_s",
    ):
        assert getattr(whole, name) == getattr(sampled, name), name
    assert (whole.record_every, sampled.record_every) == (1, EVERY)
    accepted = [line["staleness"] for line in told(runs[0]) if line.get("status") == "accepted"]
    assert whole.mean_staleness == sum(accepted) / len(accepted)
    assert whole.max_staleness == max(accepted)
    assert "record_every" not in read_header(runs[0])
    assert "record_every" not in read_header(runs[0])["config"]


def test_a_sampled_run_that_is_stopped_goes_on_to_the_same_bytes(runs: tuple[Path, Path], tmp_path: Path) -> None:
    seen: list[Any] = []

    def stop(moment: Any, scores: Any) -> None:
        seen.append(moment)
        if len(seen) == 60:
            raise Interrupted("here")

    with pytest.raises(Interrupted):
        simulate(experiment(EVERY, *FAULTS), out=tmp_path / "run", checkpoint_s=0.0, watch=stop)
    found = resume(tmp_path / "run").summary
    expected = Summary.read(runs[1])
    for name in ("model_sha256", "arrivals_sha256", "mean_staleness", "max_staleness"):
        assert getattr(found, name) == getattr(expected, name)
    assert told(tmp_path / "run") == told(runs[1])


def test_pages_of_a_sampled_record_say_so_and_count_all(runs: tuple[Path, Path]) -> None:
    made, run, summary = report_of([runs[1]]), read_run(runs[1]), Summary.read(runs[1])
    clients = next(section for section in made.sections if section.slug == "clients")
    assert "samples of one job in 3:" in clients.intro
    assert all("a sample of one job in 3." in figure.note for figure in clients.figures if figure.slug != "participation")
    assert (run.count("lost"), run.count("accepted")) == (summary.lost, summary.accepted)
    assert run.mean_staleness == summary.mean_staleness
    assert sum(run.reasons.values()) == sum(summary.reasons.values())
    whole = read_run(runs[0])
    assert (whole.count("lost"), whole.sampling_note) == (summary.lost, "")
    assert whole.mean_staleness == pytest.approx(summary.mean_staleness)


def test_a_sample_before_there_is_a_summary_is_scaled_up(runs: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / RECORD).write_bytes((runs[1] / RECORD).read_bytes())
    run, summary = read_run(tmp_path), Summary.read(runs[1])
    assert run.count("accepted") == EVERY * int(run.jobs.accepted.sum())
    assert run.count("accepted") == pytest.approx(summary.accepted, rel=0.2)


@pytest.mark.parametrize("every", [1, 4])
def test_very_many_clients_are_counted_and_not_listed(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "MOST_LISTED", 100)
    drawn = ["task.num_clients=150", "task.partition.name=drawn", "concurrency=30"]
    made = experiment(every, *drawn, algorithm="fedecho", versions=4)
    simulate(made, out=tmp_path)
    clients = read_header(tmp_path)["clients"]
    sizes = sorted(made.task.num_examples(client) for client in range(150))
    assert clients["num_clients"] == 150
    assert clients["num_examples"] == sum(sizes)
    assert (clients["examples_at"]["0%"], clients["examples_at"]["100%"]) == (sizes[0], sizes[-1])
    assert sum(clients["class_counts"].values()) == 150
    assert len(json.dumps(clients)) < 300
    report = report_of([tmp_path])
    figures = {figure.slug: figure for figure in report.figures}
    assert {"timeline-1", "staleness-by-class"} <= set(figures)
    assert "150 clients" in figures["timeline-1"].note
    missing = [why for section in report.sections for why in section.missing]
    assert any("too many clients to record them one by one" in why for why in missing)
    assert ("teacher-ages" in figures) == (every == 1)


def test_a_sample_and_privacy_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="record_every cannot be combined with privacy"):
        experiment(2, "privacy.noise_multiplier=1.0")
    with pytest.raises(ValueError, match="record_every must be at least 1, got 0"):
        experiment(0)


def test_epsilons_of_very_many_clients_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "MOST_LISTED", 3)
    lines = [{"client": client, "status": "accepted", "dispatch": 0} for client in (0, 1, 2, 3, 3, 4, 4)]
    privacy = Privacy(noise_multiplier=2.0)
    spent = accounting.privacy_spent(privacy, lines)
    once, twice = (accounting.epsilon(2.0, reports, privacy.delta) for reports in (1, 2))
    assert spent["largest_epsilon"] == twice
    assert [(row["reports"], row["clients"]) for row in spent["epsilon_by_reports"]] == [(1, 3), (2, 2)]
    assert [row["epsilon"] for row in spent["epsilon_by_reports"]] == [round(once, 4), round(twice, 4)]
