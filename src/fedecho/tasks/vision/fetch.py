"""Download image datasets from their authors: resumable, verified by MD5, unpacked atomically."""

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
"""Limit on an archive and on its unpacked size; the largest, stl10, has 2.6 GB and 3.1 GB."""
MAX_MEMBERS = 100
BLOCK = 1 << 16
RETRYABLE = {408, 425, 429}
"""HTTP status codes worth retrying, besides those from 500."""

Progress = Callable[[int, int | None], None]
"""Called with the bytes received so far, and the total if the server gives it."""
Say = Callable[[str], None]


class FetchError(ValueError):
    """A failed download: what failed and what to do, in one line."""


class _RetryableError(Exception):
    """A failure worth another attempt."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A published archive: its folder when unpacked, and the files that a reader needs."""

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
class RetryPolicy:
    """Limit on consecutive attempts without progress, the pause between them, and the timeout of each."""

    attempts: int = 4
    pause_s: float = 2.0
    timeout_s: float = 30.0


def fetch(
    name: str,
    data_dir: Path | None = None,
    progress: Progress = lambda done, total: None,
    say: Say = lambda text: None,
    retry: RetryPolicy | None = None,
) -> Path:
    """Return a dataset's folder, downloading it if missing. An archive already in the data folder is used and kept."""
    if name not in SOURCES:
        raise FetchError(f"cannot fetch {name!r}: it must be one of {', '.join(SOURCES)}")
    source, parent = SOURCES[name], data_folder(data_dir)
    folder, archive = parent / source.folder, parent / source.archive
    try:
        if folder.exists():
            _check_complete(folder, source, "remove it, then fetch again")
            say(f"{folder} already exists and is complete")
            return folder
        parent.mkdir(parents=True, exist_ok=True)
        given = archive.is_file()
        if given and _md5(archive) != source.md5:
            raise FetchError(f"{archive} is not the published file (its MD5 is not {source.md5}): remove it, then fetch again")
        if not given:
            _download(source, archive, progress, say, retry or RetryPolicy())
        say(f"unpacking {archive.name}")
        _unpack(archive, folder, source)
        if not given:
            archive.unlink()
    except OSError as error:
        raise FetchError(
            f"cannot write {error.filename or parent}: {error.strerror or error}; fix that, then fetch again"
        ) from None
    return folder


def _download(source: Source, archive: Path, progress: Progress, say: Say, retry: RetryPolicy) -> None:
    """Download to ``.part``, retrying as long as attempts make progress; rename when the MD5 matches."""
    part = archive.with_name(f"{archive.name}.part")
    failures, longest = 0, _size(part)
    while True:
        try:
            _attempt(source, part, progress, retry.timeout_s)
        except _RetryableError as error:
            failures = 1 if _size(part) > longest else failures + 1
            longest = max(longest, _size(part))
            if failures >= retry.attempts:
                raise FetchError(
                    f"cannot fetch {source.url}: {error}; fetch again to resume from byte {_size(part)}, "
                    f"or put {archive.name} into {archive.parent} yourself"
                ) from None
            say(f"{archive.name}: {error}; trying again")
            time.sleep(retry.pause_s * failures)
        else:
            part.replace(archive)
            return


def _attempt(source: Source, part: Path, progress: Progress, timeout_s: float) -> None:
    """Fetch the missing part; raise if the resulting file is not the published one."""
    start = _size(part)
    response = _answer(source, part, start, timeout_s)
    if response is not None:
        with response:
            _receive(response, part, start, progress)
    md5 = _md5(part)
    if md5 != source.md5:
        part.unlink()
        if start:
            raise _RetryableError("the partial download was not part of the published file and was removed")
        raise FetchError(f"{source.url} sent a file with MD5 {md5}, not the published {source.md5}; it was removed, try later")


def _answer(source: Source, part: Path, start: int, timeout_s: float) -> HTTPResponse | None:
    """Request the file from byte ``start``; return None if the server has nothing beyond it."""
    headers = {"User-Agent": "fedecho"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response: HTTPResponse = urlopen(Request(source.url, headers=headers), timeout=timeout_s)  # noqa: S310 (our own table)
    except HTTPError as error:
        error.close()
        problem = f"the server returned {error.code} {error.reason}"
        if error.code in RETRYABLE or error.code >= 500:
            raise _RetryableError(problem) from None
        if error.code == 416 and start:
            return None
        raise FetchError(f"cannot fetch {source.url}: {problem}; put {source.archive} into {part.parent} yourself") from None
    except (OSError, HTTPException) as error:
        raise _RetryableError(_reason(error)) from None
    return response


def _receive(response: HTTPResponse, part: Path, start: int, progress: Progress) -> None:
    """Append the response to ``part``; overwrite it if the server sends the whole file instead of the requested range."""
    length = response.headers.get("Content-Length", "")
    total = int(length) if length.isdecimal() else None
    if response.status == 206:
        sent = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if sent is None or int(sent[1]) != start:
            part.unlink(missing_ok=True)
            raise _RetryableError("the server sent a different range than requested")
        total = int(sent[2])
    done = start if response.status == 206 else 0
    with part.open("ab" if done else "wb") as file:
        while block := _block(response):
            done += len(block)
            if max(done, total or 0) > MAX_BYTES:
                part.unlink()
                raise FetchError(f"{response.url} sends more than {MAX_BYTES} bytes: not the published file, try later")
            file.write(block)
            progress(done, total)
    if total is not None and done != total:
        raise _RetryableError(f"the connection closed after {done} of {total} bytes")


def _block(response: HTTPResponse) -> bytes:
    try:
        return response.read(BLOCK)
    except (OSError, HTTPException) as error:
        raise _RetryableError(_reason(error)) from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", error)) or type(error).__name__


def _unpack(archive: Path, folder: Path, source: Source) -> None:
    """Unpack into a temporary folder and rename it when complete."""
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        try:
            _extract(archive, Path(temporary))
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise FetchError(f"cannot unpack {archive}: {error}; remove it, then fetch again") from None
        unpacked = Path(temporary) / folder.name
        _check_complete(unpacked, source, "it is not the published archive", f"{folder.name} in {archive}")
        unpacked.rename(folder)


def _extract(archive: Path, into: Path) -> None:
    with tarfile.open(archive, "r:gz") as tar:
        total = 0
        for number, member in enumerate(tar, 1):
            total += member.size
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or "\\" in member.name or ":" in member.name:
                raise tarfile.TarError(f"its member {member.name!r} points outside the folder")
            if not (member.isreg() or member.isdir()):
                raise tarfile.TarError(f"its member {member.name!r} is neither a file nor a folder")
            if total > MAX_BYTES or number > MAX_MEMBERS:
                raise tarfile.TarError(f"it contains more than {MAX_BYTES} bytes or {MAX_MEMBERS} members")
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
