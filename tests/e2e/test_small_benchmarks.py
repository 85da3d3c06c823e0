"""The crash, full-disk, soak, million and bank benchmarks, small: what they check is checked at every change."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import bank_budget, correction_cost, fuzz, halve, million, packing, soak, text_steps
from safetensors.torch import load_file
from tiny_text import write_gsm8k, write_world

from fedecho.tasks.text.pretrained import files_of

ROOT = Path(__file__).parents[2]


def printed(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
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


def test_time_and_memory_hardly_move_with_the_number_of_clients() -> None:
    """The million's worlds, small. Times are the benchmark's to judge; here, that both see the same traffic."""
    few, many = million.World(200, 50), million.World(50_000, 50)
    for world in (few, many):
        world.run(2000)
        assert world.server.counts == {"accepted": 2000}
        assert len(world.server.open) == len(world.transport.open) == len(world.transport.queue) == 50
        assert world.server.model.version == 20
    assert len(many.server.idle) == 50_000 - 50


def test_what_each_way_of_keeping_the_bank_costs_the_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_budget, "NUM_UNLABELED", 50)
    crowd = bank_budget.Crowd(200, 400)
    true, entry_mb = bank_budget.unlimited(crowd), 50 * 10 * 4 / 1e6
    budget = 2 * entry_mb + 50.5 * entry_mb
    found = {name: bank_budget.keep(crowd, keeping) for name, keeping in bank_budget.ways(budget, str(tmp_path)).items()}
    teachers = [kept.num_teachers for kept in found.values()]
    assert teachers == [200, 200, 50, 101]
    assert all(kept.drift < 1e-12 for kept in found.values())
    l1 = [bank_budget.errors(true, torch.from_numpy(kept.teacher))[0] for kept in found.values()]
    assert l1[0] < 1e-6 < l1[1] < 1e-3 < l1[3] < l1[2]
    assert all(kept.num_bytes <= 1e6 * budget for kept in list(found.values())[2:])


def test_steps_on_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for sizes in (text_steps.MINILM, text_steps.BASE, text_steps.SMOLLM):
        monkeypatch.setitem(sizes, "vocab_size", 300)
        monkeypatch.setitem(sizes, "hidden_size", 36)
    whole = text_steps.rows_of
    monkeypatch.setattr(
        text_steps, "rows_of", lambda least, most, longest, batch, vocabulary: whole(5, 9, 9, batch, vocabulary)
    )
    text_steps.main(["--device", "cpu", "--steps", "1", "--layers", "1", "--models", "minilm,mpnet,llama"])
    lines = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    shared = ["and texts share rows", "and RMSNorm is torch's own"]
    assert [line[1].strip() for line in lines] == ["eager", "replayed", "and weights are kept in low precision"] * 3 + shared
    assert all(float(line[2]) > 0 for line in lines)


def test_a_models_weights_rounded_to_half_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_world(tmp_path) / "tiny-bert", tmp_path / "half"
    halve.halve(folder, out)
    whole, half = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert capsys.readouterr().out.strip() == files_of(out)
    assert files_of(out).split("tokenizer")[1] == files_of(folder).split("tokenizer")[1]
    for name, weights in half.items():
        assert torch.equal(weights, whole[name].half())
    assert len(half) > 20


def test_texts_that_share_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gsm8k(write_world(tmp_path) / "gsm8k", num_train=400)
    packing.main(["--model", "tiny-llama", "--data-dir", str(tmp_path)])
    apart, shared = [line.split("|")[2:6] for line in capsys.readouterr().out.splitlines()[2:]]
    assert apart[0] == shared[0]
    texts, *computed = (int(number.replace(",", "")) for number in (apart[0], apart[1], shared[1]))
    assert texts < min(computed)
    for line, all_tokens in zip((apart, shared), computed, strict=True):
        assert float(line[2]) == pytest.approx(all_tokens / texts, abs=0.006)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["benchmarks.million", "--arrivals", "0"], "argument --arrivals: it must be a whole number from 1, got '0'"),
        (["benchmarks.soak", "--virtual-s", "nan"], "argument --virtual-s: it must be a number above 0, got 'nan'"),
        (["benchmarks.poison", "--kinds", "none,rude"], "argument --kinds: each must be one of none, label_flip"),
        (["benchmarks.peers.table", "--cpu", "nowhere.json"], "argument --cpu: there is no nowhere.json"),
    ],
)
def test_a_wrong_argument_is_named(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.delitem(sys.modules, words[0], raising=False)  # runpy warns of a module that runs a second time
    with pytest.raises(SystemExit) as end:
        runpy.run_module(words[0], run_name="__main__")
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_ratios_of_the_corrections_cost_are_of_an_arrival_and_of_a_version() -> None:
    costs = correction_cost.Costs(infer=9.0, put=1.0, corrected=2.0, teacher=2.0, distill=18.0, diagnostics=4.0, buffer_size=2)
    assert costs.of_correction == 1.1
    assert costs.of_diagnostics == 1.1
    small = correction_cost.measured(correction_cost.cases()["digits"], 1)
    assert min(vars(small).values()) > 0
