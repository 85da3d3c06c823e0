"""Read unlabeled images U for distillation from a named dataset, a folder of images or an array."""

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
from fedecho.storage.user_files import MIB, FileError, check_file, open_regular, read_bytes
from fedecho.tasks.data_files import FOLDERS, IMAGE_SETS, MissingDataError, data_folder, expand_home, remedy
from fedecho.tasks.vision.cifar_files import read_cifar10, read_cifar100
from fedecho.tasks.vision.images import Images, Pixels, Rows, cropped_and_resized, map_stl10

PAPER_MODEL = "google/ddpm-cifar10-32"


def sidecar(array: Path, ending: str) -> Path:
    """Return the path of a file that accompanies an array."""
    return array.with_name(array.name + ending)


def read_origin(array: Path) -> dict[str, Any] | None:
    """Read the recorded origin of an array; None if there is none, or if it belongs to another array."""
    try:
        origin = json.loads(read_bytes(sidecar(array, ".json"), MIB))
    except (ValueError, RecursionError):
        return None
    return origin if isinstance(origin, dict) and origin.get("sha256") == file_sha256(array) else None


def model_note(array: Path) -> str:
    """Describe the model that drew an array, and whether it replaces the paper's."""
    model = (read_origin(array) or {}).get("model", "unknown origin")
    return f"of {model}" if model == PAPER_MODEL else f"of {model}, in place of {PAPER_MODEL}"


if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MAX_MEGAPIXELS = 50
"""Limit against decompression bombs: a few kilobytes can unpack to gigabytes."""
MAX_FILE_BYTES = 256 << 20
MAX_IMAGES = 1_000_000
HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Header readers of the .npy formats for numeric arrays; later formats are for structured ones."""


@dataclass(frozen=True)
class ImagePool:
    """Images to draw from: their number, their provenance, and a function that reads some rows at a size."""

    num: int
    provenance: str
    read: Callable[[Rows, int], Pixels]


def read_unlabeled(source: str, data_dir: Path | str | None, num: int, seed: int, size: int = 32) -> Images:
    """Draw ``num`` images of ``source`` without replacement; a smaller draw is a prefix of a larger one.

    ``source`` is one of ``IMAGE_SETS``, or the path of a folder of images or a ``.npy`` array. If a dataset's official files are
    missing, ``<source>-32.npy`` is used as a substitute and named in ``provenance``. ``synthetic`` is always such an array; the
    JSON file next to it names the model that drew it.
    """
    if num < 1:
        raise ValueError(f"the number of unlabeled images must be at least 1, got {num}")
    if not source.strip():
        raise ValueError(
            f"task.unlabeled is empty: set it to one of {', '.join(IMAGE_SETS)}, a folder of images or a .npy file"
        )
    pool = _named(source, data_folder(data_dir)) if source in IMAGE_SETS else _at(expand_home(Path(source)))
    if num > pool.num:
        note = "" if pool.provenance == source else f" ({pool.provenance})"
        raise ValueError(f"task.num_unlabeled is {num}, but {source} has {pool.num} images{note}")
    rows = numpy_rng(seed, "unlabeled").permutation(pool.num)[:num]
    return Images(pool.read(rows, size), None, pool.provenance)


def _named(source: str, folder: Path) -> ImagePool:
    names, stand_in = FOLDERS.get(source, ()), folder / f"{source}-32.npy"
    for name in names:
        if (folder / name).is_dir():
            return _official(source, folder / name)
    if not stand_in.is_file():
        expected = " or ".join((*names, stand_in.name))
        raise MissingDataError(f"{source} is missing: there is no {expected} in {folder}; {remedy(source)}")
    note = f"in place of {source}'s official files" if names else model_note(stand_in)
    return _array_file(stand_in, f"{stand_in.name}, {note}")


def _official(source: str, folder: Path) -> ImagePool:
    if source == "stl10":
        return _pool_of(map_stl10(folder), f"{folder.name}, unlabeled images")
    train, _ = (read_cifar10 if source == "cifar10" else read_cifar100)(folder)
    return _pool_of(train.pixels, train.provenance)


def _pool_of(pixels: Pixels, provenance: str) -> ImagePool:
    return ImagePool(len(pixels), provenance, lambda rows, size: cropped_and_resized(pixels, rows, size))


def _at(path: Path) -> ImagePool:
    if path.is_dir():
        return _image_folder(path)
    if path.is_file() and path.suffix == ".npy":
        return _array_file(path, str(path))
    kind = "it is neither a folder nor a .npy file" if path.exists() else "it does not exist"
    raise MissingDataError(
        f"cannot read unlabeled images from {path}: {kind}; use one of {', '.join(IMAGE_SETS)} or another path"
    )


def _array_file(path: Path, provenance: str) -> ImagePool:
    """Memory-map a .npy array; pickles and archives are rejected."""
    try:
        _check_header(check_file(path))
        array = np.lib.format.open_memmap(path, mode="r")
    except FileError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: not an array that can be read without unpickling ({error})") from None
    if array.ndim == 4 and array[:1].size > 3 * MAX_MEGAPIXELS * 1_000_000:
        raise ValueError(f"{path}: its images have shape {list(array.shape[1:])}, and the limit is {MAX_MEGAPIXELS} megapixels")
    if array.dtype == np.uint8 and array.ndim == 4 and array.size and 3 in (array.shape[3], array.shape[1]):
        return _pool_of(array if array.shape[3] == 3 else array.transpose(0, 2, 3, 1), provenance)
    raise ValueError(f"{path}: must be uint8 [n, h, w, 3] or [n, 3, h, w], got {array.dtype} {list(array.shape)}")


def _check_header(path: Path) -> None:
    """Check that the file is large enough for its header's shape: numpy would map any size, even a negative one."""
    with open_regular(path) as file:
        version = np.lib.format.read_magic(file)
        if version not in HEADER_READERS:
            raise ValueError(f"its format is {version[0]}.{version[1]}: save it again with numpy.save")
        shape, _, dtype = HEADER_READERS[version](file)
        num_bytes = path.stat().st_size - file.tell()
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize > num_bytes:
        raise ValueError(f"its header gives {dtype} {list(shape)}, but {num_bytes} bytes follow")


