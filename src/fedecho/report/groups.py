"""Groups the runs of one experiment, which differ only in their seed, and labels each group by what differs."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from math import isfinite
from typing import Any

from fedecho.report.load import RunData
from fedecho.runs.record_schema import MODEL_FILES, Header

Settings = dict[str, Any]
RUN_SEED = "the run's"
"""Stands for the seed of a part that equals the run's seed."""
LOCATIONS = {"bank_dir", "bank_memory", "client_memory", "client_memory_dir", "memory", "memory_dir"}
"""Settings that name a storage location and change no result."""


@dataclass(frozen=True)
class Group:
    """The runs of one experiment, one per seed, sorted by seed."""

    settings: Settings
    runs: tuple[RunData, ...]
    repeated: tuple[RunData, ...]
    """Further runs of a seed that is already in ``runs``; they are not counted."""


def grouped(runs: list[RunData]) -> list[Group]:
    """Groups runs by experiment, in the order of their first runs."""
    groups: dict[str, tuple[Settings, list[RunData]]] = {}
    for run, tree in zip(runs, _trees_of(runs), strict=True):
        settings = _without_run_seed(_settings_of(run, tree), run.seed)
        groups.setdefault(key_of(settings), (settings, []))[1].append(run)
    return [_group(settings, found) for settings, found in _merged(list(groups.values()))]


def _group(settings: Settings, found: list[RunData]) -> Group:
    best_first = sorted(found, key=_rank, reverse=True)
    kept: dict[int, RunData] = {}
    for run in best_first:
        kept.setdefault(run.seed, run)
    counted = sorted(kept.values(), key=lambda run: run.seed)
    repeated = [run for run in best_first if kept[run.seed] is not run]
    return Group(settings, tuple(counted), tuple(sorted(repeated, key=lambda run: run.seed)))


def _rank(run: RunData) -> tuple[bool, int, float, str]:
    """Sort key among runs of one seed: finished runs first, then by version reached, then by start time."""
    return run.summary is not None, run.version, _start_time(run), str(run.folder)


