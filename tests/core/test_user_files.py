"""A user's file may be a pipe, a device or endless: every reader reports it in one line at once."""

import os
import signal
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from typer.testing import CliRunner

from fedecho import Runtimes, load
from fedecho.cli import app
from fedecho.flower.config import key_values
from fedecho.storage.files import file_sha256
from fedecho.storage.user_files import MAX_DEPTH, FileError, check_file, parse_toml, read_bytes, read_toml
from fedecho.tasks.text.readers import read_instructions, read_pairs
from fedecho.tasks.vision.cifar_files import read_cifar10
from fedecho.tasks.vision.images import map_stl10
from fedecho.tasks.vision.unlabeled import read_unlabeled

READERS: dict[str, Callable[[Path], object]] = {
    "mine.toml": read_toml,
    "pairs.tsv": partial(read_pairs, labelled=True),
    "pairs.jsonl": partial(read_pairs, labelled=True),
    "sums.json": read_instructions,
    "trace.csv": lambda path: Runtimes(trace=str(path)).assign([1], seed=0),
    "images.npy": lambda path: read_unlabeled(str(path), None, 1, seed=0),
    "data_batch_1": lambda path: read_cifar10(path.parent),
    "unlabeled_X.bin": lambda path: map_stl10(path.parent),
    "weights.safetensors": file_sha256,
    "node.toml": lambda path: key_values("--node-config", [str(path)], {}),
}


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(path.parent)  # the whole path of a socket may have 107 bytes
        listening.bind(path.name)
        os.chdir(here)


@pytest.fixture(autouse=True)
def _nobody_waits() -> Iterator[None]:
    """A reader that waits for a pipe would wait for ever."""

    def give_up(*_: object) -> None:
        raise AssertionError("it is still reading")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("make", [a_pipe, a_device, a_socket])
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_read(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{tmp_path}.*") as told:
        READERS[name](tmp_path / name)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(("make", "kind"), [(a_pipe, "a named pipe"), (a_device, "a device"), (a_socket, "a socket")])
def test_the_error_says_what_it_is_and_what_to_give(tmp_path: Path, make: Callable[[Path], None], kind: str) -> None:
    make(tmp_path / "odd")
    for read in (check_file, read_bytes):
        with pytest.raises(FileError, match=f"cannot read {tmp_path}/odd: it is {kind}, not a regular file"):
            read(tmp_path / "odd")


@pytest.mark.parametrize("name", ["mine.toml", "pairs.tsv", "sums.json", "trace.csv", "data_batch_1"])
def test_a_file_without_a_reasonable_end_is_not_read(tmp_path: Path, name: str) -> None:
    """A terabyte of nothing takes no room on the disk."""
    for other in [f"data_batch_{number}" for number in range(1, 6)] if name == "data_batch_1" else [name]:
        with (tmp_path / other).open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(ValueError, match=rf"{name}: it has more than \d+ bytes"):
        READERS[name](tmp_path / name)


def test_what_the_system_makes_up_has_a_limit_too() -> None:
    """Its size is 0 before it is read."""
    with pytest.raises(FileError, match="more than 10 bytes"):
        read_bytes(Path("/proc/self/status"), 10)


def test_a_command_names_the_pipe_in_one_line(tmp_path: Path) -> None:
    for words, name in ((["run"], "mine.toml"), (["run", "digits", "--set"], "trace.csv")):
        os.mkfifo(tmp_path / name)
        given = str(tmp_path / name) if len(words) == 1 else f"runtimes.trace={tmp_path / name}"
        result = CliRunner().invoke(app, [*words, given, "--out", str(tmp_path / "run")])
        assert result.exit_code == 2
        assert len(result.stderr.strip().splitlines()) == 1
        assert f"{tmp_path / name}: it is a named pipe" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 30_000) + " = 1",
        "[" + ".".join(["a"] * 30_000) + "]",
        ".".join(['"a"', "'b'", "c"] * 10_000) + " = 1",
        'x = {y = """ " """", ' + " . ".join(["a"] * 30_000) + " = 1}",
        "x = [1, {" + ".".join(["a"] * (MAX_DEPTH + 1)) + " = 1}]",
        "'''\na = '''\n" + ".".join(["a"] * 30_000) + " = 1",
    ],
    ids=["key", "heading", "quoted", "inline", "in a list", "after a text"],
)
def test_keys_of_many_parts_are_refused_before_they_are_parsed(text: str) -> None:
    tracemalloc.start()
    began = process_time()
    with pytest.raises(ValueError, match=rf"a key has more than {MAX_DEPTH} parts|Invalid|Expected"):
        parse_toml(text)
    assert process_time() - began < 2
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    "text", ["a" * 10**6, "a " * 500_000, '"\\' * 500_000, '"' * 10**6, "'''" * 300_001, "a." * 19 + "a", "a .\t" * 250_000]
)
def test_the_look_before_parsing_takes_no_time(text: str) -> None:
    began = process_time()
    with pytest.raises(ValueError, match=r".+"):
        parse_toml(text)
    assert process_time() - began < 2


def test_dots_in_texts_and_comments_are_no_parts_of_a_key() -> None:
    dots = ".".join("a" * 100)
    for quote in ('"', "'", '"""', "'''"):
        assert parse_toml(f"x = {quote}{dots}{quote} # {dots}") == {"x": dots}
    assert parse_toml('x = """\n\\"""' + dots + '""""" # a') == {"x": f'"""{dots}""'}
    assert set(parse_toml(".".join("a" * MAX_DEPTH) + " = 1")) == {"a"}
    assert load("digits", settings=[f'name="{"a." * 30}"']).name == "a." * 30


@pytest.mark.parametrize("shape", [(-1, 8, 8, 3), (10**9, 8, 8, 3), (2**62, 2, 2, 3), (5, 8, 8, -3)])
def test_an_array_whose_heading_lies_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "lie.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        file.write(bytes(8 * 8 * 3))
    with pytest.raises(ValueError, match=r"lie\.npy.*its header gives uint8 .*, but 192 bytes follow"):
        read_unlabeled(str(path), None, 1, seed=0)


def test_a_home_of_nobody_is_said() -> None:
    with pytest.raises(ValueError, match="there is no home folder of ~nobody-of-that-name"):
        read_unlabeled("~nobody-of-that-name/images.npy", None, 1, seed=0)
