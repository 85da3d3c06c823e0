import json
import pickle
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from official_files import Form, generated, write_cifar10, write_cifar100, write_stl10

from fedecho.core.randomness import numpy_rng
from fedecho.tasks.data_files import MissingDataError, data_folder
from fedecho.tasks.vision import images, unlabeled
from fedecho.tasks.vision.images import resized
from fedecho.tasks.vision.unlabeled import read_unlabeled

SHARED = Path(__file__).parents[3] / "shared" / "data"
FORMS: tuple[Form, ...] = ("python2", "binary")


@pytest.mark.parametrize("form", FORMS)
def test_cifar_gives_its_training_images(tmp_path: Path, form: Form) -> None:
    train, test = generated(100, 10), generated(20, 10, seed=1)
    folder = write_cifar10(tmp_path, train, test, form)
    images = read_unlabeled("cifar10", tmp_path, 30, seed=4)
    rows = numpy_rng(4, "unlabeled").permutation(100)[:30]
    np.testing.assert_array_equal(images.pixels, train[0][rows])
    assert images.labels is None
    assert images.provenance == f"{folder.name}, training images"
    write_cifar100(tmp_path, train, test, form)
    np.testing.assert_array_equal(read_unlabeled("cifar100", tmp_path, 30, seed=4).pixels, images.pixels)


def test_stl10_gives_its_unlabeled_images_at_32(tmp_path: Path) -> None:
    few, pixels = generated(10, 10, size=96), generated(50, 10, seed=1, size=96)[0]
    write_stl10(tmp_path, few, few, pixels)
    images = read_unlabeled("stl10", tmp_path, 50, seed=0)
    np.testing.assert_array_equal(images.pixels, resized(pixels, 32)[numpy_rng(0, "unlabeled").permutation(50)])
    assert images.provenance == "stl10_binary, unlabeled images"


def test_a_draw_is_without_replacement_and_begins_with_the_smaller_one(array: Path) -> None:
    whole = read_unlabeled(str(array), None, 60, seed=1).pixels
    assert len({image.tobytes() for image in whole}) == 60
    np.testing.assert_array_equal(read_unlabeled(str(array), None, 20, seed=1).pixels, whole[:20])
    assert (read_unlabeled(str(array), None, 60, seed=2).pixels != whole).any()


@pytest.mark.parametrize("num", [61, 0])
def test_asking_for_too_many_or_none_is_an_error(array: Path, num: int) -> None:
    with pytest.raises(ValueError, match=r"has 60|at least 1, got 0"):
        read_unlabeled(str(array), None, num, seed=0)


@pytest.mark.parametrize("source", ["cifar10", "cifar100", "stl10"])
def test_a_stand_in_is_used_and_named_where_the_official_files_are_absent(tmp_path: Path, source: str) -> None:
    pixels = generated(12, 10)[0]
    np.save(tmp_path / f"{source}-32.npy", pixels.transpose(0, 3, 1, 2))
    images = read_unlabeled(source, tmp_path, 12, seed=0)
    np.testing.assert_array_equal(images.pixels, pixels[numpy_rng(0, "unlabeled").permutation(12)])
    assert images.provenance == f"{source}-32.npy, in place of {source}'s official files"


def test_official_files_come_before_a_stand_in(tmp_path: Path) -> None:
    write_cifar10(tmp_path, generated(20, 10), generated(10, 10))
    np.save(tmp_path / "cifar10-32.npy", np.zeros((20, 3, 32, 32), np.uint8))
    assert read_unlabeled("cifar10", tmp_path, 5, seed=0).provenance == "cifar-10-batches-py, training images"


def test_an_empty_name_is_not_this_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^task\.unlabeled is empty"):
        read_unlabeled("", tmp_path, 5, seed=0)


def test_the_synthetic_set_has_no_official_files(tmp_path: Path) -> None:
    np.save(tmp_path / "synthetic-32.npy", generated(12, 10)[0])
    told = "synthetic-32.npy, of unknown origin, in place of google/ddpm-cifar10-32"
    assert read_unlabeled("synthetic", tmp_path, 5, seed=0).provenance == told


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ({"model": "google/ddpm-cifar10-32"}, "of google/ddpm-cifar10-32"),
        ({"model": "./mine"}, "of ./mine, in place of google/ddpm-cifar10-32"),
        ({"model": "./mine", "sha256": "0" * 64}, "of unknown origin, in place of google/ddpm-cifar10-32"),
        (["no object"], "of unknown origin, in place of google/ddpm-cifar10-32"),
    ],
    ids=["the paper's", "another", "of another array", "nonsense"],
)
def test_a_synthetic_set_says_which_model_drew_it(tmp_path: Path, beside: object, told: str) -> None:
    array = tmp_path / "synthetic-32.npy"
    np.save(array, generated(12, 10)[0])
    if isinstance(beside, dict):
        beside = {"sha256": sha256(array.read_bytes()).hexdigest(), **beside}
    (tmp_path / "synthetic-32.npy.json").write_text(json.dumps(beside))
    assert read_unlabeled("synthetic", tmp_path, 5, seed=0).provenance == f"synthetic-32.npy, {told}"


