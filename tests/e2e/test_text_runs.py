"""Whole runs on tiny text models: every method, stopped and resumed, one and two workers, and on what a GPU would run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from tiny_text import write_world
from torch.nn.functional import cosine_similarity
from typer.testing import CliRunner

from fedecho import ALGORITHMS, Distiller, Experiment, GlobalModel, Weights, load, resume, simulate
from fedecho.cli import app
from fedecho.core.types import Dispatch
from fedecho.distill.student import student_for
from fedecho.executors.executor import Job
from fedecho.gpu.capture import Precision
from fedecho.learning.trainer import Trainer
from fedecho.paper.rendering import View
from fedecho.paper.results import path_of
from fedecho.paper.tables import Cell
from fedecho.paper.text_tables import ECHO
from fedecho.paper.text_tables import TEXT_TABLES as TABLES
from fedecho.report.terminal import LiveProgress
from fedecho.runs import run_stats as state
from fedecho.runs.build import bound_network
from fedecho.runs.config import differences, to_config
from fedecho.runs.on_gpu import GpuParts
from fedecho.runs.record import read_header
from fedecho.runs.run import Result
from fedecho.tasks.text import gsm8k
from fedecho.tasks.text.pretrained import files_of

KINDS = {
    "mrpc": ("mrpc", ["task.model=tiny-bert", "task.unlabeled_size=8"]),
    "full": ("mathinstruct", ["task.model=tiny-llama", "task.train=gsm8k-train", "task.max_new_tokens=2", "task.num_test=2"]),
    "lora": ("mathinstruct", ["task.model=tiny-llama", "task.train=gsm8k-train", "task.max_new_tokens=2", "task.lora_rank=2"]),
}


@pytest.fixture(autouse=True, scope="module")
def _world(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The data folder, also for worker processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDECHO_DATA", str(write_world(tmp_path_factory.mktemp("world"))))
        yield


def experiment(kind: str, algorithm: str = "fedecho", versions: int = 3) -> Experiment:
    recipe, settings = KINDS[kind]
    small = ["task.num_clients=6", "eval_every=3", "local.num_local_steps=2"]
    small += [] if kind == "mrpc" else ["task.num_unlabeled=6"]
    small += ["algorithm.distiller.batch_size=4"] if algorithm == "fedecho" else []
    return load(recipe, algorithm=algorithm, versions=versions, settings=[*settings, *small])


def digests(result: Result) -> tuple[str, str]:
    return result.summary.model_sha256, result.summary.arrivals_sha256


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_full_and_low_rank_training_go_through_the_same_methods(kind: str) -> None:
    sizes, models = set(), set()
    for name in ALGORITHMS:
        if name in ("fedavg", "fedasync", "fedecho+"):  # the last is for classifiers
            continue
        result = simulate(experiment(kind, name, versions=2))
        sizes.add(len(result.weights.params))
        models.add(result.summary.model_sha256)
        assert torch.isfinite(result.weights.params).all()
        assert all(("lora_" in part) == (kind == "lora") for part in result.named)
    assert len(sizes) == 1
    assert len(models) == 5, "every method makes a model of its own"


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_stopped_in_the_middle_of_a_buffer_goes_on_to_the_same_bytes(kind: str, tmp_path: Path) -> None:
    whole = simulate(experiment(kind), out=tmp_path / "whole")
    seen = 0

    def stop(moment: object, scores: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(experiment(kind), out=tmp_path / "cut", checkpoint_s=0.0, watch=stop)
    assert digests(resume(tmp_path / "cut")) == digests(whole)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mrpc", "full"))])
def test_one_and_two_workers_give_the_bytes_of_serial(kind: str, workers: int) -> None:
    wanted = digests(simulate(experiment(kind, versions=2)))
    assert digests(simulate(experiment(kind, versions=2), executor="pool", workers=workers)) == wanted


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_a_gpu_runs_is_what_serial_runs(kind: str) -> None:
    """The executor cuda's way with texts, on the CPU: in float32 the numbers of the plain trainer on the same padded batches.

    In bfloat16 they are the same but for rounding.
    """
    plain = experiment(kind)
    network = bound_network(plain.task, plain.seed)
    job = Job(Dispatch(0, 1, GlobalModel(0, network.weights.clone()), 7))
    update = Trainer(plain.task.in_few_shapes(), plain.local, network).train(job.dispatch)
    trained = Weights(job.dispatch.model.weights.params + update.delta, update.buffers)
    wanted = _first(student_for(network, plain.task, Distiller()).infer(trained))
    for dtype in (torch.float32, torch.bfloat16):
        parts = GpuParts(plain, Precision(dtype, compiled=False), torch.device("cpu"))
        assert "does not build its batches on the device" in parts.one_by_one
        executor = parts.executor(1, None)
        executor.submit(job, 0.0)
        delta, found = executor.result(0).delta, _first(parts.student().infer(trained))
        if dtype == torch.float32:
            torch.testing.assert_close(delta, update.delta, rtol=1e-4, atol=1e-8)
            assert torch.equal(found, wanted)
        # In units of the update, which is smaller than any tolerance that one would think of: 6e-5 in a weight.
        assert float(cosine_similarity(delta, update.delta, dim=0)) > 0.9
        assert float(delta.norm()) == pytest.approx(float(update.delta.norm()), rel=0.1)
        assert float((found - wanted).norm()) <= 0.02 * float(wanted.norm())
        assert parts.evaluate(trained).keys() == plain.task.evaluate(network.module.eval()).keys()


def _first(answer: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return answer if isinstance(answer, torch.Tensor) else answer[0]


def test_the_prompt_and_the_scores_stand_in_the_record(tmp_path: Path) -> None:
    result = simulate(experiment("lora", "fedbuff", versions=2), out=tmp_path / "run")
    notes = read_header(tmp_path / "run")["notes"]
    assert "{question}" in notes["prompt"]
    assert notes["trained"] == "LoRA of rank 2 on all-linear"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["notes"] == notes
    assert set(summary["scores"]) == {"accuracy", "standard_error", "answer_loss", "num_questions"}
    assert result.evaluations[-1]["answer_loss"] == summary["scores"]["answer_loss"]


def test_the_record_names_libraries_and_weights_and_a_resume_wants_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = shutil.copytree(os.environ["FEDECHO_DATA"], tmp_path / "world")
    monkeypatch.setenv("FEDECHO_DATA", str(world))

    def stop(moment: object, scores: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(experiment("lora", "fedbuff"), out=tmp_path / "run", watch=stop)
    header, config = read_header(tmp_path / "run"), world / "tiny-llama" / "config.json"
    for name in ("transformers", "tokenizers", "peft"):
        assert header["software"][name] == version(name)
    weights, tokenizer = header["notes"]["model files"].split(", tokenizer ")
    assert re.fullmatch(r"sha256 [0-9a-f]{64} sha256 [0-9a-f]{64}", f"{weights} {tokenizer}")
    for path in (config, world / "tiny-llama" / "tokenizer.json", world / "tiny-llama" / "chat_template.jinja"):
        text = path.read_text()
        path.write_text(text + "\n")
        with pytest.raises(ValueError, match=r"run began with tiny-llama \(sha256 .* but its files are now sha256"):
            resume(tmp_path / "run")
        path.write_text(text)
    record = tmp_path / "run" / "run.jsonl"  # as one of before, which named the weights alone
    record.write_text(record.read_text().replace(f"{weights}, tokenizer {tokenizer}", weights))
    assert resume(tmp_path / "run").summary.notes == header["notes"]
    commit = "0123456789abcdef0123456789abcdef01234567"
    _the_hubs_cache_is_hashed_too(world, tmp_path / "hub" / "models--a--b", commit)
    for own in ("snapshots/step-100", f"snapshots/{commit}", "models--a--b/snapshots/step-100"):
        folder = tmp_path / own
        shutil.copytree(world / "tiny-llama", folder)
        assert files_of(folder).startswith("sha256 "), "whoever keeps checkpoints in a folder of that name may change them"


def _the_hubs_cache_is_hashed_too(world: Path, cache: Path, commit: str) -> None:
    """Its snapshots are links into blobs, which anybody may change and keep their names."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / commit
    shutil.copytree(world / "tiny-llama", blobs)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    own = files_of(world / "tiny-llama")
    assert files_of(snapshot) == f"hub commit {commit}, {own}"
    weights = blobs / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert files_of(snapshot) != f"hub commit {commit}, {own}"


