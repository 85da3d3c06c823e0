"""One command line's settings for several methods: each takes those it has, and every one must be taken by somebody."""

from collections.abc import Sequence

from fedecho.experiments.config import ConfigError, UnknownKeyError, load
from fedecho.experiments.toml import setting_of, shown

OWN = {"seed": "--seeds", "algorithm.name": "--algorithms"}
"""What tells the runs of a comparison apart, and the option that says it."""


def settings_of_methods(source: str, methods: Sequence[str], settings: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The settings that each method takes. An error names the method; a key that none of them has names them all."""
    _check_own(settings)
    unknown: dict[str, list[UnknownKeyError]] = {}
    taken = {method: _taken(source, method, settings, unknown) for method in methods}
    for setting, errors in unknown.items():
        if len(errors) == len(methods):
            error = next((each for each in errors if "did you mean" in str(each)), errors[0])
            raise ConfigError(f"--set {shown(setting)[1:-1]}: none of {', '.join(methods)} has it; {error}")
    return taken


def shares(taken: dict[str, tuple[str, ...]], settings: Sequence[str]) -> list[str]:
    """A line for each setting that some methods take and others do not have."""
    lines = []
    for setting in dict.fromkeys(settings):
        takers = [method for method, found in taken.items() if setting in found]
        others = [method for method in taken if method not in takers]
        if others:
            lines.append(f"--set {setting} is for {', '.join(takers)} alone; {', '.join(others)} has no such setting")
    return lines


def _taken(source: str, method: str, settings: Sequence[str], unknown: dict[str, list[UnknownKeyError]]) -> tuple[str, ...]:
    load(source, algorithm=method)  # what is wrong without any setting is nothing of the method's
    mine = tuple(settings)
    while True:
        try:
            load(source, algorithm=method, settings=mine)
            return mine
        except UnknownKeyError as error:
            lacked = [setting for setting in mine if _within(_key(setting), error.key)]
            elsewhere = error.below is not None and not any(_within(_key(setting), error.below) for setting in mine)
            if not error.key.startswith("algorithm."):
                raise
            if not lacked or elsewhere:
                raise ConfigError(f"{method}: {error}") from None
            for setting in dict.fromkeys(lacked):
                unknown.setdefault(setting, []).append(error)
            mine = tuple(setting for setting in mine if setting not in lacked)
        except ValueError as error:
            raise ConfigError(f"{method}: {error}") from None


def _check_own(settings: Sequence[str]) -> None:
    for setting in settings:
        table = setting_of(setting)
        algorithm = table.get("algorithm")
        given = "seed" if "seed" in table else "algorithm.name" if isinstance(algorithm, dict) and "name" in algorithm else ""
        if given:
            raise ConfigError(f"--set {given}=... would make all runs the same: give {OWN[given]}")


def _key(setting: str) -> str:
    return ".".join(part.strip() for part in setting.partition("=")[0].split("."))


def _within(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.")
