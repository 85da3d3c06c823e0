"""``fedecho certificates``, ``serve``, ``join`` and ``submit``: Flower's programs with hardened defaults."""

import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fedecho.cli.console import PLACE, OtherSoftware, fail, friendly, out, say
from fedecho.core.ranges import VERSIONS, at_least, between, shown
from fedecho.runs.suggestions import ConfigError
from fedecho.storage.user_files import MIB, check_file

PORT = between(1, 65535)
PAUSE = at_least(0, most=1e6)
Ca = Annotated[Path | None, typer.Option("--ca", click_type=PLACE, help="The authority's certificate, ca.crt.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS: only on a network you trust.")]


def certificates(
    folder: Annotated[
        Path, typer.Argument(click_type=PLACE, metavar="DIR", help="Where the files go; only its owner may enter.")
    ],
    host: Annotated[list[str], typer.Option("--host", help="A name or address by which nodes reach the server; repeatable.")],
    nodes: Annotated[int, at_least(0, most=10_000), typer.Option("--nodes", help="How many key pairs for nodes.")] = 0,
    days: Annotated[int, at_least(1, most=36_500), typer.Option("--days", help="How long the certificate is valid.")] = 365,
) -> None:
    """Make a certificate for a server and keys for its nodes."""
    with friendly():
        _need_flower()
        from fedecho.flower.launch import make_certificates, make_node_keys

        for each in host:
            _check_host(each)
        make_certificates(folder, host, days)
        make_node_keys(folder, nodes)
        out.print(f"server: {folder}/server.pem, server.key and ca.crt; every node: ca.crt and its own nodeN", soft_wrap=True)


def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, PORT, typer.Option(help="The one port that nodes need.")] = 8000,
    ca: Ca = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", click_type=PLACE, help="The server's certificate.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", click_type=PLACE, help="The key of the server's certificate.")] = None,
    insecure: Insecure = False,
    any_node: Annotated[bool, typer.Option("--any-node", help="With TLS: let nodes in whose key is not registered.")] = False,
    database: Annotated[
        Path | None, typer.Option("--database", click_type=PLACE, help="Keep registered nodes in this file.")
    ] = None,
) -> None:
    """Start a SuperLink: TLS and registered nodes only, unless told otherwise."""
    with friendly():
        _need_flower()
        from fedecho.flower.launch import Tls, superlink

        _check_host(host)
        tls = Tls.checked(insecure, ca=ca, certificate=certificate, key=key)
        if host not in ("127.0.0.1", "::1", "localhost"):
            say(f"{host} is open to others, the control API too, which starts runs: put a proxy before it (docs/deployment.md)")
        _become(superlink(host, port, tls, authenticate=not insecure and not any_node, database=database))


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The SuperLink.")],
    client: Annotated[int, at_least(0, most=10**8 - 1), typer.Option(help="Which client this node is, from 0.")],
    ca: Ca = None,
    private_key: Annotated[
        Path | None, typer.Option("--private-key", click_type=PLACE, help="The node's own key (node0).")
    ] = None,
    insecure: Insecure = False,
    port: Annotated[int, PORT, typer.Option(help="A local port for the node's own processes.")] = 9094,
    pause_s: Annotated[float, PAUSE, typer.Option(help="Be so many seconds slower a message, for trials.")] = 0.0,
    node_config: Annotated[
        list[str] | None,
        typer.Option("--node-config", metavar="PAIRS", help="What else the app asks of a node, such as 'num-partitions=3'."),
    ] = None,
) -> None:
    """Start a SuperNode: one client of the federation."""
    with friendly():
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
        _become(supernode(address, client, tls, port=port, private_key=private_key, settings=settings))


def submit(
    app: Annotated[Path, typer.Argument(click_type=PLACE, metavar="APP", help="The folder of a Flower app.")],
    address: Annotated[str, typer.Option("--superlink", metavar="HOST:PORT", help="The SuperLink.")] = "127.0.0.1:8000",
    ca: Ca = None,
    insecure: Insecure = False,
    run_out: Annotated[
        Path | None, typer.Option("--out", click_type=PLACE, help="The server's run folder; a stopped run there goes on.")
    ] = None,
    versions: Annotated[
        int | None, VERSIONS, typer.Option("--versions", "--num-versions", help="How many global versions to make.")
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", metavar="PAIRS", help="The app's own settings: 'num-server-rounds=9', or a TOML file."),
    ] = None,
    other_software: OtherSoftware = False,
    register: Annotated[
        list[Path] | None, typer.Option("--register", click_type=PLACE, help="First let in a node by its public key.")
    ] = None,
) -> None:
    """Run an app on a SuperLink and wait for its end; the exit code is the run's."""
    with friendly():
        _need_flower()
        from fedecho.flower.config import check_run_config, key_values
        from fedecho.flower.launch import Control, RunFailedError, Tls

        _check_address("--superlink", address)
        if not app.is_dir():
            raise ConfigError(f"APP {app} is no folder: give the one that holds the app's pyproject.toml")
        ours = {"out": ("--out", str(run_out.absolute()) if run_out else None), "versions": ("--versions", versions)}
        ours["other-software"] = ("--other-software", other_software or None)
        told = key_values("--run-config", run_config or (), ours)
        check_run_config(app, told)
        control = Control.to(address, Tls.checked(insecure, ca=ca))
        for key in register or ():
            control.register(check_file(key, MIB))
        run = control.submit(app, told)
        say(f"run {run}; `flwr log` shows what the server says")
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
            fail(f"run {run} goes on; to stop it: FLWR_HOME={control.home} flwr stop {run} {control.name}", 130)


def _check_host(host: str) -> None:
    if not host.strip():
        raise ConfigError("--host: it is empty: give a name or an address")


def _check_address(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not (host.strip() and port.isdecimal() and len(port) <= 5 and PORT.fault(int(port)) is None):
        raise ConfigError(f"{name} must be like 127.0.0.1:8000, HOST:PORT with a port from 1 to 65535, got {shown(address)}")


def _need_flower() -> None:
    try:
        import fedecho.flower
    except ImportError as error:
        raise ConfigError(str(error)) from None
    del fedecho


def _become(words: list[str]) -> NoReturn:
    """This process becomes Flower's: signals and exit codes are its own."""
    from fedecho.flower.launch import environment

    told = environment()
    try:
        os.execvpe(words[0], words, told)  # noqa: S606
    except FileNotFoundError:
        fail(f"{words[0]} is not installed: pip install 'fedecho[flower]'", 2)
