"""Bad input of the text tasks: one clear line, exit code 2, no traceback, and no download unless a hub's name is given."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_text import save_classifier, save_language_model, write_world
from typer.testing import CliRunner, Result

from fedecho.cli import app
from fedecho.tasks.text import pretrained

MRPC = ["run", "mrpc", "--versions", "1", "--set", "task.model=tiny-bert", "--set", "task.unlabeled_size=4"]
MATH = ["run", "mathinstruct", "--versions", "1", "--set", "task.model=tiny-llama", "--set", "task.train=gsm8k-train"]
MATH += ["--set", "task.num_unlabeled=4"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def data(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may spoil."""
    monkeypatch.setenv("FEDECHO_DATA", str(shutil.copytree(made, tmp_path / "data")))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def one_clear_line(words: list[str], *parts: str) -> None:
    result: Result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    said = result.stderr.strip()
    assert "\n" not in said
    assert "Traceback" not in said
    for part in parts:
        assert part in said


def test_a_broken_row(data: Path) -> None:
    path = data / "MRPC" / "train.tsv"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[4] = lines[4].replace("\t", " ", 1)
    path.write_text("\n".join(lines), encoding="utf-8")
    one_clear_line(MRPC, "train.tsv, line 5", "has 4 columns", "header has 5")


def test_an_empty_client(data: Path) -> None:
    one_clear_line([*MRPC, "--set", "task.num_clients=61"], "60 examples cannot fill 61 parts", "fewer clients")
    thin = ["--set", "task.partition.alpha=0.001"]
    one_clear_line(
        [*MRPC, "--set", "task.num_clients=20", *thin], "gave each of 20 clients at least 1 in any of", "larger alpha"
    )


def test_a_tokenizer_without_a_pad_token(data: Path) -> None:
    save_language_model(data / "no-pad", pad_token=None)
    one_clear_line([*MATH, "--set", "task.model=no-pad"], "no pad token", "task.pad_token", "</s>")


def test_a_model_without_a_tokenizer(data: Path) -> None:
    """transformers would make one up that knows no word, and the run would train on that."""
    for kind, words in (("tiny-bert", MRPC), ("tiny-llama", MATH)):
        for path in (data / kind).iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                path.unlink()
        one_clear_line(words, kind, "tokenizer")


def test_a_tokenizer_that_knows_more_tokens_than_the_model(data: Path) -> None:
    for kind, words in (("tiny-bert", MRPC), ("tiny-llama", MATH)):
        config = pretrained.library("transformers").AutoConfig.from_pretrained(data / kind)
        size, config.vocab_size = config.vocab_size, 20
        model_of = "AutoModelForSequenceClassification" if kind == "tiny-bert" else "AutoModelForCausalLM"
        getattr(pretrained.library("transformers"), model_of).from_config(config).save_pretrained(data / kind)
        assert size > 20
        one_clear_line(words, "line 2: " if kind == "tiny-bert" else "line ", "but the model in", "has 20", "its own tokenizer")


@pytest.mark.parametrize(
    ("template", "said"),
    [("{% for m in %}", "Expected an expression"), ("{{ raise_exception('no user here') }}", "no user here")],
)
def test_a_chat_template_that_cannot_be_used(template: str, said: str, data: Path) -> None:
    (data / "tiny-llama" / "chat_template.jinja").write_text(template)
    one_clear_line(MATH, "the chat template of", "tiny-llama", said, "use plain text")


def test_weights_of_other_sizes_than_the_configuration(data: Path) -> None:
    config = (data / "tiny-llama" / "config.json").read_text()
    (data / "tiny-llama" / "config.json").write_text(config.replace('"intermediate_size": ', '"intermediate_size": 1'))
    one_clear_line(MATH, "cannot load its weights from", "their sizes do not match config.json")


def test_a_model_that_is_a_file_or_nothing(data: Path) -> None:
    one_clear_line(
        [*MRPC, "--set", f"task.model={data / 'MRPC' / 'dev.tsv'}"],
        "dev.tsv is a file",
        "the folder that the model was saved to",
    )
    one_clear_line([*MRPC, "--set", "task.model="], "task.model is empty", "the folder of a saved model")


