"""Models of the Hugging Face kind, from a folder or, if a name at the hub is given, from there. Never unpickles anything."""

import importlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from inspect import signature
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from fedecho.storage.files import file_sha256
from fedecho.storage.user_files import check_file

FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
CONFIG = "config.json"
WORDS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "generation_config.json",
)
"""Files that say how texts become tokens and back, and where an answer ends."""
TYPES = "token_type_ids"
OWN_TOKENIZER = "put its own tokenizer beside it, or resize its embeddings (resize_token_embeddings) and save it again"
USUAL_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
ADAPTERS = "adapter_config.json"
OFFLINE = {"local_files_only": True, "trust_remote_code": False}
"""A folder is read as it is: nothing is fetched, and no program that lies in it is run."""
COMMIT = re.compile(r"[0-9a-f]{40}")
PACKING = ("llama", "qwen2", "qwen3")
"""Models known to keep apart several texts in a row, given positions and a mask that do (tests/tasks/test_few_shapes.py)."""
ENDLESS = 10**9
"""Where neither tokenizer nor model sets a limit; a tokenizer says 10**30 then, which is too long for a tensor's index."""


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
    if (folder / ADAPTERS).is_file():  # transformers would load them on top, and freeze all else
        raise ValueError(
            f"{folder} holds adapters ({ADAPTERS}): merge them into their model (merge_and_unload), save that, and give its folder"
        )
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} holds no {CONFIG}: give a folder that a model was saved into with save_pretrained")
    for path in {path for pattern in FILES for path in folder.glob(pattern) if not path.is_dir()}:
        check_file(path)  # a pipe among them would never be read to its end
    return folder


def _from_hub(name: str) -> Path:
    download = library("huggingface_hub").snapshot_download
    try:
        with quiet():
            return Path(download(name, allow_patterns=list(FILES)))
    except Exception as error:  # whatever its network library raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = shorten(first, 160, placeholder=" ...")
        raise ValueError(
            f"there is no model folder {name}, and the hub did not give it ({reason}): check the name and the network "
            "(HF_HUB_OFFLINE=1 uses only what is cached), or set task.model to the folder of a saved copy"
        ) from None


def files_of(folder: Path) -> str:
    """Which model this is: the SHA-256 of the configuration and the weights, and that of the tokenizer; before them its commit at
    the hub, if it lies where the hub's cache would keep it. Anybody may change what lies there, so its name alone says little.

    Records of before have the first alone, which is how this begins.
    """
    cached = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    commit = f"hub commit {folder.name}, " if cached and COMMIT.fullmatch(folder.name) else ""
    words = sorted({path for pattern in WORDS for path in folder.glob(pattern) if path.is_file()})
    return f"{commit}{_digest([folder / CONFIG, *sorted(folder.glob('*.safetensors'))])}, tokenizer {_digest(words)}"


def _digest(paths: Iterable[Path]) -> str:
    lines = "".join(f"{path.name} {file_sha256(path)}\n" for path in paths)
    return f"sha256 {sha256(lines.encode()).hexdigest()}"


def load_tokenizer(folder: Path, pad_token: str | None = None) -> Any:
    """The tokenizer, which must be able to pad."""
    with quiet(), _loading(folder, "its tokenizer"):
        tokenizer = library("transformers").AutoTokenizer.from_pretrained(folder, **OFFLINE)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # made up for want of files: it knows no word
        raise ValueError(
            f"{folder} holds no tokenizer: put the model's own beside its weights (tokenizer.json, vocab.txt or the like)"
        )
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():  # the unknown token itself may pad: GPT-2 has one token for everything
            raise ValueError(f"task.pad_token {pad_token!r} is not in the vocabulary of {folder}")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        usual = (word for word in (tokenizer.eos_token, *USUAL_PADS) if word in tokenizer.get_vocab())
        word = next(usual, next(iter(tokenizer.get_vocab())))
        raise ValueError(f"the tokenizer of {folder} has no pad token: set task.pad_token, for example to {word!r}")
    known = num_tokens(folder)
    if known is not None and tokenizer.pad_token_id >= known:
        told = f"the pad token {tokenizer.pad_token!r} is token {tokenizer.pad_token_id}, but the model in {folder} has {known}"
        raise ValueError(f"{told}: {OWN_TOKENIZER}, or set task.pad_token to one that it has")
    return tokenizer


def longest(folder: Path, tokenizer: Any) -> int:
    """How many tokens the model can take; one that says nothing, or less than one, takes any number."""
    config = _config(folder).get_text_config()
    limits = [getattr(config, name, None) or 0 for name in ("max_position_embeddings", "n_positions")]
    taken = _positions_taken(folder) if max(limits) > 0 else 0
    return min(int(tokenizer.model_max_length), *(int(limit) - taken for limit in limits if limit > 0), ENDLESS)


