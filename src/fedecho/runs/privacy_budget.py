"""Privacy accounting: each client's epsilon, computed by Google's dp-accounting."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from math import sqrt
from typing import Any

from fedecho.learning.privacy import Privacy
from fedecho.runs.record_schema import Spent, SpentBy

MOST_LISTED = 10_000
"""Above this many clients, the summary has the number of clients per epsilon instead of one entry per client."""


class MissingAccountantError(ValueError):
    """The package dp-accounting is not installed."""


def check_accountant() -> None:
    """Check before a run, not at its end, that dp-accounting is installed."""
    if find_spec("dp_accounting") is None:
        raise MissingAccountantError("privacy needs the package dp-accounting: pip install 'fedecho[privacy]'")


@cache
def epsilon(noise_multiplier: float, num_reports: int, delta: float) -> float:
    """The epsilon of ``num_reports`` composed Gaussian mechanisms on the same data.

    Their composition is exactly one mechanism with the noise divided by sqrt(num_reports), for which dp-accounting has a closed
    form. Its discretized accountant agrees but takes gigabytes if the noise is small. There is no amplification by sampling: in
    an asynchronous schedule, who reports when is not a secret random draw of the server.
    """
    check_accountant()
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    if num_reports == 0:
        return 0.0
    mechanism = GaussianPrivacyLoss(noise_multiplier / sqrt(num_reports))
    low, high = 0.0, 1.0
    while mechanism.get_delta_for_epsilon(high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if mechanism.get_delta_for_epsilon(middle) > delta else (low, middle)
    return high


def reports(lines: Iterable[Mapping[str, Any]], *, lost_too: bool = False) -> Counter[int]:
    """Count the updates that each client sent. Rejected ones count, because the server saw them.

    Over a network, the server may also have seen lost ones (``lost_too``).
    """
    sent = ("accepted", "rejected", "lost") if lost_too else ("accepted", "rejected")
    return Counter(line["client"] for line in lines if line.get("status") in sent and line.get("dispatch", -1) >= 0)


def privacy_spent(
    privacy: Privacy, lines: Iterable[Mapping[str, Any]], *, lost_too: bool = False, more: Mapping[int, int] | None = None
) -> Spent:
    """Compute each client's epsilon and the largest one. With very many clients, the number of clients per epsilon.

    ``more`` counts reports that may have been sent but are in no line of the record.
    """
    counts = sorted((reports(lines, lost_too=lost_too) + Counter(more or {})).items())
    by_reports = {n: epsilon(privacy.noise_multiplier, n, privacy.delta) for n in {count for _, count in counts}}
    totals: Spent = {"delta": privacy.delta, "largest_epsilon": max(by_reports.values(), default=0.0)}
    if len(counts) <= MOST_LISTED:
        return {**totals, "epsilon": {str(client): round(by_reports[count], 4) for client, count in counts}}
    clients = Counter(count for _, count in counts)
    rows: list[SpentBy] = [{"reports": n, "clients": clients[n], "epsilon": round(by_reports[n], 4)} for n in sorted(clients)]
    return {**totals, "epsilon_by_reports": rows}
