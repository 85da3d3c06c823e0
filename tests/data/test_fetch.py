import hashlib
import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from official_files import generated, write_cifar10

from fedecho.tasks.vision import fetch as fetching
from fedecho.tasks.vision.cifar_files import read_cifar10
from fedecho.tasks.vision.fetch import SOURCES, FetchError, RetryPolicy, fetch

FAST = RetryPolicy(attempts=3, pause_s=0.001, timeout_s=60)
ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
PART = f"{ARCHIVE}.part"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How the server answers one request."""

    status: int = 200
    cut: int | None = None
    """Hang up after so many bytes of the body."""
    claim: int = 0
    """Added to the true Content-Length."""
    length: bool = True
    ranges: bool = True
    shift: int = 0
    """Added to the first byte of a part."""
    body: bytes | None = None


@dataclass
class Origin:
    """The published file, the answers to come (the last one for good), and what was asked."""

    content: bytes
    address: str = ""
    answers: list[Answer] = field(default_factory=lambda: [Answer()])
    asked: list[str | None] = field(default_factory=list)

    def next_answer(self) -> Answer:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def handler_of(origin: Origin) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked, answer = self.headers["Range"], origin.next_answer()
            origin.asked.append(asked)
            body = origin.content if answer.body is None else answer.body
            if answer.status != 200:
                return self.send_error(answer.status)
            start = int(asked.removeprefix("bytes=").removesuffix("-")) + answer.shift if asked and answer.ranges else 0
            if start >= len(body):
                return self.send_error(416)
            self.send_response(206 if asked and answer.ranges else 200)
            if asked and answer.ranges:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            if answer.length:
                self.send_header("Content-Length", str(len(body) - start + answer.claim))
            self.end_headers()
            self.wfile.write(body[start:][: answer.cut])
            return None

        def log_message(self, *args: Any) -> None:
            """Tests are silent."""

    return Handler


def tarred(fill: Callable[[tarfile.TarFile], None]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        fill(tar)
    return stream.getvalue()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = write_cifar10(tmp_path_factory.mktemp("published"), generated(100, 10), generated(20, 10, seed=1))
    return tarred(lambda tar: tar.add(folder, FOLDER))


@pytest.fixture
def origin(published: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Origin]:
    monkeypatch.setenv("no_proxy", "*")
    origin = Origin(published)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(origin)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        origin.address = f"http://127.0.0.1:{server.server_port}/{ARCHIVE}"
        publish(origin, monkeypatch)
        yield origin
        server.shutdown()
        thread.join()


def publish(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    md5 = hashlib.md5(origin.content, usedforsecurity=False).hexdigest()
    monkeypatch.setitem(SOURCES, "cifar10", replace(SOURCES["cifar10"], url=origin.address, md5=md5))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_set_is_fetched_unpacked_and_readable(origin: Origin, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    folder = fetch("cifar10", tmp_path / "new" / "data", lambda done, total: seen.append((done, total)), retry=FAST)
    np.testing.assert_array_equal(read_cifar10(folder)[0].pixels, generated(100, 10)[0])
    assert names(folder.parent) == {FOLDER}
    assert seen[-1] == (len(origin.content), len(origin.content))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_what_is_there_is_left_alone(origin: Origin, tmp_path: Path) -> None:
    write_cifar10(tmp_path, generated(10, 10), generated(10, 10))
    said: list[str] = []
    assert fetch("cifar10", tmp_path, say=said.append) == tmp_path / FOLDER
    assert said == [f"{tmp_path / FOLDER} already exists and is complete"]
    assert origin.asked == []
    (tmp_path / FOLDER / "data_batch_2").unlink()
    with pytest.raises(FetchError, match="lacks data_batch_2: remove it, then fetch again"):
        fetch("cifar10", tmp_path)


def test_a_download_goes_on_where_it_broke_off(origin: Origin, tmp_path: Path) -> None:
    """Five times cut although three failures in a row are the limit: each attempt gained something."""
    cut = len(origin.content) // 6 + 1
    origin.answers = [Answer(cut=cut)]
    said: list[str] = []
    fetch("cifar10", tmp_path, say=said.append, retry=FAST)
    assert origin.asked == [None, *(f"bytes={cut * k}-" for k in range(1, 6))]
    assert said[0] == f"{ARCHIVE}: the connection closed after {cut} of {len(origin.content)} bytes; trying again"
    assert names(tmp_path) == {FOLDER}


def test_a_later_fetch_resumes_the_part_of_an_earlier_one(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(cut=1000), Answer(status=503)]
    with pytest.raises(FetchError, match=r"returned 503 .*fetch again to resume from byte 1000, or put") as caught:
        fetch("cifar10", tmp_path, retry=FAST)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == {PART}
    assert (tmp_path / PART).read_bytes() == origin.content[:1000]
    origin.answers, origin.asked = [Answer()], []
    fetch("cifar10", tmp_path, retry=FAST)
    assert origin.asked == ["bytes=1000-"]
    assert names(tmp_path) == {FOLDER}


def test_a_server_that_ignores_ranges_sends_it_all_again(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(cut=1000), Answer(ranges=False)]
    fetch("cifar10", tmp_path, retry=FAST)
    assert names(tmp_path) == {FOLDER}


def test_a_server_that_cuts_and_ignores_ranges_is_given_up(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(cut=1000, ranges=False)]
    with pytest.raises(FetchError, match="closed after 1000 of"):
        fetch("cifar10", tmp_path, retry=FAST)
    assert len(origin.asked) == 3
    assert names(tmp_path) == {PART}


def test_a_part_that_is_the_whole_file_needs_no_more(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / PART).write_bytes(origin.content)
    fetch("cifar10", tmp_path, retry=FAST)
    assert origin.asked == [f"bytes={len(origin.content)}-"]
    assert names(tmp_path) == {FOLDER}


@pytest.mark.parametrize("extra", [-1000, 0, 1000])
def test_a_part_of_another_file_is_thrown_away(origin: Origin, tmp_path: Path, extra: int) -> None:
    """Shorter: the sum is wrong. As long or longer: the server has nothing beyond it (416)."""
    (tmp_path / PART).write_bytes(b"x" * (len(origin.content) + extra))
    fetch("cifar10", tmp_path, retry=FAST)
    assert origin.asked[1:] == [None]
    assert names(tmp_path) == {FOLDER}


def test_another_part_than_asked_for_is_not_appended(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(cut=1000), Answer(shift=7), Answer()]
    fetch("cifar10", tmp_path, retry=FAST)
    assert origin.asked == [None, "bytes=1000-", None]


def test_a_length_claimed_too_large_is_a_broken_download(origin: Origin, tmp_path: Path) -> None:
    """The next request learns that there is no more, and the md5 that it is all."""
    origin.answers = [Answer(claim=500)]
    fetch("cifar10", tmp_path, retry=FAST)
    assert origin.asked == [None, f"bytes={len(origin.content)}-"]


def test_a_length_claimed_too_small_is_caught_by_the_md5(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(claim=-500)]
    with pytest.raises(FetchError, match="not the published"):
        fetch("cifar10", tmp_path, retry=FAST)
    assert names(tmp_path) == set()


def test_no_length_at_all_is_left_to_the_md5(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(length=False)]
    seen: list[int | None] = []
    fetch("cifar10", tmp_path, lambda done, total: seen.append(total), retry=FAST)
    assert set(seen) == {None}


def test_a_wrong_file_is_never_unpacked(origin: Origin, tmp_path: Path, published: bytes) -> None:
    origin.answers = [Answer(body=published + b"\x00")]
    with pytest.raises(FetchError, match=r"sent a file with MD5 \w+, not the published \w+; it was removed"):
        fetch("cifar10", tmp_path, retry=FAST)
    assert len(origin.asked) == 1
    assert names(tmp_path) == set()


def test_errors_of_the_server_are_tried_again_and_refusals_are_not(origin: Origin, tmp_path: Path) -> None:
    origin.answers = [Answer(status=500), Answer(status=429), Answer()]
    fetch("cifar10", tmp_path / "a", retry=FAST)
    assert len(origin.asked) == 3
    origin.answers, origin.asked = [Answer(status=404)], []
    with pytest.raises(FetchError, match=r"the server returned 404 Not Found; put cifar-10-python.tar.gz into"):
        fetch("cifar10", tmp_path / "b", retry=FAST)
    assert len(origin.asked) == 1


def test_no_server_at_all_is_one_line(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(origin)) as closed:
        origin.address = f"http://127.0.0.1:{closed.server_port}/{ARCHIVE}"
    publish(origin, monkeypatch)
    with pytest.raises(FetchError, match=r"cannot fetch http.*refused") as caught:
        fetch("cifar10", tmp_path, retry=FAST)
    assert "\n" not in str(caught.value)


def test_a_server_that_hangs_times_out(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket takes the connection and nobody answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(origin)) as silent:
        origin.address = f"http://127.0.0.1:{silent.server_port}/{ARCHIVE}"
        publish(origin, monkeypatch)
        with pytest.raises(FetchError, match="timed out"):
            fetch("cifar10", tmp_path, retry=replace(FAST, timeout_s=0.05))


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, 4 if kind == tarfile.REGTYPE else 0
    return info


TRAPS = {
    "a way up": member("../escape"),
    "a way up from inside": member(f"{FOLDER}/../../escape"),
    "an absolute path": member("/fedecho-escape"),
    "a way up on Windows": member("..\\escape"),
    "a drive": member("C:escape"),
    "a symbolic link": member(f"{FOLDER}/link", tarfile.SYMTYPE, "/"),
    "a symbolic link inside": member(f"{FOLDER}/link", tarfile.SYMTYPE, "data_batch_1"),
    "a hard link": member(f"{FOLDER}/link", tarfile.LNKTYPE, "/etc/passwd"),
    "a device": member(f"{FOLDER}/device", tarfile.CHRTYPE),
    "a pipe": member(f"{FOLDER}/pipe", tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS)
def test_an_archive_with_a_trap_leaves_nothing(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: tarfile.TarInfo
) -> None:
    """Even if its md5 were right. What comes before the trap is not left either."""

    def fill(tar: tarfile.TarFile) -> None:
        for name in SOURCES["cifar10"].files:
            tar.addfile(member(f"{FOLDER}/{name}"), io.BytesIO(b"good"))
        tar.addfile(trap, io.BytesIO(b"evil"))

    origin.content = tarred(fill)
    publish(origin, monkeypatch)
    inner = tmp_path / "data"
    with pytest.raises(FetchError, match=r"cannot unpack .*(points outside the folder|neither a file nor a folder)"):
        fetch("cifar10", inner, retry=FAST)
    assert names(inner) == {ARCHIVE}
    assert names(tmp_path) == {"data"}
    assert not Path("/fedecho-escape").exists()


@pytest.mark.parametrize(("limit", "value"), [("MAX_MEMBERS", 5), ("MAX_BYTES", 100_000)])
def test_an_archive_may_not_unpack_without_bounds(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    origin.content = tarred(lambda tar: [tar.addfile(big(f"{FOLDER}/{k}"), io.BytesIO(bytes(30_000))) for k in range(6)])
    publish(origin, monkeypatch)
    monkeypatch.setattr(fetching, limit, value)
    with pytest.raises(FetchError, match="it contains more than"):
        fetch("cifar10", tmp_path, retry=FAST)
    assert names(tmp_path) == {ARCHIVE}


def big(name: str) -> tarfile.TarInfo:
    info = member(name)
    info.size = 30_000
    return info


def test_a_download_may_not_grow_without_bounds(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_BYTES", 1000)
    for answer in (Answer(), Answer(length=False)):
        origin.answers = [answer]
        with pytest.raises(FetchError, match="sends more than 1000 bytes"):
            fetch("cifar10", tmp_path, retry=FAST)
        assert names(tmp_path) == set()


@pytest.mark.parametrize("damage", ["no archive", "cut", "incomplete"])
def test_an_archive_that_cannot_be_unpacked_leaves_no_folder(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bytes, damage: str
) -> None:
    few = tarred(lambda tar: tar.addfile(member(f"{FOLDER}/data_batch_1"), io.BytesIO(b"good")))
    origin.content = {"no archive": b"<html>", "cut": published[:-1000], "incomplete": few}[damage]
    publish(origin, monkeypatch)
    with pytest.raises(FetchError, match=r"cannot unpack|lacks data_batch_2") as caught:
        fetch("cifar10", tmp_path, retry=FAST)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == {ARCHIVE}


def test_an_interruption_while_unpacking_leaves_no_folder(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack, count = tarfile.TarFile.extract, [0]

    def interrupted(*args: Any, **kwargs: Any) -> None:
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        unpack(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(tarfile.TarFile, "extract", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch("cifar10", tmp_path, retry=FAST)
    assert names(tmp_path) == {ARCHIVE}
    origin.asked = []
    fetch("cifar10", tmp_path, retry=FAST)
    assert origin.asked == []


def test_an_archive_put_there_by_hand_is_used_and_kept(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(origin.content)
    fetch("cifar10", tmp_path)
    assert origin.asked == []
    assert names(tmp_path) == {ARCHIVE, FOLDER}


def test_an_archive_put_there_by_hand_must_be_the_published_one(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(b"another")
    with pytest.raises(FetchError, match="is not the published file"):
        fetch("cifar10", tmp_path)
    assert names(tmp_path) == {ARCHIVE}


def test_a_folder_that_cannot_be_made_is_one_line(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FetchError, match=r"cannot write .*file"):
        fetch("cifar10", tmp_path / "file" / "data", retry=FAST)


def test_only_known_sets_can_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="must be one of cifar10, cifar100, stl10"):
        fetch("imagenet", tmp_path)


def test_the_table_is_what_the_authors_publish() -> None:
    for source in SOURCES.values():
        assert len(source.md5) == 32
        assert source.archive.endswith(".tar.gz")
        assert source.url.startswith(("https://www.cs.toronto.edu/~kriz/", "http://ai.stanford.edu/~acoates/"))
