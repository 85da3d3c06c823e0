"""Locate data files: in ``--data-dir``, else the environment variable FEDECHO_DATA, else ./data."""

import os
import re
from pathlib import Path

VARIABLE = "FEDECHO_DATA"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""owner/name. A bare name is always a folder, so that nothing is downloaded by mistake."""

FOLDERS: dict[str, tuple[str, ...]] = {
    "cifar10": ("cifar-10-batches-py", "cifar-10-batches-bin"),
    "cifar100": ("cifar-100-python", "cifar-100-binary"),
    "stl10": ("stl10_binary",),
    "mrpc": ("MRPC", "glue_mrpc", "mrpc"),
    "gsm8k": ("gsm8k", "GSM8K"),
    "mathinstruct": ("MathInstruct", "mathinstruct"),
}
"""Folder names under which each dataset is published; any one is accepted."""
IMAGE_SETS = ("cifar10", "cifar100", "stl10", "synthetic")
"""Names of unlabeled image sets."""
MRPC_FILES = {f"mrpc-{part}": ("mrpc", f"{part}.tsv") for part in ("train", "dev", "test")}
MATH_FILES = {
    "mathinstruct": ("mathinstruct", "MathInstruct.json"),
    "gsm8k-train": ("gsm8k", "train.jsonl"),
    "gsm8k-test": ("gsm8k", "test.jsonl"),
}
"""The dataset and the file of each named part, for the two text tasks."""
FETCHED = ("cifar10", "cifar100", "stl10")
"""The datasets that ``fedecho data fetch`` can download."""
ALTERNATIVES = {"mathinstruct": "set task.train=gsm8k-train or to a file of your own, or "}
"""Alternatives to downloading a dataset."""


class MissingDataError(ValueError):
    """Data that was not found where it was expected."""


def data_folder(data_dir: Path | str | None = None) -> Path:
    """Return the folder that contains all datasets."""
    return expand_home(Path(data_dir or os.environ.get(VARIABLE) or "data"))


def expand_home(path: Path) -> Path:
    """Expand ~ and ~user."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise MissingDataError(f"{path}: there is no home folder of {path.parts[0]}") from None


def find(name: str, data_dir: Path | str | None = None) -> Path:
    """Return the folder of a dataset (for ``cifar10``, any of its distributions), or the folder with the given name."""
    parent = data_folder(data_dir)
    names = FOLDERS.get(name, (name,))
    for folder in names:
        if (parent / folder).is_dir():
            return parent / folder
    raise MissingDataError(f"{name} is missing: there is no {' or '.join(names)} in {parent}; {remedy(name)}")


def remedy(name: str) -> str:
    """Return advice on how to get a missing dataset or folder."""
    elsewhere = f"give its location with --data-dir or {VARIABLE}"
    for dataset in FETCHED:
        if name == dataset or name in FOLDERS[dataset]:
            return f"run `fedecho data fetch {dataset}`, or {elsewhere}"
    return ALTERNATIVES.get(name, "") + elsewhere


def find_model(name: str, data_dir: Path | str | None = None) -> str:
    """Return the folder of saved weights, here or in the data folder; else the name itself if it can be a hub name."""
    inside, hub_name = data_folder(data_dir), HUB_NAME.fullmatch(name)
    copies = [inside / Path(name).name] if hub_name else []  # a missing path is a mistake, not a name to look up elsewhere
    for folder in (expand_home(Path(name)), inside / name, *copies):
        if folder.is_dir():
            return str(folder)
    if hub_name:
        return name
    missing = "" if inside.is_dir() else ", which does not exist"
    raise MissingDataError(
        f"there is no model folder {name}, and none of that name in {inside}{missing}: set task.model to a folder with a saved "
        f"model or to a hub name such as google-bert/bert-base-uncased, or give the location with --data-dir or {VARIABLE}"
    )
