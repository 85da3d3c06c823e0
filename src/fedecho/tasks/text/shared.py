"""Helpers shared by the text tasks: precision, sequence limits, data files and digests."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import torch

from fedecho.storage.files import file_sha256
from fedecho.tasks.data_files import expand_home, find, find_model
from fedecho.tasks.text.pretrained import OWN_TOKENIZER, num_tokens
from fedecho.tasks.text.readers import LineError


class HasSource(Protocol):
    """Data with a location in a file."""

    @property
    def path(self) -> Path: ...

    @property
    def line(self) -> int: ...


def computing(device: str, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Compute matrix products in bf16 if requested and supported; weights and losses stay in float32."""
    return torch.autocast(torch.device(device).type, dtype) if has_lower(device, dtype) else nullcontext()


def has_lower(device: str, dtype: torch.dtype) -> bool:
    """Whether a lower precision is requested and supported. A GPU that only emulates bf16 is faster in float32."""
    if dtype == torch.float32:
        return False
    return torch.device(device).type != "cuda" or _cuda_has_bf16()


def _cuda_has_bf16() -> bool:
    supported: Callable[..., bool] = torch.cuda.is_bf16_supported
    try:
        return supported(including_emulation=False)
    except TypeError:  # older torch without emulation lacks the argument
        return supported()


def checked_max_length(max_length: int | None, limit: int) -> int:
    """Return the token limit of a text; raise if ``max_length`` exceeds the model's limit."""
    if max_length is not None and max_length > limit:
        raise ValueError(f"task.max_length must be at most the model's limit of {limit} tokens, got {max_length}")
    return limit if max_length is None else max_length


def check_rows(
    rows: Sequence[Sequence[int]], texts: Sequence[HasSource], max_tokens: int, folder: Path, tokenizer: Any
) -> None:
    """Raise if a text is too long or has tokens that the model in ``folder`` lacks (another model's tokenizer may have more)."""
    vocab_size = num_tokens(folder)
    for row, text in zip(rows, texts, strict=True):
        largest = max(row, default=0)
        if len(row) > max_tokens:
            problem = f"{len(row)} tokens exceed the model's limit of {max_tokens}"
            raise LineError(text.path, text.line, f"{problem}: set task.max_length to truncate")
        if vocab_size is not None and largest >= vocab_size:
            token = f"{tokenizer.convert_ids_to_tokens(largest)!r} is token {largest}"
            problem = f"{token}, but the model in {folder} has {vocab_size}"
            raise LineError(text.path, text.line, f"{problem}: {OWN_TOKENIZER}")


def between_sentences(tokenizer: Any) -> str:
    """Return the separator to put before a second sentence; empty if the tokenizer adds its own.

    BERT's tokenizer puts a token between the sentences. GPT-2's and Qwen's do not: "a cat" and "a dog" would become "a cata dog".
    """
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("one", "other"))
    for between in ("", "\n", tokenizer.sep_token, tokenizer.eos_token):
        if between is not None and not _contains(tokenizer("one", f"{between}other")["input_ids"], first + second):
            return str(between)
    raise ValueError(
        f"the tokenizer of {tokenizer.name_or_path} puts nothing between two sentences and has no token to separate them: "
        "use a model whose tokenizer has one (sep_token or eos_token)"
    )


def _contains(row: list[int], part: list[int]) -> bool:
    return any(row[start : start + len(part)] == part for start in range(len(row) - len(part) + 1))


def file_of(setting: str, given: str, known: dict[str, tuple[str, str]], data_dir: str | None) -> Path:
    """Return the path of a known dataset's file (``known``: name -> dataset and file) or of a user's own file."""
    if given in known:
        name, file = known[given]
        return find(name, None if data_dir is None else Path(data_dir)) / file
    own = expand_home(Path(given))
    if not own.exists():
        close = get_close_matches(given, known, n=1)
        if close and not own.suffix:
            raise ValueError(f"{setting}: there is no {given!r}: did you mean {close[0]!r}?")
        where = "" if own.is_absolute() else f" in {Path.cwd()}: give its full path"
        raise ValueError(f"{setting}: there is no file {given}{where}")
    return own


def file_digests(files: Mapping[str, str], known: dict[str, tuple[str, str]], data_dir: str | None) -> dict[str, str]:
    """Return the SHA-256 of the file that each setting names."""
    return {setting: file_sha256(file_of(setting, given, known, data_dir)) for setting, given in files.items()}


def resolve_model(model: str, data_dir: str | None) -> str:
    """Return the folder or hub name of ``task.model``; raise if it cannot be either."""
    if not model.strip():
        raise ValueError("task.model is empty: set it to the folder of a saved model or to a hub name (owner/model)")
    if expand_home(Path(model)).is_file():
        raise ValueError(f"task.model {model} is a file: set it to the folder that the model was saved to")
    return find_model(model, None if data_dir is None else Path(data_dir))


def stand_in(model: str, paper: str) -> str:
    """Describe a model that replaces the paper's; empty for the paper's own."""
    ours, theirs = Path(model).name, paper.rpartition("/")[2]
    return "" if ours.lower() == theirs.lower() else f"{ours} in place of {theirs}"
