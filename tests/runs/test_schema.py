"""Records are validated by one schema: an invalid field gives one line with the file, the line and the field."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.report.hand_made import SUMMARY, lines, write
from typer.testing import CliRunner

from fedecho.cli import app
from fedecho.core.loop import Moment
from fedecho.core.server import Receipt
from fedecho.report.live import LiveReport
from fedecho.report.page import report_of
from fedecho.runs.record import Record, read_header, read_record
from fedecho.runs.summary import Summary

ODD_HEADERS = {
    "software": (None, "software must be a table, got None"),
    "clients": ({"classes": 7}, "clients.classes must be a list, got 7"),
    "seed": (True, "seed must be a whole number, got True"),
    "num_versions": (-1, "num_versions must be a whole number of at least 0, got -1"),
    "clock": ("wall", "clock must be 'virtual' or 'real', got 'wall'"),
    "record_every": (0, "record_every must be a whole number of at least 1, got 0"),
    "inputs": ({"a": 3}, "inputs.a must be a text, got 3"),
}
ODD_LINES = [
    ({"event": "version"}, "version is missing"),
    ({"event": 5}, "event must be a text, got 5"),
    ({"event": "version", "version": 1, "time": 0, "loss": "low"}, "loss must be a finite number, got 'low'"),
    ({"event": "version", "version": 2.0, "time": 0}, "version must be a whole number of at least 0, got 2.0"),
    ({"event": "evaluation", "version": 1, "time": -1}, "time must be a finite number of at least 0, got -1"),
    ({"event": "evaluation", "version": 1, "time": 1, "per_class": [0.5, "x"]}, "per_class.1 must be a number, got 'x'"),
    ({"event": "arrival", "time": 1, "client": 0, "status": None}, "status must be a text, got None"),
    ({"event": "arrival", "time": 1, "client": 0, "status": "lost", "dispatch": 0}, "base is missing"),
    ({"event": "dispatch", "time": 1e999, "client": 0, "dispatch": 0, "base": 0}, "time must be a finite number"),
    (
        {"event": "dispatch", "time": 1, "client": 10**8, "dispatch": 0, "base": 0},
        "client must be a whole number of at least 0 and below",
    ),
    ({"event": "evaluation", "version": 1, "time": 1, "f1": json.loads("[" * 200 + "]" * 200)}, "f1 must be nested at most"),
    ({"event": "dispatch", "time": 1, "client": 2**64, "dispatch": 0, "base": 0}, "client must be a whole number of at least"),
]
NESTED: Any = 1
for _ in range(500):
    NESTED = {"a": NESTED}
ABSURD_HEADERS = [
    ({"config": {"name": []}}, "config.name must be a text, got []"),
    ({"config": None, "parts": {"name": {}}}, "parts.name must be a text, got {}"),
    ({"clients": {"num_clients": 2**62}}, "clients.num_clients must be a whole number of at least 0, at most 100,000,000, got"),
    (
        {"clients": {"labels": [{"99999999999": 1}]}},
        "clients.labels.0.99999999999 must be a whole number below 100,000 as text",
    ),
    ({"config": {"algorithm": NESTED}}, "config must be nested at most 100 deep"),
    ({"config": None, "parts": {"algorithm": NESTED}}, "parts must be nested at most 100 deep"),
    ({"notes": {"a": [NESTED]}}, "notes must be nested at most 100 deep"),
]


@pytest.mark.parametrize(("fields", "said"), ABSURD_HEADERS)
def test_a_header_of_absurd_size_or_depth_is_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    told = lines()
    folder = write(tmp_path / "run", [told[0] | fields, *told[1:]])
    with pytest.raises(ValueError, match=r"run\.jsonl, line 1: ") as caught:
        report_of([folder])
    assert said in str(caught.value)


def test_a_job_of_a_client_that_the_run_does_not_have_is_named(tmp_path: Path) -> None:
    for event in ("dispatch", "arrival"):
        told = lines()
        next(line for line in told if line["event"] == event)["client"] = 3
        with pytest.raises(ValueError, match=r"run\.jsonl has a job of client 3, but the run has only 3 clients"):
            report_of([write(tmp_path / event, told)])
        told[0]["clients"] = {}
        assert report_of([write(tmp_path / "unknown", told)]).figures, "a deployed run does not say how many it has"


@pytest.mark.parametrize("score", [None, "high", [1], {"a": 1}, 10**400, True])
def test_a_score_that_is_no_number_is_left_out(tmp_path: Path, score: Any) -> None:
    told = lines()
    told[-1] |= {"f1": score, "loss": 0.25}
    (table,) = [table for table in report_of([write(tmp_path / "run", told)]).sections[0].tables if "loss" in table.head]
    assert "f1" not in table.head


def test_half_a_character_in_a_text_does_not_stop_a_page(tmp_path: Path) -> None:
    told = lines()
    told[0] |= {"name": "half \ud800", "command": "fedecho run \udcff"}  # as the name of a folder may be
    folder = write(tmp_path / "run", told)
    live = LiveReport([folder])
    assert b"half ?" in live.page()
    assert json.loads(live.update_json())["figures"]
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    assert b"half ?" in (folder / "report.html").read_bytes()


def test_lists_of_classes_of_different_lengths_are_named(tmp_path: Path) -> None:
    told = lines()
    told[-1]["per_class"] = [0.5]
    with pytest.raises(ValueError, match=r"run\.jsonl: per_class has 1 entries in one evaluation and 2 in another"):
        report_of([write(tmp_path / "run", told)])


@pytest.mark.parametrize("name", ["run.jsonl", "summary.json"])
def test_a_file_as_large_as_the_disk_is_not_read_whole(tmp_path: Path, name: str) -> None:
    """A sparse file of 64 GB without a line's end."""
    folder = write(tmp_path / "run", lines())
    with (folder / name).open("ab") as file:
        file.truncate(64 << 30)
    with pytest.raises(ValueError, match=r"run\.jsonl, line \d+ is longer|summary\.json: it has more") as caught:
        report_of([folder])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ODD_HEADERS)
