"""Flower's programs with hardened defaults, and the commands around them."""

import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from fedecho.cli import app
from fedecho.flower import launch
from fedecho.flower.config import Settings, experiment, pause_of
from fedecho.flower.launch import Control, LaunchError, RunFailedError, Tls, make_certificates, make_node_keys
from fedecho.flower.local_federation import free_port


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    make_certificates(folder, ["fl.example.org", "127.0.0.1"])
    make_node_keys(folder, 2)
    return folder


def test_nothing_is_sent_home_and_nothing_installed() -> None:
    told = launch.environment(Path("/home/of/flower"))
    assert told["FLWR_TELEMETRY_ENABLED"] == told["RAY_USAGE_STATS_ENABLED"] == "0"
    assert told["FLWR_DISABLE_UPDATE_CHECK"] == told["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert told["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert told["FLWR_HOME"] == "/home/of/flower"
    assert "FLWR_HOME" not in launch.HARDENED


def executed(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[str], str, int]:
    """The command that ours becomes, what is said, the exit code."""
    became: list[list[str]] = []

    def replace_process(name: str, given: list[str], environment: dict[str, str]) -> None:
        assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
        became.append(given)
        raise SystemExit(0)

    monkeypatch.setattr("os.execvpe", replace_process)
    done = CliRunner().invoke(app, list(words))
    return became[0] if became else [], done.output, done.exit_code


def test_serve_is_secure_unless_told_otherwise(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["--ca", str(keys / "ca.crt"), "--certificate", str(keys / "server.pem"), "--key", str(keys / "server.key")]
    words, said, _ = executed(monkeypatch, "serve", *files)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert "control API" not in said
    assert "control API" in executed(monkeypatch, "serve", *files, "--host", "192.0.2.7")[1]
    assert words[0] == "flower-superlink"
    assert "--enable-supernode-auth" in words
    assert "--insecure" not in words
    assert str(keys / "server.key") in words
    words, _, _ = executed(monkeypatch, "serve", *files, "--any-node", "--host", "127.0.0.1")
    assert "--enable-supernode-auth" not in words
    words, said, code = executed(monkeypatch, "serve")
    assert (words, code) == ([], 2)
    assert "--ca is missing: give the file, or --insecure" in said
    words, said, code = executed(monkeypatch, "serve", *files[:4], "--key", "nowhere")
    assert code == 2
    assert "--key: nowhere is not a file" in said
    words, _, _ = executed(monkeypatch, "serve", "--insecure")
    assert "--insecure" in words


def test_join_says_which_client_a_node_is(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secure = ["--ca", str(keys / "ca.crt"), "--private-key", str(keys / "node1")]
    words, _, _ = executed(monkeypatch, "join", "h:8000", "--client", "1", *secure, "--pause-s", "2.5")
    assert words[:3] == ["flower-supernode", "--superlink", "h:8000"]
    assert words[words.index("--node-config") + 1] == "partition-id=1 pause-s=2.5"
    assert words[words.index("--auth-supernode-private-key") + 1] == str(keys / "node1")
    for wrong, text in ((["--client", "-1", "--insecure"], "at least 0"), (["--client", "0"], "--ca is missing")):
        words, said, code = executed(monkeypatch, "join", "h:8000", *wrong)
        assert (words, code) == ([], 2)
        assert text in said
    _, said, code = executed(monkeypatch, "join", "h:1", "--client", "0", "--insecure", "--private-key", "nowhere")
    assert "there is no file nowhere" in said


def test_certificates_are_for_the_hosts_and_keys_are_private(keys: Path) -> None:
    leaf = x509.load_pem_x509_certificate((keys / "server.pem").read_bytes())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    for name in ("server.key", "node0", "node1"):
        assert stat.S_IMODE((keys / name).stat().st_mode) == 0o600
    root = x509.load_pem_x509_certificate((keys / "ca.crt").read_bytes())
    leaf.verify_directly_issued_by(root)
    if openssl := shutil.which("openssl"):
        words = [openssl, "verify", "-x509_strict", "-CAfile", str(keys / "ca.crt"), str(keys / "server.pem")]
        verified = subprocess.run(words, check=False, capture_output=True)
        assert verified.returncode == 0, verified.stderr
    public = load_ssh_private_key((keys / "node0").read_bytes(), None).public_key()
    assert public == load_ssh_public_key((keys / "node0.pub").read_bytes())
    assert (keys / "node0.pub").read_text().startswith("ecdsa-sha2-nistp384")
    again = CliRunner().invoke(app, ["certificates", str(keys), "--host", "x"])
    assert again.exit_code == 2
    assert "already exists" in again.output


def test_flwr_that_fails_and_exits_with_zero_is_a_failure(tmp_path: Path) -> None:
    control = Control.to(f"127.0.0.1:{free_port()}", Tls(), tmp_path)
    with pytest.raises(LaunchError, match="flwr run failed"):
        control.submit(tmp_path / "no-app")


def scripted(monkeypatch: pytest.MonkeyPatch, *statuses: str) -> None:
    told = list(statuses)
    monkeypatch.setattr(Control, "submit", lambda self, app, config: "17")
    monkeypatch.setattr(Control, "status", lambda self, run: (told.pop(0), "out of memory"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def test_submit_has_the_exit_code_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripted(monkeypatch, "starting", "running", "running", "finished:completed")
    done = CliRunner().invoke(app, ["submit", str(tmp_path), "--insecure"])
    assert done.exit_code == 0
    assert done.output.count("is running") == 1
    scripted(monkeypatch, "running", "finished:failed")
    failed = CliRunner().invoke(app, ["submit", str(tmp_path), "--insecure"])
    assert failed.exit_code == 1
    assert "run 17 is finished:failed: out of memory" in failed.output
    scripted(monkeypatch, "finished:stopped")
    with pytest.raises(RunFailedError, match="finished:stopped"):
        Control.to("h:1", Tls(), tmp_path).follow("17")


def test_a_moments_silence_of_the_superlink_is_no_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[Any] = [LaunchError("busy")] * 4 + [("finished:completed", "")]

    def status(self: Control, run: str) -> Any:
        next_one = told.pop(0)
        if isinstance(next_one, Exception):
            raise next_one
        return next_one

    monkeypatch.setattr(Control, "status", status)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    Control.to("h:1", Tls(), tmp_path).follow("17")
    told += [LaunchError("gone")] * 5
    with pytest.raises(LaunchError, match="gone"):
        Control.to("h:1", Tls(), tmp_path).follow("17")


def test_an_interrupted_submit_says_that_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(self: Control, run: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Control, "submit", lambda self, app, config: "17")
    monkeypatch.setattr(Control, "status", interrupt)
    done = CliRunner().invoke(app, ["submit", str(tmp_path), "--insecure"])
    assert done.exit_code == 130
    assert "run 17 continues; to stop it" in done.output


def test_an_apps_configuration_is_read_strictly_where_it_is_ours() -> None:
    assert Settings.of({"min-nodes": 3, "timeout-s": 5, "theirs": "x"}) == Settings(min_nodes=3, timeout_s=5.0)
    wrong: list[tuple[dict[str, Any], str]] = [({"min-nodes": "3"}, "a whole number"), ({"worker": 1}, "true or false")]
    for config, text in wrong:
        with pytest.raises(ValueError, match=f"in the app's configuration must be {text}"):
            Settings.of(config)
    made = experiment({"algorithm": "fadas", "seed": 4, "versions": 9, "settings": "task.num_clients=6 concurrency=4"})
    assert (made.seed, made.num_versions, made.task.num_clients, made.concurrency) == (4, 9, 6, 4)
    assert pause_of({}) == 0.0
    assert pause_of({"pause-s": 2}) == 2.0
