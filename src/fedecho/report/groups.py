"""Groups the runs of one experiment, which differ only in their seed, and labels each group by what differs."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fedecho.report.load import RunData
from fedecho.runs.config import CHOICES, from_config
from fedecho.runs.experiment import described
from fedecho.runs.identity import MODEL_FILES
from fedecho.runs.record_schema import Header

Settings = dict[str, Any]
FOLLOWS = "the run's"
"""What a part's seed is called that is the run's own."""
PLACES = {"bank_dir", "bank_memory", "client_memory", "client_memory_dir", "memory", "memory_dir"}
"""Where things lie, which changes no result; a text, or null by default."""
NAMES = {cls.__name__: name for choices in CHOICES.values() for name, cls in choices.items()}


@dataclass(frozen=True)
class Group:
    """The runs of one experiment, one for each seed, in the order of the seeds."""

    settings: Settings
    runs: tuple[RunData, ...]
    repeated: tuple[RunData, ...]
    """Runs of a seed that another run stands for; they count nowhere."""


def grouped(runs: list[RunData]) -> list[Group]:
    """In the order of their first runs."""
    groups: dict[str, tuple[Settings, list[RunData]]] = {}
    for run in runs:
        settings = _followed(_settings_of(run), run.seed)
        groups.setdefault(key_of(settings), (settings, []))[1].append(run)
    return [_group(settings, found) for settings, found in _joined(list(groups.values()))]


def _group(settings: Settings, found: list[RunData]) -> Group:
    best_first = sorted(found, key=_rank, reverse=True)
    kept: dict[int, RunData] = {}
    for run in best_first:
        kept.setdefault(run.seed, run)
    counted = sorted(kept.values(), key=lambda run: run.seed)
    repeated = [run for run in best_first if kept[run.seed] is not run]
    return Group(settings, tuple(counted), tuple(sorted(repeated, key=lambda run: run.seed)))


def _rank(run: RunData) -> tuple[bool, int, float, str]:
    """Of equal seeds that run counts which is finished, else has come furthest; then the one that began last."""
    return run.summary is not None, run.version, _began(run), str(run.folder)


def _began(run: RunData) -> float:
    try:
        began = datetime.fromisoformat(run.header.get("started", ""))
        return (began if began.tzinfo else began.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _settings_of(run: RunData) -> Settings:
    """All by which its experiment differs from another one, by dotted path. How it was computed, and where, is none of it."""
    header = run.header
    config, parts = header["config"], header.get("parts")
    told: Settings = {"method": run.algorithm, "name": header["name"]}
    if config is None and parts is None:  # an old record, of a user's own parts: what it ran, it does not say
        return told | {"folder": str(run.folder.resolve())}
    flat = _flat((_as_parts(config) if config is not None else {}) | (parts or {})) | (header.get("attributes") or {})
    if config is None:
        flat |= {key: header.get(key) for key in ("num_params", "num_unlabeled")}
    kept = {key: value for key, value in flat.items() if not _is_place(key, value, header)}
    return told | kept | {"num_versions": header["num_versions"], "clock": run.clock} | _files(header)


def _as_parts(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as a header describes a user's own parts, with the defaults of what it leaves out, so that both compare."""
    try:
        tree: dict[str, Any] = described(from_config(config))
        return tree
    except (
        ValueError,
        TypeError,
        OSError,
        ArithmeticError,
        LookupError,
        RecursionError,
    ):  # of another fedecho, or of a strategy in Flower
        return config


def _files(header: Header) -> Settings:
    """The digests of the files it read."""
    told = {name: digest.split()[0] for name, digest in (header.get("inputs") or {}).items() if digest.split()}
    model, trace = (header.get("notes") or {}).get(MODEL_FILES), header.get("trace_sha256")
    told |= {MODEL_FILES: str(model).partition(",")[0]} if model is not None else {}
    return told | ({"runtimes.trace": trace} if trace is not None else {})


def _is_place(key: str, value: Any, header: Header) -> bool:
    name = key.rpartition(".")[2]
    if key in ("seed", "record_every") or (name in PLACES and (value is None or isinstance(value, str))):
        return True
    return key == "task.data_dir" and (header["config"] is not None or bool(header.get("inputs")))


def _flat(tree: Mapping[str, Any], path: str = "") -> Settings:
    flat: Settings = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{path}{key}.")
        else:
            named = path and isinstance(value, str) and (key == "class" or (key == "name" and "class" not in tree))
            flat[f"{path}class" if named else f"{path}{key}"] = NAMES.get(value, value) if named else value
    return flat


def _is_seed(key: str) -> bool:
    return key.endswith((".seed", "_seed"))


