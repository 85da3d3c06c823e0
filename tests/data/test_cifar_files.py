import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from official_files import Form, generated, python2_pickle, write_batch, write_cifar10, write_cifar100

from fedecho.tasks.data_files import MissingDataError, data_folder
from fedecho.tasks.vision import cifar_files as cifar
from fedecho.tasks.vision.cifar_files import read_cifar10, read_cifar100
from fedecho.tasks.vision.images import Images

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
FORMS: tuple[Form, ...] = ("python2", "python3", "binary")


@pytest.mark.parametrize("form", FORMS)
def test_cifar10_comes_back_as_it_was_written(tmp_path: Path, form: Form) -> None:
    train, test = generated(200, 10), generated(40, 10, seed=1)
    for read, written in zip(read_cifar10(write_cifar10(tmp_path, train, test, form)), (train, test), strict=True):
        np.testing.assert_array_equal(read.pixels, written[0])
        np.testing.assert_array_equal(read.labels, written[1])
        assert read.labels is not None
        assert read.labels.dtype == np.int64


@pytest.mark.parametrize("form", FORMS)
def test_cifar100_comes_back_with_its_fine_labels(tmp_path: Path, form: Form) -> None:
    train, test = generated(300, 100), generated(100, 100, seed=1)
    for read, written in zip(read_cifar100(write_cifar100(tmp_path, train, test, form)), (train, test), strict=True):
        np.testing.assert_array_equal(read.pixels, written[0])
        np.testing.assert_array_equal(read.labels, written[1])


def test_the_layout_is_planes_row_by_row(tmp_path: Path) -> None:
    """By the author's page: 1,024 red, then green, then blue bytes, rows first. Written here without the helper."""
    record = bytes([7]) + bytes(range(256)) * 4 + b"\x01" * 1024 + b"\x02" * 1024
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(record)
    (tmp_path / "test_batch.bin").write_bytes(record)
    _, test = read_cifar10(tmp_path)
    assert test.pixels[0, 0, :3].tolist() == [[0, 1, 2], [1, 1, 2], [2, 1, 2]]
    assert test.pixels[0, 1, 0].tolist() == [32, 1, 2]
    assert test.labels is not None
    assert test.labels.tolist() == [7]


def test_an_array_stored_by_columns_is_the_same_array(tmp_path: Path) -> None:
    train, test = generated(10, 10), generated(10, 10, seed=1)
    folder = write_cifar10(tmp_path, train, test)
    planes = np.asfortranarray(test[0].transpose(0, 3, 1, 2).reshape(10, -1))
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": planes, b"labels": test[1].tolist()}, protocol=2))
    np.testing.assert_array_equal(read_cifar10(folder)[1].pixels, test[0])