def _positions_taken(folder: Path) -> int:
    """RoBERTa and its kin number positions from the padding token's number plus one on, and so take that many tokens fewer."""
    config = _config(folder)
    try:
        with torch.device("meta"), quiet():
            outline = library("transformers").AutoModel.from_config(config, trust_remote_code=False)
    except Exception:  # whatever its library raises: loading it will say so, and some have a head and no model without one
        return 0
    tables = [module for name, module in outline.named_modules() if name.endswith("position_embeddings")]
    paddings = (getattr(table, "padding_idx", None) for table in tables)
    return max((padding + 1 for padding in paddings if padding is not None), default=0)


def num_tokens(folder: Path) -> int | None:
    """How many tokens the model has numbers for, where its files say so."""
    size = getattr(_config(folder).get_text_config(), "vocab_size", None)
    return None if size is None else int(size)


def packs(folder: Path) -> bool:
    """Can several texts share a row of this language model?"""
    config = _config(folder).get_text_config()
    everywhere = {"full_attention"} >= set(getattr(config, "layer_types", None) or ())
    return config.model_type in PACKING and everywhere and getattr(config, "sliding_window", None) is None


def _config(folder: Path) -> Any:
    with _loading(folder, CONFIG):
        return library("transformers").AutoConfig.from_pretrained(folder, **OFFLINE)


def classifier(folder: Path, num_labels: int, pad_token_id: int) -> nn.Module:
    """A model with a classification head; a head that the files lack is drawn from torch's generator."""
    config = _config(folder)
    headed = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())
    if headed and config.num_labels != num_labels:
        raise ValueError(
            f"{folder} holds a classifier of {config.num_labels} classes, but the training data has {num_labels}: "
            "give a model of as many classes, or one without a head"
        )
    return _load("AutoModelForSequenceClassification", folder, num_labels=num_labels, pad_token_id=pad_token_id)


def wants_types(folder: Path, tokenizer: Any) -> bool:
    """Does the classifier take which sentence a token is of, and does its tokenizer say so as something meant for it?"""
    config = _config(folder)
    kinds = library("transformers").MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in kinds or TYPES not in tokenizer.model_input_names or getattr(config, "type_vocab_size", 2) == 1:
        return False
    return TYPES in signature(kinds[type(config)].forward).parameters


def language_model(folder: Path) -> nn.Module:
    """A causal language model whose logits are its head applied to its last hidden states, nothing in between.

    Of what its files say of generation only the tokens that end a text are kept: penalties and sampling are no greedy answer.
    """
    model: Any = _load("AutoModelForCausalLM", folder)
    model.generation_config = library("transformers").GenerationConfig(eos_token_id=stop_tokens(model) or None)
    ids = torch.arange(4)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        hidden = model.eval().base_model(ids, use_cache=False).last_hidden_state
        if not bool(hidden.isfinite().all()):
            raise ValueError(f"{folder}: this model's answers are not finite: are its weights damaged?")
        if not torch.allclose(model.get_output_embeddings()(hidden), model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-3):
            kinds = ", ".join(model.config.architectures or ())
            named = f" (it was saved as {kinds}: is it a causal language model?)" if kinds and "CausalLM" not in kinds else ""
            raise ValueError(f"{folder}: this model changes its logits after the output layer, which is not supported{named}")
    language: nn.Module = model
    return language


def stop_tokens(model: Any) -> list[int]:
    """The tokens that the model's own files say end a text; there may be several, or none."""
    ends = model.generation_config.eos_token_id
    ends = getattr(model.config, "eos_token_id", None) if ends is None else ends
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def save_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    """A folder from which transformers loads both."""
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _load(kind: str, folder: Path, **options: Any) -> nn.Module:
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds no .safetensors weights (pickled .bin files are not read): save the model again")
    with quiet(), _loading(folder, "its weights"):
        model: nn.Module = getattr(library("transformers"), kind).from_pretrained(
            folder, use_safetensors=True, **OFFLINE, **_in_float32(), **options
        )
    return model


def _in_float32() -> dict[str, Any]:
    """Version 5 is asked for; an older one that a machine already has calls the same option torch_dtype."""
    major = int(str(library("transformers").__version__).partition(".")[0])
    return {"dtype" if major >= 5 else "torch_dtype": torch.float32}


@contextmanager
def _loading(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged or foreign file raises whatever its reader likes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "ignore_mismatched_sizes" in reason:  # it speaks of a report that is not shown
            reason = f"their sizes are not those that {CONFIG} gives"
        if "trust_remote_code" in str(error):
            reason = "it needs a program that lies beside it, and no such program is run here"
        raise ValueError(f"cannot load {what} from {folder}: {shorten(reason, 200, placeholder=' ...')}") from None