def test_a_file_in_another_encoding(data: Path) -> None:
    path = data / "MRPC" / "train.tsv"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\xe9", 3))
    one_clear_line(MRPC, "train.tsv, line 2: not UTF-8", "save the file as UTF-8")


def test_settings_of_control_variates_for_a_method_that_has_none(data: Path) -> None:
    for setting in ("local.corrected=step", "local.correct_unseen=false"):
        one_clear_line([*MRPC, "--set", setting], "local.corrected and local.correct_unseen", "fedac", "leave them out")


def test_a_pad_token_that_the_model_has_no_number_for(data: Path) -> None:
    """Added to the tokenizer and not to the model: as common as it is fatal, in the middle of a run."""
    for kind, words in (("tiny-bert", MRPC), ("tiny-llama", MATH)):
        tokenizer = pretrained.library("transformers").AutoTokenizer.from_pretrained(data / kind)
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        tokenizer.save_pretrained(data / kind)
        one_clear_line(
            words, "the pad token '[PAD]' is number 330", "has 330 tokens", "resize_token_embeddings", "task.pad_token"
        )


def test_a_folder_of_adapters(data: Path) -> None:
    for kind, words in (("tiny-bert", MRPC), ("tiny-llama", MATH)):
        (data / kind / "adapter_config.json").write_text("{}")
        one_clear_line(words, f"{kind} contains adapters (adapter_config.json)", "merge_and_unload")