def test_tables_name_every_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(state, "LONG_S", 0.0)
    monkeypatch.setattr(LiveProgress, "LINE_EVERY_S", 0.0)
    words = ["--executor", "serial", "--seeds", "0", "--results", "mine"]
    small = ["num_versions=2", "task.num_clients=6", "local.num_local_steps=1", "task.model=tiny-llama"]
    small += ["task.num_unlabeled=6", "task.max_new_tokens=2", "eval_every=1", "task.lora_rank=2"]
    settings = [word for setting in small for word in ("--set", setting)]
    for row in ("before", "fedbuff"):
        only = ["--only", row, "--only", "smollm2-135m-5-versions"]
        made = CliRunner().invoke(app, ["table", "gsm8k", *only, *words, *settings])
        assert made.exit_code == 0, made.output
        assert "evaluating 0/" in made.stderr, "of a long evaluation one sees how far it is"
    look = ["table", "gsm8k", "--only", "smollm2-135m-5-versions", *words, "--show", "--format", "csv"]
    assert "was made with other settings" in CliRunner().invoke(app, look).stderr
    shown = CliRunner().invoke(app, [*look, *settings]).stdout
    lines = {line.split(",")[0]: line for line in shown.splitlines()}
    for row, paper in (("before training", "42.38"), ("FedBuff", "52.08")):
        assert f",{paper},,tiny-llama in place of Qwen2.5-1.5B-Instruct; gsm8k-train in place of MathInstruct" in lines[row]
        assert "; LoRA of rank 2 on q_proj and v_proj in place of the whole model" in lines[row]
    assert "; 2 versions in place of 5; client_lr 0.0002 in place of 3e-05; " in lines["FedBuff"]
    assert "; batch_size 32 in place of 8" in lines["FedBuff"]
    assert "seeds,diverged,ours,deviation,s.e.,loss,last alone,paper,paper deviation,ran on,with,hardware,unlabeled" in shown
    assert not any(column == "SmolLM2-135M, 45 versions" for _, column in TABLES["gsm8k"].values), "the paper ran five"
    kept = json.loads((tmp_path / "mine" / "gsm8k" / "before-training-smollm2-135m-5-versions-seed0.json").read_text())
    assert kept["summary"]["num_versions"] == 0
    assert kept["evaluations"][0]["accuracy"] == kept["summary"]["last10_accuracy"]
    text = CliRunner().invoke(app, ["table", "gsm8k", "--only", "smollm2-135m-5", *words, *settings, "--show"]).stdout
    assert "prompt: " in text
    assert "[1] tiny-llama in place of Qwen2.5-1.5B-Instruct\n[2] gsm8k-train in place of MathInstruct\n" in stripped(text)
    marks = {line.split("  ")[1]: line.split("  ")[-1] for line in stripped(text).splitlines() if line.endswith("]")}
    assert marks == {"before training": "[1 2 3]", "FedBuff": "[1 2 3 4 5 6 7]"}, "once below, by number in the rows"


