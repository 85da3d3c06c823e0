"""STL-10 (Coates, Ng and Lee, 2011) in its authors' binary files; the images are mapped, not loaded."""

from pathlib import Path
from typing import Literal, get_args

import numpy as np

from fedecho.core.user_files import MIB, check_file, read_bytes
from fedecho.data.images import Images, Labels, Pixels, Rows, taken
from fedecho.data.locate import MissingDataError, remedy

Split = Literal["train", "test", "unlabeled"]
SIDE = 96
IMAGE_BYTES = 3 * SIDE * SIDE
NUM_CLASSES = 10


def map_stl10(folder: Path, split: Split) -> Pixels:
    """All images of a split as [n, 96, 96, 3]: a view of the file, of which only what is used is read."""
    if split not in get_args(Split):
        raise ValueError(f"the split of stl10 must be one of {', '.join(get_args(Split))}, got {split!r}")
    path = _present(folder / f"{split}_X.bin")
    size = path.stat().st_size
    if not size or size % IMAGE_BYTES:
        raise ValueError(f"{path}: must hold images of {IMAGE_BYTES} bytes each, got {size} bytes; it is cut short")
    try:
        content = np.memmap(check_file(path), np.uint8, "r")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    # Each plane is stored column by column.
    return content.reshape(-1, 3, SIDE, SIDE).transpose(0, 3, 2, 1)


def read_stl10(folder: Path, split: Split, rows: Rows | None = None, size: int = 32) -> Images:
    """The images of a split, or ``rows`` of them, resized. Labels count from 0; the unlabeled split has none."""
    pixels = map_stl10(folder, split)
    labels = None if split == "unlabeled" else _labels(folder / f"{split}_y.bin", len(pixels))
    rows = np.arange(len(pixels)) if rows is None else rows
    chosen = labels if labels is None else labels[rows]
    return Images(taken(pixels, rows, size), chosen, f"{folder.name}, {split} images")


def _labels(path: Path, num_images: int) -> Labels:
    labels = np.frombuffer(read_bytes(_present(path), MIB), np.uint8).astype(np.int64)
    if len(labels) != num_images:
        raise ValueError(f"{path}: must hold the labels of {num_images} images, got {len(labels)}")
    wrong = np.flatnonzero((labels < 1) | (labels > NUM_CLASSES))
    if len(wrong):
        raise ValueError(f"{path}, image {wrong[0]}: its label must be 1 to {NUM_CLASSES}, got {labels[wrong[0]]}")
    return labels - 1


def _present(path: Path) -> Path:
    if not path.is_file():
        raise MissingDataError(f"{path} is missing: remove what is there of stl10, then {remedy('stl10')}")
    return path
