"""Models of the Hugging Face kind, from a folder or, if a name at the hub is given, from there. Never unpickles anything."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
CONFIG = "config.json"


def library(name: str) -> Any:
    """transformers or peft, imported when it is first needed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"text tasks need {name} ({error}): pip install 'fedecho[text]'") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and reports of loading; a user's mistake is one line of ours."""
    logging = library("transformers").utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def model_folder(place: str) -> Path:
    """The folder itself, or the cached copy of a name at the hub: only a name asks the network, and HF_HUB_OFFLINE is obeyed."""
    folder = Path(place) if Path(place).is_dir() else _from_hub(place)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} holds no {CONFIG}: give a folder that a model was saved into with save_pretrained")
    return folder


def _from_hub(name: str) -> Path:
    download = library("huggingface_hub").snapshot_download
    try:
        with quiet():
            return Path(download(name, allow_patterns=list(FILES)))
    except Exception as error:  # whatever its network library raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"there is no model folder {name}, and the hub did not give it ({reason[:120]}): check the name and the network "
            "(HF_HUB_OFFLINE=1 uses only what is cached), or set task.model to the folder of a saved copy"
        ) from None


def load_tokenizer(folder: Path, pad_token: str | None = None) -> Any:
    """The tokenizer, which must be able to pad."""
    with quiet(), _loading(folder, "its tokenizer"):
        tokenizer = library("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if pad_token is not None:
        if tokenizer.convert_tokens_to_ids(pad_token) in (None, tokenizer.unk_token_id):
            raise ValueError(f"task.pad_token {pad_token!r} is not in the vocabulary of {folder}")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        end = tokenizer.eos_token or "one of its tokens"
        raise ValueError(f"the tokenizer of {folder} has no pad token: set task.pad_token, for example to {end!r}")
    return tokenizer


def longest(folder: Path, tokenizer: Any) -> int:
    """How many tokens the model can take."""
    with _loading(folder, CONFIG):
        config = library("transformers").AutoConfig.from_pretrained(folder, local_files_only=True)
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    return min(int(limit) for limit in (*limits, tokenizer.model_max_length) if limit)


def classifier(folder: Path, num_labels: int, pad_token_id: int) -> nn.Module:
    """A model with a classification head; a head that the files lack is drawn from torch's generator."""
    return _load("AutoModelForSequenceClassification", folder, num_labels=num_labels, pad_token_id=pad_token_id)


def language_model(folder: Path) -> nn.Module:
    """A causal language model whose logits are its head applied to its last hidden states, nothing in between."""
    model: Any = _load("AutoModelForCausalLM", folder)
    ids = torch.arange(4)[None] % model.config.vocab_size
    with torch.no_grad():
        hidden = model.eval().base_model(ids, use_cache=False).last_hidden_state
        if not torch.allclose(model.get_output_embeddings()(hidden), model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-3):
            raise ValueError(f"{folder}: this model changes its logits after the output layer, which is not supported")
    language: nn.Module = model
    return language


def _load(kind: str, folder: Path, **options: Any) -> nn.Module:
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds no .safetensors weights (pickled .bin files are not read): save the model again")
    with quiet(), _loading(folder, "its weights"):
        model: nn.Module = getattr(library("transformers"), kind).from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, **options
        )
    return model


@contextmanager
def _loading(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged or foreign file raises whatever its reader likes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot load {what} from {folder}: {reason[:200]}") from None


def with_lora(model: nn.Module, rank: int, alpha: float, targets: str) -> nn.Module:
    """The same model with low-rank adapters, which alone are trained. ``targets``: all-linear, or names separated by commas."""
    peft = library("peft")
    names = targets if targets == "all-linear" else [name.strip() for name in targets.split(",")]
    try:
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=names, bias="none")
        adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ValueError(f"task.lora_targets {targets!r} does not fit this model: {str(error).splitlines()[0][:160]}") from None
    for name, param in adapted.named_parameters():
        param.requires_grad_("lora_" in name)
    return adapted
