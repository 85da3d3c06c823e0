"""How much privacy a client has left: epsilon, by Google's dp-accounting."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from math import sqrt
from typing import Any

from fedecho.learning.privacy import Privacy
from fedecho.runs.record_schema import Spent, SpentBy

MOST_LISTED = 10_000
"""Above so many clients the summary says how many have which epsilon, and not who."""


class MissingAccountantError(ValueError):
    """The extra is not installed."""


def check_accountant() -> None:
    """Before a run, not at its end."""
    if find_spec("dp_accounting") is None:
        raise MissingAccountantError("privacy needs an accountant: pip install 'fedecho[privacy]'")


@cache
def epsilon(noise_multiplier: float, num_reports: int, delta: float) -> float:
    """Of ``num_reports`` Gaussian mechanisms in a row on the same data, which are exactly one with the noise over their root.

    The closed form of one is dp-accounting's; its accountant by discretised losses agrees and takes gigabytes where noise is
    small. No amplification by sampling: in an asynchronous schedule who reports when is no secret draw of the server's.
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
    """How often each client sent an update. What was refused has been seen all the same; over a network, what was lost may have."""
    sent = ("accepted", "rejected", "lost") if lost_too else ("accepted", "rejected")
    return Counter(line["client"] for line in lines if line.get("status") in sent and line.get("dispatch", -1) >= 0)


def spent(
    privacy: Privacy, lines: Iterable[Mapping[str, Any]], *, lost_too: bool = False, more: Mapping[int, int] | None = None
) -> Spent:
    """Each client's epsilon (of very many clients, how many have which), and the largest.

    ``more`` are reports that may have been sent and stand in no line.
    """
    counts = sorted((reports(lines, lost_too=lost_too) + Counter(more or {})).items())
    by_reports = {n: epsilon(privacy.noise_multiplier, n, privacy.delta) for n in {count for _, count in counts}}
    told: Spent = {"delta": privacy.delta, "largest_epsilon": max(by_reports.values(), default=0.0)}
    if len(counts) <= MOST_LISTED:
        return {**told, "epsilon": {str(client): round(by_reports[count], 4) for client, count in counts}}
    clients = Counter(count for _, count in counts)
    rows: list[SpentBy] = [{"reports": n, "clients": clients[n], "epsilon": round(by_reports[n], 4)} for n in sorted(clients)]
    return {**told, "epsilon_by_reports": rows}
