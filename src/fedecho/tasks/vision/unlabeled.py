"""Unlabeled images U to distil on: a named set, a folder of images or an array, with a note of their origin."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedecho.core.randomness import numpy_rng
from fedecho.storage.files import file_sha256
from fedecho.storage.user_files import MIB, FileError, check_file, opened, read_bytes
from fedecho.tasks.data_files import FOLDERS, MissingDataError, at_home, data_folder, remedy
from fedecho.tasks.vision.cifar_files import read_cifar10, read_cifar100
from fedecho.tasks.vision.images import Images, Pixels, Rows, map_stl10, taken

PAPER_MODEL = "google/ddpm-cifar10-32"


def beside(array: Path, ending: str) -> Path:
    return array.with_name(array.name + ending)


def origin_of(array: Path) -> dict[str, Any] | None:
    """What is written beside an array; None if there is nothing, or if it speaks of another array."""
    try:
        found = json.loads(read_bytes(beside(array, ".json"), MIB))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("sha256") == file_sha256(array) else None


def drawn_from(array: Path) -> str:
    """For people: the model, and that it is not the paper's if it is not."""
    model = (origin_of(array) or {}).get("model", "unknown origin")
    return f"of {model}" if model == PAPER_MODEL else f"of {model}, in place of {PAPER_MODEL}"


if TYPE_CHECKING:
    from PIL.Image import Image

NAMED = ("cifar10", "cifar100", "stl10", "synthetic")
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MAX_MEGAPIXELS = 50
"""A few kilobytes can unpack to gigabytes."""
MAX_FILE_BYTES = 256 << 20
MAX_IMAGES = 1_000_000
HEADINGS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Of arrays of numbers; later formats are for others."""


@dataclass(frozen=True)
class Pool:
    """Images to draw from: how many there are, which, and a way to read some rows at a size."""

    num: int
    provenance: str
    take: Callable[[Rows, int], Pixels]


def read_unlabeled(source: str, data_dir: Path | None, num: int, seed: int, size: int = 32) -> Images:
    """``num`` images of ``source`` drawn without replacement; the first of a larger draw are the smaller draw.

    ``source`` is one of ``NAMED`` or the path of a folder of images or of a ``.npy`` array. ``provenance`` says which
    files were read: of a set whose official files are absent it is ``<source>-32.npy``, a stand-in. ``synthetic`` is always
    such an array, and what was written beside it says which model drew it.
    """
    if num < 1:
        raise ValueError(f"the number of unlabeled images must be at least 1, got {num}")
    if not source.strip():
        raise ValueError(f"task.unlabeled is empty: name one of {', '.join(NAMED)}, a folder of images or a .npy file")
    pool = _named(source, data_folder(data_dir)) if source in NAMED else _at(at_home(Path(source)))
    if num > pool.num:
        told = "" if pool.provenance == source else f" ({pool.provenance})"
        raise ValueError(f"{num} unlabeled images were asked for (task.num_unlabeled), but {source} has {pool.num}{told}")
    rows = numpy_rng(seed, "unlabeled").permutation(pool.num)[:num]
    return Images(pool.take(rows, size), None, pool.provenance)


def _named(source: str, folder: Path) -> Pool:
    names, stand_in = FOLDERS.get(source, ()), folder / f"{source}-32.npy"
    for name in names:
        if (folder / name).is_dir():
            return _official(source, folder / name)
    if not stand_in.is_file():
        looked_for = " or ".join((*names, stand_in.name))
        raise MissingDataError(f"{source} is missing: there is no {looked_for} in {folder}; {remedy(source)}")
    told = f"in place of {source}'s official files" if names else drawn_from(stand_in)
    return _array_file(stand_in, f"{stand_in.name}, {told}")


def _official(source: str, folder: Path) -> Pool:
    if source == "stl10":
        return _pool(map_stl10(folder, "unlabeled"), f"{folder.name}, unlabeled images")
    train, _ = (read_cifar10 if source == "cifar10" else read_cifar100)(folder)
    return _pool(train.pixels, train.provenance)


def _pool(pixels: Pixels, provenance: str) -> Pool:
    return Pool(len(pixels), provenance, lambda rows, size: taken(pixels, rows, size))


def _at(path: Path) -> Pool:
    if path.is_dir():
        return _image_folder(path)
    if path.is_file() and path.suffix == ".npy":
        return _array_file(path, str(path))
    kind = "it is neither a folder nor a .npy file" if path.exists() else "there is nothing there"
    raise MissingDataError(f"cannot read unlabeled images from {path}: {kind}; name one of {', '.join(NAMED)} or another path")


def _array_file(path: Path, provenance: str) -> Pool:
    """Mapped, and read as numpy's own format only: neither pickles nor archives."""
    try:
        _check_heading(check_file(path))
        array = np.lib.format.open_memmap(path, mode="r")
    except FileError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: no array that can be read without unpickling ({error})") from None
    if array.ndim == 4 and array[:1].size > 3 * MAX_MEGAPIXELS * 1_000_000:
        raise ValueError(f"{path}: its images are of {list(array.shape[1:])}, and the limit is {MAX_MEGAPIXELS} megapixels")
    if array.dtype == np.uint8 and array.ndim == 4 and array.size and 3 in (array.shape[3], array.shape[1]):
        return _pool(array if array.shape[3] == 3 else array.transpose(0, 2, 3, 1), provenance)
    raise ValueError(f"{path}: must be uint8 [n, h, w, 3] or [n, 3, h, w], got {array.dtype} {list(array.shape)}")


