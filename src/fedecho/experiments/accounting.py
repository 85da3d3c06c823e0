"""How much privacy a client has left: epsilon by Google's dp-accounting, over the reports the client actually made."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from fedecho.learning.privacy import Privacy


class MissingAccountantError(ValueError):
    """The extra is not installed."""


def check_accountant() -> None:
    """Before a run, not at its end."""
    if find_spec("dp_accounting") is None:
        raise MissingAccountantError("privacy needs an accountant: pip install 'fedecho[privacy]'")


@cache
def epsilon(noise_multiplier: float, num_reports: int, delta: float) -> float:
    """Of ``num_reports`` Gaussian mechanisms in a row on the same data.

    No amplification by sampling: in an asynchronous schedule who reports when is no secret draw of the server's.
    """
    check_accountant()
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    if num_reports == 0:
        return 0.0
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier), num_reports)
    return float(accountant.get_epsilon(delta))


def reports(lines: Iterable[Mapping[str, Any]], *, lost_too: bool = False) -> Counter[int]:
    """How often each client sent an update. What was refused has been seen all the same; over a network, what was lost may have."""
    sent = ("accepted", "rejected", "lost") if lost_too else ("accepted", "rejected")
    return Counter(line["client"] for line in lines if line.get("status") in sent and line.get("dispatch", -1) >= 0)


def spent(privacy: Privacy, lines: Iterable[Mapping[str, Any]], *, lost_too: bool = False) -> dict[str, Any]:
    """Each client's epsilon, and the largest."""
    counts = sorted(reports(lines, lost_too=lost_too).items())
    by_client = {client: epsilon(privacy.noise_multiplier, count, privacy.delta) for client, count in counts}
    return {
        "delta": privacy.delta,
        "largest_epsilon": max(by_client.values(), default=0.0),
        "epsilon": {str(client): round(value, 4) for client, value in by_client.items()},
    }
