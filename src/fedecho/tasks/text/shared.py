"""What the text tasks share: a pretrained model, its tokenizer and limits, precision, and data files."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from fedecho.storage.files import file_sha256
from fedecho.tasks.data_files import expand_home, find, find_model
from fedecho.tasks.partition import Parts
from fedecho.tasks.text.pretrained import OWN_TOKENIZER, files_of, load_tokenizer, max_input_tokens, model_folder, num_tokens
from fedecho.tasks.text.readers import LineError

KnownFiles = Mapping[str, tuple[str, str]]
"""The dataset and the file of each name that a setting may have."""


class HasSource(Protocol):
    """Data with a location in a file."""

    @property
    def path(self) -> Path: ...

    @property
    def line(self) -> int: ...


class TextTask(ABC):
    """A task on a pretrained model. Each subclass is a frozen dataclass that has these fields."""

    model: str
    max_length: int | None
    pad_token: str | None
    data_dir: str | None
    device: str
    compute: torch.dtype

    def on(self, device: str) -> Self:
        """Return the same task with its tokens on a device."""
        return self._with(device=device)

    def computing_in(self, dtype: torch.dtype) -> Self:
        """Return the same task with matrix products in ``dtype``."""
        return self._with(compute=dtype)

    def in_few_shapes(self) -> Self:
        """Return the same task with few batch shapes in training: texts share rows or get extra padding."""
        return self._with(few_shapes=True)

    def _with(self, **changes: Any) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]

    def num_examples(self, client: int) -> int:
        return self._parts.size(client)

    @property
    def model_files(self) -> str:
        """Identify the initial weights; a resumed run must find the same ones."""
        return files_of(self._folder)

    @property
    @abstractmethod
    def _parts(self) -> Parts: ...

    @cached_property
    def _folder(self) -> Path:
        if not self.model.strip():
            raise ValueError("task.model is empty: set it to the folder of a saved model or to a hub name (owner/model)")
        if expand_home(Path(self.model)).is_file():
            raise ValueError(f"task.model {self.model} is a file: set it to the folder that the model was saved to")
        return model_folder(find_model(self.model, self.data_dir))

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._folder, self.pad_token)

    @cached_property
    def _limit(self) -> int:
        """The model's limit on the tokens of a text."""
        return max_input_tokens(self._folder, self._tokenizer)

    @property
    def _max_tokens(self) -> int:
        """The limit on the tokens of a text, from the settings or the model."""
        if self.max_length is not None and self.max_length > self._limit:
            raise ValueError(
                f"task.max_length must be at most the model's limit of {self._limit} tokens, got {self.max_length}"
            )
        return self._limit if self.max_length is None else self.max_length

    def _computing(self) -> AbstractContextManager[None]:
        """Compute matrix products in bf16 if requested and supported; weights and losses stay in float32."""
        if not has_lower(self.device, self.compute):
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, self.compute)

    def _check_rows(self, rows: Sequence[Sequence[int]], texts: Sequence[HasSource], max_tokens: int) -> None:
        """Raise if a text is too long or has tokens that the model lacks (another model's tokenizer may have more)."""
        vocab_size = num_tokens(self._folder)
        for row, text in zip(rows, texts, strict=True):
            largest = max(row, default=0)
            if len(row) > max_tokens:
                problem = f"{len(row)} tokens exceed the model's limit of {max_tokens}"
                raise LineError(text.path, text.line, f"{problem}: set task.max_length to truncate")
            if vocab_size is not None and largest >= vocab_size:
                token = f"{self._tokenizer.convert_ids_to_tokens(largest)!r} is token {largest}"
                problem = f"{token}, but the model in {self._folder} has {vocab_size}"
                raise LineError(text.path, text.line, f"{problem}: {OWN_TOKENIZER}")

    def _digests(self, known: KnownFiles, **settings: str) -> dict[str, str]:
        """Return the SHA-256 of the file that each setting names."""
        files = {f"task.{name}": file_of(f"task.{name}", given, known, self.data_dir) for name, given in settings.items()}
        return {name: file_sha256(path) for name, path in files.items()}


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


def file_of(setting: str, given: str, known: KnownFiles, data_dir: str | None) -> Path:
    """Return the path of a known dataset's file (``known``: name -> dataset and file) or of a user's own file."""
    if given in known:
        name, file = known[given]
        return find(name, data_dir) / file
    own = expand_home(Path(given))
    if not own.exists():
        close = get_close_matches(given, known, n=1)
        if close and not own.suffix:
            raise ValueError(f"{setting}: there is no {given!r}: did you mean {close[0]!r}?")
        where = "" if own.is_absolute() else f" in {Path.cwd()}: give its full path"
        raise ValueError(f"{setting}: there is no file {given}{where}")
    return own


def stand_in(model: str, paper: str) -> str:
    """Describe a model that replaces the paper's; empty for the paper's own."""
    ours, theirs = Path(model).name, paper.rpartition("/")[2]
    return "" if ours.lower() == theirs.lower() else f"{ours} in place of {theirs}"
