"""A run saves a model that other programs can load."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_text import save_language_model, write_world
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from fedecho import load, simulate, trained
from fedecho.cli import app
from fedecho.runs.config import ConfigError
from fedecho.tasks.text.readers import read_pairs

QUICK = ("local.num_local_steps=2", "eval_every=2", "num_versions=2")
MRPC = (*QUICK, "task.model=tiny-bert", "task.unlabeled_size=4", "task.num_clients=6", "local.client_lr=1e-2")
MATH = (*QUICK, "task.model=tiny-llama", "task.train=gsm8k-train", "task.num_unlabeled=4", "task.num_clients=6")
MATH += ("task.max_new_tokens=4", "local.client_lr=1e-2")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDECHO_DATA", str(write_world(tmp_path / "world")))
    return tmp_path / "world"


def fedecho(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def test_the_model_of_a_run_is_judged_as_its_summary_says(tmp_path: Path) -> None:
    experiment = load("digits", algorithm="fedbuff", versions=3, settings=("eval_every=3", "task.width=4"))
    result = simulate(experiment, out=tmp_path / "run")
    module = trained(tmp_path / "run")
    assert not module.training
    assert experiment.task.evaluate(module)["accuracy"] == result.accuracy == result.summary.final_accuracy
    said = fedecho("export", str(tmp_path / "run"), "--out", str(tmp_path / "new"), code=2)
    assert "models of DigitsTask have no export format" in said
    assert "fedecho.trained(" in said
    assert not (tmp_path / "new").exists()


def test_a_classifier_is_what_transformers_loads(world: Path, tmp_path: Path) -> None:
    """Its accuracy by transformers alone, one pair at a time, is the run's."""
    result = simulate(load("mrpc", algorithm="fedbuff", settings=MRPC), out=tmp_path / "run")
    assert "load it with from_pretrained" in fedecho("export", str(tmp_path / "run"), "--out", str(tmp_path / "deep" / "new"))
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "deep" / "new").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "deep" / "new")
    right, pairs = 0, read_pairs(world / "MRPC" / "dev.tsv", labelled=True)
    for pair in pairs:
        right += int(model(**tokenizer(pair.first, pair.second, return_tensors="pt")).logits.argmax()) == pair.label
    assert right / len(pairs) == result.summary.final_accuracy
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["new"], "nothing half-written is left"
    onward = [*MRPC[:3], f"task.model={tmp_path / 'deep' / 'new'}", *MRPC[4:]]
    assert simulate(load("mrpc", algorithm="fedbuff", settings=onward)).summary.num_versions == 2


@pytest.mark.parametrize(
    "lora", [(), ("task.lora_rank=2",), ("task.lora_rank=2", "task.lora_targets=q_proj,down_proj")], ids=str
)
def test_a_language_model_is_what_transformers_loads(lora: tuple[str, ...], world: Path, tmp_path: Path) -> None:
    simulate(load("mathinstruct", algorithm="fedbuff", settings=(*MATH, *lora)), out=tmp_path / "run")
    assert fedecho("export", str(tmp_path / "run"), "--out", str(tmp_path / "new"), "--quiet").strip() == str(tmp_path / "new")
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours: Any = trained(tmp_path / "run")
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
        began: Any = AutoModelForCausalLM.from_pretrained(world / "tiny-llama").eval()
        assert torch.allclose(model(ids).logits, ours(ids).logits, atol=1e-5)
        assert not torch.allclose(model(ids).logits, began(ids).logits, atol=1e-3), "it has learnt something"
    assert not [name for name in load_file(tmp_path / "new" / "model.safetensors") if "lora" in name or "base_layer" in name]
    assert AutoTokenizer.from_pretrained(tmp_path / "new").chat_template


@pytest.mark.parametrize("targets", ["lm_head", "embed_tokens", "q_proj,lm_head,embed_tokens"])
def test_an_adapted_head_parts_from_the_embedding_that_it_shared_its_weights_with(
    targets: str, world: Path, tmp_path: Path
) -> None:
    save_language_model(world / "tied", tied=True)
    settings = (*MATH, "task.model=tied", "task.lora_rank=2", f"task.lora_targets={targets}", "local.client_lr=0.1")
    simulate(load("mathinstruct", algorithm="fedbuff", settings=settings), out=tmp_path / "run")
    fedecho("export", str(tmp_path / "run"), "--out", str(tmp_path / "new"))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        ours: Any = trained(tmp_path / "run")
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
        assert torch.allclose(model(ids).logits, ours(ids).logits, atol=1e-4)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not tied


def test_where_an_export_goes(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(load("mrpc", algorithm="fedbuff", settings=MRPC), out=tmp_path / "run")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = os.umask(0o027)
    try:
        fedecho("export", str(tmp_path / "run"), "--out", str(tmp_path / "link"))
    finally:
        os.umask(before)
    assert (tmp_path / "link").is_symlink()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "real").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == 0o640
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "already exists" in fedecho("export", str(tmp_path / "run"), "--out", ".", code=2)
    with (world / "MRPC" / "train.tsv").open("a") as file:
        file.write("2\t1\t2\ta third\tclass\n")
    said = fedecho("export", str(tmp_path / "run"), "--out", "new", code=2)
    assert "does not fit the task" in said
    assert "check that its model and data are those of the run" in said.replace("\n", " ")


def test_what_cannot_be_exported_is_a_line(tmp_path: Path) -> None:
    experiment = load("digits", algorithm="fedbuff", versions=2, settings=("eval_every=2", "task.width=1"))
    run, new = tmp_path / "run", str(tmp_path / "new")

    def stop(moment: object, scores: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(experiment, out=run, watch=stop)
    assert "holds an unfinished run" in fedecho("export", str(run), "--out", new, code=2)
    assert "no run" in fedecho("export", str(tmp_path / "nothing"), "--out", new, code=2)
    shutil.rmtree(run)
    simulate(experiment, out=run)
    assert "already exists" in fedecho("export", str(run), "--out", str(run), code=2)
    whole = load_file(run / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in whole.items()}, run / "model.safetensors", metadata={"format": "pt"})
    assert "is not the model of this run" in fedecho("export", str(run), "--out", new, code=2)
    (run / "model.safetensors").write_bytes(b"damaged")
    assert "cannot read" in fedecho("export", str(run), "--out", new, code=2)
    header, _, rest = (run / "run.jsonl").read_text().partition("\n")
    (run / "run.jsonl").write_text(json.dumps(json.loads(header) | {"config": None}) + "\n" + rest)
    with pytest.raises(ConfigError, match=r"used your own task or method: give its experiment"):
        trained(run)


def test_another_experiment_is_refused(tmp_path: Path) -> None:
    experiment = load("digits", algorithm="fedbuff", versions=2, settings=("eval_every=2", "task.width=1"))
    simulate(experiment, out=tmp_path / "run")
    trained(tmp_path / "run", experiment)
    with pytest.raises(ConfigError, match="another configuration"):
        trained(tmp_path / "run", replace(experiment, seed=1))
