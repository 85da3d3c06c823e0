"""Figures against counts made by hand."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.hand_made import lines, write

from fedecho.report.accuracy import accuracy_section, classes_section, glance, stragglers
from fedecho.report.clients import clients_section
from fedecho.report.distillation import echo_section
from fedecho.report.drawing import figure_json
from fedecho.report.inside import _toml, costs_section, origin_section
from fedecho.report.load import RunData, read_run
from fedecho.report.methods import methods_of
from fedecho.report.page import report_of
from fedecho.report.spec import Bars, Curve, Dots, Figure, HeatMap, Spans


@pytest.fixture
def run(tmp_path: Path) -> RunData:
    return read_run(write(tmp_path / "hand", lines(), finished=True))


def figure(figures: object, slug: str) -> Figure:
    found = {figure.slug: figure for figure in figures}
    return found[slug]


def test_the_band_spans_the_seeds(tmp_path: Path, run: RunData) -> None:
    other = read_run(write(tmp_path / "other", lines(seed=1, lift=0.1)))
    (method,) = methods_of([other, run])
    assert [r.seed for r in method.runs] == [0, 1]
    drawn = figure(accuracy_section([method]).figures, "accuracy-over-versions")
    (line,) = drawn.marks
    assert isinstance(line, Curve)
    assert line.low is not None
    assert line.high is not None
    np.testing.assert_allclose(line.x, [1, 2, 3])
    np.testing.assert_allclose(line.y, [0.25, 0.45, 0.65])
    np.testing.assert_allclose(line.low, [0.2, 0.4, 0.6])
    np.testing.assert_allclose(line.high, [0.3, 0.5, 0.7])


def test_time_axes_are_in_units_people_read(run: RunData) -> None:
    drawn = figure(accuracy_section(methods_of([run])).figures, "accuracy-over-virtual-time")
    assert drawn.x_label == "virtual seconds"
    assert drawn.marks[0].x.tolist() == [10, 20, 100]


def test_runs_of_other_settings_are_methods_of_their_own(tmp_path: Path, run: RunData) -> None:
    told = lines()
    told[0]["config"]["algorithm"]["distill_lr"] = 0.5
    other = read_run(write(tmp_path / "other", told))
    labels = [method.label for method in methods_of([run, other])]
    assert labels[1] == "fedecho (distill_lr 0.5)"
    assert len(set(labels)) == 2


def test_the_table_counts_losses_and_says_what_is_not_finished(tmp_path: Path, run: RunData) -> None:
    going = read_run(write(tmp_path / "going", lines(algorithm="fadas")))
    rows = glance(methods_of([run, going])).tables[0].rows
    assert rows[0] == ["fedecho", "1", "40.0", "60.0", "60.0", "1.0", "0.03", "6.0", "1", "1", "finished"]
    assert rows[1][-1] == "not finished: 3/3"


def test_what_else_a_task_judges_by_stands_below(tmp_path: Path) -> None:
    told = lines()
    for line in told:
        if line["event"] == "evaluation":
            line["f1"] = line["version"] / 4
    told[0]["notes"] = {"judged on": "mrpc-dev", "stand_in": "tiny in place of large", "model files": "sha256 12"}
    told[0]["software"] = {"python": "3.12", "torch": "2.11", "peft": "9.9"}
    run = read_run(write(tmp_path / "pairs", told, finished=True))
    _, scores = glance(methods_of([run])).tables
    assert (scores.head, scores.rows) == (("method", "f1"), [["fedecho", "0.75"]])
    assert "Evaluated on mrpc-dev." in scores.note
    assert glance(methods_of([run])).tables[0].note.endswith(" Stand-ins: tiny in place of large.")
    _, environment, notes = origin_section(methods_of([run])).tables
    assert ["model files", "sha256 12", "1"] in notes.rows
    assert environment.rows[0][environment.head.index("other software")] == "peft 9.9"


def test_one_evaluation_is_a_point(tmp_path: Path, run: RunData) -> None:
    told = lines()
    last = max(number for number, line in enumerate(told) if line["event"] == "evaluation")
    once = [line for number, line in enumerate(told) if line["event"] != "evaluation" or number == last]
    for found, mode in ((run, "lines"), (read_run(write(tmp_path / "once", once, finished=True)), "markers")):
        (trace,) = figure_json(accuracy_section(methods_of([found])).figures[0])["traces"]
        assert trace["mode"] == mode


def test_the_timeline_has_every_job(run: RunData) -> None:
    section = clients_section(methods_of([run]))
    (spans,) = figure(section.figures, "timeline-1").marks
    assert isinstance(spans, Spans)
    assert list(spans.rows) == ["long 2", "short 0", "short 1"]
    jobs = sorted(zip(spans.row.tolist(), spans.start.tolist(), spans.end.tolist(), spans.status, strict=True))
    assert jobs == [
        (0, 0.0, 100.0, "accepted"),
        (1, 0.0, 10.0, "accepted"),
        (1, 10.0, 30.0, "lost"),
        (1, 30.0, 40.0, "rejected"),
        (2, 0.0, 20.0, "accepted"),
    ]
    assert section.tables[0].rows == [["fedecho", "because", "2"]]


def test_many_clients_share_rows_and_the_work_is_all_there(tmp_path: Path) -> None:
    told = lines()
    told[0]["clients"] = {"examples": [1] * 1000, "classes": ["short"] * 900 + ["long"] * 100}
    run = read_run(write(tmp_path / "run", told))
    (heat,) = figure(clients_section(methods_of([run])).figures, "timeline-1").marks
    assert isinstance(heat, HeatMap)
    assert len(heat.y) <= 60
    assert {label.split()[0] for label in heat.y} == {"short", "long"}
    sizes = np.array([21 if label.startswith("short") else 20 for label in heat.y])
    assert (heat.z.sum(axis=1) * sizes).sum() == pytest.approx((10 + 20 + 20 + 10 + 100) * 120 / 100, rel=0.05)
    assert {name: table.sum() for name, table in heat.hover.items() if name != "mean staleness"} == {
        "accepted": 3,
        "rejected": 1,
        "lost": 1,
    }


def test_staleness_is_by_class_and_adds_up(run: RunData) -> None:
    bars = figure(clients_section(methods_of([run])).figures, "staleness-by-class").marks
    assert all(isinstance(mark, Bars) for mark in bars)
    assert [(mark.name, mark.y.tolist()) for mark in bars] == [
        ("short, mean 0.5", [0.5, 0.5, 0]),
        ("long, mean 2.0", [0, 0, 1]),
    ]


def test_who_is_heard_stands_beside_the_share_of_the_data(run: RunData) -> None:
    dots = [
        mark for mark in figure(clients_section(methods_of([run])).figures, "participation").marks if isinstance(mark, Dots)
    ]
    assert [(mark.name, mark.x.tolist(), mark.y.round(3).tolist()) for mark in dots] == [
        ("short", [10, 30], [0.333, 0.333]),
        ("long", [60], [0.333]),
    ]


def test_the_classes_of_stragglers_are_those_they_alone_hold(run: RunData) -> None:
    assert stragglers(run) == [2]
    figures = classes_section(methods_of([run])).figures
    assert figure(figures, "straggler-classes").marks[0].y.tolist() == [0.0, 0.0, 0.6]
    assert figure(figures, "other-classes").marks[0].y.tolist() == [0.5, 0.8, 0.9]


def test_without_a_slow_class_the_slowest_tenth_are_stragglers(tmp_path: Path) -> None:
    told = lines()
    told[0]["clients"]["classes"] = ["traced"] * 3
    assert stragglers(read_run(write(tmp_path / "run", told))) == [2]


def test_how_old_a_teacher_is(run: RunData) -> None:
    """Client 0 is heard at version 0 and speaks from 1 on; client 1 at 1, client 2 at 2."""
    section = echo_section(methods_of([run]))
    assert section is not None
    (heat,) = figure(section.figures, "teacher-ages").marks
    assert list(heat.y) == ["long 2", "short 0", "short 1"]
    np.testing.assert_array_equal(heat.z, [[np.nan, np.nan, 0], [0, 1, 2], [np.nan, 0, 1]])


DIAGNOSTICS = {"distill_shift": 0.2, "teacher_kl_before": 0.5, "teacher_kl_after": 0.4, "lowest_agreement": 0.1}


def diagnosed(**settings: Any) -> list[dict[str, Any]]:
    """The record with diagnostics: class 1 has a teacher from version 3 on."""
    told = lines(**settings)
    for line in told:
        if line["event"] == "version":
            line |= DIAGNOSTICS | {"teacher_agreement": 0.9, "teacher_coverage": [line["version"], int(line["version"] == 3)]}
    return told


def test_what_distillation_does_is_drawn_by_version(tmp_path: Path) -> None:
    section = echo_section(methods_of([read_run(write(tmp_path / "run", diagnosed()))]))
    assert section is not None
    figures = {figure.slug: figure for figure in section.figures}
    before, after = figures["echo-teacher-kl"].marks
    assert isinstance(before, Curve)
    assert isinstance(after, Curve)
    assert (before.name, before.dash, before.y.tolist()) == ("fedecho before", True, [0.5] * 3)
    assert (after.name, after.dash, after.y.tolist()) == ("fedecho after", False, [0.4] * 3)
    mean, lowest = figures["echo-teacher-agreement"].marks
    assert isinstance(mean, Curve)
    assert isinstance(lowest, Curve)
    assert (mean.y.tolist(), lowest.y.tolist()) == ([0.9] * 3, [0.1] * 3)
    (heat,) = figures["teacher-coverage"].marks
    assert isinstance(heat, HeatMap)
    assert (list(heat.y), heat.z.tolist()) == (["class 0", "class 1"], [[1, 2, 3], [0, 0, 1]])
    assert section.intro == ""
    assert section.missing == []


def test_of_very_many_classes_the_least_covered_are_shown(tmp_path: Path) -> None:
    told = diagnosed()
    for line in told:
        if line["event"] == "version":
            line["teacher_coverage"] = [9] * 50 + [1] * 100
    section = echo_section(methods_of([read_run(write(tmp_path / "run", told))]))
    assert section is not None
    figure = next(figure for figure in section.figures if figure.slug == "teacher-coverage")
    (heat,) = figure.marks
    assert isinstance(heat, HeatMap)
    assert list(heat.y) == [f"class {label}" for label in range(50, 150)]
    assert "100 least covered of 150 classes" in figure.note


def test_a_language_models_page_says_what_its_bank_cannot_tell(tmp_path: Path) -> None:
    told = diagnosed()
    for line in told:
        for name in ("teacher_agreement", "lowest_agreement", "teacher_coverage"):
            line.pop(name, None)
    section = echo_section(methods_of([read_run(write(tmp_path / "run", told))]))
    assert section is not None
    assert not {"echo-teacher-agreement", "teacher-coverage"} & {figure.slug for figure in section.figures}
    assert any("agreement and coverage by class" in text for text in section.missing)


def test_advice_of_a_run_stands_at_the_top_of_the_chapter(tmp_path: Path) -> None:
    told = [*diagnosed(), {"event": "advice", "version": 3, "time": 100.0, "text": "raise the rate"}]
    section = echo_section(methods_of([read_run(write(tmp_path / "run", told))]))
    assert section is not None
    assert section.intro == "fedecho, seed 0: raise the rate."


def test_a_coverage_of_unequal_lengths_is_refused(tmp_path: Path) -> None:
    told = diagnosed()
    next(line for line in told if line["event"] == "version")["teacher_coverage"] = [1]
    with pytest.raises(ValueError, match=r"run\.jsonl: teacher_coverage has 1 entries in one version and 2 in another"):
        echo_section(methods_of([read_run(write(tmp_path / "run", told))]))


def test_a_method_that_does_not_distil_has_no_such_chapter(tmp_path: Path) -> None:
    told = [{k: v for k, v in line.items() if k != "num_teachers"} for line in lines(algorithm="fedbuff")]
    assert echo_section(methods_of([read_run(write(tmp_path / "run", told))])) is None


def test_a_versions_time_is_split(run: RunData) -> None:
    section = costs_section(methods_of([run]))
    marks = figure(section.figures, "server-time").marks
    assert [(mark.name, mark.y.tolist()) for mark in marks] == [
        ("clients", [1000.0]),
        ("server", [500.0]),
        ("evaluation and recording", [500.0]),
    ]
    assert section.tables[0].rows[0] == ["fedecho", "1,000", "3", "0.01", "0.0008", "5.00"]


def test_old_records_give_a_report_that_says_what_is_left_out(tmp_path: Path) -> None:
    report = report_of([write(tmp_path / "old", lines(old=True))])
    slugs = {figure.slug for figure in report.figures}
    assert {"accuracy-over-versions", "staleness-by-class", "participation", "teacher-ages"} <= slugs
    assert not slugs & {"timeline-1", "accuracy-by-class", "server-time"}
    said = " ".join(why for section in report.sections for why in section.missing)
    for word in ("timeline", "by class", "time per version"):
        assert word in said


def test_a_run_that_has_just_begun_gives_a_report(tmp_path: Path) -> None:
    report = report_of([write(tmp_path / "begun", lines()[:1])])
    assert any("nothing has been evaluated" in why for section in report.sections for why in section.missing)


def test_a_configuration_is_toml_whatever_its_texts_hold() -> None:
    tree = {"name": "a", "task": {"prompt": 'a "quoted" \U0001f600 line\nand \x7f \x01 more', "partition": {"alpha": 0.6}}}
    assert tomllib.loads("\n".join(_toml(tree))) == tree
