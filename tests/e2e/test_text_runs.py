"""Whole runs on tiny text models: every method, stopped and resumed, one and two workers, and on what a GPU would run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_text import write_world
from typer.testing import CliRunner

from fedecho import ALGORITHMS, Distiller, Experiment, GlobalModel, Weights, load, resume, simulate
from fedecho.cli import app
from fedecho.core.capture import Precision
from fedecho.core.types import Dispatch
from fedecho.distill.token_student import student_for
from fedecho.experiments.build import bound_network
from fedecho.experiments.gpu import GpuParts
from fedecho.experiments.record import read_header
from fedecho.experiments.run import Result
from fedecho.learning.trainer import Trainer
from fedecho.simulation.executors.executor import Job

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
        if name in ("fedavg", "fedasync"):
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


def test_one_and_two_workers_give_the_bytes_of_serial() -> None:
    for kind in ("mrpc", "lora"):
        wanted = digests(simulate(experiment(kind, versions=2)))
        for workers in (1, 2):
            assert digests(simulate(experiment(kind, versions=2), executor="pool", workers=workers)) == wanted


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_a_gpu_runs_is_what_serial_runs(kind: str) -> None:
    """The eager path of the executor cuda, on the CPU: the same numbers in float32, near ones in bfloat16."""
    plain = experiment(kind)
    network = bound_network(plain.task, plain.seed)
    job = Job(Dispatch(0, 1, GlobalModel(0, network.weights.clone()), 7))
    update = Trainer(plain.task, plain.local, network).train(job.dispatch)
    trained = Weights(job.dispatch.model.weights.params + update.delta, update.buffers)
    wanted = _first(student_for(network, plain.task, Distiller()).infer(trained))
    for dtype, near in ((torch.float32, 0.0), (torch.bfloat16, 0.05)):
        parts = GpuParts(plain, Precision(dtype, compiled=False), torch.device("cpu"))
        assert "does not make its batches on the device" in parts.eager
        executor = parts.executor(1, None)
        executor.submit(job, 0.0)
        assert torch.allclose(executor.result(0).delta, update.delta, rtol=0, atol=near and 1e-3)
        found = _first(parts.student().infer(trained))
        assert float((found - wanted).abs().max()) <= near * (1 + float(wanted.abs().max()))
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


def test_tables_name_every_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--executor", "serial", "--seeds", "0", "--results", "mine"]
    small = ["num_versions=2", "task.num_clients=6", "local.num_local_steps=1", "task.model=tiny-llama"]
    small += ["task.num_unlabeled=6", "task.max_new_tokens=2", "eval_every=1", "task.lora_rank=2"]
    settings = [word for setting in small for word in ("--set", setting)]
    for row in ("before", "fedbuff"):
        only = ["--only", row, "--only", "smollm2-135m-5-versions"]
        made = CliRunner().invoke(app, ["table", "gsm8k", *only, *words, *settings])
        assert made.exit_code == 0, made.output
    shown = CliRunner().invoke(app, ["table", "gsm8k", "--only", "5-versions", *words, "--show", "--format", "csv"]).stdout
    lines = {line.split(",")[0]: line for line in shown.splitlines()}
    for row, paper in (("before training", "42.38"), ("FedBuff", "52.08")):
        assert f",1,{paper},tiny-llama in place of Qwen2.5-1.5B-Instruct; gsm8k-train in place of MathInstruct" in lines[row]
    assert "s.e.,loss,seeds,paper,ran on" in shown
    kept = json.loads((tmp_path / "mine" / "gsm8k" / "before-training-smollm2-135m-5-versions-seed0.json").read_text())
    assert kept["summary"]["num_versions"] == 0
    assert kept["evaluations"][0]["accuracy"] == kept["summary"]["last10_accuracy"]
    text = CliRunner().invoke(app, ["table", "gsm8k", "--only", "smollm2-135m-5", *words, "--show"]).stdout
    assert "prompt: " in text


def test_importing_fedecho_imports_no_text_library() -> None:
    code = "import sys, fedecho, fedecho.cli; sys.exit(any(name in sys.modules for name in ('transformers', 'peft', 'tokenizers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
