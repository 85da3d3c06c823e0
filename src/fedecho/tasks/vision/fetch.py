"""Fetch the image sets from their authors' addresses: resumed where it broke off, checked by md5, unpacked whole or not at all."""

import hashlib
import re
import tarfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedecho.tasks.data_files import data_folder

MAX_BYTES = 4 << 30
"""Of an archive, and of what it unpacks to: stl10, the largest, is 2.6 GB and 3.1 GB."""
MAX_MEMBERS = 100
BLOCK = 1 << 16
PASSING = {408, 425, 429}
"""Answers that another attempt may change, beside those from 500 on."""

Progress = Callable[[int, int | None], None]
"""Told the bytes that are there, and the bytes there will be if the server said so."""
Say = Callable[[str], None]


class FetchError(ValueError):
    """What failed and what to do, in one line."""


class _BrokenOffError(Exception):
    """Worth another attempt."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """An archive as its authors publish it: what it unpacks to, and which of its files a reader needs."""

    url: str
    md5: str
    folder: str
    files: tuple[str, ...]

    @property
    def archive(self) -> str:
        return self.url.rpartition("/")[2]


SOURCES: dict[str, Source] = {
    "cifar10": Source(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        folder="cifar-10-batches-py",
        files=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    ),
    "cifar100": Source(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        folder="cifar-100-python",
        files=("train", "test"),
    ),
    "stl10": Source(
        url="http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
        md5="91f7769df0f17e558f3565bffb0c7dfb",
        folder="stl10_binary",
        files=("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "unlabeled_X.bin"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often an attempt may fail in a row without a byte gained, and how long to wait for an answer and between them."""

    attempts: int = 4
    pause_s: float = 2.0
    timeout_s: float = 30.0


def fetch(
    name: str,
    data_dir: Path | None = None,
    progress: Progress = lambda done, total: None,
    say: Say = lambda text: None,
    patience: Patience | None = None,
) -> Path:
    """The folder of a set, fetched if it is not there. An archive that lies in the data folder already is used and kept."""
    if name not in SOURCES:
        raise FetchError(f"there is nothing to fetch for {name!r}: it must be one of {', '.join(SOURCES)}")
    source, parent = SOURCES[name], data_folder(data_dir)
    folder, archive = parent / source.folder, parent / source.archive
    try:
        if folder.exists():
            _check_complete(folder, source, "remove it, then fetch again")
            say(f"{folder} is already there, and complete")
            return folder
        parent.mkdir(parents=True, exist_ok=True)
        given = archive.is_file()
        if given and _md5(archive) != source.md5:
            raise FetchError(f"{archive} is not the published file (its md5 is not {source.md5}): remove it, then fetch again")
        if not given:
            _download(source, archive, progress, say, patience or Patience())
        say(f"unpacking {archive.name}")
        _unpack(archive, folder, source)
        if not given:
            archive.unlink()
    except OSError as error:
        raise FetchError(
            f"cannot write {error.filename or parent}: {error.strerror or error}; mend that, then fetch again"
        ) from None
    return folder


def _download(source: Source, archive: Path, progress: Progress, say: Say, patience: Patience) -> None:
    """Into ``.part``, over as many attempts as gain something; the archive gets its name when its md5 is right."""
    part = archive.with_name(f"{archive.name}.part")
    failures, longest = 0, _size(part)
    while True:
        try:
            _attempt(source, part, progress, patience.timeout_s)
        except _BrokenOffError as error:
            failures = 1 if _size(part) > longest else failures + 1
            longest = max(longest, _size(part))
            if failures >= patience.attempts:
                raise FetchError(
                    f"cannot fetch {source.url}: {error}; fetch again to go on from byte {_size(part)}, "
                    f"or put {archive.name} into {archive.parent} yourself"
                ) from None
            say(f"{archive.name}: {error}; trying again")
            time.sleep(patience.pause_s * failures)
        else:
            part.replace(archive)
            return