def test_a_model_with_a_program_of_its_own(data: Path) -> None:
    """It is neither run nor offered to be."""
    for kind, words in (("tiny-bert", MRPC), ("tiny-llama", MATH)):
        path = data / kind / "config.json"
        config = json.loads(path.read_text()) | {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig"}}
        path.write_text(json.dumps(config))
        (data / kind / "mine.py").write_text(f"import pathlib\npathlib.Path({str(data / 'ran')!r}).touch()\n")
        one_clear_line(words, f"from {data / kind}", "such code is not run here")
    assert not (data / "ran").exists()


def test_weights_that_are_not_finite(data: Path) -> None:
    weights = load_file(data / "tiny-llama" / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, data / "tiny-llama" / "model.safetensors", metadata={"format": "pt"})
    one_clear_line(MATH, "tiny-llama: this model's outputs are not finite", "damaged")


def test_adapters_that_were_asked_for_wrongly(data: Path) -> None:
    one_clear_line(
        [*MATH, "--set", "task.lora_rank=2", "--set", "task.lora_targets=q_proj,vproj"], "no layer 'vproj'", "v_proj"
    )
    one_clear_line([*MATH, "--set", "task.lora_alpha=32"], "need task.lora_rank")


def test_a_file_that_is_not_there_is_named_with_its_setting(data: Path, tmp_path: Path) -> None:
    for words, name in ((MRPC, "train"), (MRPC, "dev"), (MRPC, "unlabeled"), (MATH, "train"), (MATH, "test")):
        said = (f"task.{name}: there is no file none.tsv in {tmp_path}", "give its full path")
        one_clear_line([*words, "--set", f"task.{name}=none.tsv"], *said)
    for key in ("train", "model"):
        one_clear_line([*MRPC, "--set", f"task.{key}=~nobody-here/x.tsv"], "there is no home folder of ~nobody-here")
    one_clear_line([*MRPC, "--set", "task.dev=mrpc-dew"], "task.dev: there is no 'mrpc-dew': did you mean 'mrpc-dev'?")
    one_clear_line(
        [*MATH, "--set", "task.train=gsm8k-trian"], "task.train: there is no 'gsm8k-trian': did you mean 'gsm8k-train'?"
    )
    one_clear_line(
        [*MATH, "--set", "task.num_unlabeled=40"], "task.num_unlabeled = 40 leaves 7 examples of gsm8k-train for 10 clients"
    )


def test_more_questions_than_there_are(data: Path) -> None:
    one_clear_line([*MATH, "--set", "task.num_test=9999"], "task.num_test is 9999, but gsm8k-test has 6 questions")


def test_texts_longer_than_the_model_takes(data: Path) -> None:
    save_classifier(data / "short", room=16)
    one_clear_line([*MRPC, "--set", "task.model=short"], "line ", "exceed the model's limit of 16", "task.max_length")


def test_weights_that_are_missing(data: Path) -> None:
    one_clear_line([*MRPC, "--set", "task.model=nowhere"], "no model folder nowhere", "task.model", "--data-dir")
    one_clear_line([*MRPC, "--set", "task.model=/nowhere/v2/tiny-bert"], "no model folder /nowhere/v2/tiny-bert")
    one_clear_line([*MATH, "--set", "task.model=tiny-bert"], "saved as Bert", "is it a causal language model?")
    (data / "empty").mkdir()
    one_clear_line([*MRPC, "--set", "task.model=empty"], "empty contains no config.json")
    (data / "tiny-bert" / "model.safetensors").unlink()
    one_clear_line(MRPC, "tiny-bert contains no .safetensors weights")
    (data / "tiny-llama" / "model.safetensors").write_bytes(b"damaged")
    one_clear_line(MATH, "cannot load its weights from", "tiny-llama")
    (data / "tiny-llama" / "config.json").write_text("{}")
    one_clear_line(MATH, "cannot load", "tiny-llama")


def test_an_unlabeled_set_of_nothing(data: Path) -> None:
    one_clear_line([*MRPC, "--set", "task.unlabeled_size=0"], "FedEcho needs an unlabeled set", "has 0 examples")
    one_clear_line([*MATH, "--set", "task.num_unlabeled=0"], "FedEcho needs an unlabeled set", "has 0 examples")


def test_a_head_of_other_classes(data: Path) -> None:
    rows = [f'{{"sentence1": "one {n}", "sentence2": "two {n}", "label": {n % 3}}}' for n in range(60)]
    (data / "three.jsonl").write_text("\n".join(rows))
    own = ["--set", f"task.train={data / 'three.jsonl'}", "--set", f"task.dev={data / 'three.jsonl'}"]
    transformers = pretrained.library("transformers")
    model = transformers.BertForSequenceClassification.from_pretrained(data / "tiny-bert", num_labels=2)
    model.save_pretrained(data / "tiny-bert")
    one_clear_line([*MRPC, *own], "tiny-bert", "a classifier for 2 classes", "training data has 3")


def test_a_bank_of_tokens_where_there_are_none(data: Path) -> None:
    for setting in ("token_bank=exact", "top_k=8"):
        one_clear_line([*MRPC, "--set", f"algorithm.distiller.{setting}"], "distiller.token_bank and top_k", "MrpcTask")


def test_data_that_is_missing(data: Path) -> None:
    one_clear_line([*MATH, "--set", "task.train=mathinstruct"], "mathinstruct is missing", "--data-dir")
    one_clear_line([*MATH, "--set", "task.train=nowhere.jsonl"], f"there is no file nowhere.jsonl in {Path.cwd()}")
    (data / "MRPC" / "dev.tsv").unlink()
    one_clear_line([*MRPC], "there is no file", "dev.tsv")


def test_a_hub_that_cannot_be_reached(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, asked = pretrained.library("huggingface_hub"), []

    def unreachable(name: str, **options: object) -> str:
        asked.append(name)
        raise OSError("cannot reach the hub\nand more")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    one_clear_line([*MRPC, "--set", "task.model=someone/some-bert"], "someone/some-bert", "cannot reach", "HF_HUB_OFFLINE")
    assert asked == ["someone/some-bert"]
    one_clear_line([*MRPC, "--set", "task.model=some-bert"], "no model folder some-bert")
    assert len(asked) == 1, "nothing is asked for a name that has no owner"


def test_offline_the_cache_alone_is_looked_at(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads HF_HUB_OFFLINE when it is imported; this is what it sets."""
    constants = pretrained.library("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    one_clear_line([*MRPC, "--set", "task.model=someone/some-bert"], "someone/some-bert", "set task.model to the folder")


def test_libraries_that_are_missing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(pretrained.importlib, "import_module", absent)
    one_clear_line(MRPC, "transformers", "pip install 'fedecho[text]'")
