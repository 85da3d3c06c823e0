"""Small tensors: one thread is faster, and sums round the same way everywhere."""

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# A busy machine is slow for a while, which is no failure. Every run of the suite tries the same examples, so that a change is
# never blamed for a rare one that it did not cause; the long profile looks for new ones, also of properties that name no number.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", patient, derandomize=True)
settings.register_profile("long", patient, max_examples=500)
settings.load_profile("steady")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and what they start inherits it: no test of Ctrl-C could pass there.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
