"""Where data files are: the ``--data-dir`` argument, else the environment variable FEDECHO_DATA, else ./data."""

import os
import re
from pathlib import Path

VARIABLE = "FEDECHO_DATA"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""owner/name: a bare name is always a folder, so that nothing is ever downloaded by mistake."""

FOLDERS: dict[str, tuple[str, ...]] = {
    "cifar10": ("cifar-10-batches-py", "cifar-10-batches-bin"),
    "cifar100": ("cifar-100-python", "cifar-100-binary"),
    "stl10": ("stl10_binary",),
    "mrpc": ("MRPC", "glue_mrpc", "mrpc"),
    "gsm8k": ("gsm8k", "GSM8K"),
    "mathinstruct": ("MathInstruct", "mathinstruct"),
}
"""The folders in which a set's authors publish it; any one will do."""
FETCHED = ("cifar10", "cifar100", "stl10")
"""The sets that ``fedecho data fetch`` knows."""


INSTEAD = {"mathinstruct": "set task.train=gsm8k-train or to a file of your own, or "}
"""What else a task that wants a set can do."""


class MissingDataError(ValueError):
    """Data that is not where it was looked for, said in one line."""


def data_folder(data_dir: Path | None = None) -> Path:
    """The folder that holds all data."""
    return at_home(Path(data_dir or os.environ.get(VARIABLE) or "data"))


def at_home(path: Path) -> Path:
    """With ~ and ~somebody in full."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise MissingDataError(f"{path}: there is no home folder of {path.parts[0]}") from None


def find(name: str, data_dir: Path | None = None) -> Path:
    """The folder of a set (``cifar10``: any of its distributions), or the folder of that very name."""
    parent = data_folder(data_dir)
    names = FOLDERS.get(name, (name,))
    for folder in names:
        if (parent / folder).is_dir():
            return parent / folder
    raise MissingDataError(f"{name} is missing: there is no {' or '.join(names)} in {parent}; {remedy(name)}")


def remedy(name: str) -> str:
    """How to get a set, or the folder of one."""
    elsewhere = f"say where it is with --data-dir or {VARIABLE}"
    for known in FETCHED:
        if name == known or name in FOLDERS[known]:
            return f"run `fedecho data fetch {known}`, or {elsewhere}"
    return INSTEAD.get(name, "") + elsewhere


def find_model(name: str, data_dir: Path | None = None) -> str:
    """The folder of saved weights of that name, here or in the data folder; else the name itself if it can be one at the hub."""
    inside, hub_name = data_folder(data_dir), HUB_NAME.fullmatch(name)
    copies = [inside / Path(name).name] if hub_name else []  # a path that is not there is a mistake, and no name of another's
    for folder in (at_home(Path(name)), inside / name, *copies):
        if folder.is_dir():
            return str(folder)
    if hub_name:
        return name
    place = f"{inside}{'' if inside.is_dir() else ', which is not there'}"
    raise MissingDataError(
        f"there is no model folder {name}, nor one of that name in {place}: give task.model a folder that a model was saved into, "
        f"or a name at the hub such as google-bert/bert-base-uncased, or say with --data-dir or {VARIABLE} where models are"
    )
