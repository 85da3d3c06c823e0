"""Runtimes from a user's file: what is read, and the errors for invalid files."""

import re
from collections import Counter
from pathlib import Path

import pytest

from fedecho.simulation.runtimes import Runtimes, read_trace


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_every_client_gets_its_own_rows(tmp_path: Path) -> None:
    path = written(tmp_path, "client,runtime_s\n1,2.5\n0,10\n1,1e2\n\n2,0.125\n")
    trace = read_trace(path, 3)
    assert [trace.of(client) for client in range(3)] == [[10.0], [2.5, 100.0], [0.125]]


@pytest.mark.parametrize(
    "text",
    [
        "runtime_s,client\n3.5,0\n",
        "day,client,runtime_s,note\nMonday,0,3.5,hot\n",
        "client,runtime_s\r\n0,3.5\r\n",
        'client,runtime_s\n"0","3.5"\n',
        "client,runtime_s\n 0 , 3.5 \n",
        "client,runtime_s\n0,3.5",
    ],
    ids=["other order", "more columns", "windows line ends", "quotes", "spaces", "no last line end"],
)
def test_usual_ways_of_writing_a_table_are_read(tmp_path: Path, text: str) -> None:
    assert read_trace(written(tmp_path, text), 1).of(0) == [3.5]


BAD_LINES = {
    "no number for the client": ("0,1\nx,2\n1,3\n", 3, "client and runtime_s must be numbers"),
    "no number for the runtime": ("0,1\n1,soon\n", 3, "client and runtime_s must be numbers"),
    "half a client": ("0,1\n1,1\n0.5,2\n", 4, "client and runtime_s must be numbers"),
    "nothing for the runtime": ("0,\n1,1\n", 2, "client and runtime_s must be numbers"),
    "a short row": ("0,1\n1\n", 3, "client and runtime_s must be numbers"),
    "a client too many": ("0,1\n1,1\n2,1\n", 4, "client must be between 0 and 1, got 2"),
    "a client below 0": ("-1,1\n0,1\n1,1\n", 2, "client must be between 0 and 1, got -1"),
    "no time at all": ("0,1\n1,0\n", 3, "runtime_s must be above 0, got 0.0"),
    "time backwards": ("0,1\n1,-3\n", 3, "runtime_s must be above 0, got -3.0"),
    "not a number": ("0,nan\n1,1\n", 2, "runtime_s must be above 0, got nan"),
    "for ever": ("0,1\n1,inf\n", 3, "runtime_s must be above 0, got inf"),
    "a comma for the decimal point": ("0,1\n1,2,5\n", 3, ""),
}


@pytest.mark.parametrize("fault", BAD_LINES)
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, fault: str) -> None:
    text, line, reason = BAD_LINES[fault]
    path = written(tmp_path, "client,runtime_s\n" + text)
    with pytest.raises(ValueError, match=r"trace\.csv, line") as caught:
        read_trace(path, 2)
    assert f"{path}, line {line}: " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ["", "client,runtime\n0,1\n", "0,1\n1,2\n", "client;runtime_s\n0;1\n"])
def test_a_first_line_without_the_columns_is_said(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=r"the header must contain the columns client,runtime_s") as caught:
        read_trace(path, 2)
    assert str(path) in str(caught.value)


def test_a_client_without_a_row_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "client,runtime_s\n0,1\n3,1\n")
    with pytest.raises(ValueError, match=r"no runtime for client 1 \(2 of 4 clients have none\)") as caught:
        read_trace(path, 4)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text", [b"client,runtime_s\n0,\xff\xfe\n", b"client,runtime_s\n0," + b"1" * 200_000], ids=["not utf-8", "endless field"]
)
def test_a_file_that_is_no_text_table_is_said(tmp_path: Path, text: bytes) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(f"cannot read the trace {path}")):
        read_trace(path, 1)


@pytest.mark.parametrize("name", ["missing.csv", ""])
def test_a_file_that_is_not_there_or_a_folder_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"cannot read the trace {tmp_path / name}")):
        Runtimes(trace=str(tmp_path / name)).assign([1, 1], seed=0)


def test_draws_are_the_clients_own_and_evenly_so(tmp_path: Path) -> None:
    """Chi-square with 3 degrees of freedom at a share of .001."""
    path = written(tmp_path, "client,runtime_s\n0,1\n0,2\n0,3\n0,4\n1,77\n")
    runtimes = Runtimes(trace=str(path)).assign([1, 1], seed=0)
    assert runtimes.class_of(0) == "traced"
    counts = Counter(runtimes.draw(0, number) for number in range(2000))
    assert set(counts) == {1.0, 2.0, 3.0, 4.0}
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 16.3
    assert {runtimes.draw(1, number) for number in range(50)} == {77.0}
    assert [runtimes.draw(0, number) for number in range(9)] == [runtimes.draw(0, number) for number in range(9)]