class Touch:
    """Unpickled by Python itself, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_does_not_execute(folder: Path, tmp_path: Path, protocol: int) -> None:
    trap = tmp_path / "trap"
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": Touch(trap), b"labels": []}, protocol=protocol))
    with pytest.raises(ValueError, match=r"test_batch: not a valid CIFAR pickle \(it refers to (posix|nt)\.mkdir"):
        read_cifar10(folder)
    assert not trap.exists()
    pickle.loads((folder / "test_batch").read_bytes())  # noqa: S301 (the trap does work)
    assert trap.exists()


REFUSED = {
    "builtins.eval": b"cbuiltins\neval\nU\x011\x85R.",
    "a name with dots": b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.tofile\x93.",
    "another codec": b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.",
    "an array of objects": b"cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.",
    "a persistent id": b"Pname\n.",
    "another method of numpy": b"cnumpy\nload\nU\x01x\x85R.",
    "an array that does not fit": b"cnumpy.core.multiarray\n_reconstruct\n" + b"NNN\x87R(K\x01K\x09\x85NNU\x01xtb.",
    "no pickle": b"<html>not found</html>",
    "nothing": b"",
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_what_the_official_files_do_not_hold_is_refused(folder: Path, content: bytes) -> None:
    (folder / "data_batch_3").write_bytes(content)
    with pytest.raises(ValueError, match="data_batch_3: not a valid CIFAR pickle"):
        read_cifar10(folder)


def test_a_pickle_cannot_change_what_reads_the_next(folder: Path) -> None:
    """BUILD sets attributes of whatever is on the stack, functions included: here the default of ``encoding``."""
    latin1 = b"X\x06\x00\x00\x00latin1"
    defaults = b"}}X\x0c\x00\x00\x00__defaults__" + latin1 + b"\x85s\x86"
    (folder / "test_batch").write_bytes(b"\x80\x02c_codecs\nencode\n" + defaults + b"b.")
    with pytest.raises(ValueError, match="test_batch: must be a dictionary"):
        read_cifar10(folder)
    (folder / "test_batch").write_bytes(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00a\x85R.")
    with pytest.raises(ValueError, match=r"test_batch: not a valid CIFAR pickle .*missing 1 required positional argument"):
        read_cifar10(folder)


PLANES = np.zeros((4, 3072), np.uint8)
FAULTS = {
    "no data": (pickle.dumps({b"labels": [0]}, protocol=2), "must be a dictionary with data and labels"),
    "no table": (pickle.dumps([1, 2], protocol=2), "must be a dictionary with data and labels"),
    "no array": (pickle.dumps({b"data": [1], b"labels": [1]}, protocol=2), r"data must be uint8 \[n, 3072\]"),
    "another width": (python2_pickle(PLANES[:, :3000], {b"labels": [0] * 4}), r"got uint8 \[4, 3000\]"),
    "no images": (python2_pickle(PLANES[:0], {b"labels": []}), r"got uint8 \[0, 3072\]"),
    "too few labels": (python2_pickle(PLANES, {b"labels": [0] * 3}), "labels must be a list of 4, got 3"),
    "a label too large": (python2_pickle(PLANES, {b"labels": [0, 1, 10, 3]}), "image 2: its label must be 0 to 9, got 10"),
    "a label below 0": (python2_pickle(PLANES, {b"labels": [-1, 1, 1, 3]}), "image 0: its label must be 0 to 9, got -1"),
    "a huge label": (pickle.dumps({b"data": PLANES, b"labels": [0, 1, 2, 2**80]}, protocol=2), "small integers"),
    "a label in words": (pickle.dumps({b"data": PLANES, b"labels": ["cat"] * 4}, protocol=2), "small integers"),
    "cut short": (python2_pickle(PLANES, {b"labels": [0] * 4})[:-500], "not a valid CIFAR pickle"),
}


@pytest.mark.parametrize(("content", "said"), FAULTS.values(), ids=FAULTS)
def test_every_fault_of_a_pickle_names_the_file(folder: Path, content: bytes, said: str) -> None:
    (folder / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        read_cifar10(folder)
    assert str(folder / "test_batch") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x00" * 3072, b"\x00" * 3074])
def test_a_binary_file_must_hold_whole_images(tmp_path: Path, content: bytes) -> None:
    folder = write_cifar10(tmp_path, generated(10, 10), generated(10, 10), "binary")
    (folder / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"data_batch_2.bin: must contain images of 3073 bytes each, got {len(content)}"):
        read_cifar10(folder)


def test_a_binary_label_out_of_range_is_refused(tmp_path: Path) -> None:
    folder = write_cifar100(tmp_path, generated(10, 100), generated(10, 100), "binary")
    (folder / "test.bin").write_bytes(struct.pack("BB", 19, 100) + bytes(3072))
    with pytest.raises(ValueError, match=r"test.bin, image 0: its label must be 0 to 99, got 100"):
        read_cifar100(folder)


def test_a_file_larger_than_any_official_one_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="data_batch_1: it has more than 1000 bytes"):
        read_cifar10(folder)


def test_a_training_file_cut_between_images_is_noticed(folder: Path) -> None:
    write_batch(folder / "data_batch_5", *_labelled(3), "python2")
    with pytest.raises(ValueError, match=r"equally many images, got \[4, 4, 4, 4, 3\]"):
        read_cifar10(folder)


def test_a_missing_file_is_named_with_the_way_to_get_it(folder: Path) -> None:
    (folder / "data_batch_4").unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_4.*`fedecho data fetch cifar10`"):
        read_cifar10(folder)


@pytest.mark.parametrize(
    ("pixels", "labels"),
    [
        (np.zeros((2, 32, 32), np.uint8), None),
        (np.zeros((2, 32, 32, 3), np.float32), None),
        (np.zeros((2, 32, 31, 3), np.uint8), None),
        (np.zeros((2, 32, 32, 3), np.uint8), np.zeros(3, np.int64)),
        (np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2, np.int32)),
    ],
)
def test_images_are_square_bytes_with_as_many_labels(pixels: Any, labels: Any) -> None:
    with pytest.raises(ValueError, match="images"):
        Images(pixels, labels)


def test_the_real_cifar10_is_read_byte_for_byte() -> None:
    """Wherever it has been restored; the hashes are those of the official files' pixels and labels."""
    places = [place / "cifar-10-batches-py" for place in (data_folder(), ROOT / "data", SHARED)]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None or not (SHARED / "manifest.json").is_file():
        pytest.skip("no restored cifar-10-batches-py: set FEDECHO_DATA to the folder that holds it")
    manifest = json.loads((SHARED / "manifest.json").read_text())
    for images, part in zip(read_cifar10(folder), ("train", "test"), strict=True):
        expected = manifest[f"cifar10/{part}"]
        planes = np.ascontiguousarray(images.pixels.transpose(0, 3, 1, 2))
        assert len(images) == expected["num_images"]
        assert hashlib.sha256(planes.tobytes()).hexdigest() == expected["sha256"]
        assert images.labels is not None
        assert hashlib.sha256(images.labels.astype(np.uint8).tobytes()).hexdigest() == expected["labels"]["labels"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_cifar10(tmp_path, generated(20, 10), generated(10, 10, seed=1))


def _labelled(num: int) -> tuple[Any, dict[bytes, Any]]:
    pixels, labels = generated(num, 10)
    return pixels, {b"labels": labels}
