"""How the commands talk: to people, to scripts, to shells."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedecho.cli import app
from fedecho.cli.complete import complete_algorithms, complete_source
from fedecho.core.loop import Moment
from fedecho.core.server import Receipt
from fedecho.report.terminal import LiveProgress
from fedecho.runs.run_stats import RunState, clock

SHORT = ["--versions", "2", "--set", "local.num_local_steps=1", "--set", "task.width=1", "--set", "task.num_unlabeled=20"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_json_is_all_there_is_on_stdout() -> None:
    result = CliRunner().invoke(app, ["run", "digits", *SHORT, "--json", "--out", "run"])
    told = json.loads(result.stdout)
    assert told["folder"] == "run"
    assert told["num_versions"] == 2
    assert result.stderr == ""
    again = json.loads(CliRunner().invoke(app, ["resume", "run", "--json"]).stdout)
    assert again == told
    assert {"recipes", "algorithms", "tasks", "profiles"} == set(json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout))


def test_quiet_says_only_where_the_result_is() -> None:
    result = CliRunner().invoke(app, ["run", "digits", *SHORT, "--quiet", "--out", "run"])
    assert (result.stdout, result.stderr) == ("run\n", "")


def test_a_comparison_for_scripts(tmp_path: Path) -> None:
    words = [
        "compare",
        "digits",
        "--algorithms",
        "fedbuff",
        "--seeds",
        "0,1",
        *SHORT,
        "--jobs",
        "1",
        "--out",
        "both",
        "--track",
        "tensorboard",
    ]
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [run["seed"] for run in told["runs"]] == [0, 1]
    assert len(list(tmp_path.glob("both/*/tensorboard/events*"))) == 2
    assert CliRunner().invoke(app, [*words, "--quiet"]).stdout == "both\n"


def test_without_a_terminal_progress_is_plain_lines() -> None:
    result = CliRunner().invoke(app, ["run", "digits", *SHORT, "--out", "run"])
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("run: version 2/2  accuracy")
    assert "short" in line
    assert "\x1b" not in result.output


def state() -> RunState:
    seen = RunState(100)
    for place, kind in enumerate(["short", "short", "long", "medium"]):
        seen.see(Moment(60.0, Receipt("accepted", place, staleness=place), None), {"accuracy": 0.5}, kind)
    seen.see(Moment(7200.0, Receipt("rejected", 0), None), None)
    seen.see(Moment(7200.0, Receipt("lost", 0), None), None)
    return seen


def test_what_a_person_watches() -> None:
    seen = state()
    assert seen.arrivals == "short 2  medium 1  long 1"
    assert seen.text.split() == [
        "accuracy",
        "50.0",
        "%",
        "clock",
        "2.00",
        "h",
        "staleness",
        "1.5",
        "rejected",
        "1",
        "lost",
        "1",
    ]
    assert clock(90).strip() == "1.5 min"


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_terminal_of_any_width_shows_a_bar(width: int) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=width, color_system=None)
    with LiveProgress(console) as progress:
        progress.update("mine", state())
        time.sleep(0.11)  # bars are drawn ten times a second at most
        progress.update("mine", state())
    shown = text.getvalue()
    assert "mine" in shown
    assert "0/100" in shown
    assert ("medium 1" in shown) == (width == 160)


def test_the_help_teaches_and_names_every_command() -> None:
    said = CliRunner().invoke(app, ["--help"]).stdout
    for word in ("fedecho run digits", "fedecho report", "compare", "watch", "table", "--install-completion", "Every command"):
        assert word in said


def test_a_shell_completes(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("")
    assert complete_source("mi") == ["mine.toml"]
    assert complete_source("dig") == ["digits"]
    others = ["fedavg", "fedasync", "fedac", "fedecho", "fedecho+"]
    assert complete_algorithms("fedbuff,fed") == [f"fedbuff,{name}" for name in others]
    asked = os.environ | {
        "_FEDECHO_COMPLETE": "complete_bash",
        "COMP_WORDS": "fedecho run digits --set local.c",
        "COMP_CWORD": "4",
    }
    code = "import sys; sys.argv = ['fedecho']; from fedecho.cli import app; app(prog_name='fedecho')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=asked, timeout=300, check=False)
    assert "local.client_lr=" in done.stdout.split()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["report", "nowhere"], ["nowhere", "fedecho run"]),
        (["report", "."], ["holds no run"]),
        (["watch", "nowhere"], ["nowhere"]),
        (["run", "digits", "--track", "tensorbord"], ["did you mean 'tensorboard'"]),
        (["run", "digits", "--sed", "1"], ["--seed"]),
    ],
)
def test_a_mistake_comes_with_the_fix(words: list[str], parts: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    for part in parts:
        assert part in result.stderr
