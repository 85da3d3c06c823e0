"""Load run folders that are complete, torn, old or damaged."""

from pathlib import Path

import numpy as np
import pytest
from tests.report.hand_made import lines, write

from fedecho import load, simulate
from fedecho.report.load import find_runs, read_run
from fedecho.tasks.vision.digits import read_digits


def test_a_hand_made_run_is_read_number_by_number(tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "run", lines(seed=4), finished=True))
    assert (run.seed, run.algorithm, run.num_clients) == (4, "fedecho", 3)
    assert run.jobs.client.tolist() == [0, 1, 0, 0, 2]
    assert run.jobs.status.tolist() == [0, 0, 2, 1, 0]
    assert run.column("accuracy").tolist() == pytest.approx([0.2, 0.4, 0.6])
    assert [values.tolist() for values in run.metric("teacher_entropy")] == [[1, 2, 3], [1, 0.5, 1 / 3]]
    assert run.reasons == {"because": 2}
    assert run.labels is not None
    np.testing.assert_array_equal(run.labels, [[10, 0], [30, 0], [0, 60]])


def test_losses_are_counted_by_code_where_the_record_has_codes(tmp_path: Path) -> None:
    told = lines()
    for number, line in enumerate(line for line in told if line.get("reason")):
        line |= {"reason": f"delta's norm {number} is above the bound", "code": "norm"}
    assert read_run(write(tmp_path / "run", told)).reasons == {"norm": 2}


def test_what_an_old_record_lacks_is_none_and_not_an_error(tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "run", lines(old=True)))
    assert run.per_class is None
    assert run.labels is None
    assert not len(run.dispatches.number)
    assert np.isnan(run.column("server_s")).all()


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines())
    whole = read_run(folder)
    with (folder / "run.jsonl").open("a") as file:
        file.write('{"event":"arrival","ti')
    assert read_run(folder).jobs.time.tolist() == whole.jobs.time.tolist()


def test_folders_are_found_below_and_each_once(tmp_path: Path) -> None:
    first, second = write(tmp_path / "all" / "a", lines()), write(tmp_path / "all" / "b", lines())
    assert find_runs([tmp_path / "all", first]) == [first, second]
    with pytest.raises(ValueError, match=r"nowhere.*fedecho run"):
        find_runs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no run"):
        find_runs([tmp_path / "empty"])


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines())
    with (folder / "run.jsonl").open("a") as file:
        file.write("no json\n")
    with pytest.raises(ValueError, match=r"run\.jsonl, line \d+ is not a line of a run's record: it is damaged"):
        read_run(folder)


def test_a_folder_in_the_place_of_a_summary_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines())
    (folder / "summary.json").mkdir()
    with pytest.raises(ValueError, match=r"summary.json: it is a folder"):
        read_run(folder)


def test_the_record_of_a_real_run_says_who_trained_from_when_to_when(tmp_path: Path) -> None:
    """Every arrival has its dispatch, at a time before it; no client has two jobs at once; what is not answered is in progress."""
    experiment = load("digits", algorithm="fedbuff", versions=12, settings=["task.width=1", "faults.dropout=0.2"])
    result = simulate(experiment, out=tmp_path / "run")
    run = read_run(tmp_path / "run")
    sent = dict(zip(run.dispatches.number.tolist(), zip(run.dispatches.time, run.dispatches.client, strict=True), strict=True))
    assert sorted(sent) == list(range(len(sent)))
    busy_until = dict.fromkeys(range(20), 0.0)
    for number, client, time in zip(run.jobs.number.tolist(), run.jobs.client.tolist(), run.jobs.time.tolist(), strict=True):
        began, who = sent[number]
        assert who == client
        assert busy_until[client] <= began < time
        busy_until[client] = time
    assert len(sent) == len(run.jobs.number) + experiment.concurrency
    assert run.per_class is not None
    labels = read_digits()[1].labels
    test_share = np.bincount(labels) / len(labels)
    np.testing.assert_allclose(run.per_class @ test_share, run.column("accuracy"), atol=1e-4)
    assert run.labels is not None
    np.testing.assert_array_equal(run.labels.sum(axis=1), run.examples)
    last = result.evaluations[-1]
    assert 0 < last["clients_s"] + last["server_s"] <= last["real_s"] + 1e-3