def _image_folder(folder: Path) -> ImagePool:
    _pillow()
    candidates = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    paths = list(islice((path for path in candidates if path.is_file()), MAX_IMAGES + 1))
    if len(paths) > MAX_IMAGES:
        raise ValueError(f"there are more than {MAX_IMAGES} images in {folder}: use a folder with fewer")
    paths.sort(key=lambda path: path.relative_to(folder).as_posix())
    if not paths:
        raise MissingDataError(f"there are no images in {folder}: it must contain {', '.join(sorted(SUFFIXES))} files")

    def read(rows: Rows, size: int) -> Pixels:
        return np.stack([_read(paths[row], size) for row in rows])

    return ImagePool(len(paths), f"{folder}, {len(paths)} images", read)


def _pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ValueError("a folder of images needs Pillow: pip install 'fedecho[vision]'") from None


def _read(path: Path, size: int) -> Pixels:
    """Read one image as stored (ignoring EXIF rotation), cropped to the centred square and resized with antialiasing."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about images that are rejected below
            with Image.open(check_file(path, MAX_FILE_BYTES), formats=FORMATS) as image:
                return _square(image, size)
    except FileError as error:
        raise ValueError(f"cannot read the image {path}: {error.reason}") from None
    except Exception as error:  # decoding a damaged file can raise anything
        raise ValueError(f"cannot read the image {path}: {str(error) or type(error).__name__}") from None


def _in_bytes(image: "Image") -> "Image":
    """Reduce 16-bit grey values to their upper 8 bits; Pillow's own conversion would clip everything above 255 to white."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    gray = np.asarray(image)
    if gray.min() < 0 or gray.max() > 65_535:
        raise ValueError(f"its grey values range from {gray.min()} to {gray.max()}: they must fit in 16 bits")
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
