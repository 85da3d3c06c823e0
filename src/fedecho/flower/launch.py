"""Flower's programs with hardened defaults, and the certificates and keys of a deployment."""

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

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
}
"""Nothing is sent home, nothing is installed, and a message waits a quarter of a second for its process, not a whole one."""

DONE, FAILED = "finished:completed", ("finished:failed", "finished:stopped")


MOST_FAILURES = 5
"""In a row, of asking how a run is."""


class LaunchError(ValueError):
    """A user's mistake, or what Flower could not do, said in one line."""


class RunFailedError(RuntimeError):
    """A run that was started did not come to its end."""


@dataclass(frozen=True, kw_only=True)
class Tls:
    """``None`` everywhere is ``--insecure``, which must be asked for."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def checked(cls, insecure: bool, **paths: Path | None) -> "Tls":
        """The files, or a reason why not."""
        if insecure:
            return cls()
        for name, path in paths.items():
            if path is None:
                raise LaunchError(f"--{name} is missing: give it, or --insecure on a network you trust (docs/deployment.md)")
            if not path.is_file():
                raise LaunchError(f"--{name}: there is no file {path}")
        return cls(**{name: path.absolute() for name, path in paths.items() if path is not None})


def environment(home: Path | None = None) -> dict[str, str]:
    """For every Flower program we start. Those start others by name, so ours come first in the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    told = os.environ | QUIET | {"PATH": path}
    return told if home is None else told | {"FLWR_HOME": str(home)}


def superlink(
    host: str, port: int, tls: Tls, authenticate: bool = False, database: Path | None = None, simulation: bool = False
) -> list[str]:
    """The server side. Without TLS there is no authentication of nodes: Flower refuses it."""
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
    """One client. ``port`` is local, for the node's own processes."""
    told = {"partition-id": client, **(settings or {})}
    words = ["flower-supernode", "--superlink", address, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--node-config", as_words("--node-config", told)]
    words += ["--insecure"] if tls.ca is None else ["--root-certificates", str(tls.ca)]
    return words + (["--auth-supernode-private-key", str(private_key)] if private_key else [])


@dataclass(frozen=True)
class Control:
    """``flwr`` against one SuperLink. It can fail and exit with 0, so its JSON is read."""

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
        """Start a run; its id."""
        words = ["run", str(app), self.name, *options]
        if run_config:
            told = self.home / "run-config.toml"
            told.write_text(tomli_w.dumps(dict(run_config)))
            words += ["--run-config", str(told)]
        return str(self._flwr(*words)["run-id"])

    def status(self, run: str) -> tuple[str, str]:
        """Such as ``running`` or ``finished:failed``, and what Flower says of it."""
        (found,) = self._flwr("list", self.name, "--run-id", run)["runs"]
        return str(found["status"]), str(found["status-details"])

    def register(self, public_key: Path) -> None:
        """Let a node's key in; before the node starts."""
        self._flwr("supernode", "register", str(public_key), self.name)

    def stop(self, run: str) -> None:
        self._flwr("stop", run, self.name)

    def follow(self, run: str, every_s: float = 3.0, see: Callable[[str], None] = lambda status: None) -> None:
        """Wait for the end; a run that failed is an error."""
        failures = 0
        while True:
            try:
                status, details = self.status(run)
            except LaunchError:  # a SuperLink may be busy for a moment; the run goes on meanwhile
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
                    f"run {run} is {status}: {details or 'flwr log has more'} (a stopped run goes on when it is submitted again)"
                )
            time.sleep(every_s)

    def _flwr(self, *words: str) -> dict[str, Any]:
        done = subprocess.run(  # noqa: S603
            [str(Path(sys.executable).parent / "flwr"), *words, "--format", "json"],
            env=environment(self.home),
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            raise LaunchError(f"flwr {words[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}") from None
        if done.returncode or not answer.get("success"):
            raise LaunchError(f"flwr {words[0]} failed: {answer.get('error-message') or answer}")
        return answer


CA, CERTIFICATE, KEY = "ca.crt", "server.pem", "server.key"


def make_certificates(folder: Path, hosts: list[str], days: int = 365) -> None:
    """``ca.crt``, ``server.pem`` and ``server.key``, valid for these names and addresses. The authority's own key is not kept.

    So no further certificate can be made from it: a new server gets a new authority, and its nodes the new ``ca.crt``.
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
    """``node0``, ``node0.pub``, ...: ECDSA on P-384, in the form of ssh-keygen, which is what Flower reads. The public keys."""
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
            raise LaunchError(f"{folder / name} exists already: choose another folder, or remove it")


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
    return x509.KeyUsage(
        digital_signature=not sign,
        key_cert_sign=sign,
        crl_sign=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