def _start_time(run: RunData) -> float:
    try:
        started = datetime.fromisoformat(run.header.get("started", ""))
        return (started if started.tzinfo else started.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _trees_of(runs: list[RunData]) -> list[Settings]:
    """Each run's configuration by dotted path, such that equal settings compare equal.

    Configurations written by the same version of fedecho differ only in what they say. All others are read with their
    defaults, which imports torch.
    """
    configs = [run.header["config"] or {} for run in runs]
    if _written_alike(runs):
        return _with_nones([_flat(_jsonable(config)) for config in configs])
    names = _class_names()
    return [_flat(_as_parts(config) if config else {}, names=names) for config in configs]


def _written_alike(runs: list[RunData]) -> bool:
    sources = {(run.header.get("software") or {}).get("source") for run in runs}
    has_parts = any(run.header["config"] is None or run.header.get("parts") is not None for run in runs)
    return not has_parts and len(sources) == 1 and None not in sources


def _with_nones(trees: list[Settings]) -> list[Settings]:
    """A written configuration leaves out every setting that is None."""
    for key in dict.fromkeys(key for tree in trees for key in tree):
        part = key.rpartition(".")[0]
        classes = {tree.get(f"{part}.class") for tree in trees if key in tree}
        for tree in trees:
            is_same = key not in tree and tree.get(f"{part}.class") in classes
            if is_same and (not part or any(other.startswith(f"{part}.") for other in tree)):
                tree[key] = None
    return trees


def _jsonable(value: Any) -> Any:
    """Infinities as texts, as in a description of parts."""
    if isinstance(value, dict):
        return {key: _jsonable(each) for key, each in value.items()}
    return repr(value) if isinstance(value, float) and not isfinite(value) else value


def _settings_of(run: RunData, tree: Settings) -> Settings:
    """Everything that identifies the experiment, by dotted path. Excludes how and where it was computed."""
    header = run.header
    config, parts = header["config"], header.get("parts")
    settings: Settings = {"method": run.algorithm, "name": header["name"]}
    flat = tree | (_flat(parts, names=_class_names()) if parts else {}) | (header.get("attributes") or {})
    if config is None:
        flat |= {key: header.get(key) for key in ("num_params", "num_unlabeled")}
    kept = {key: value for key, value in flat.items() if not _is_location(key, value, header)}
    return settings | kept | {"num_versions": header["num_versions"], "clock": run.clock} | _files(header)


def _as_parts(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with its defaults filled in, in the form in which headers describe custom parts, so that both compare."""
    from fedecho.runs.config import from_config
    from fedecho.runs.experiment import describe

    try:
        tree: dict[str, Any] = describe(from_config(config))
        return tree
    except (ValueError, TypeError, OSError, ArithmeticError, LookupError, RecursionError):
        return config  # written by another version of fedecho, or by an AsyncStrategy


def _files(header: Header) -> Settings:
    """The digests of the input files."""
    digests = {name: digest.split()[0] for name, digest in (header.get("inputs") or {}).items() if digest.split()}
    model, trace = (header.get("notes") or {}).get(MODEL_FILES), header.get("trace_sha256")
    digests |= {MODEL_FILES: str(model).partition(",")[0]} if model is not None else {}
    return digests | ({"runtimes.trace": trace} if trace is not None else {})


def _is_location(key: str, value: Any, header: Header) -> bool:
    name = key.rpartition(".")[2]
    if key in ("seed", "record_every") or (name in LOCATIONS and (value is None or isinstance(value, str))):
        return True
    return key == "task.data_dir" and (header["config"] is not None or bool(header.get("inputs")))


@cache
def _class_names() -> dict[str, str]:
    """The names in configurations of tasks, methods and partitioners, by class."""
    from fedecho.runs.config import CHOICES

    return {cls.__name__: name for choices in CHOICES.values() for name, cls in choices.items()}


def _flat(tree: Mapping[str, Any], path: str = "", names: Mapping[str, str] | None = None) -> Settings:
    flat: Settings = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{path}{key}.", names)
        else:
            named = path and isinstance(value, str) and (key == "class" or (key == "name" and "class" not in tree))
            flat[f"{path}class" if named else f"{path}{key}"] = (names or {}).get(value, value) if named else value
    return flat


def _is_seed(key: str) -> bool:
    return key.endswith((".seed", "_seed"))


def _without_run_seed(settings: Settings, seed: int) -> Settings:
    return {key: RUN_SEED if _is_seed(key) and value == seed else value for key, value in settings.items()}


def _merged(groups: list[tuple[Settings, list[RunData]]]) -> list[tuple[Settings, list[RunData]]]:
    """Merges a group of one seed, whose parts use the run's seed, into a group whose parts have that seed fixed.

    From a single seed it is not clear whether a part follows the run's seed or was fixed to the same number.
    """
    for settings, found in groups:
        seed = found[0].seed
        if RUN_SEED not in settings.values() or any(run.seed != seed for run in found):
            continue
        fixed = {key: seed if value == RUN_SEED and _is_seed(key) else value for key, value in settings.items()}
        fits = [other for other in groups if other[1] is not found and _fits(other[0], fixed, settings)]
        if fits:
            fits[0][1].extend(found)
            found.clear()
    return [(settings, found) for settings, found in groups if found]


def _fits(there: Settings, fixed: Settings, own: Settings) -> bool:
    return there.keys() == own.keys() and all(key_of(there[key]) in (key_of(fixed[key]), key_of(own[key])) for key in own)


def key_of(value: Any) -> str:
    """A key that is equal for equal settings; 1 equals 1.0."""
    return json.dumps(_number(value), sort_keys=True)


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_number(each) for each in value]
    return float(value) if type(value) is int and abs(value) < 2**53 else value


MOST_SETTINGS, MOST_CHARACTERS = 4, 28
"""Limits of a label: the number of settings, unless more are needed to be unique, and the length of a value."""
DERIVED = ("num_params", "num_unlabeled")
"""Consequences of other settings, named only if nothing else distinguishes two methods."""


@dataclass(frozen=True)
class Label:
    text: str
    settings: dict[str, str] = field(default_factory=dict)
    """All settings that differ from other methods of the same name."""
    num_omitted: int = 0
    """The number of settings that the text leaves out."""


def labels_of(groups: list[Group]) -> list[Label]:
    several = len({group.settings["name"] for group in groups}) > 1
    names = [
        f"{group.settings['method']}, {group.settings['name']}" if several else str(group.settings["method"])
        for group in groups
    ]
    labels = [Label("")] * len(groups)
    for name in set(names):
        places = [place for place, other in enumerate(names) if other == name]
        for place, label in zip(places, _labels(name, [groups[place].settings for place in places]), strict=True):
            labels[place] = label
    texts = [label.text for label in labels]
    return [
        label
        if texts.count(label.text) == 1
        else Label(f"{label.text} [{group.runs[0].folder}]", label.settings, label.num_omitted)
        for label, group in zip(labels, groups, strict=True)
    ]


def _labels(name: str, every: list[Settings]) -> list[Label]:
    """Labels for methods of one name. All list the same settings, first those needed to make the labels unique."""
    needed, further = _differing(every)
    differing = [*needed, *further]
    named = set(differing[: max(MOST_SETTINGS, len(needed))])
    order = list(dict.fromkeys(key for settings in every for key in settings))
    words = _words(differing)
    labels = []
    for settings in every:
        values = {key: _short_text(settings[key]) for key in sorted(differing, key=order.index) if key in settings}
        shown = ", ".join(f"{words[key]} {value}" for key, value in values.items() if key in named)
        text = f"{name} ({shown})" if shown else name
        labels.append(Label(text, {words[key]: value for key, value in values.items()}, len(differing) - len(named)))
    return labels


def _differing(every: list[Settings]) -> tuple[list[str], list[str]]:
    """A small set of settings that distinguishes all of ``every``, and all other settings that differ.

    The latter exclude settings that only one class of a part has, since the class itself is listed.
    """
    keys = dict.fromkeys(key for settings in every for key in settings if key not in ("method", "name"))
    columns = {key: [key_of(settings[key]) if key in settings else None for settings in every] for key in keys}
    differing = [key for key, column in columns.items() if len(set(column)) > 1]
    differing.sort(key=lambda key: (None in columns[key], key in DERIVED))  # settings that all methods have come first
    needed: list[str] = []
    while differing:
        num_distinct = len(set(zip(*(columns[key] for key in needed), strict=True))) if needed else 1
        best = max(differing, key=lambda key: len(set(zip(*(columns[each] for each in (*needed, key)), strict=True))))
        if len(set(zip(*(columns[each] for each in (*needed, best)), strict=True))) <= num_distinct:
            break
        needed.append(best)
        differing.remove(best)
    parts = [key.removesuffix("class") for key in (*needed, *differing) if key.endswith(".class")]
    return needed, [
        key for key in differing if key not in DERIVED and not (None in columns[key] and key.startswith(tuple(parts)))
    ]


def _words(keys: list[str]) -> dict[str, str]:
    """The shortest unique suffix of each dotted path: ``client_lr`` for ``local.client_lr``. Seeds keep the part's name."""
    paths = {key: key.removesuffix(".class").split(".") for key in keys}
    words = {}
    for key, path in paths.items():
        length = 2 if path[-1] == "seed" else 1
        while length < len(path) and any(other[-length:] == path[-length:] for other in paths.values() if other != path):
            length += 1
        words[key] = ".".join(path[-length:])
    return words


def _short_text(value: Any) -> str:
    if isinstance(value, str):
        text = value[:8] if re.fullmatch(r"[0-9a-f]{32,}", value) else value.replace("<locals>.", "")
    else:
        text = "none" if value is None else json.dumps(value).removesuffix(".0")
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
