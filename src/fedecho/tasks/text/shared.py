"""What the text tasks share: device and precision, sequence limits, data files and digests."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import torch

from fedecho.storage.files import file_sha256
from fedecho.tasks.data_files import at_home, find, find_model
from fedecho.tasks.text.pretrained import OWN_TOKENIZER, num_tokens
from fedecho.tasks.text.readers import BadLine


class Placed(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def line(self) -> int: ...


def computing(device: str, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Matrix products in bf16 where that was asked for and the hardware has it; weights and losses stay in float32."""
    return torch.autocast(torch.device(device).type, dtype) if has_lower(device, dtype) else nullcontext()


def has_lower(device: str, dtype: torch.dtype) -> bool:
    """Is a lower precision asked for that the device computes in? A GPU that only emulates bf16 is faster in float32."""
    if dtype == torch.float32:
        return False
    return torch.device(device).type != "cuda" or _cuda_has_bf16()


def _cuda_has_bf16() -> bool:
    supported: Callable[..., bool] = torch.cuda.is_bf16_supported
    try:
        return supported(including_emulation=False)
    except TypeError:  # a torch that does not emulate has no such question
        return supported()


def room_for(max_length: int | None, limit: int) -> int:
    """The most tokens of a text: what was asked for, within what the model can take."""
    if max_length is not None and max_length > limit:
        raise ValueError(f"task.max_length must be at most the model's limit of {limit} tokens, got {max_length}")
    return limit if max_length is None else max_length


def check_rows(rows: Sequence[Sequence[int]], texts: Sequence[Placed], room: int, folder: Path, tokenizer: Any) -> None:
    """Are the tokens of every text such as the model in ``folder`` can take? A tokenizer of another one may know more of them."""
    known = num_tokens(folder)
    for row, text in zip(rows, texts, strict=True):
        largest = max(row, default=0)
        if len(row) > room:
            told = f"{len(row)} tokens are more than the {room} that the model takes: set task.max_length to cut"
            raise BadLine(text.path, text.line, told)
        if known is not None and largest >= known:
            told = f"{tokenizer.convert_ids_to_tokens(largest)!r} is token {largest}, but the model in {folder} has {known}"
            raise BadLine(text.path, text.line, f"{told}: {OWN_TOKENIZER}")


def between_sentences(tokenizer: Any) -> str:
    """What must be written before a second sentence so that it does not run into the first; nothing where the tokenizer sees to it.

    BERT's kind puts a token of its own between them. GPT-2's and Qwen's do not: "a cat" and "a dog" would be read as "a cata dog".
    """
    one, other = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("one", "other"))
    for between in ("", "\n", tokenizer.sep_token, tokenizer.eos_token):
        if between is not None and not _holds(tokenizer("one", f"{between}other")["input_ids"], one + other):
            return str(between)
    raise ValueError(
        f"the tokenizer of {tokenizer.name_or_path} puts nothing between two sentences, and has no token that could stand there: "
        "give a model whose tokenizer has one (sep_token or eos_token)"
    )


def _holds(row: list[int], part: list[int]) -> bool:
    return any(row[start : start + len(part)] == part for start in range(len(row) - len(part) + 1))


def file_of(setting: str, given: str, known: dict[str, tuple[str, str]], data_dir: str | None) -> Path:
    """A user's own file, or the file of a known set in the data folder (``known``: name -> set and file)."""
    if given in known:
        name, file = known[given]
        return find(name, None if data_dir is None else Path(data_dir)) / file
    own = at_home(Path(given))
    if not own.exists():
        meant = get_close_matches(given, known, n=1)
        if meant and not own.suffix:
            raise ValueError(f"{setting}: there is no {given!r}: did you mean {meant[0]!r}?")
        where = "" if own.is_absolute() else f" in {Path.cwd()}: go to the folder that it lies in, or give its whole path"
        raise ValueError(f"{setting}: there is no file {given}{where}")
    return own


def digests(files: Mapping[str, str], known: dict[str, tuple[str, str]], data_dir: str | None) -> dict[str, str]:
    """Of what each setting names."""
    return {setting: file_sha256(file_of(setting, given, known, data_dir)) for setting, given in files.items()}


def model_place(model: str, data_dir: str | None) -> str:
    if not model.strip():
        raise ValueError("task.model is empty: name the folder of a saved model, or a model at the hub with its owner")
    if at_home(Path(model)).is_file():
        raise ValueError(f"task.model {model} is a file: give the folder that the model was saved into")
    return find_model(model, None if data_dir is None else Path(data_dir))


def stand_in(model: str, paper: str) -> str:
    """How a model that is not the paper's own is named beside a number; empty for the paper's own."""
    ours, theirs = Path(model).name, paper.rpartition("/")[2]
    return "" if ours.lower() == theirs.lower() else f"{ours} in place of {theirs}"