@pytest.mark.parametrize("source", ["cifar10", "stl10", "synthetic", "no/such/folder"])
def test_what_is_missing_is_said_in_one_line(tmp_path: Path, source: str) -> None:
    with pytest.raises(MissingDataError) as caught:
        read_unlabeled(source, tmp_path, 5, seed=0)
    assert source in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ("fedecho data fetch" in str(caught.value)) == (source in ("cifar10", "stl10"))


def test_an_array_may_be_of_another_size_and_not_square(tmp_path: Path) -> None:
    pixels = generated(6, 10, size=48)[0]
    np.save(tmp_path / "wide.npy", np.pad(pixels, ((0, 0), (0, 0), (8, 8), (0, 0))))
    images = read_unlabeled(str(tmp_path / "wide.npy"), None, 6, seed=0, size=24)
    np.testing.assert_array_equal(images.pixels, resized(pixels, 24)[numpy_rng(0, "unlabeled").permutation(6)])


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((4, 32, 32, 3), np.float32), r"got float32 \[4, 32, 32, 3\]"),
        (np.zeros((4, 32, 32), np.uint8), r"got uint8 \[4, 32, 32\]"),
        (np.zeros((4, 32, 32, 4), np.uint8), r"got uint8 \[4, 32, 32, 4\]"),
        (np.zeros((0, 32, 32, 3), np.uint8), r"got uint8 \[0, 32, 32, 3\]"),
        (np.array([{}, None], object), "without unpickling"),
    ],
)
def test_another_array_is_refused_with_its_shape_and_dtype(tmp_path: Path, array: Any, said: str) -> None:
    np.save(tmp_path / "other.npy", array)
    with pytest.raises(ValueError, match=said) as caught:
        read_unlabeled(str(tmp_path / "other.npy"), None, 1, seed=0)
    assert "other.npy" in str(caught.value)


def test_pickles_archives_and_cut_files_are_no_arrays(tmp_path: Path, array: Path) -> None:
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(np.zeros((4, 32, 32, 3), np.uint8)))
    with zipfile.ZipFile(tmp_path / "archive.npy", "w") as archive:
        archive.write(array, "x.npy")
    (tmp_path / "cut.npy").write_bytes(array.read_bytes()[:-1])
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("pickle", "archive", "cut", "empty"):
        with pytest.raises(ValueError, match=f"{name}.npy: not an array"):
            read_unlabeled(str(tmp_path / f"{name}.npy"), None, 1, seed=0)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"neither a folder nor a \.npy file"):
        read_unlabeled(str(tmp_path / "images.zip"), None, 1, seed=0)


def test_a_folder_of_images_is_read_sorted_at_any_depth(tmp_path: Path) -> None:
    pictures = pytest.importorskip("PIL.Image")
    pixels = generated(8, 10)[0]
    names = ["a.png", "b/c/d.PNG", "b/e.bmp", "c.webp", "d.png", "e/f.png", "f.png", "g.bmp"]
    for name, image in zip(names, pixels, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pictures.fromarray(image).save(tmp_path / name, **({"lossless": True} if name.endswith("webp") else {}))
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "._a.png").write_text("what a Mac leaves behind")
    images = read_unlabeled(str(tmp_path), None, 8, seed=3)
    np.testing.assert_array_equal(images.pixels, pixels[numpy_rng(3, "unlabeled").permutation(8)])
    assert images.provenance == f"{tmp_path}, 8 images"


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_images_of_any_mode_and_shape_become_square_colour(tmp_path: Path, mode: str) -> None:
    pictures = pytest.importorskip("PIL.Image")
    suffix = "jpg" if mode == "CMYK" else "png"
    pictures.new("RGB", (100, 60), (255, 255, 255)).convert(mode).save(tmp_path / f"white.{suffix}")
    images = read_unlabeled(str(tmp_path), None, 1, seed=0, size=16)
    assert images.pixels.shape == (1, 16, 16, 3)
    assert (images.pixels >= 250).all()


def test_grays_of_16_bits_keep_their_brightness(tmp_path: Path) -> None:
    from PIL import Image

    gray = np.linspace(0, 65_535, 32 * 32).reshape(32, 32).astype(np.uint16)
    Image.fromarray(gray).save(tmp_path / "deep.png")
    found = read_unlabeled(str(tmp_path), None, 1, 0).pixels[0]
    assert np.array_equal(found, np.repeat((gray >> 8).astype(np.uint8)[:, :, None], 3, axis=2))


