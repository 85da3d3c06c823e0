"""Permissions of a run's folder, and that symlinks in it are never written through."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedecho import Experiment, load, simulate
from fedecho.cli import app
from fedecho.runs.record import Record
from fedecho.storage.checkpoint import write_atomically
from fedecho.tracking import tracked

PRECIOUS = "somebody's own\n"


def tiny() -> Experiment:
    return load("digits", algorithm="fedbuff", versions=1, settings=["task.width=1", "local.num_local_steps=1"])


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def link_in(folder: Path, name: str) -> Path:
    """A link of that name in the folder; what it leads to."""
    precious = folder.parent / "precious"
    precious.write_text(PRECIOUS)
    folder.mkdir(exist_ok=True)
    (folder / name).symlink_to(precious)
    return precious


def test_a_runs_folder_and_its_files_are_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    seen: dict[str, int] = {}
    simulate(tiny(), out=folder, checkpoint_s=0.0, watch=lambda *_: seen.update({p.name: mode(p) for p in folder.iterdir()}))
    assert mode(folder) == 0o700
    assert mode(folder.parent) == 0o755, "only what holds the run is private"
    modes = {path.name: mode(path) for path in folder.iterdir()}
    assert {".lock", "run.jsonl"} <= set(seen)
    assert set(modes) == {"run.jsonl", "model.safetensors", "summary.json"}
    assert set(seen.values()) | set(modes.values()) == {0o600}


def test_a_folder_that_was_there_stays_as_it_was_made_and_its_files_follow_it(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    simulate(tiny(), out=folder)
    assert mode(folder) == 0o755
    assert {mode(path) for path in folder.iterdir()} == {0o644}


def test_a_tracker_that_is_there_before_the_run_makes_its_folder_no_more_open(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with tracked(["tensorboard"], tmp_path / "run"):
        pass
    assert mode(tmp_path / "run") == 0o700


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    precious = link_in(tmp_path / "run", ".lock")
    said = CliRunner().invoke(app, ["run", "digits", "--out", str(tmp_path / "run")])
    assert said.exit_code == 2
    told = f"{tmp_path / 'run' / '.lock'} is a symbolic link, and links are not followed when writing: remove it"
    assert said.stderr.splitlines() == [told]
    assert precious.read_text() == PRECIOUS


def test_a_record_that_has_become_a_link_is_not_written(tmp_path: Path) -> None:
    precious = link_in(tmp_path / "run", "run.jsonl")
    with pytest.raises(ValueError, match=r"run\.jsonl is a symbolic link"):
        Record.continued(tmp_path / "run", lambda client: "short", None)
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_what_lies_where_a_file_is_begun_is_taken_away_and_not_written(tmp_path: Path, kind: str) -> None:
    precious, part = tmp_path / "precious", tmp_path / "summary.json.part"
    precious.write_text(PRECIOUS)
    if kind == "pipe":
        os.mkfifo(part)
    elif kind == "link":
        part.symlink_to(precious)
    else:
        part.hardlink_to(precious)
    write_atomically(tmp_path / "summary.json", b"{}")
    assert (tmp_path / "summary.json").read_bytes() == b"{}"
    assert precious.read_text() == PRECIOUS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "summary.json"]
