"""Whatever is typed and whatever lies in a file: exit code 0 or 2, one line, never a traceback."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from fedecho import ALGORITHMS, RECIPES, Experiment, load, simulate
from fedecho.cli import app, data, runs
from fedecho.paper import filling
from fedecho.runs import compare, estimates
from fedecho.runs.compare import ComparisonResult
from fedecho.runs.config import to_config
from fedecho.runs.estimates import ServerCost
from fedecho.runs.summary import Summary
from fedecho.tasks.vision import synthesize

FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True)


@pytest.fixture(autouse=True)
def _nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes all checks would train for days, fetch gigabytes or fill the disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "_finish", lambda *arguments: None)
    monkeypatch.setattr(compare, "run_all", lambda *arguments, **options: ComparisonResult([_summary()], {}))
    monkeypatch.setattr(filling, "fill", lambda *arguments, **options: [])
    monkeypatch.setattr(estimates, "server_cost", lambda *arguments: ServerCost(0.0, 0.0, 1, 1, 1, 1))
    monkeypatch.setattr(data, "fetch", lambda *arguments: Path())
    monkeypatch.setattr(synthesize, "synthesize", lambda *arguments, **options: Path())


@cache
def _summary() -> Summary:
    """Of a run that was made, so that what is printed of it is fuzzed too."""
    return simulate(load("digits", algorithm="fedbuff", versions=1, settings=["local.num_local_steps=1"])).summary


def check(result: Result) -> None:
    """Help and the parser's own complaints are of several lines, with the usage or in a frame; ours are one line."""
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 2), result.output
    assert "Traceback" not in result.output
    if result.exit_code == 2 and not ("Usage:" in result.output or "─ Error ─" in result.stderr):
        assert len(result.stderr.strip("\n").splitlines()) == 1, result.stderr


