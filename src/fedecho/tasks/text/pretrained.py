"""Load Hugging Face models from a folder or from the hub. Never unpickles anything."""

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
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "generation_config.json",
)
"""Files that define tokenization and where an answer ends."""
TYPES = "token_type_ids"
OWN_TOKENIZER = "save it with its own tokenizer, or resize its embeddings (resize_token_embeddings) and save it again"
USUAL_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
ADAPTERS = "adapter_config.json"
OFFLINE = {"local_files_only": True, "trust_remote_code": False}
"""Read a folder as it is: fetch nothing, and run no code from it."""
COMMIT = re.compile(r"[0-9a-f]{40}")
PACKING = ("llama", "qwen2", "qwen3")
"""Model types that keep packed texts apart, given positions and a mask (tested in tests/tasks/test_few_shapes.py)."""
ENDLESS = 10**9
"""Limit if neither tokenizer nor model sets one; the tokenizer's own 10**30 is too large for a tensor index."""


def library(name: str) -> Any:
    """Import transformers or peft when first needed; raise if not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"text tasks need {name} ({error}): pip install 'fedecho[text]'") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars and loading reports, so that a user's mistake gives a one-line error."""
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
    """Return the folder itself or the cached copy of a hub name. Only names use the network; HF_HUB_OFFLINE is respected."""
    folder = Path(place) if Path(place).is_dir() else _from_hub(place)
    if (folder / ADAPTERS).is_file():  # transformers would apply them and freeze everything else
        raise ValueError(
            f"{folder} contains adapters ({ADAPTERS}): merge them into the model (merge_and_unload) and give the merged folder"
        )
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} contains no {CONFIG}: give a folder that a model was saved to with save_pretrained")
    for path in {path for pattern in FILES for path in folder.glob(pattern) if not path.is_dir()}:
        check_file(path)  # reading a named pipe would never end
    return folder


def _from_hub(name: str) -> Path:
    download = library("huggingface_hub").snapshot_download
    try:
        with quiet():
            return Path(download(name, allow_patterns=list(FILES)))
    except Exception as error:  # the network library can raise anything
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = shorten(first, 160, placeholder=" ...")
        raise ValueError(
            f"there is no model folder {name}, and downloading it from the hub failed ({reason}): check the name and the network "
            "(HF_HUB_OFFLINE=1 uses only the cache), or set task.model to the folder of a saved copy"
        ) from None


def files_of(folder: Path) -> str:
    """Identify a model by the SHA-256 of its configuration and weights, and that of its tokenizer.

    In the hub's cache, the commit comes first. The hashes are needed as well because cached files can be modified.
    """
    cached = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    commit = f"hub commit {folder.name}, " if cached and COMMIT.fullmatch(folder.name) else ""
    words = sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    return f"{commit}{_digest([folder / CONFIG, *sorted(folder.glob('*.safetensors'))])}, tokenizer {_digest(words)}"


def _digest(paths: Iterable[Path]) -> str:
    lines = "".join(f"{path.name} {file_sha256(path)}\n" for path in paths)
    return f"sha256 {sha256(lines.encode()).hexdigest()}"


def load_tokenizer(folder: Path, pad_token: str | None = None) -> Any:
    """Load the tokenizer; raise if it cannot pad."""
    with quiet(), _loading(folder, "its tokenizer"):
        tokenizer = library("transformers").AutoTokenizer.from_pretrained(folder, **OFFLINE)
    # Without tokenizer files, transformers makes an empty one.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"{folder} contains no tokenizer: add the model's own tokenizer files (tokenizer.json, vocab.txt or similar)"
        )
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():  # it may be the unknown token: GPT-2 has one token for everything
            raise ValueError(f"task.pad_token {pad_token!r} is not in the vocabulary of {folder}")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        usual = (word for word in (tokenizer.eos_token, *USUAL_PADS) if word in tokenizer.get_vocab())
        word = next(usual, next(iter(tokenizer.get_vocab())))
        raise ValueError(f"the tokenizer of {folder} has no pad token: set task.pad_token, for example to {word!r}")
    vocab_size = num_tokens(folder)
    if vocab_size is not None and tokenizer.pad_token_id >= vocab_size:
        pad = f"pad token {tokenizer.pad_token!r} is number {tokenizer.pad_token_id}"
        raise ValueError(
            f"the {pad}, but the model in {folder} has {vocab_size} tokens: {OWN_TOKENIZER}, or set task.pad_token to a known one"
        )
    return tokenizer


def max_input_tokens(folder: Path, tokenizer: Any) -> int:
    """Return the model's maximum number of input tokens; a missing limit, or one below 1, means no limit."""
    config = _config(folder).get_text_config()
    limits = [getattr(config, name, None) or 0 for name in ("max_position_embeddings", "n_positions")]
    reserved = _reserved_positions(folder) if max(limits) > 0 else 0
    return min(int(tokenizer.model_max_length), *(int(limit) - reserved for limit in limits if limit > 0), ENDLESS)


