"""A full disk, a second process, a changed input: nothing is lost, and one line says what to do."""

import errno
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save
from typer.testing import CliRunner

from fedecho import Experiment, FedBuff, Runtimes, load, resume, simulate
from fedecho.cli import app
from fedecho.core.loop import Moment
from fedecho.paper.filling import run_cell
from fedecho.paper.tables import Cell, Column, Row
from fedecho.runs.config import from_config, to_config
from fedecho.runs.experiment import describe
from fedecho.runs.folder import LOCK, locked_folder
from fedecho.runs.record import read_header, read_record
from fedecho.runs.summary import Summary
from fedecho.storage import checkpoint
from fedecho.storage.checkpoint import CheckpointError, load_checkpoint
from fedecho.storage.files import DiskFullError, disk_full_at

SMALL = ["task.width=1", "local.num_local_steps=1", "task.num_unlabeled=20", "eval_every=2"]
NO_LIMIT = resource.RLIM_INFINITY


def small(versions: int = 6, width: int = 1) -> Experiment:
    return load("digits", algorithm="fedecho", versions=versions, settings=[*SMALL, f"task.width={width}"])


@pytest.fixture(scope="module")
def whole() -> str:
    return simulate(small()).summary.model_sha256


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel itself refuses: it writes what fits, then says EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def after_a_full_disk(folder: Path, whole: str, *names: str) -> None:
    """One line, nothing half-written, and resumed to the same bytes."""
    assert not list(folder.glob("*.part"))
    assert not list(folder.glob(LOCK))
    assert not (folder / "summary.json").exists()
    again = CliRunner().invoke(app, ["resume", str(folder)])
    assert again.exit_code == 0, again.output
    assert Summary.read(folder).model_sha256 == whole
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "run.jsonl", "summary.json"]


@pytest.mark.parametrize(
    ("num_bytes", "width", "checkpoint_s", "named"),
    [(10_000, 1, 0.0, "checkpoint-"), (14_000, 8, 1e6, "model.safetensors")],
    ids=["a checkpoint", "the model"],
)
def test_a_disk_that_is_full_at_a_checkpoint_or_at_the_model(
    tmp_path: Path, num_bytes: int, width: int, checkpoint_s: float, named: str
) -> None:
    """The record is smaller than either, and fits."""
    folder = tmp_path / "run"
    experiment = small(width=width)
    whole = simulate(experiment).summary.model_sha256
    with files_of_at_most(num_bytes), pytest.raises(DiskFullError) as caught:
        simulate(experiment, out=folder, checkpoint_s=checkpoint_s)
    assert str(caught.value).startswith(f"the disk is full: cannot write {folder / named}")
    assert str(caught.value).endswith(f"(File too large); free some space, then resume with: fedecho resume {folder}")
    after_a_full_disk(folder, whole)


def test_a_disk_that_is_full_at_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: str) -> None:
    folder, write = tmp_path / "run", Summary.write

    def full(summary: Summary, folder: Path) -> None:
        with files_of_at_most(100):
            write(summary, folder)

    with monkeypatch.context() as patched:
        patched.setattr(Summary, "write", full)
        with pytest.raises(DiskFullError, match=r"summary\.json .* fedecho resume"):
            simulate(small(), out=folder)
    after_a_full_disk(folder, whole)


def test_a_disk_that_is_full_in_the_middle_of_a_line_of_the_record(tmp_path: Path, whole: str) -> None:
    folder = tmp_path / "run"
    words = ["run", "digits", "--versions", "6", *(word for setting in SMALL for word in ("--set", setting))]
    with files_of_at_most(3333):
        said = CliRunner().invoke(app, [*words, "--out", str(folder)])
    assert said.exit_code == 1
    assert said.stderr.strip().splitlines()[-1].startswith(f"the disk is full: cannot write {folder / 'run.jsonl'}")
    assert "Traceback" not in said.output
    assert (folder / "run.jsonl").stat().st_size == 3333
    assert all(line["event"] for line in read_record(folder)), "the torn line is passed over"
    after_a_full_disk(folder, whole)