def _attempt(source: Source, part: Path, progress: Progress, timeout_s: float) -> None:
    """Fetch what is still missing; returns if the file is then the published one."""
    start = _size(part)
    response = _answer(source, part, start, timeout_s)
    if response is not None:
        with response:
            _receive(response, part, start, progress)
    found = _md5(part)
    if found != source.md5:
        part.unlink()
        if start:
            raise _BrokenOffError("what was fetched earlier is no part of the published file, and was removed")
        raise FetchError(
            f"{source.url} sent a file with md5 {found}, not the published {source.md5}; it was removed: try later"
        )


def _answer(source: Source, part: Path, start: int, timeout_s: float) -> HTTPResponse | None:
    """The server's answer to a request from byte ``start`` on; None if it has nothing beyond that."""
    headers = {"User-Agent": "fedecho"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response: HTTPResponse = urlopen(Request(source.url, headers=headers), timeout=timeout_s)  # noqa: S310 (our own table)
    except HTTPError as error:
        error.close()
        said = f"the server answers {error.code} {error.reason}"
        if error.code in PASSING or error.code >= 500:
            raise _BrokenOffError(said) from None
        if error.code == 416 and start:
            return None
        raise FetchError(f"cannot fetch {source.url}: {said}; put {source.archive} into {part.parent} yourself") from None
    except (OSError, HTTPException) as error:
        raise _BrokenOffError(_reason(error)) from None
    return response


def _receive(response: HTTPResponse, part: Path, start: int, progress: Progress) -> None:
    """Append to ``part``; a server that sends the whole file although a part was asked for starts it anew."""
    length = response.headers.get("Content-Length", "")
    total = int(length) if length.isdecimal() else None
    if response.status == 206:
        sent = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if sent is None or int(sent[1]) != start:
            part.unlink(missing_ok=True)
            raise _BrokenOffError("the server sent another part than it was asked for")
        total = int(sent[2])
    done = start if response.status == 206 else 0
    with part.open("ab" if done else "wb") as file:
        while block := _block(response):
            done += len(block)
            if max(done, total or 0) > MAX_BYTES:
                part.unlink()
                raise FetchError(f"{response.url} sends more than {MAX_BYTES} bytes: it is not the published file; try later")
            file.write(block)
            progress(done, total)
    if total is not None and done != total:
        raise _BrokenOffError(f"it broke off after {done} of {total} bytes")


def _block(response: HTTPResponse) -> bytes:
    try:
        return response.read(BLOCK)
    except (OSError, HTTPException) as error:
        raise _BrokenOffError(_reason(error)) from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", error)) or type(error).__name__


def _unpack(archive: Path, folder: Path, source: Source) -> None:
    """Into a folder beside, which is renamed when everything is there."""
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        try:
            _extract(archive, Path(temporary))
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise FetchError(f"cannot unpack {archive}: {error}; remove it, then fetch again") from None
        unpacked = Path(temporary) / folder.name
        _check_complete(unpacked, source, "that is not the published archive", f"{archive}: its {folder.name}")
        unpacked.rename(folder)


def _extract(archive: Path, into: Path) -> None:
    with tarfile.open(archive, "r:gz") as tar:
        total = 0
        for number, member in enumerate(tar, 1):
            total += member.size
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or "\\" in member.name or ":" in member.name:
                raise tarfile.TarError(f"its member {member.name!r} leads out of the folder")
            if not (member.isreg() or member.isdir()):
                raise tarfile.TarError(f"its member {member.name!r} is neither a file nor a folder")
            if total > MAX_BYTES or number > MAX_MEMBERS:
                raise tarfile.TarError(f"it holds more than {MAX_BYTES} bytes or {MAX_MEMBERS} members")
            tar.extract(member, into, filter="data")


def _check_complete(folder: Path, source: Source, remedy: str, called: str = "") -> None:
    missing = [name for name in source.files if not (folder / name).is_file()]
    if missing:
        raise FetchError(f"{called or folder} lacks {', '.join(missing)}: {remedy}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
