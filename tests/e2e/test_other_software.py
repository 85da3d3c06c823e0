"""A run that other software goes on with would be another run: it is refused, or its record says so."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedecho
from fedecho import Experiment, load, resume, simulate
from fedecho.cli import app
from fedecho.core.loop import Moment
from fedecho.runs.compare import PlannedRun, run_all
from fedecho.runs.record import read_header, read_record

Change = Callable[[dict[str, Any]], None]


def small() -> Experiment:
    return load("digits", algorithm="fadas", versions=3, settings=["task.width=1", "local.num_local_steps=1"])


def stopped(folder: Path, checkpoint_s: float = 0.0, **options: Any) -> None:
    def stop(moment: Moment, scores: object) -> None:
        if moment.step is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(small(), out=folder, checkpoint_s=checkpoint_s, watch=stop, **options)


def begun_by(folder: Path, **software: str) -> None:
    """A run that was stopped before its first checkpoint, and whose record says that this software began it."""
    stopped(folder, checkpoint_s=600.0)
    record = folder / "run.jsonl"
    header, rest = record.read_text().split("\n", 1)
    told = json.loads(header)
    told["software"] |= software
    record.write_text(json.dumps(told, separators=(",", ":")) + "\n" + rest)


def test_the_header_says_what_may_change_a_number(tmp_path: Path) -> None:
    simulate(small(), out=tmp_path)
    told = read_header(tmp_path)["software"]
    assert told["torch"] == torch.__version__
    assert told["numpy"] == np.__version__
    assert told["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert len(told["source"]) == 16


def test_an_edited_source_and_another_cpu_are_refused_and_named(tmp_path: Path) -> None:
    """The real ones: a copy of the package with one line changed, and a CPU that torch is told to take for an older one."""
    folder, copy = tmp_path / "run", tmp_path / "src"
    stopped(folder)
    shutil.copytree(Path(fedecho.__file__).parent, copy / "fedecho", ignore=shutil.ignore_patterns("__pycache__"))
    edited = copy / "fedecho" / "algorithms" / "fadas.py"
    edited.write_text(edited.read_text() + "\n# another line\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    said = subprocess.run(
        [sys.executable, "-m", "fedecho", "resume", str(folder)],
        env=os.environ | {"PYTHONPATH": str(copy), "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 2
    (line,) = said.stderr.splitlines()
    was = read_header(folder)["software"]
    capability = "" if was["cpu"] == "DEFAULT" else f", CPU capability {was['cpu']}"
    assert f"was computed with source files of fedecho {was['source']}{capability}; resuming it with source files of" in line
    assert line.endswith("or resume anyway with --other-software (other_software=True), which the record will note")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("software", "named"),
    [
        ({"torch": "2.0.1"}, "torch 2.0.1; resuming it with"),
        ({"numpy": "1.21"}, "numpy 1.21; resuming it with"),
        ({"fedecho": "0.0.9", "cpu": "SVE"}, "fedecho 0.0.9, CPU capability SVE; resuming it with"),
        ({"python": "3.9.1"}, "Python 3.9; resuming it with"),
        ({"peft": "0.0.1"}, "peft 0.0.1; resuming it with"),
        ({"gpu": "Abacus"}, "GPU Abacus; resuming it with"),
    ],
    ids=str,
)
def test_what_differs_is_named(tmp_path: Path, software: dict[str, str], named: str) -> None:
    begun_by(tmp_path, **software)
    said = CliRunner().invoke(app, ["resume", str(tmp_path)])
    assert said.exit_code == 2
    assert len(said.stderr.splitlines()) == 1
    assert f"{tmp_path} was computed with {named}" in said.stderr


def test_what_changes_no_number_is_not_compared(tmp_path: Path) -> None:
    major, minor, _ = platform.python_version_tuple()
    begun_by(tmp_path, platform="Another-1.0", python=f"{major}.{minor}.999")
    resume(tmp_path)
    assert not [line for line in read_record(tmp_path) if line["event"] == "software"]


def test_the_flag_goes_on_and_the_record_says_so(tmp_path: Path) -> None:
    begun_by(tmp_path, torch="2.0.1")
    said = CliRunner().invoke(app, ["resume", str(tmp_path), "--other-software", "--quiet"])
    assert said.exit_code == 0, said.output
    assert f"resuming with other software: torch {torch.__version__} in place of 2.0.1" in said.stderr
    (line,) = [line for line in read_record(tmp_path) if line["event"] == "software"]
    assert line["software"]["torch"] == torch.__version__
    assert read_header(tmp_path)["software"]["torch"] == "2.0.1"
    page = CliRunner().invoke(app, ["report", str(tmp_path), "--quiet"])
    assert page.exit_code == 0, page.output


def test_a_run_that_was_let_go_on_is_of_its_new_software(tmp_path: Path) -> None:
    """Resumed a second time by the same, it is not asked again; and not by what had begun it."""
    begun_by(tmp_path, torch="2.0.1")
    stopped(tmp_path, resume=True, other_software=True)
    stopped(tmp_path, resume=True)
    record = tmp_path / "run.jsonl"
    assert record.read_text().count('"event":"software"') == 1
    for checkpoint in tmp_path.glob("checkpoint-*"):
        checkpoint.unlink()
    record.write_text(record.read_text().replace(torch.__version__, "2.0.2").replace("2.0.1", torch.__version__))
    with pytest.raises(ValueError, match=r"was computed with torch 2\.0\.2; resuming it with torch"):
        resume(tmp_path)


def test_a_line_of_software_that_a_crash_tore_or_cut_off_is_written_again(tmp_path: Path) -> None:
    begun_by(tmp_path, torch="2.0.1")
    with (tmp_path / "run.jsonl").open("ab") as record:
        record.write(b'{"event":"software","softw')
    with pytest.raises(ValueError, match=r"torch 2\.0\.1"):
        resume(tmp_path)
    stopped(tmp_path, checkpoint_s=600.0, resume=True, other_software=True)
    assert resume(tmp_path).summary.num_versions == 3, "the line lies behind the last checkpoint; it allows this software"
    assert len([line for line in read_record(tmp_path) if line["event"] == "software"]) == 1


def test_a_record_of_before_names_less_and_goes_on(tmp_path: Path) -> None:
    stopped(tmp_path, checkpoint_s=600.0)
    record = tmp_path / "run.jsonl"
    header, rest = record.read_text().split("\n", 1)
    told = json.loads(header)
    told["software"] = {"fedecho": told["software"]["fedecho"], "torch": torch.__version__}
    record.write_text(json.dumps(told) + "\n" + rest)
    assert resume(tmp_path).summary.num_versions == 3


@pytest.mark.parametrize("allowed", [False, True])
def test_a_comparison_asks_the_same_before_it_starts_anything(tmp_path: Path, allowed: bool) -> None:
    begun_by(tmp_path / "begun", torch="2.0.1")
    options = {"executor": "serial", "other_software": allowed}
    plan = [PlannedRun(name, small(), tmp_path / name, execution=options) for name in ("new", "begun")]
    if not allowed:
        with pytest.raises(ValueError, match=r"begun was computed with torch 2\.0\.1"):
            run_all(plan, jobs=1, see=lambda *_: None)
        assert not (tmp_path / "new").exists()
        return
    assert len(run_all(plan[1:], jobs=1, see=lambda *_: None).summaries) == 1
    assert '"event":"software"' in (tmp_path / "begun" / "run.jsonl").read_text()