def test_a_disk_that_was_full_from_the_beginning_leaves_no_run(tmp_path: Path, whole: str) -> None:
    with files_of_at_most(0), pytest.raises(DiskFullError, match=r"run\.jsonl .*; free some space, then start it again"):
        simulate(small(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert simulate(small(), out=tmp_path / "run").summary.model_sha256 == whole


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_every_way_of_being_full_is_known_and_crosses_processes(code: int) -> None:
    with pytest.raises(DiskFullError) as caught, disk_full_at(Path("here")):
        raise OSError(code, os.strerror(code))
    caught.value.advice = "do that"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 (our own)
    assert str(caught.value) == f"the disk is full: cannot write here ({os.strerror(code)}); do that"


def test_another_fault_of_the_disk_is_not_called_full() -> None:
    with pytest.raises(OSError, match="Input/output error") as caught, disk_full_at(Path("here")):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert not isinstance(caught.value, DiskFullError)


HOLD = """
import sys, time
from pathlib import Path
from fedecho.runs.folder import locked_folder
with locked_folder(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_told_and_a_killed_one_holds_nothing(tmp_path: Path, whole: str) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        said = CliRunner().invoke(app, ["run", "digits", "--out", str(folder)])
        assert said.exit_code == 2
        told = f"{folder} is in use by another process ({other.pid}): wait for it or stop it, or choose another folder"
        assert said.stderr.strip() == told
        other.send_signal(signal.SIGKILL)
    assert (folder / LOCK).exists()
    assert simulate(small(), out=folder).summary.model_sha256 == whole
    assert not (folder / LOCK).exists()


def test_two_runs_of_one_process_cannot_share_a_folder(tmp_path: Path) -> None:
    with locked_folder(tmp_path, print), pytest.raises(ValueError, match="is in use by another process"):
        simulate(small(), out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_used_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    said: list[str] = []
    monkeypatch.setattr("fedecho.runs.folder.flock", no_locks)
    with locked_folder(tmp_path / "run", said.append):
        assert "without locks" in said[0]
    assert not (tmp_path / "run").exists()


def test_what_a_killed_process_left_is_removed_and_other_files_are_not(tmp_path: Path) -> None:
    for name in ("checkpoint-0000000007.safetensors.part", "model.safetensors.part", "mine.part"):
        (tmp_path / name).write_bytes(b"half")
    simulate(small(1), out=tmp_path)
    kept = ["mine.part", "model.safetensors", "run.jsonl", "summary.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    (tmp_path / "checkpoint-0000000003.safetensors").write_bytes(b"of a process killed right after its summary")
    assert CliRunner().invoke(app, ["resume", str(tmp_path)]).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def stopped(experiment: Experiment, folder: Path) -> None:
    """A run that was interrupted at its first message."""
    with pytest.raises(KeyboardInterrupt):
        simulate(experiment, out=folder, watch=_interrupt)


def _interrupt(moment: object, scores: object) -> None:
    raise KeyboardInterrupt


def stopped_with_checkpoint(folder: Path) -> None:
    """A run that was interrupted at its first version, every message of it in a checkpoint."""
    with pytest.raises(KeyboardInterrupt):
        simulate(small(), out=folder, checkpoint_s=0.0, watch=_at_a_version)


def _at_a_version(moment: Moment, scores: object) -> None:
    if moment.step is not None:
        raise KeyboardInterrupt


def test_a_record_that_is_not_the_one_of_its_checkpoint_is_refused_before_anything_is_trained(
    tmp_path: Path, whole: str
) -> None:
    stopped_with_checkpoint(tmp_path)
    record = tmp_path / "run.jsonl"
    good = record.read_bytes()
    at = good.index(b'"event":"arrival"')
    for damaged in (good[: at + 20] + b"7" + good[at + 21 :], good[: at + 20], good[:at] + b" " + good[at:]):
        record.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"run\.jsonl does not match its checkpoint"):
            resume(tmp_path)
        assert record.read_bytes() == damaged, "what is not understood is not touched"
    record.write_bytes(good + b'{"event":"arr')
    assert resume(tmp_path).summary.model_sha256 == whole


def test_a_checkpoint_of_another_kind_is_named(tmp_path: Path) -> None:
    stopped_with_checkpoint(tmp_path)
    tree, tensors = load_checkpoint(tmp_path) or (None, None)
    assert tree is not None
    for path in tmp_path.glob("checkpoint-*"):
        path.unlink()
    named = dict(tree["map"])
    rewritten(tmp_path, {key: value for key, value in named.items() if key != "transport"}, tensors)
    with pytest.raises(
        CheckpointError, match=r"was written by another version of fedecho \(KeyError: 'transport'\); start in a new folder"
    ):
        resume(tmp_path)
    rewritten(tmp_path, {key: value for key, value in named.items() if key != "record_sha256"}, tensors)
    with pytest.raises(CheckpointError, match=r"written by another version of fedecho \(KeyError: 'record_sha256'\)"):
        resume(tmp_path)


def rewritten(folder: Path, named: dict[str, Any], tensors: Any) -> None:
    text = json.dumps({"map": list(named.items())})
    metadata = {"format": checkpoint.FORMAT, "tree": text, "sha256": checkpoint._digest(text, tensors)}
    (folder / "checkpoint-0000000009.safetensors").write_bytes(save(tensors, metadata))


def test_damaged_files_of_a_run_are_named(tmp_path: Path) -> None:
    simulate(small(1), out=tmp_path)
    (tmp_path / "summary.json").write_text('{"name": "digits"}')
    with pytest.raises(ValueError, match=r"summary\.json is damaged .*; remove it and run `fedecho resume"):
        Summary.read(tmp_path)
    (tmp_path / "run.jsonl").write_bytes((tmp_path / "run.jsonl").read_bytes() + b"[1]\n")
    with pytest.raises(ValueError, match=r"run\.jsonl, line \d+ is not a line of a run's record"):
        list(read_record(tmp_path))


def test_a_trace_that_has_changed_is_refused(tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace.csv", tmp_path / "run"
    rows = "client,runtime_s\n" + "".join(f"{client},{client + 1}\n" for client in range(20))
    trace.write_text(rows)
    experiment = replace(small(2), runtimes=Runtimes(trace=str(trace)))
    stopped(experiment, folder)
    trace.write_text(rows.replace("19,20", "19,21"))
    with pytest.raises(
        ValueError, match=rf"the trace {trace} has changed since the run in {folder} began .* restore the old one"
    ):
        resume(folder)
    trace.unlink()
    with pytest.raises(ValueError, match=f"cannot read the trace {trace}: No such file"):
        resume(folder)
    trace.write_text(rows)
    assert resume(folder).summary.num_versions == 2


def test_a_record_of_before_traces_were_known_still_resumes(tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace.csv", tmp_path / "run"
    trace.write_text("client,runtime_s\n" + "".join(f"{client},9\n" for client in range(20)))
    stopped(replace(small(2), runtimes=Runtimes(trace=str(trace))), folder)
    record = folder / "run.jsonl"
    first, *others = record.read_text().splitlines()
    header = json.loads(first)
    del header["trace_sha256"]
    record.write_text("".join(f"{line}\n" for line in (json.dumps(header, separators=(",", ":")), *others)))
    trace.write_text(trace.read_text().replace("9", "8", 1))
    assert resume(folder).summary.num_versions == 2


def test_a_run_of_before_there_was_a_setting_still_resumes(tmp_path: Path, whole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its record nor its checkpoints know the setting, which has its default; another value is another run."""

    def before(experiment: Experiment) -> Any:
        tree = to_config(experiment)
        del tree["local"]["proximal"]
        return tree

    with monkeypatch.context() as patch:
        patch.setattr("fedecho.runs.identity.config_of", before)
        stopped_with_checkpoint(tmp_path)
    assert "proximal" not in read_header(tmp_path)["config"]["local"]
    other = from_config(read_header(tmp_path)["config"])
    other = replace(other, local=replace(other.local, proximal=0.5))
    with pytest.raises(ValueError, match=r"local\.proximal is 0\.0 there and 0\.5 here"):
        resume(tmp_path, other)
    with pytest.raises(KeyboardInterrupt):  # a second time, with checkpoints made by this fedecho
        resume(tmp_path, checkpoint_s=0.0, watch=_at_a_version)
    assert resume(tmp_path).summary.model_sha256 == whole


@dataclass(frozen=True)
class Mine(FedBuff):
    """A method of a user's own."""

    temperature: float = 1.0
    weigh: Callable[[int], float] = field(default=float)


@dataclass(frozen=True)
class Other(Mine):
    """The same fields under another name."""


def test_the_parts_of_a_users_own_are_compared_as_far_as_they_are_plain(tmp_path: Path) -> None:
    experiment = replace(load("digits", algorithm="fedbuff", versions=2, settings=SMALL), algorithm=Mine(buffer_size=3))
    stopped(experiment, tmp_path)
    header = read_header(tmp_path)
    assert header["config"] is None
    assert header["parts"]["algorithm"]["class"] == "Mine"
    assert header["parts"]["algorithm"]["weigh"] == {"class": "type"}
    for changed, said in [
        (Mine(buffer_size=3, temperature=2.0), "algorithm.temperature is 1.0 there and 2.0 here"),
        (Mine(buffer_size=4), "algorithm.buffer_size is 3 there and 4 here"),
        (Other(buffer_size=3), "algorithm.class is 'Mine' there and 'Other' here"),
    ]:
        with pytest.raises(ValueError, match=said):
            resume(tmp_path, replace(experiment, algorithm=changed))
    with pytest.raises(ValueError, match=r"local\.client_lr is 0.05 there and 0.06 here"):
        resume(tmp_path, replace(experiment, local=replace(experiment.local, client_lr=0.06)))
    assert resume(tmp_path, experiment).summary.num_versions == 2


def test_what_cannot_be_written_down_is_known_by_its_class() -> None:
    assert describe([float("nan"), (1, None), {"a": {1, 2}}]) == ["nan", [1, None], {"a": {"class": "set"}}]
    assert describe(list(range(101))) == {"class": "list", "len": 101}
    assert describe({1: 2}) == {"class": "dict"}


def test_a_cell_whose_run_is_finished_and_whose_result_is_not_there(tmp_path: Path) -> None:
    """As a disk that was full at the result, or a kill just before it, leaves it."""
    cell = Cell("small", Row("cell", "fedbuff"), Column("", ("num_versions=2",)), 0, "digits")
    kept = run_cell(cell, results=tmp_path / "results", runs=tmp_path / "runs", options={})
    (tmp_path / "results" / "small" / "cell-seed0.json").unlink()
    assert run_cell(cell, results=tmp_path / "results", runs=tmp_path / "runs", options={}) == kept
