"""Where data files are: the ``--data-dir`` argument, else the environment variable FEDECHO_DATA, else ./data."""

import os
from pathlib import Path

VARIABLE = "FEDECHO_DATA"

FOLDERS: dict[str, tuple[str, ...]] = {
    "cifar10": ("cifar-10-batches-py", "cifar-10-batches-bin"),
    "cifar100": ("cifar-100-python", "cifar-100-binary"),
    "stl10": ("stl10_binary",),
}
"""The folders in which a set's authors publish it; any one will do."""


class MissingDataError(ValueError):
    """Data that is not where it was looked for, said in one line."""


def data_folder(data_dir: Path | None = None) -> Path:
    """The folder that holds all data."""
    return Path(data_dir or os.environ.get(VARIABLE) or "data").expanduser()


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
    for known, folders in FOLDERS.items():
        if name == known or name in folders:
            return f"run `fedecho data fetch {known}`, or {elsewhere}"
    return elsewhere
