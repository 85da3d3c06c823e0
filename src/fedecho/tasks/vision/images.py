"""Square colour images as bytes, and the unlabeled images of STL-10 (Coates, Ng and Lee, 2011) in its official format."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedecho.storage.user_files import check_file
from fedecho.tasks.data_files import MissingDataError, remedy

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Rows = NDArray[np.int64]
CHUNK = 256
"""Images resized at a time: about 30 MB for 96 x 96 in single precision."""
CHUNK_BYTES = 1 << 26
"""Limit in bytes, so that fewer large images are resized at a time."""


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels [n, size, size, 3], optional labels [n], and a description of the source files for reports."""

    pixels: Pixels
    labels: Labels | None = None
    provenance: str = ""

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        if self.pixels.dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or shape[1] != shape[2]:
            raise ValueError(f"images must be uint8 [n, size, size, 3], got {self.pixels.dtype} {list(shape)}")
        if self.labels is not None and (self.labels.dtype != np.int64 or self.labels.shape != shape[:1]):
            raise ValueError(
                f"{shape[0]} images need int64 [{shape[0]}] labels, got {self.labels.dtype} {list(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.pixels)


def resized(pixels: Pixels, size: int) -> Pixels:
    """Resize [n, h, w, 3] to [n, size, size, 3], antialiased bilinear; images of the right size are unchanged."""
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if pixels.shape[1:3] == (size, size):
        return np.ascontiguousarray(pixels)
    output = np.empty((len(pixels), size, size, 3), np.uint8)
    for start in range(0, len(pixels), CHUNK):
        planes = torch.from_numpy(pixels[start : start + CHUNK].astype(np.float32)).permute(0, 3, 1, 2)
        smaller = torch.nn.functional.interpolate(planes, size=(size, size), mode="bilinear", antialias=True)
        output[start : start + CHUNK] = smaller.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return output


def centre_cropped(pixels: Pixels) -> Pixels:
    """Crop [n, h, w, 3] to the largest centred square."""
    height, width = pixels.shape[1:3]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[:, top : top + side, left : left + side]


def cropped_and_resized(pixels: Pixels, rows: Rows, size: int) -> Pixels:
    """Crop and resize the given rows in chunks. Of a memory-mapped array, only these rows are read."""
    output = np.empty((len(rows), size, size, 3), np.uint8)
    chunk = min(CHUNK, max(1, CHUNK_BYTES // prod(pixels.shape[1:])))
    for start in range(0, len(rows), chunk):
        output[start : start + chunk] = resized(centre_cropped(pixels[rows[start : start + chunk]]), size)
    return output


SIDE = 96
IMAGE_BYTES = 3 * SIDE * SIDE


def map_stl10(folder: Path) -> Pixels:
    """Memory-map STL-10's unlabeled images as [n, 96, 96, 3]; only the images that are used are read."""
    path = folder / "unlabeled_X.bin"
    if not path.is_file():
        raise MissingDataError(f"{path} is missing: remove the incomplete folder, then {remedy('stl10')}")
    size = path.stat().st_size
    if not size or size % IMAGE_BYTES:
        raise ValueError(f"{path}: must contain images of {IMAGE_BYTES} bytes each, got {size} bytes; the file is truncated")
    try:
        content = np.memmap(check_file(path), np.uint8, "r")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    # Each plane is stored column by column.
    return content.reshape(-1, 3, SIDE, SIDE).transpose(0, 3, 2, 1)
