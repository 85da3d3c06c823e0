"""The crash, full-disk and soak benchmarks, small: what they check is checked at every change."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import fuzz, soak, text_steps

ROOT = Path(__file__).parents[2]


def printed(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_five_runs_killed_and_five_disks_full() -> None:
    said = printed("benchmarks.crash", "--num", "5", "--disk-full", "5", "--seed", "1")
    digests = [line.split() for line in said.splitlines() if "sha256" in line]
    assert [words[:5] for words in digests] == [["5", "final", "models", "with", "1"]] * 2
    assert digests[0][-1] == digests[1][-1]


def test_a_minute_of_traffic() -> None:
    """Every check of the books is made inside, at every message."""
    small = soak.traffic(seed=3, num_clients=200, concurrency=20, mean_s=1.0)
    small.run(60.0, 1.0)
    books = small.books
    assert books.moments > 500
    assert min(books.ended["accepted"], books.ended["rejected"], books.ended["lost"], books.unasked) > 5
    assert books.sent == books.ended.total() + len(books.in_flight)
    assert max(sample[4] for sample in small.samples) <= 21


@pytest.mark.filterwarnings("ignore")
def test_mutated_updates() -> None:
    found = fuzz.fuzz(1500, seed=7)
    assert not found.failures, found.examples
    assert min(found.seen["accepted"], found.seen["rejected"]) > 300


@pytest.mark.filterwarnings("ignore")
def test_nothing_refused_changes_a_bit_and_nothing_odd_is_let_in() -> None:
    """Of what fails above, nothing may be worse than an error: no state changed, no model, no tensor that does not fit."""
    found = fuzz.fuzz(1500, seed=8)
    worse = [what for what in found.failures if "has changed" in what or "does not fit" in what or "another kind" in what]
    assert not worse, [found.examples[what] for what in worse]


def test_steps_on_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for sizes in (text_steps.MINILM, text_steps.SMOLLM):
        monkeypatch.setitem(sizes, "vocab_size", 300)
        monkeypatch.setitem(sizes, "hidden_size", 36)
    whole = text_steps.rows_of
    monkeypatch.setattr(text_steps, "rows_of", lambda least, most, vocabulary: whole(5, 9, vocabulary))
    text_steps.main(["--device", "cpu", "--steps", "1", "--layers", "1", "--llama"])
    lines = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [line[1].strip() for line in lines] == ["eager", "replayed"] * 2
    assert all(float(line[2]) > 0 for line in lines)