def _check_heading(path: Path) -> None:
    """A shape that the file is large enough for: numpy maps as many bytes as the heading asks for, even fewer than none."""
    with opened(path) as file:
        version = np.lib.format.read_magic(file)
        if version not in HEADINGS:
            raise ValueError(f"its format is {version[0]}.{version[1]}: save it again with numpy.save")
        shape, _, dtype = HEADINGS[version](file)
        room = path.stat().st_size - file.tell()
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize > room:
        raise ValueError(f"its heading says {dtype} {list(shape)}, but {room} bytes follow")


def _image_folder(folder: Path) -> Pool:
    _pillow()
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    paths = list(islice((path for path in found if path.is_file()), MAX_IMAGES + 1))
    if len(paths) > MAX_IMAGES:
        raise ValueError(f"there are more than {MAX_IMAGES} images in {folder}: name a folder with fewer")
    paths.sort(key=lambda path: path.relative_to(folder).as_posix())
    if not paths:
        raise MissingDataError(f"there are no images in {folder}: it must hold {', '.join(sorted(SUFFIXES))} files")

    def take(rows: Rows, size: int) -> Pixels:
        return np.stack([_read(paths[row], size) for row in rows])

    return Pool(len(paths), f"{folder}, {len(paths)} images", take)


def _pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ValueError("a folder of images needs Pillow: pip install 'fedecho[vision]'") from None


def _read(path: Path, size: int) -> Pixels:
    """One image as it is stored (EXIF's rotation ignored), cropped to the square in its middle, antialiased."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of what is refused below
            with Image.open(check_file(path, MAX_FILE_BYTES), formats=FORMATS) as image:
                return _square(image, size)
    except FileError as error:
        raise ValueError(f"cannot read the image {path}: {error.reason}") from None
    except Exception as error:  # a damaged file raises whatever its decoder likes
        raise ValueError(f"cannot read the image {path}: {str(error) or type(error).__name__}") from None


def _in_bytes(image: "Image") -> "Image":
    """Grays of 16 bits by their upper 8: Pillow's own way to colours would cut all above 255 off, which leaves white."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    gray = np.asarray(image)
    if gray.min() < 0 or gray.max() > 65_535:
        raise ValueError(f"its grays lie between {gray.min()} and {gray.max()}: they must fit in 16 bits")
    return Image.fromarray((gray.astype(np.uint32) >> 8).astype(np.uint8))


def _square(image: "Image", size: int) -> Pixels:
    from PIL.Image import Resampling

    width, height = image.size
    if width * height > MAX_MEGAPIXELS * 1_000_000:
        raise ValueError(f"it has {width} x {height} pixels, and the limit is {MAX_MEGAPIXELS} megapixels")
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    square = _in_bytes(image).convert("RGB").crop((left, top, left + side, top + side))
    return np.asarray(square.resize((size, size), Resampling.BILINEAR), np.uint8)
