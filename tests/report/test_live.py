"""``fedecho watch``: on loopback alone, read only, and up to date."""

import itertools
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from tests.report.hand_made import lines, write

from fedecho.report import live
from fedecho.report.live import MOST_CONNECTIONS, serve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "run", lines()[:9])


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    server = serve([folder], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    assert server.server_address[0] == "127.0.0.1"
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_the_page_and_its_news(port: int) -> None:
    answer, body = ask(port, "/")
    assert answer.status == 200
    assert b'data-live="true"' in body
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    answer, body = ask(port, "/report.json")
    assert {"figures", "tables", "subtitle", "finished"} == set(json.loads(body))


def test_what_has_not_changed_is_not_sent_again_and_what_has_is(
    port: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "page_subtitle", lambda report: "")
    first, before = ask(port, "/report.json")
    again, nothing = ask(port, "/report.json", **{"If-None-Match": first.headers["ETag"]})
    assert (again.status, nothing) == (304, b"")
    write(folder, lines(), finished=True)
    monkeypatch.setattr(live.time, "monotonic", lambda: 1e12)
    news, after = ask(port, "/report.json", **{"If-None-Match": first.headers["ETag"]})
    assert news.status == 200
    assert len(after) > len(before)
    assert json.loads(after)["finished"]


def test_nothing_else_can_be_read_and_nothing_can_be_done(port: int, folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for path in ("/run.jsonl", "/../run.jsonl", "/etc/passwd", "/report.json/.."):
        assert ask(port, path)[0].status == 404
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert ask(port, "/", method)[0].status == 501
    assert ask(port, "/", "HEAD")[1] == b""
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_another_name_for_this_machine_is_refused(port: int) -> None:
    assert ask(port, "/", Host="evil.example:80")[0].status == 403
    assert ask(port, "/", Host=f"localhost:{port}")[0].status == 200


def test_the_command_serves_until_ctrl_c(folder: Path) -> None:
    command = [sys.executable, "-m", "fedecho.cli", "watch", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = process.stderr.readline()
    assert ask(int(re.search(r"127\.0\.0\.1:(\d+)/", said)[1]), "/report.json")[0].status == 200
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=300)
    assert process.returncode == 0
    assert rest == "no longer watching; the runs continue\n"


def test_a_port_in_use_is_said_with_the_fix(port: int, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"--port"):
        serve([folder], port)


def num_threads() -> int:
    """Those of connections."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends, "it did not happen within a minute"
        time.sleep(0.02)


def test_idle_and_slow_clients_keep_nobody_out(port: int) -> None:
    """200 connections that say nothing, and 100 that send a byte of an endless request now and then."""
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(200)]
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)]
        for connection in slow:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        for turn in range(5):
            for connection in slow:
                with suppress(OSError):  # closed, to make room
                    connection.sendall(b"X")
            assert ask(port, "/report.json")[0].status == 200, turn
            wait_until(lambda: num_threads() <= MOST_CONNECTIONS)  # those that were just closed may still be ending
        assert idle[0].recv(1) == b"", "the oldest were closed"


def is_closed(connection: socket.socket) -> bool:
    """Wait until the server closes it, which resets it where something was not read."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_client_that_says_nothing_is_closed_after_a_while(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.RequestHandler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as silent:
        assert is_closed(silent)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as half:
        with suppress(OSError):  # closed before it began
            half.sendall(b"GET / HT")
        assert is_closed(half)


def test_a_client_that_takes_nothing_or_goes_away_leaves_no_word(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it asked for is much more than the system holds for it."""
    monkeypatch.setattr(live.RequestHandler, "timeout", 1.0)
    monkeypatch.setattr(live.LiveReport, "page", lambda self: b"x" * (64 << 20))
    request = b"GET / HTTP/1.1\r\nHost: localhost:1\r\n\r\n"
    before = num_threads()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as silent:
        silent.sendall(request)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as gone:
            gone.sendall(request)
            gone.recv(1)
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed with a reset
        wait_until(lambda: num_threads() == before)
    assert capfd.readouterr().err == ""


def test_what_is_no_request_is_answered_in_a_line_and_ends(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (
        b"\0\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70_000,
        b"A: b\r\n" * 200 + b"\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(words + b"\r\n")
            client.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionResetError):  # it was answered before all of it was read
                while piece := client.recv(1 << 16):
                    answer += piece
            assert not answer or b" 4" in answer or b" 5" in answer
    assert ask(port, "/report.json")[0].status == 200
    assert capfd.readouterr().err == ""


def test_a_record_that_becomes_odd_is_said_in_a_line_and_the_server_goes_on(
    folder: Path, port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live.time, "monotonic", itertools.count(10**9, 10**4).__next__)  # read anew for every request
    for odd in ({"event": "version"}, {"event": "dispatch", "time": 0, "client": 99, "dispatch": 9, "base": 0}):
        write(folder, [*lines(), odd])
        answer, body = ask(port, "/report.json")
        assert answer.status == 503
        assert body.startswith(str(folder).encode())
        assert body.count(b"\n") == 1
    write(folder, lines())
    assert ask(port, "/report.json")[0].status == 200
    assert capfd.readouterr().err == ""
