"""``fedecho watch``: on loopback alone, read only, and up to date."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from tests.report.hand_made import lines, write

from fedecho.report import live
from fedecho.report.live import serve


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
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
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
    monkeypatch.setattr(live, "subtitle", lambda report: "")
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
    _, rest = process.communicate(timeout=20)
    assert process.returncode == 0
    assert rest == "no longer watching; the runs go on\n"


def test_a_port_in_use_is_said_with_the_fix(port: int, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"--port"):
        serve([folder], port)
