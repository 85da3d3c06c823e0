"""What methods are called on a page: by their names, and by the settings in which those of one name differ."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from fedecho.report.groups import Group, Settings, key_of

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