def _followed(settings: Settings, seed: int) -> Settings:
    return {key: FOLLOWS if _is_seed(key) and value == seed else value for key, value in settings.items()}


def _joined(groups: list[tuple[Settings, list[RunData]]]) -> list[tuple[Settings, list[RunData]]]:
    """A seed's only run whose parts have its own seed may be one of those in which they have that seed throughout."""
    for settings, found in groups:
        seed = found[0].seed
        if FOLLOWS not in settings.values() or any(run.seed != seed for run in found):
            continue
        fixed = {key: seed if value == FOLLOWS and _is_seed(key) else value for key, value in settings.items()}
        fits = [other for other in groups if other[1] is not found and _fits(other[0], fixed, settings)]
        if fits:
            fits[0][1].extend(found)
            found.clear()
    return [(settings, found) for settings, found in groups if found]


def _fits(there: Settings, fixed: Settings, own: Settings) -> bool:
    return there.keys() == own.keys() and all(key_of(there[key]) in (key_of(fixed[key]), key_of(own[key])) for key in own)


def key_of(value: Any) -> str:
    """Equal for equal settings: 1 is 1.0."""
    return json.dumps(_number(value), sort_keys=True)


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_number(each) for each in value]
    return float(value) if type(value) is int and abs(value) < 2**53 else value


MOST_SETTINGS, MOST_CHARACTERS = 4, 28
"""Of a label: so many settings, unless more are needed, and so much of a value's text."""
DERIVED = ("num_params", "num_unlabeled")
"""They differ because something else does, and are named where nothing else tells."""


@dataclass(frozen=True)
class Label:
    text: str
    settings: dict[str, str] = field(default_factory=dict)
    """All in which it differs from others of its name."""
    unnamed: int = 0
    """How many of these the text has no room for."""


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
        else Label(f"{label.text} [{group.runs[0].folder}]", label.settings, label.unnamed)
        for label, group in zip(labels, groups, strict=True)
    ]


def _labels(name: str, every: list[Settings]) -> list[Label]:
    """Of methods of one name: with the same settings named in each, those without which two would have one label first."""
    needed, further = _differing(every)
    differing = [*needed, *further]
    named = set(differing[: max(MOST_SETTINGS, len(needed))])
    order = list(dict.fromkeys(key for settings in every for key in settings))
    words = _words(differing)
    labels = []
    for settings in every:
        told = {key: _said(settings[key]) for key in sorted(differing, key=order.index) if key in settings}
        shown = ", ".join(f"{words[key]} {value}" for key, value in told.items() if key in named)
        text = f"{name} ({shown})" if shown else name
        labels.append(Label(text, {words[key]: value for key, value in told.items()}, len(differing) - len(named)))
    return labels


def _differing(every: list[Settings]) -> tuple[list[str], list[str]]:
    """The settings that tell all of them apart, as few as do, and all others in which they differ.

    What only one class of a part has is none of these others: its class says more.
    """
    keys = dict.fromkeys(key for settings in every for key in settings if key not in ("method", "name", "folder"))
    columns = {key: [key_of(settings[key]) if key in settings else None for settings in every] for key in keys}
    found = [key for key, column in columns.items() if len(set(column)) > 1]
    found.sort(key=lambda key: (None in columns[key], key in DERIVED))  # those that all have first
    needed: list[str] = []
    while found:
        apart = len(set(zip(*(columns[key] for key in needed), strict=True))) if needed else 1
        best = max(found, key=lambda key: len(set(zip(*(columns[each] for each in (*needed, key)), strict=True))))
        if len(set(zip(*(columns[each] for each in (*needed, best)), strict=True))) <= apart:
            break
        needed.append(best)
        found.remove(best)
    parts = [key.removesuffix("class") for key in (*needed, *found) if key.endswith(".class")]
    return needed, [key for key in found if key not in DERIVED and not (None in columns[key] and key.startswith(tuple(parts)))]


def _words(keys: list[str]) -> dict[str, str]:
    """As short as tells them apart: ``client_lr`` of ``local.client_lr``. A part is named by its class, a part's seed with it."""
    paths = {key: key.removesuffix(".class").split(".") for key in keys}
    words = {}
    for key, path in paths.items():
        length = 2 if path[-1] == "seed" else 1
        while length < len(path) and any(other[-length:] == path[-length:] for other in paths.values() if other != path):
            length += 1
        words[key] = ".".join(path[-length:])
    return words


def _said(value: Any) -> str:
    if isinstance(value, str):
        text = value[:8] if re.fullmatch(r"[0-9a-f]{32,}", value) else value.replace("<locals>.", "")
    else:
        text = "none" if value is None else json.dumps(value).removesuffix(".0")
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
