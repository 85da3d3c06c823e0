import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from official_files import Pixels, generated, write_stl10

from fedecho.tasks.data_files import MissingDataError
from fedecho.tasks.vision.images import centre_cropped, cropped_and_resized, map_stl10, resized

TRAIN, TEST = generated(30, 10, size=96), generated(20, 10, seed=1, size=96)
UNLABELED = generated(40, 10, seed=2, size=96)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_stl10(tmp_path, TRAIN, TEST, UNLABELED)


def test_the_images_come_back_as_they_were_written(folder: Path) -> None:
    np.testing.assert_array_equal(map_stl10(folder), UNLABELED)


def test_planes_are_stored_column_by_column(tmp_path: Path) -> None:
    """Written without the helper: red counts down the first column."""
    plane = np.zeros(3 * 96 * 96, np.uint8)
    plane[:96] = np.arange(96)
    (tmp_path / "unlabeled_X.bin").write_bytes(plane.tobytes())
    assert map_stl10(tmp_path)[0, :, 0, 0].tolist() == list(range(96))


def test_chosen_rows_are_resized_in_their_order(folder: Path) -> None:
    rows = np.array([7, 3, 29])
    np.testing.assert_array_equal(cropped_and_resized(map_stl10(folder), rows, 32), resized(UNLABELED[rows], 32))


def test_a_few_images_of_a_large_file_do_not_load_it(tmp_path: Path) -> None:
    path = tmp_path / "unlabeled_X.bin"
    with path.open("wb") as file:
        file.truncate(100_000 * 27_648)  # sparse: it takes no room
    tracemalloc.start()
    images = cropped_and_resized(map_stl10(tmp_path), np.array([0, 50_000, 99_999]), 32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(images) == 3
    assert peak < 20_000_000


def test_faults_name_the_file(folder: Path) -> None:
    (folder / "unlabeled_X.bin").write_bytes(b"\x00" * 27_647)
    with pytest.raises(ValueError, match=r"unlabeled_X.bin: must contain images of 27648 bytes each, got 27647"):
        map_stl10(folder)
    (folder / "unlabeled_X.bin").unlink()
    with pytest.raises(MissingDataError, match=r"unlabeled_X.bin is missing.*`fedecho data fetch stl10`"):
        map_stl10(folder)


def smooth(num: int, size: int) -> Pixels:
    rng = np.random.default_rng(0)
    x = np.linspace(0, 3, size)
    waves = np.sin(x[:, None] * rng.uniform(1, 4, (num, 1, 1, 3)) + x[None, :, None] * rng.uniform(1, 4, (num, 1, 1, 3)).mean())
    return (127 + 120 * np.broadcast_to(waves, (num, size, size, 3))).astype(np.uint8)


def test_resizing_to_the_same_size_is_the_identity() -> None:
    pixels = generated(5, 10)[0]
    np.testing.assert_array_equal(resized(pixels, 32), pixels)


def test_resizing_agrees_with_pillow() -> None:
    image_module = pytest.importorskip("PIL.Image")
    pixels = np.concatenate([smooth(3, 96), generated(300, 10, size=96)[0]])  # more than one chunk
    ours = resized(pixels, 32)
    theirs = [np.asarray(image_module.fromarray(p).resize((32, 32), image_module.Resampling.BILINEAR)) for p in pixels]
    assert np.abs(ours.astype(int) - np.stack(theirs).astype(int)).max() <= 1


def test_resizing_is_antialiased() -> None:
    stripes = np.zeros((1, 96, 96, 3), np.uint8)
    stripes[:, :, ::2] = 255
    assert np.abs(resized(stripes, 32)[:, :, 2:-2].astype(int) - 127).max() < 20


def test_cropping_takes_the_middle() -> None:
    wide = np.zeros((1, 4, 8, 3), np.uint8)
    wide[:, :, 2:6] = 9
    assert centre_cropped(wide).shape == (1, 4, 4, 3)
    assert (centre_cropped(wide) == 9).all()


def test_a_size_must_be_at_least_one() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        resized(UNLABELED, 0)
