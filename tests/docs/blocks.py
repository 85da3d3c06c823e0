"""The code blocks of a page, and how each kind of them is run."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from click import Context, Group
from typer.testing import CliRunner

from fedecho.cli import app
from fedecho.runs.config import load

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
ELSEWHERE = ("fedecho data", "fedecho table", "fedecho watch", "--executor cuda", "fedecho run cifar")
ELSEWHERE += ("--executor ray", "--device cuda", "fedecho export")  # a Ray and models of text have tests of their own
ELSEWHERE += ("fedecho certificates", "fedecho serve", "fedecho join", "fedecho submit")
"""Commands that want a network, a GPU, a set or for ever: that they exist as written is checked, no more."""


@dataclass(frozen=True)
class Block:
    kind: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(kind, text) for kind, text in FENCE.findall(page.read_text())]


def shortened(text: str) -> str:
    """The same in a moment: three versions, each of them evaluated, a narrow network."""
    text = re.sub(r"(num_versions|versions) ?= ?\d+", r"\g<1>=3", text)
    return re.sub(r"eval_every=\d+", "eval_every=1", text)


def run_python(block: Block, names: dict[str, Any]) -> None:
    exec(compile(shortened(block.text), names["__name__"], "exec"), names)  # noqa: S102


def run_toml(block: Block, folder: Path) -> None:
    (folder / "mine.toml").write_text(block.text)
    rows = "".join(f"{client},{client + 1}\n" for client in range(20))
    (folder / "my_clients.csv").write_text("client,runtime_s\n" + rows)
    load(str(folder / "mine.toml"))


def run_shell(line: str) -> None:
    line = line.partition("  #")[0].strip().replace(".venv/bin/fedecho", "fedecho")
    if not line or line == ". .venv/bin/activate":
        return
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), line
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), line  # an example; tests of its own run it
    elif words[0] in ("pip", "export", "ray"):
        return
    elif any(part in line for part in ELSEWHERE):
        parse(words[1:])
    else:
        assert words[0] == "fedecho", f"no way to run: {line}"
        done = CliRunner().invoke(app, quickly(words[1:]))
        assert done.exit_code == 0, f"{line}: {done.output}"


def quickly(words: list[str]) -> list[str]:
    if words[0] not in ("run", "compare"):
        return words
    kept = [
        word for place, word in enumerate(words) if word != "--versions" and (not place or words[place - 1] != "--versions")
    ]
    if words[0] == "compare" and "--jobs" not in words:
        kept += ["--jobs", "1"]
    return [*kept, "--versions", "2", "--set", "task.width=1", "--set", "local.num_local_steps=1"]


def parse(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while isinstance(command, Group):
        command, words = command.get_command(Context(command), words[0]), words[1:]
    command.make_context("fedecho", list(words))