def fedecho(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def keys_of(tree: dict[str, Any], before: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield before + key
        if isinstance(value, dict):
            yield from keys_of(value, f"{before}{key}.")


KEYS = sorted({key for name in ALGORITHMS for key in keys_of(to_config(load("digits", algorithm=name)))})
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
ODD = st.sampled_from(
    [
        "",
        " ",
        ".",
        "..",
        "=",
        "a.b",
        "\0",
        "\n",
        "\x1b[31m",
        "../x",
        "odd[/b]",
        "~",
        "é",
        "\u202e",
        "\U0001d54f",
        "x" * 300,
        "-1",
        "1e999",
    ]
)
LITERALS = st.sampled_from(
    ["nan", "-inf", "0x" + "f" * 4000, "9" * 5000, "1" * 19, "-0.0", "1e-400", "[" * 3000, "{a={a={a=1}}}", "1979-05-27"]
) | st.sampled_from(
    ["true", "'x'", "[]", "{}", '"""', "''", "0", "-1", "1.5", "2", '"digits"', '"fedbuff"', "[1, [2, {a = 3}]]"]
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
TREE = st.recursive(PLAIN, lambda child: st.lists(child, max_size=3) | st.dictionaries(TEXT, child, max_size=3), max_leaves=8)
KEY = st.sampled_from(KEYS) | TEXT | ODD
SETTING = st.tuples(KEY, LITERALS | TEXT | ODD | TREE.map(json.dumps)).map("=".join)


@given(st.lists(SETTING, max_size=4), st.sampled_from([*RECIPES]) | ODD)
@FUZZ
def test_any_setting(chosen: list[str], recipe: str) -> None:
    check(fedecho("run", recipe, *(word for setting in chosen for word in ("--set", setting))))


def toml(tree: Any) -> str:
    """A value as TOML; None as a string, because TOML has none."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(toml(value) for value in tree) + "]"
    if isinstance(tree, float):
        return repr(tree)
    return json.dumps("none" if tree is None else tree)


@st.composite
def altered(draw: st.DrawFn) -> dict[str, Any]:
    """A good experiment with a few of its values, tables or keys replaced by anything."""
    tree = to_config(load("digits", algorithm=draw(st.sampled_from(sorted(ALGORITHMS)))))
    for _ in range(draw(st.integers(1, 3))):
        table = tree
        while draw(st.booleans()) and (inner := [value for value in table.values() if isinstance(value, dict)]):
            table = draw(st.sampled_from(inner))
        key = draw(st.sampled_from(sorted(table)) | TEXT) if table else draw(TEXT)
        table[key] = draw(TREE | st.integers(-3, 3) | st.floats(0, 2))
    return tree


@given(altered(), st.sampled_from([None, *ALGORITHMS]))
@FUZZ
def test_any_table(tmp_path: Path, tree: dict[str, Any], algorithm: str | None) -> None:
    path = tmp_path / "fuzzed.toml"
    path.write_text("".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in tree.items()), encoding="utf-8")
    check(fedecho("run", str(path), *([] if algorithm is None else ["--algorithm", algorithm])))
    with suppress(ValueError):
        assert isinstance(load(str(path)), Experiment)


@given(
    st.binary(max_size=200)
    | TEXT.map(str.encode)
    | st.tuples(KEY, LITERALS).map(lambda pair: f"{pair[0]} = {pair[1]}".encode())
)
@FUZZ
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fuzzed.toml"
    path.write_bytes(content)
    check(fedecho("run", str(path)))


FOUND = {
    "a list for a method's name, beside an unknown key": '"" = 0\n[task]\nname = "digits"\n[algorithm]\nname = []\n',
    "a number for the method inside": '[task]\nname = "digits"\n[algorithm]\nname = "fedecho"\ninner = 3\n',
    "three thousand lists in each other": "seed = " + "[" * 3000,
    "lists that are closed": "seed = " + "[" * 100 + "]" * 100,
    "a number of 16,000 bits": "seed = 0x" + "f" * 4000,
    "a number of 5,000 digits": "seed = " + "9" * 5000,
    "a megabyte": "#" * (1 << 20) + "\n",
    "orders to a terminal": 'recipe = "digits"\n"\\u001b[31m\\n" = 1\n',
}


@pytest.mark.parametrize("content", FOUND.values(), ids=FOUND)
def test_what_once_ended_in_a_traceback(tmp_path: Path, content: str) -> None:
    (tmp_path / "found.toml").write_text(content)
    for words in ([], ["--algorithm", "fadas"]):
        result = fedecho("run", "found.toml", *words)
        check(result)
        assert result.exit_code == 2
        assert result.stderr.strip().isprintable()


COMMANDS = ["run", "resume", "compare", "table", "cost", "list", "data fetch", "data synthesize", "data", "--version", "--help"]
OPTIONS = ["--algorithm", "--algorithms", "--seed", "--seeds", "--versions", "--set", "--executor", "--workers", "--precision"]
OPTIONS += [
    "--checkpoint-every",
    "--out",
    "--data-dir",
    "--jobs",
    "--only",
    "--format",
    "--results",
    "--num",
    "--steps",
    "--dry-run",
]
VALUES = ODD | TEXT | st.integers().map(str) | st.floats().map(str)
VALUES |= st.sampled_from(
    [*RECIPES, *ALGORITHMS, "cifar10", "pool", "cuda", "1,2", ",", "file", "folder", "file/x", "/dev/null", "/proc"]
)
WORDS = st.lists(st.sampled_from(OPTIONS) | VALUES, max_size=6)


@given(st.sampled_from(COMMANDS), WORDS)
@FUZZ
def test_any_words(tmp_path: Path, command: str, words: list[str]) -> None:
    (tmp_path / "file").write_bytes(b"\x00\xff")
    (tmp_path / "folder").mkdir(exist_ok=True)
    check(fedecho(*command.split(), *(word.replace("\0", "") for word in words)))  # no kernel passes a NUL on


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted with a checkpoint."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    small = ["task.width=1", "local.num_local_steps=1", "task.num_unlabeled=20"]

    def stop(moment: Any, scores: Any) -> None:
        if moment.step is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(load("digits", versions=2, settings=small), out=folder, checkpoint_s=0.0, watch=stop)
    return folder


WRONG = (None, True, 0, 1.5, "", "x", [], [1], {}, {"a": 3}, {"classes": 3}, {"model files": 3}, {"device": 3})


def test_every_field_of_a_header_may_be_wrong(tmp_path: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    first, rest = (stopped / "run.jsonl").read_bytes().split(b"\n", 1)
    header = json.loads(first)
    for name, value in product(header, WRONG):
        folder = shutil.copytree(stopped, tmp_path / "run", dirs_exist_ok=True)
        (folder / "run.jsonl").write_bytes(json.dumps({**header, name: value}).encode() + b"\n" + rest)
        check(fedecho("resume", str(folder)))


@given(st.data())
@settings(parent=FUZZ, max_examples=20)
def test_any_damage_to_a_record(tmp_path: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """A bit, a byte, a stretch or a value of the header: resumed, or refused in one line."""
    monkeypatch.undo()
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    for path in (*folder.iterdir(),):
        path.unlink()
    for path in stopped.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    record = folder / "run.jsonl"
    lines = record.read_bytes().split(b"\n")
    if data.draw(st.booleans()):
        header = json.loads(lines[0])
        header[data.draw(st.sampled_from(sorted(header)))] = data.draw(TREE)
        lines[0] = json.dumps(header).encode()
    else:
        row = data.draw(st.integers(0, len(lines) - 1))
        start, length = data.draw(st.integers(0, max(len(lines[row]), 1))), data.draw(st.integers(0, 50))
        lines[row] = lines[row][:start] + data.draw(st.binary(max_size=20)) + lines[row][start + length :]
    record.write_bytes(b"\n".join(lines))
    check(fedecho("resume", str(folder)))