def _reserved_positions(folder: Path) -> int:
    """Return the number of unusable positions: RoBERTa and similar models count positions from the padding index plus one."""
    config = _config(folder)
    try:
        with torch.device("meta"), quiet():
            outline = library("transformers").AutoModel.from_config(config, trust_remote_code=False)
    except Exception:  # loading the model will report the error; some models exist only with a head
        return 0
    tables = [module for name, module in outline.named_modules() if name.endswith("position_embeddings")]
    paddings = (getattr(table, "padding_idx", None) for table in tables)
    return max((padding + 1 for padding in paddings if padding is not None), default=0)


def num_tokens(folder: Path) -> int | None:
    """Return the model's vocabulary size, if its files give it."""
    size = getattr(_config(folder).get_text_config(), "vocab_size", None)
    return None if size is None else int(size)


def supports_packing(folder: Path) -> bool:
    """Whether several texts can share a row of this language model's input."""
    config = _config(folder).get_text_config()
    full_attention = {"full_attention"} >= set(getattr(config, "layer_types", None) or ())
    return config.model_type in PACKING and full_attention and getattr(config, "sliding_window", None) is None


def _config(folder: Path) -> Any:
    with _loading(folder, CONFIG):
        return library("transformers").AutoConfig.from_pretrained(folder, **OFFLINE)


def classifier(folder: Path, num_labels: int, pad_token_id: int) -> nn.Module:
    """Load a model with a classification head; a missing head is drawn from torch's generator."""
    config = _config(folder)
    has_head = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())
    if has_head and config.num_labels != num_labels:
        raise ValueError(
            f"{folder} contains a classifier for {config.num_labels} classes, but the training data has {num_labels}: "
            "use a model with as many classes, or one without a head"
        )
    return _load("AutoModelForSequenceClassification", folder, num_labels=num_labels, pad_token_id=pad_token_id)


def uses_token_types(folder: Path, tokenizer: Any) -> bool:
    """Whether the classifier accepts token types and its tokenizer produces them."""
    config = _config(folder)
    kinds = library("transformers").MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in kinds or TYPES not in tokenizer.model_input_names or getattr(config, "type_vocab_size", 2) == 1:
        return False
    return TYPES in signature(kinds[type(config)].forward).parameters


def language_model(folder: Path) -> nn.Module:
    """Load a causal language model whose logits are exactly its head applied to its last hidden states.

    From its generation settings only the stop tokens are kept: penalties and sampling would change greedy answers.
    """
    model: Any = _load("AutoModelForCausalLM", folder)
    model.generation_config = library("transformers").GenerationConfig(eos_token_id=stop_tokens(model) or None)
    ids = torch.arange(4)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        hidden = model.eval().base_model(ids, use_cache=False).last_hidden_state
        if not bool(hidden.isfinite().all()):
            raise ValueError(f"{folder}: this model's outputs are not finite: its weights may be damaged")
        if not torch.allclose(model.get_output_embeddings()(hidden), model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-3):
            kinds = ", ".join(model.config.architectures or ())
            named = f" (it was saved as {kinds}: is it a causal language model?)" if kinds and "CausalLM" not in kinds else ""
            raise ValueError(f"{folder}: this model changes its logits after the output layer, which is not supported{named}")
    language: nn.Module = model
    return language


def stop_tokens(model: Any) -> list[int]:
    """Return the tokens that end a text according to the model's files; there may be several or none."""
    ends = model.generation_config.eos_token_id
    ends = getattr(model.config, "eos_token_id", None) if ends is None else ends
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def save_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save model and tokenizer to a folder that transformers can load."""
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _load(kind: str, folder: Path, **options: Any) -> nn.Module:
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} contains no .safetensors weights (pickled .bin files are not read): save the model again")
    with quiet(), _loading(folder, "its weights"):
        model: nn.Module = getattr(library("transformers"), kind).from_pretrained(
            folder, use_safetensors=True, **OFFLINE, **_in_float32(), **options
        )
    return model


def _in_float32() -> dict[str, Any]:
    """Return the option for float32 weights; before transformers 5 it was called torch_dtype."""
    major = int(str(library("transformers").__version__).partition(".")[0])
    return {"dtype" if major >= 5 else "torch_dtype": torch.float32}


@contextmanager
def _loading(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged or foreign file can raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "ignore_mismatched_sizes" in reason:  # the original message refers to a report that is not shown
            reason = f"their sizes do not match {CONFIG}"
        if "trust_remote_code" in str(error):
            reason = "it needs code from its folder, and such code is not run here"
        raise ValueError(f"cannot load {what} from {folder}: {shorten(reason, 200, placeholder=' ...')}") from None
