"""``fedecho certificates``, ``serve``, ``join`` and ``submit``: Flower's programs with secure defaults."""

import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fedecho.cli.console import USER_PATH, OtherSoftware, VersionsOption, fail, one_line_errors, out, say
from fedecho.core.ranges import at_least, between, format_value
from fedecho.runs.suggestions import ConfigError
from fedecho.storage.user_files import MIB, check_file

PORT = between(1, 65535)
PAUSE = at_least(0, most=1e6)
Ca = Annotated[Path | None, typer.Option("--ca", click_type=USER_PATH, help="The CA certificate, ca.crt.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Do not use TLS. Only for trusted networks.")]


def certificates(
    folder: Annotated[
        Path, typer.Argument(click_type=USER_PATH, metavar="DIR", help="Output folder, accessible to its owner only.")
    ],
    host: Annotated[list[str], typer.Option("--host", help="A host name or address of the server; repeatable.")],
    nodes: Annotated[int, at_least(0, most=10_000), typer.Option("--nodes", help="Number of node key pairs.")] = 0,
    days: Annotated[int, at_least(1, most=36_500), typer.Option("--days", help="Validity of the certificate in days.")] = 365,
) -> None:
    """Create a server certificate and keys for its nodes."""
    with one_line_errors():
        _need_flower()
        from fedecho.flower.launch import make_certificates, make_node_keys

        for each in host:
            _check_host(each)
        make_certificates(folder, host, days)
        make_node_keys(folder, nodes)
        out.print(f"server: {folder}/server.pem, server.key and ca.crt; every node: ca.crt and its own nodeN", soft_wrap=True)


def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, PORT, typer.Option(help="The port that nodes connect to.")] = 8000,
    ca: Ca = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", click_type=USER_PATH, help="The server's certificate.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", click_type=USER_PATH, help="The server's private key.")] = None,
    insecure: Insecure = False,
    any_node: Annotated[
        bool, typer.Option("--any-node", help="With TLS: also accept nodes whose key is not registered.")
    ] = False,
    database: Annotated[
        Path | None, typer.Option("--database", click_type=USER_PATH, help="Store registered nodes in this file.")
    ] = None,
) -> None:
    """Start a SuperLink with TLS and registered nodes only (the default)."""
    with one_line_errors():
        _need_flower()
        from fedecho.flower.launch import Tls, superlink

        _check_host(host)
        tls = Tls.checked(insecure, ca=ca, certificate=certificate, key=key)
        if host not in ("127.0.0.1", "::1", "localhost"):
            say(f"{host} exposes the control API, which can start runs, to others: put a proxy before it (docs/deployment.md)")
        _exec(superlink(host, port, tls, authenticate=not insecure and not any_node, database=database))


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The SuperLink.")],
    client: Annotated[int, at_least(0, most=10**8 - 1), typer.Option(help="Index of this node's client, from 0.")],
    ca: Ca = None,
    private_key: Annotated[
        Path | None, typer.Option("--private-key", click_type=USER_PATH, help="The node's private key (node0).")
    ] = None,
    insecure: Insecure = False,
    port: Annotated[int, PORT, typer.Option(help="A local port for the node's processes.")] = 9094,
    pause_s: Annotated[float, PAUSE, typer.Option(help="Seconds to wait before each reply, for experiments.")] = 0.0,
    node_config: Annotated[
        list[str] | None,
        typer.Option(
            "--node-config", metavar="PAIRS", help="Further node settings that the app reads, such as 'num-partitions=3'."
        ),
    ] = None,
) -> None:
    """Start a SuperNode, which is one client of the federation."""
    with one_line_errors():
        _need_flower()
        from fedecho.flower.config import key_values
        from fedecho.flower.launch import Tls, supernode
        from fedecho.flower.wire import PARTITION

        _check_address("HOST:PORT", address)
        tls = Tls.checked(insecure, ca=ca)
        if private_key is not None and not private_key.is_file():
            raise ConfigError(f"--private-key: there is no file {private_key}")
        ours = {PARTITION: ("--client", client), "pause-s": ("--pause-s", pause_s or None)}
        settings = key_values("--node-config", node_config or (), ours)
        _exec(supernode(address, client, tls, port=port, private_key=private_key, settings=settings))


def submit(
    app: Annotated[Path, typer.Argument(click_type=USER_PATH, metavar="APP", help="The folder of a Flower app.")],
    address: Annotated[str, typer.Option("--superlink", metavar="HOST:PORT", help="The SuperLink.")] = "127.0.0.1:8000",
    ca: Ca = None,
    insecure: Insecure = False,
    run_out: Annotated[
        Path | None,
        typer.Option("--out", click_type=USER_PATH, help="The server's run folder; a stopped run in it is resumed."),
    ] = None,
    versions: VersionsOption = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            "--run-config", metavar="PAIRS", help="The app's settings, such as 'num-server-rounds=9', or a TOML file."
        ),
    ] = None,
    other_software: OtherSoftware = False,
    register: Annotated[
        list[Path] | None,
        typer.Option("--register", click_type=USER_PATH, help="First register a node by its public key; repeatable."),
    ] = None,
) -> None:
    """Run an app on a SuperLink, wait for it to finish and return its exit code."""
    with one_line_errors():
        _need_flower()
        from fedecho.flower.config import check_run_config, key_values
        from fedecho.flower.launch import Control, RunFailedError, Tls

        _check_address("--superlink", address)
        if not app.is_dir():
            raise ConfigError(f"APP {app} is not a folder: give the folder that holds the app's pyproject.toml")
        ours = {"out": ("--out", str(run_out.absolute()) if run_out else None), "versions": ("--versions", versions)}
        ours["other-software"] = ("--other-software", other_software or None)
        settings = key_values("--run-config", run_config or (), ours)
        check_run_config(app, settings)
        control = Control.to(address, Tls.checked(insecure, ca=ca))
        for key in register or ():
            control.register(check_file(key, MIB))
        run = control.submit(app, settings)
        say(f"run {run}; `flwr log` shows the server's log")
        last = ""

        def see(status: str) -> None:
            nonlocal last
            if status != last:
                say(f"run {run} is {status}")
            last = status

        try:
            control.follow(run, see=see)
        except RunFailedError as error:
            fail(str(error), 1)
        except KeyboardInterrupt:
            fail(f"run {run} continues; to stop it: FLWR_HOME={control.home} flwr stop {run} {control.name}", 130)


def _check_host(host: str) -> None:
    if not host.strip():
        raise ConfigError("--host is empty: give a host name or an address")


def _check_address(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not (host.strip() and port.isdecimal() and len(port) <= 5 and PORT.fault(int(port)) is None):
        raise ConfigError(
            f"{name} must be HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:8000, got {format_value(address)}"
        )


def _need_flower() -> None:
    try:
        import fedecho.flower
    except ImportError as error:
        raise ConfigError(str(error)) from None
    del fedecho


def _exec(words: list[str]) -> NoReturn:
    """Replace this process with Flower's, which then handles signals and the exit code."""
    from fedecho.flower.launch import environment

    variables = environment()
    try:
        os.execvpe(words[0], words, variables)  # noqa: S606
    except FileNotFoundError:
        fail(f"{words[0]} is not installed: pip install 'fedecho[flower]'", 2)