def test_an_odd_header_is_named(tmp_path: Path, name: str) -> None:
    value, said = ODD_HEADERS[name]
    told = lines()
    told[0][name] = value
    folder = write(tmp_path / "run", told)
    with pytest.raises(ValueError, match=r"run\.jsonl, line 1: .*; the record is damaged or not a FedEcho record") as caught:
        read_header(folder)
    assert said in str(caught.value)


def test_lists_of_clients_must_be_of_one_length(tmp_path: Path) -> None:
    told = lines()
    told[0]["clients"] = {"examples": [1, 2, 3], "classes": ["a"]}
    with pytest.raises(ValueError, match=r"clients\.classes must be a list of as many clients as the others \(3\)"):
        read_header(write(tmp_path / "run", told))


@pytest.mark.parametrize(("line", "said"), ODD_LINES)
def test_an_odd_line_is_named(tmp_path: Path, line: dict[str, Any], said: str) -> None:
    folder = write(tmp_path / "run", [*lines(), line])
    with pytest.raises(ValueError, match=rf"run\.jsonl, line {len(lines()) + 1}: ") as caught:
        list(read_record(folder))
    assert said in str(caught.value)


def test_a_later_versions_fields_and_events_are_passed_over(tmp_path: Path) -> None:
    told = lines()
    told[0]["weather"] = [1]
    folder = write(tmp_path / "run", [*told, {"event": "weather", "of": None}], finished=True)
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"algorithm": "fedecho", "seed": 0, "weather": 5}))
    assert Summary.read(folder).accepted == 3
    assert report_of([folder]).figures


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5", "it must be a table, got 5"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps(SUMMARY), "algorithm is missing"),
        (json.dumps(SUMMARY | {"algorithm": "a", "seed": 0, "reasons": {"x": None}}), "reasons.x must be a whole number"),
        (json.dumps(SUMMARY | {"algorithm": "a", "seed": 0, "privacy": {"delta": 1}}), "privacy.largest_epsilon is missing"),
    ],
)
def test_an_odd_summary_is_named(tmp_path: Path, text: str, said: str) -> None:
    folder = write(tmp_path / "run", lines())
    (folder / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=r"summary\.json is damaged .*; remove it and run `fedecho resume") as caught:
        report_of([folder])
    assert said in str(caught.value)


def test_every_line_that_a_record_writes_is_read_back(tmp_path: Path) -> None:
    """Refusals have a code, and a client may call its metrics what it likes, even by names that our own fields have."""
    metrics = dict.fromkeys(("loss", "code", "reason", "status", "time", "class"), 0.5)
    job: dict[str, Any] = {"dispatch": 3, "base_version": 1, "staleness": 0}
    record = Record.new(tmp_path, lambda client: "short", {k: v for k, v in lines()[0].items() if k != "event"})
    for receipt in (
        Receipt("accepted", 1, **job, metrics=metrics),
        Receipt("rejected", 1, "delta is not finite", "not finite", **job),
        Receipt("rejected", 1, "update was not asked for", "not asked for"),
    ):
        record.moment(Moment(2.0, receipt, None))
    record.evaluation(1, 2.0, {"accuracy": 0.5, "time": -3.0, "version": 7.5, "event": 1.0}, {})
    record.close()
    _, accepted, refused, unasked, evaluation = read_record(tmp_path)
    assert (accepted["loss"], accepted["status"], accepted["time"], accepted["class"]) == (0.5, "accepted", 2.0, "short")
    assert not {"code", "reason"} & set(accepted)
    assert (refused["code"], unasked["code"]) == ("not finite", "not asked for")
    assert evaluation == {"event": "evaluation", "version": 1, "time": 2.0, "accuracy": 0.5}
