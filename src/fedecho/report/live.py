"""The server behind ``fedecho watch``: the live page of running runs, read-only, on the loopback interface."""

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
from fedecho.report.page import POLICY, figures_json, page, page_subtitle, report_of, tables_html
from fedecho.report.spec import Report
from fedecho.runs.record import RECORD
from fedecho.runs.summary import SUMMARY

LOOPBACK = "127.0.0.1"
NAMES = {LOOPBACK, "localhost"}
MOST_CONNECTIONS = 32
"""Each connection has a thread. Beyond the limit the oldest is closed, so idle clients cannot block new ones."""


class LiveReport:
    """The current report. Re-reads grown records, spending at most a fifth of the time on it."""

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

    def update_json(self) -> bytes:
        """The figures and tables that a live page fetches to refresh itself."""
        report = self.current()
        tables = {section.slug: tables_html(section) for section in report.sections}
        update = {"figures": figures_json(report), "tables": tables, "finished": self._finished}
        return json.dumps(update | {"subtitle": page_subtitle(report)}, separators=(",", ":")).encode()

    def page(self) -> bytes:
        return page(self.current(), live=True).encode(errors="replace")


class RequestHandler(BaseHTTPRequestHandler):
    """Serves the page and its data; no request changes anything."""

    protocol_version = "HTTP/1.1"
    timeout = 30.0
    """Idle connections are closed after this many seconds; browsers reconnect."""
    live: LiveReport

    def do_GET(self) -> None:
        if (self.headers.get("Host") or "").rpartition(":")[0] not in NAMES:
            # Another name that resolves to this address: DNS rebinding.
            self._answer(403, b"only available as http://127.0.0.1 or http://localhost\n", "text/plain")
            return
        routes: dict[str, tuple[Callable[[], bytes], str]] = {
            "/": (self.live.page, "text/html; charset=utf-8"),
            "/report.json": (self.live.update_json, "application/json"),
        }
        route = routes.get(self.path.partition("?")[0])
        if route is None:
            self._answer(404, b"not found: only / and /report.json exist\n", "text/plain")
            return
        make, content_type = route
        try:
            body = make()
        except Exception as error:  # a folder may hold anything; the page retries
            message = str(error) or type(error).__name__
            self._answer(503, f"{message}\n".encode(errors="replace"), "text/plain; charset=utf-8")
            return
        self._answer(200, body, content_type)

    do_HEAD = do_GET  # noqa: N815 (required by http.server)

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

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 (required by http.server)
        pass


class LiveServer(ThreadingHTTPServer):
    """One thread per connection, with a limit on their number."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, handler: type[RequestHandler]) -> None:
        self._connections: dict[Any, None] = {}
        self._changing = threading.Lock()
        super().__init__((LOOPBACK, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changing:
            if len(self._connections) >= MOST_CONNECTIONS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with suppress(OSError):  # the client has just closed it
                    oldest.shutdown(socket.SHUT_RDWR)  # ends its thread
            self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changing:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that disconnects is no error
            super().handle_error(request, client_address)


def serve(places: list[Path], port: int) -> LiveServer:
    """A server bound to the loopback interface, not yet serving; port 0 picks a free port."""
    handler = type("LiveRequestHandler", (RequestHandler,), {"live": LiveReport(places)})
    try:
        return LiveServer(port, handler)
    except OSError as error:
        raise ValueError(
            f"cannot serve on port {port} ({error.strerror}): choose another with --port, or 0 for any free port"
        ) from None
