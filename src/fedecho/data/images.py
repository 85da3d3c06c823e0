"""Square colour images as bytes."""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Rows = NDArray[np.int64]
CHUNK = 256
"""Images resized at a time: 96 x 96 in single precision, some 30 MB."""
CHUNK_BYTES = 1 << 26
"""Of large images, fewer at a time."""


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels [n, size, size, 3], their labels [n] if they have any, and the files they came from, for naming beside a number."""

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
    """[n, h, w, 3] to [n, size, size, 3], antialiased bilinear; images that have the size already stay as they are."""
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if pixels.shape[1:3] == (size, size):
        return np.ascontiguousarray(pixels)
    done = np.empty((len(pixels), size, size, 3), np.uint8)
    for start in range(0, len(pixels), CHUNK):
        planes = torch.from_numpy(pixels[start : start + CHUNK].astype(np.float32)).permute(0, 3, 1, 2)
        smaller = torch.nn.functional.interpolate(planes, size=(size, size), mode="bilinear", antialias=True)
        done[start : start + CHUNK] = smaller.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return done


def centre_cropped(pixels: Pixels) -> Pixels:
    """[n, h, w, 3] to the largest square in the middle."""
    height, width = pixels.shape[1:3]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[:, top : top + side, left : left + side]


def taken(pixels: Pixels, rows: Rows, size: int) -> Pixels:
    """These rows, cropped and resized. Of a memory-mapped array only they are read, and never all at full size at once."""
    done = np.empty((len(rows), size, size, 3), np.uint8)
    chunk = min(CHUNK, max(1, CHUNK_BYTES // prod(pixels.shape[1:])))
    for start in range(0, len(rows), chunk):
        done[start : start + chunk] = resized(centre_cropped(pixels[rows[start : start + chunk]]), size)
    return done
