"""The schema of the files that are read back: a record's header and lines, and the summary."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from fedecho.runs.json_types import LARGEST, LARGEST_INT, NUMBERS, PlainType, SchemaError, check_of, whole

MODEL_FILES = "model files"
"""The note in a header that holds the digest of a pretrained model's files."""
MOST_CLIENTS = 10**8
"""Reports allocate an array entry for each client."""

MOST_DEPTH = 100
Whole = Annotated[int, whole("", -LARGEST_INT)]
Count = Annotated[int, whole(" of at least 0", 0)]
Client = Annotated[int, whole(" of at least 0 and below 100,000,000", 0, MOST_CLIENTS - 1)]
Every = Annotated[int, whole(" of at least 1", 1)]
Seconds = Annotated[float, PlainType("a finite number of at least 0", NUMBERS, lambda value: 0 <= value <= LARGEST)]
Finite = Annotated[float, PlainType("a finite number", NUMBERS, lambda value: -LARGEST <= value <= LARGEST)]
Label = Annotated[
    str,
    PlainType("a whole number below 100,000 as text", (str,), lambda text: text.isascii() and text.isdigit() and len(text) < 6),
]


class Clients(TypedDict, total=False):
    """A header's clients, or totals if there are very many. Empty for a deployed run."""

    examples: list[Count]
    classes: list[str]
    labels: list[dict[Label, Count]]
    num_clients: Annotated[int, whole(" of at least 0, at most 100,000,000", 0, MOST_CLIENTS)]
    num_examples: Count
    examples_at: dict[str, Count]
    class_counts: dict[str, Any] | None


class Header(TypedDict):
    """The first line of a record: the run's identity, configuration and environment."""

    event: Literal["header"]
    config: dict[str, Any] | None
    name: str
    seed: int
    num_versions: Count
    execution: dict[str, Any]
    software: NotRequired[dict[str, Any]]
    algorithm: NotRequired[str]
    parts: NotRequired[dict[str, Any] | None]
    attributes: NotRequired[dict[str, Any] | None]
    clients: NotRequired[Clients | None]
    inputs: NotRequired[dict[str, str] | None]
    notes: NotRequired[dict[str, Any] | None]
    trace_sha256: NotRequired[str | None]
    record_every: NotRequired[Every]
    clock: NotRequired[Literal["virtual", "real"]]
    command: NotRequired[str]
    started: NotRequired[str]
    num_params: NotRequired[Count]
    num_unlabeled: NotRequired[Count]


class DispatchLine(TypedDict):
    time: Seconds
    client: Client
    dispatch: Count
    base: Count


class MessageLine(TypedDict):
    """A client's message that belongs to no job. Its client may not exist."""

    time: Seconds
    client: Whole
    status: str
    reason: NotRequired[str]
    code: NotRequired[str]


_WithClass = TypedDict("_WithClass", {"class": NotRequired[str]})  # "class" is a keyword


class AnswerLine(DispatchLine, _WithClass):
    """The answer to a job. The norm of its update and the client's own metrics are further fields."""

    status: str
    reason: NotRequired[str]
    code: NotRequired[str]
    staleness: Count


class VersionLine(TypedDict):
    """A new version. The method's own metrics are further fields."""

    version: Count
    time: Seconds
    teacher_coverage: NotRequired[list[Count]]


class AdviceLine(TypedDict):
    """What the run advised its user to change."""

    version: Count
    time: Seconds
    text: str


class EvaluationLine(TypedDict):
    """An evaluation. The task's own scores are further fields of any type."""

    version: Count
    time: Seconds
    accuracy: NotRequired[float]
    per_class: NotRequired[list[float]]
    real_s: NotRequired[Seconds]
    clients_s: NotRequired[Seconds]
    server_s: NotRequired[Seconds]
    versions_alive: NotRequired[Count]
    peak_bytes: NotRequired[Count]


class SpentBy(TypedDict):
    reports: Count
    clients: Count
    epsilon: float


class Spent(TypedDict):
    """A summary's privacy: epsilon per client, or the number of clients per epsilon if there are very many."""

    delta: float
    largest_epsilon: float
    epsilon: NotRequired[dict[str, float]]
    epsilon_by_reports: NotRequired[list[SpentBy]]


class CellSummary(TypedDict):
    """Summary in a result file. A diverged run has ``num_versions`` alone."""

    num_versions: Count
    last10_accuracy: NotRequired[float]
    final_accuracy: NotRequired[float]
    best_accuracy: NotRequired[float]
    real_s: NotRequired[Seconds]
    scores: NotRequired[dict[str, float]]


class CellFile(TypedDict):
    """Result file of one table cell."""

    cell: str
    summary: CellSummary
    evaluations: list[EvaluationLine]
    config: dict[str, Any]
    execution: dict[str, Any]
    software: dict[str, Any]
    unlabeled: str
    commit: str
    notes: NotRequired[dict[str, str]]
    diverged: NotRequired[str]


# Further fields of these lines are metrics.
ANSWER, MESSAGE, VERSION = check_of(AnswerLine, Finite), check_of(MessageLine), check_of(VersionLine, Finite)
LINES = {
    "header": check_of(Header),
    "dispatch": check_of(DispatchLine),
    "version": VERSION,
    "evaluation": check_of(EvaluationLine),
    "advice": check_of(AdviceLine),
}


def check_line(line: Mapping[str, Any]) -> None:
    """Check a line of a record. Unknown events are accepted: a later version may have added them."""
    event = line.get("event")
    if type(event) is not str:
        raise SchemaError("event", "a text", *([line["event"]] if "event" in line else ()))
    if event == "arrival":
        (ANSWER if "dispatch" in line else MESSAGE)(line)
    elif event in LINES:
        LINES[event](line)
    if event in ("header", "evaluation"):
        _check_depth(line)
    if event == "header":
        _check_sizes(line.get("clients") or {})
        for part in ("config", "parts", "attributes"):
            if type(name := (line.get(part) or {}).get("name", "")) is not str:
                raise SchemaError(f"{part}.name", "a text", name)


def _check_depth(line: Mapping[str, Any]) -> None:
    """Limit the depth of fields of any type, which are processed by recursion."""
    for name, value in line.items():
        level = [value]
        for _ in range(MOST_DEPTH):
            level = [
                each for one in level for each in (one.values() if type(one) is dict else one if type(one) is list else ())
            ]
        if level:
            raise SchemaError(name, f"nested at most {MOST_DEPTH} deep", value)


def _check_sizes(clients: Mapping[str, Any]) -> None:
    sizes = {name: len(clients[name]) for name in ("examples", "classes", "labels") if name in clients}
    for name, size in sizes.items():
        if size != (most := max(sizes.values())):
            raise SchemaError(f"clients.{name}", f"a list of as many clients as the others ({most})", f"{size} entries")


def check_fields(cls: Any, tree: Any) -> dict[str, Any]:
    """Check a table against the fields of a dataclass and return these fields. Others are dropped."""
    check_of(cls)(tree)
    return {f.name: tree[f.name] for f in fields(cls) if f.name in tree}


def check_cell(tree: Any) -> dict[str, Any]:
    """Check a result file. Unknown fields are an error."""
    check_of(CellFile)(tree)
    for part in ("config", "execution", "software"):
        _check_depth(tree[part])
    if others := tree.keys() - CellFile.__annotations__.keys():
        raise SchemaError(min(others), "left out", tree[min(others)])
    return dict(tree)
