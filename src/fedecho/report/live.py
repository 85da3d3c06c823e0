"""``fedecho watch``: the page of runs that go on, served to this machine alone, and read only."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedecho.report.load import find_runs
from fedecho.report.page import POLICY, figures_json, page, report_of, subtitle, tables_html
from fedecho.report.spec import Report
from fedecho.runs.record import RECORD
from fedecho.runs.summary import SUMMARY

LOOPBACK = "127.0.0.1"
NAMES = {LOOPBACK, "localhost"}
MOST_CONNECTIONS = 32
"""Each has a thread. Beyond that many, the oldest connection is closed, so idle and slow clients never keep others out."""


class LiveReport:
    """Read anew when a record has grown, but never so often that reading takes more than a fifth of the time."""

    def __init__(self, places: list[Path]) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._state: object = None
        self._next = 0.0
        self._report: Report | None = None
        self._finished = False
        self.current()

    def current(self) -> Report:
        with self._lock:
            if self._report is None or time.monotonic() >= self._next:
                self._read()
            assert self._report is not None  # noqa: S101 (for the type checker)
            return self._report

    def _read(self) -> None:
        began = time.monotonic()
        folders = find_runs(self._places)
        state = [(str(folder), (folder / RECORD).stat().st_size, (folder / SUMMARY).exists()) for folder in folders]
        if state != self._state:
            self._report = report_of(self._places)
            self._state, self._finished = state, all(done for *_, done in state)
        now = time.monotonic()
        self._next = now + max(1.0, 4 * (now - began))

    def news(self) -> bytes:
        report = self.current()
        tables = {section.slug: tables_html(section) for section in report.sections}
        told = {"figures": figures_json(report), "tables": tables, "finished": self._finished}
        return json.dumps(told | {"subtitle": subtitle(report)}, separators=(",", ":")).encode()

    def page(self) -> bytes:
        return page(self.current(), live=True).encode(errors="replace")


class Reader(BaseHTTPRequestHandler):
    """Two things can be read and nothing can be done."""

    protocol_version = "HTTP/1.1"
    timeout = 30.0
    """Seconds that a client may neither send nor take anything; browsers connect again."""
    live: LiveReport

    def do_GET(self) -> None:
        if (self.headers.get("Host") or "").rpartition(":")[0] not in NAMES:
            self._answer(
                403, b"only as http://127.0.0.1 or http://localhost\n", "text/plain"
            )  # a name that was made to point here
            return
        makers: dict[str, tuple[Callable[[], bytes], str]] = {
            "/": (self.live.page, "text/html; charset=utf-8"),
            "/report.json": (self.live.news, "application/json"),
        }
        made = makers.get(self.path.partition("?")[0])
        if made is None:
            self._answer(404, b"there are / and /report.json\n", "text/plain")
            return
        try:
            body = made[0]()
        except Exception as error:  # the folder's content is anybody's; the page tries again
            told = str(error) or type(error).__name__
            self._answer(503, f"{told}\n".encode(errors="replace"), "text/plain; charset=utf-8")
            return
        self._answer(200, body, made[1])

    do_HEAD = do_GET  # noqa: N815 (the name is the library's)

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        tag = f'"{sha256(body).hexdigest()[:20]}"'
        if status == 200 and self.headers.get("If-None-Match") == tag:
            status, body = 304, b""
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "ETag": tag, "Cache-Control": "no-store"}
        for name, value in (headers | {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 (the name is the library's)
        pass


class LiveServer(ThreadingHTTPServer):
    """A thread for each connection, and a bounded number of them."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, reader: type[Reader]) -> None:
        self._connections: dict[Any, None] = {}
        self._changing = threading.Lock()
        super().__init__((LOOPBACK, port), reader)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changing:
            if len(self._connections) >= MOST_CONNECTIONS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with suppress(OSError):  # its client has just closed it
                    oldest.shutdown(socket.SHUT_RDWR)  # which ends its thread
            self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changing:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that is gone is no error
            super().handle_error(request, client_address)


def serve(places: list[Path], port: int) -> LiveServer:
    """A server on loopback that has not begun to serve; port 0 takes a free one."""
    reader = type("LiveReader", (Reader,), {"live": LiveReport(places)})
    try:
        return LiveServer(port, reader)
    except OSError as error:
        raise ValueError(
            f"cannot serve on port {port} ({error.strerror}): choose another with --port, 0 takes a free one"
        ) from None
