"""Command lines of Flower's programs with hardened defaults, and certificates and keys for a deployment."""

import ipaddress
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedecho.flower.config import as_words

HARDENED = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
}
"""No telemetry, no installation of packages, and a poll interval of 0.25 s instead of 1 s for the process of a message."""

DONE, FAILED = "finished:completed", ("finished:failed", "finished:stopped")
MOST_FAILURES = 5
"""Consecutive failed status requests after which ``follow`` gives up."""


class LaunchError(ValueError):
    """Invalid input, or a failure of Flower, as a one-line message."""


class RunFailedError(RuntimeError):
    """A submitted run failed or was stopped."""


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The TLS files of a server or node. All None means ``--insecure``, which must be requested."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def checked(cls, insecure: bool, **paths: Path | None) -> "Tls":
        """Check that the files exist. Raises LaunchError if one is missing."""
        if insecure:
            return cls()
        for name, path in paths.items():
            if path is None:
                raise LaunchError(
                    f"--{name} is missing: give the file, or --insecure on a network you trust (docs/deployment.md)"
                )
            if not path.is_file():
                raise LaunchError(f"--{name}: {path} is not a file")
        return cls(**{name: path.absolute() for name, path in paths.items() if path is not None})


def environment(home: Path | None = None) -> dict[str, str]:
    """The environment of every Flower program we start. They start others by name, so our Python comes first in PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    variables = os.environ | HARDENED | {"PATH": path}
    return variables if home is None else variables | {"FLWR_HOME": str(home)}


def superlink(
    host: str, port: int, tls: Tls, authenticate: bool = False, database: Path | None = None, simulation: bool = False
) -> list[str]:
    """The command of the server. Flower allows authentication of nodes only with TLS."""
    words = ["flower-superlink", "--host", host, "--port", str(port)]
    if tls.ca is None:
        words += ["--insecure"]
    else:
        words += ["--ssl-ca-certfile", str(tls.ca), "--ssl-certfile", str(tls.certificate), "--ssl-keyfile", str(tls.key)]
    words += ["--enable-supernode-auth"] if authenticate else []
    words += ["--simulation"] if simulation else []
    return words + (["--database", str(database)] if database else [])


def supernode(
    address: str,
    client: int,
    tls: Tls,
    *,
    port: int,
    private_key: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[str]:
    """The command of a node. ``port`` is local, for the node's own processes."""
    config = {"partition-id": client, **(settings or {})}
    words = ["flower-supernode", "--superlink", address, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--node-config", as_words("--node-config", config)]
    words += ["--insecure"] if tls.ca is None else ["--root-certificates", str(tls.ca)]
    return words + (["--auth-supernode-private-key", str(private_key)] if private_key else [])


@dataclass(frozen=True)
class Control:
    """The ``flwr`` command for one SuperLink. It may exit with 0 on failure, so its JSON output is checked."""

    home: Path
    name: str = "deployment"

    @classmethod
    def to(cls, address: str, tls: Tls, home: Path | None = None) -> "Control":
        home = home or Path(tempfile.mkdtemp(prefix="fedecho-flwr-"))
        home.mkdir(parents=True, exist_ok=True)
        link: dict[str, Any] = {"address": address}
        link |= {"insecure": True} if tls.ca is None else {"root-certificates": str(tls.ca)}
        (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": cls.name, cls.name: link}}))
        return cls(home)

    def submit(self, app: Path, run_config: Mapping[str, Any] | None = None, options: Sequence[str] = ()) -> str:
        """Start a run and return its id."""
        words = ["run", str(app), self.name, *options]
        if run_config:
            file = self.home / "run-config.toml"
            file.write_text(tomli_w.dumps(dict(run_config)))
            words += ["--run-config", str(file)]
        return str(self._flwr(*words)["run-id"])

    def status(self, run: str) -> tuple[str, str]:
        """The status of a run, such as ``running`` or ``finished:failed``, and Flower's details."""
        (info,) = self._flwr("list", self.name, "--run-id", run)["runs"]
        return str(info["status"]), str(info["status-details"])

    def register(self, public_key: Path) -> None:
        """Register a node's public key, before the node starts."""
        self._flwr("supernode", "register", str(public_key), self.name)

    def stop(self, run: str) -> None:
        self._flwr("stop", run, self.name)

    def follow(self, run: str, every_s: float = 3.0, see: Callable[[str], None] = lambda status: None) -> None:
        """Wait until a run ends. Raises RunFailedError if it failed or was stopped."""
        failures = 0
        while True:
            try:
                status, details = self.status(run)
            except LaunchError:  # the SuperLink may be busy; the run continues
                failures += 1
                if failures >= MOST_FAILURES:
                    raise
                time.sleep(every_s)
                continue
            failures = 0
            see(status)
            if status == DONE:
                return
            if status in FAILED:
                raise RunFailedError(
                    f"run {run} is {status}: {details or 'see flwr log'} (submit a stopped run again to resume it)"
                )
            time.sleep(every_s)

    def _flwr(self, *words: str) -> dict[str, Any]:
        process = subprocess.run(  # noqa: S603
            [str(Path(sys.executable).parent / "flwr"), *words, "--format", "json"],
            env=environment(self.home),
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            answer: dict[str, Any] = json.loads(process.stdout[process.stdout.index("{") :])
        except ValueError:
            raise LaunchError(f"flwr {words[0]} failed: {(process.stderr or process.stdout).strip()[-500:]}") from None
        if process.returncode or not answer.get("success"):
            raise LaunchError(f"flwr {words[0]} failed: {answer.get('error-message') or answer}")
        return answer


CA, CERTIFICATE, KEY = "ca.crt", "server.pem", "server.key"


def make_certificates(folder: Path, hosts: list[str], days: int = 365) -> None:
    """Create ``ca.crt``, ``server.pem`` and ``server.key``, valid for these host names and addresses.

    The key of the certificate authority is not kept, so no further certificate can be signed: a new server needs a new
    authority, and its nodes the new ``ca.crt``.
    """
    _fresh(folder, CA, CERTIFICATE, KEY)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer, now = _name("FedEcho deployment"), datetime.now(UTC) - timedelta(minutes=5)
    until = now + timedelta(days=days)
    root = _builder(issuer, issuer, authority, now, until).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    root = root.add_extension(_usage(sign=True), critical=True)
    root = root.add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
    leaf = _builder(_name(hosts[0]), issuer, server, now, until)
    leaf = leaf.add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
    leaf = leaf.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    leaf = leaf.add_extension(_usage(sign=False), critical=True)
    leaf = leaf.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    leaf = leaf.add_extension(identifier, critical=False)
    (folder / CA).write_bytes(root.sign(authority, hashes.SHA384()).public_bytes(forms.Encoding.PEM))
    (folder / CERTIFICATE).write_bytes(leaf.sign(authority, hashes.SHA384()).public_bytes(forms.Encoding.PEM))
    _private(folder / KEY, server, forms.PrivateFormat.PKCS8)


def make_node_keys(folder: Path, number: int) -> list[Path]:
    """Create key pairs ``node0``, ``node0.pub``, ... (ECDSA on P-384, OpenSSH format). Returns the public keys."""
    names = [f"node{client}" for client in range(number)]
    _fresh(folder, *names)
    for name in names:
        key = ec.generate_private_key(ec.SECP384R1())
        _private(folder / name, key, forms.PrivateFormat.OpenSSH)
        public = key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
        (folder / f"{name}.pub").write_bytes(public + b"\n")
    return [folder / f"{name}.pub" for name in names]


def _fresh(folder: Path, *names: str) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in names:
        if (folder / name).exists():
            raise LaunchError(f"{folder / name} already exists: choose another folder, or remove it")


def _private(path: Path, key: ec.EllipticCurvePrivateKey, form: forms.PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(forms.Encoding.PEM, form, forms.NoEncryption()))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, start: datetime, until: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(until)


def _usage(sign: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only")
    return x509.KeyUsage(digital_signature=not sign, key_cert_sign=sign, crl_sign=sign, **dict.fromkeys(others, False))


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
