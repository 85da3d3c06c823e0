"""``--node-config`` and ``--run-config``: Flower's own syntax, and what Flower itself reads of what we pass on."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from flwr.common.config import parse_config_args
from networks import DIGITS
from test_launch import executed
from typer.testing import CliRunner

from fedecho.cli import app
from fedecho.flower.config import as_words, key_values
from fedecho.flower.launch import Control

NODE = ["join", "h:8000", "--insecure", "--client", "1"]
APP = """
[project]
name = "theirs"
version = "1.0.0"
description = "An app that knows nothing of FedEcho."
license = "Apache-2.0"

[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "theirs.server_app:app"
clientapp = "theirs.client_app:app"
[tool.flwr.app.config]
num-server-rounds = 3
local = { batch-size = 32 }
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "pyproject.toml").write_text(APP)
    return tmp_path / "theirs"


def node_config(monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    """As the node that is started reads it."""
    words, said, code = executed(monkeypatch, *NODE, *options)
    assert code == 0, said
    return parse_config_args([words[words.index("--node-config") + 1]])


def test_a_node_gets_what_the_app_asks_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert node_config(monkeypatch, "--node-config", "num-partitions=3") == {"partition-id": 1, "num-partitions": 3}
    text = "num-partitions=3 lr=1e-3 fast=true name=\"a b\" path='c:\\d' odd='say \"x\"' file='a.toml' partition-id=1"
    told = node_config(monkeypatch, "--node-config", text, "--node-config", "more=inf", "--pause-s", "2.5")
    expected = {"num-partitions": 3, "lr": 1e-3, "fast": True, "name": "a b", "path": "c:\\d", "odd": 'say "x"'}
    assert told == expected | {"file": "a.toml", "partition-id": 1, "pause-s": 2.5, "more": float("inf")}
    file = tmp_path / "node.toml"
    file.write_text("num-partitions = 3\n[data]\nfolder = '/srv/my data'\n")
    expected = {"partition-id": 1, "num-partitions": 3, "data.folder": "/srv/my data"}
    assert node_config(monkeypatch, "--node-config", str(file)) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("num-partitions", "takes key=value pairs"),
        ("num-partitions=3, x=", "takes key=value pairs"),
        ("", "takes key=value pairs"),
        ("a=1 a=2", "cannot read --node-config from"),
        ("name=alice", "cannot read --node-config from"),
        ("file=a.toml", "cannot read --node-config from"),
        ("sizes=[1,2]", "cannot read --node-config from"),
        ("partition-id=2", "'partition-id' is 1 by --client and 2 by --node-config: give it only once"),
        ("nowhere.toml", "cannot read --node-config from 'nowhere.toml'"),
    ],
)
def test_what_flower_would_pass_over_is_said(text: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, said, code = executed(monkeypatch, *NODE, "--node-config", text)
    assert (words, code) == ([], 2)
    assert told in said.replace("\n", " ")
    assert "Traceback" not in said


def test_what_flowers_quotes_cannot_hold_is_refused() -> None:
    for value in ("both ' and \"", "two\nlines"):
        with pytest.raises(ValueError, match="which Flower does not accept"):
            as_words("--node-config", {"key": value})
    with pytest.raises(ValueError, match="Flower does not accept the key 'a b'"):
        as_words("--node-config", {"a b": 1})


def submitted(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[dict[str, Any], str, int]:
    """What goes to Flower's own ``--run-config``."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(Control, "submit", lambda self, app, config: seen.append(dict(config)) or "17")
    monkeypatch.setattr(Control, "status", lambda self, run: ("finished:completed", ""))
    done = CliRunner().invoke(app, ["submit", "--insecure", *words])
    return seen[0] if seen else {}, done.output.replace("\n", " "), done.exit_code


def test_an_app_gets_its_own_settings(theirs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told, said, code = submitted(monkeypatch, str(theirs), "--run-config", "num-server-rounds=9 local.batch-size=8")
    assert (told, code) == ({"num-server-rounds": 9, "local.batch-size": 8}, 0), said
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps({"num-server-rounds": 4, "local": {"batch-size": 2}}))
    assert submitted(monkeypatch, str(theirs), "--run-config", str(file))[0] == {"num-server-rounds": 4, "local.batch-size": 2}
    ours = submitted(monkeypatch, str(DIGITS), "--out", str(tmp_path / "run"), "--run-config", "seed=3", "--versions", "5")[0]
    assert ours == {"out": str(tmp_path / "run"), "versions": 5, "seed": 3}


def test_a_key_that_an_app_does_not_have_is_named(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower says "Invalid run configuration." and no more."""
    for words in (["--run-config", "rounds=9"], ["--versions", "9"], ["--out", "runs/x"]):
        told, said, code = submitted(monkeypatch, str(theirs), *words)
        key = {"--run-config": "rounds"}.get(words[0], words[0][2:])
        assert (told, code) == ({}, 2)
        assert f"the app has no setting '{key}'" in said
        assert "which has local.batch-size, num-server-rounds" in said
    _, said, code = submitted(monkeypatch, str(DIGITS), "--versions", "9", "--run-config", "versions=8")
    assert code == 2
    assert "'versions' is 9 by --versions and 8 by --run-config: give it only once" in said


def test_the_same_twice_is_no_question() -> None:
    assert key_values("--run-config", ["a=1", "a=1 b=2"], {"c": ("--c", None)}) == {"a": 1, "b": 2}
