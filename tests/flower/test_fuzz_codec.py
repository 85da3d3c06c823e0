"""A small piece of ``benchmarks/fuzz_codec.py``."""

from benchmarks.fuzz_codec import fuzz


def test_mutated_answers_crash_nothing_and_change_nothing() -> None:
    statuses, reasons, failures = fuzz(400, seed=1)
    assert not failures
    assert min(statuses["accepted"], statuses["rejected"]) > 50
    assert reasons["unreadable"] > 50