def test_a_model_that_is_judged_as_it_is_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    real = gsm8k.report_progress

    def interrupted(done: int, total: int) -> None:
        signal.raise_signal(signal.SIGINT)
        real(done, total)

    monkeypatch.setattr(gsm8k, "report_progress", interrupted)
    small = ["task.model=tiny-llama", "task.max_new_tokens=2", "task.num_clients=6", "task.num_unlabeled=6"]
    settings = [word for setting in small for word in ("--set", setting)]
    only = ["--only", "before", "--only", "smollm2-135m-5-versions", "--seeds", "0"]
    made = CliRunner().invoke(app, ["table", "gsm8k", *only, "--executor", "serial", "--results", "mine", *settings])
    assert made.exit_code == 130, made.output
    assert "stopped before the evaluation was complete" in made.stderr
    assert not list(tmp_path.rglob("*.json"))


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_scores_are_of_the_evaluations_that_accuracy_is_of(tmp_path: Path) -> None:
    table, lines = TABLES["mrpc"], [{"version": row, "time": 1.0, "accuracy": 0.5, "f1": row / 100} for row in range(12)]
    cell = Cell("mrpc", ECHO, table.columns[1], 0, "mrpc")
    kept = {
        "cell": "",
        "evaluations": lines,
        "config": {},
        "execution": {},
        "software": {"torch": "2"},
        "unlabeled": "",
        "commit": "",
    }
    kept["config"] = to_config(cell.experiment())
    kept |= {"summary": {"num_versions": 200, "last10_accuracy": 0.5, "scores": {"accuracy": 0.5, "f1": 0.11}}, "notes": {}}
    path_of(tmp_path, cell).parent.mkdir()
    for evaluations, shown in ((lines, "6.50"), ([{"version": 9, "time": 1.0, "accuracy": 0.5}, *lines[-2:]], "11.00 (last)")):
        path_of(tmp_path, cell).write_text(json.dumps(kept | {"evaluations": evaluations}))
        assert View(table, tmp_path, (0, 1)).figure(ECHO, table.columns[1]).scores == (shown,)


def test_what_is_kept_of_every_client_is_in_main_memory_for_a_language_model() -> None:
    for recipe, place in (("mrpc", "device"), ("mathinstruct", "cpu")):
        assert load(recipe, algorithm="ca2fl").algorithm.memory == place
        assert load(recipe, algorithm="fedac").client_memory == place


def test_control_rows_tell_fedecho_from_its_settings() -> None:
    changed = {}
    for name in ("mrpc", "gsm8k"):
        table = TABLES[name]
        rows = [row for row in table.rows if row.control and row.algorithm == "fedecho"]
        plain = to_config(Cell(name, ECHO, table.columns[-1], 0, table.recipe).experiment())
        for row in rows:
            found = to_config(Cell(name, row, table.columns[-1], 0, table.recipe).experiment())
            changed[row.label.rpartition(", ")[2]] = differences(found, plain)
    assert {len(found) for found in changed.values()} == {1}, "one setting each"
    rates = [f"distill_lr {rate}" for rate in ("3e-6", "3e-5", "2e-5")]
    assert list(changed) == ["U all test pairs", "distillation batch 8", *rates]


def test_importing_fedecho_imports_no_text_library() -> None:
    code = "import sys, fedecho, fedecho.cli; sys.exit(any(name in sys.modules for name in ('transformers', 'peft', 'tokenizers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
