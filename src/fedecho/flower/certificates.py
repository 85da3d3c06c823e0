"""Certificates and keys for a deployment: an authority of its own, the server's certificate, a key pair for every node."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedecho.flower.launch import LaunchError

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
