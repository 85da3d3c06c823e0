"""Flower's own way to configure from a command line, ``key=1 other="text"``: read strictly, and written as Flower reads it back.

Flower skips what it does not understand, knows no escapes between quotes, and does not say which key of a run's configuration
an app does not have. Free of torch.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from flwr.common.config import flatten_dict, get_project_config, parse_config_args

from fedecho.core.toml import read_toml

PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)(?=\s|$)")
"""What Flower takes for a pair."""
KEY = re.compile(r"[\w.-]+", re.ASCII)
PROJECT = "pyproject.toml"


def key_values(option: str, texts: Sequence[str], ours: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of an option that may be given again and again, or of TOML files, with what options of our own say.

    ``ours`` is, by key, our option and its value (None: not given). What is said twice must be the same.
    """
    found = {key: value for key, (_, value) in ours.items() if value is not None}
    for text in texts:
        for key, value in _of_one(option, text).items():
            if key in found and found[key] != value:
                other = ours[key][0] if key in ours else option
                raise ValueError(f"{key!r} is {found[key]!r} by {other} and {value!r} by {option}: which?")
            found[key] = value
    return found


def as_words(option: str, told: Mapping[str, Any]) -> str:
    """The pairs as Flower reads them."""
    return " ".join(f"{_key(option, key)}={_value(option, key, value)}" for key, value in told.items())


def check_run_config(app: Path, told: Mapping[str, Any]) -> None:
    """An app has the keys that its pyproject.toml names and no others, ours (``out``, ``versions``) included."""
    if not (app / PROJECT).is_file():
        return  # ``flwr run`` says what is wrong with it
    read_toml(app / PROJECT)  # Flower's own reader has no limits
    try:
        known = flatten_dict(get_project_config(app)["tool"]["flwr"]["app"].get("config", {}))
    except ValueError as error:
        raise ValueError(f"{app / PROJECT}: {_one_line(error)}") from None
    if unknown := sorted(told.keys() - known.keys()):
        has = ", ".join(sorted(known)) or "nothing"
        where = f"[tool.flwr.app.config] of {app / PROJECT}"
        raise ValueError(f"the app has no {unknown[0]!r} in its configuration: add it to {where}, which has {has}")


def _of_one(option: str, text: str) -> dict[str, Any]:
    in_file = text.endswith(".toml") and "=" not in text
    if not in_file and (not text.strip() or PAIR.sub("", text).strip()):
        raise ValueError(
            f"{option} takes key=value pairs, such as 'num-partitions=3 name=\"a b\"', or a TOML file, not {text!r}"
        )
    try:
        if in_file:
            read_toml(Path(text))  # Flower's own reader has no limits
        return parse_config_args([text if in_file else f"{text} "])  # a pair that ends in .toml is no file
    except (click.ClickException, OSError, ValueError) as error:
        raise ValueError(f"{option} cannot be read from {text!r}: {_one_line(error)}") from None


def _key(option: str, key: str) -> str:
    if not KEY.fullmatch(key):
        raise ValueError(f"{option}: Flower takes no key {key!r}: letters, digits, '-', '_' and '.' alone")
    return key


def _value(option: str, key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(value)
    for quote, forbidden in (('"', '"\\'), ("'", "'")):
        if value.isprintable() and not any(sign in value for sign in forbidden):
            return f"{quote}{value}{quote}"
    raise ValueError(f"{option}: {key} = {value!r} has both kinds of quotes or is more than a line, which Flower cannot take")


def _one_line(error: Exception) -> str:
    text = error.message if isinstance(error, click.ClickException) else str(error)
    return " ".join(text.split())