def test_an_image_is_cropped_in_the_middle_and_not_turned(tmp_path: Path) -> None:
    pictures = pytest.importorskip("PIL.Image")
    pixels = np.zeros((30, 60, 3), np.uint8)
    pixels[:, 15:45] = (10, 200, 10)
    pixels[:15, 15:45] = (200, 10, 10)
    image = pictures.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6  # "turn me by a quarter"
    image.save(tmp_path / "turned.png", exif=exif)
    found = read_unlabeled(str(tmp_path), None, 1, seed=0, size=30).pixels[0]
    np.testing.assert_array_equal(found, pixels[:, 15:45])


@pytest.mark.parametrize("side", [8_000, 12_000, 20_000])
def test_a_decompression_bomb_is_refused_by_name(tmp_path: Path, side: int) -> None:
    """Below Pillow's own warning, at it, and at its error."""
    pictures = pytest.importorskip("PIL.Image")
    pictures.new("1", (side, side)).save(tmp_path / "bomb.png")
    with pytest.raises(ValueError, match=r"bomb.png: .*(megapixels|decompression bomb)"):
        read_unlabeled(str(tmp_path), None, 1, seed=0)


def test_files_too_large_and_too_many_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = pytest.importorskip("PIL.Image")
    for name in ("a", "b", "c"):
        pictures.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    monkeypatch.setattr(unlabeled, "MAX_IMAGES", 2)
    with pytest.raises(ValueError, match=f"there are more than 2 images in {tmp_path}"):
        read_unlabeled(str(tmp_path), None, 1, seed=0)
    monkeypatch.setattr(unlabeled, "MAX_IMAGES", 3)
    monkeypatch.setattr(unlabeled, "MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match=r"cannot read the image .*png: it has more than 10 bytes"):
        read_unlabeled(str(tmp_path), None, 1, seed=0)


def test_an_array_of_giant_images_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Half a gigabyte of nothing: a file with a hole takes no room on the disk."""
    path = tmp_path / "giant.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (1, 8000, 8000, 3)})
        file.truncate(file.tell() + 8000 * 8000 * 3)
    with pytest.raises(ValueError, match=r"giant.npy: its images have shape \[8000, 8000, 3\], and the limit is 50 megapixels"):
        read_unlabeled(str(path), None, 1, seed=0)


def test_large_images_are_read_a_few_at_a_time_and_come_out_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "large.npy", generated(7, 10, size=64)[0])
    whole = read_unlabeled(str(tmp_path / "large.npy"), None, 7, seed=0).pixels
    monkeypatch.setattr(images, "CHUNK_BYTES", 3 * 64 * 64 * 3)
    np.testing.assert_array_equal(read_unlabeled(str(tmp_path / "large.npy"), None, 7, seed=0).pixels, whole)


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" + b"\x00" * 40, b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_a_damaged_image_is_named(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("PIL")
    (tmp_path / "broken.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot read the image .*broken.png"):
        read_unlabeled(str(tmp_path), None, 1, seed=0)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    with pytest.raises(MissingDataError, match="there are no images in"):
        read_unlabeled(str(tmp_path), None, 1, seed=0)


def test_without_pillow_a_folder_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ValueError, match=r"pip install 'fedecho\[vision\]'"):
        read_unlabeled(str(tmp_path), None, 1, seed=0)


@pytest.mark.parametrize("source", ["cifar100", "stl10", "synthetic"])
def test_the_real_stand_ins_are_read_byte_for_byte(source: str) -> None:
    path = next((p for p in (data_folder() / f"{source}-32.npy", SHARED / f"{source}-32.npy") if p.is_file()), None)
    if path is None or not (SHARED / "manifest.json").is_file():
        pytest.skip(f"no restored {source}-32.npy: set FEDECHO_DATA to the folder that holds it")
    expected = json.loads((SHARED / "manifest.json").read_text())[f"{source}-32/all"]
    images = read_unlabeled(str(path), None, expected["num_images"], seed=0)
    in_order = np.empty_like(images.pixels)
    in_order[numpy_rng(0, "unlabeled").permutation(len(images))] = images.pixels
    assert sha256(np.ascontiguousarray(in_order.transpose(0, 3, 1, 2)).tobytes()).hexdigest() == expected["sha256"]


@pytest.fixture
def array(tmp_path: Path) -> Path:
    np.save(tmp_path / "mine.npy", generated(60, 10)[0])
    return tmp_path / "mine.npy"
