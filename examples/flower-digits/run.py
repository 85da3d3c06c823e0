"""A whole federation on this machine with one command: a SuperLink, six SuperNodes of which two are slow, FedEcho.

    python examples/flower-digits/run.py [--out runs/flower-digits] [--versions 30]

Stopped and started again with the same --out, the run goes on from its last version.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from fedecho.flower.launch import DONE, FAILED, LaunchError
from fedecho.flower.local_federation import LocalFederation
from fedecho.report.terminal import LiveProgress
from fedecho.runs.record import RECORD, read_record
from fedecho.runs.run_stats import RunState
from fedecho.runs.summary import Summary

PAUSES = {4: 10.0, 5: 20.0}
"""Seconds by which two of the nodes are slower a message."""


def watched(run: Path, num_versions: int) -> RunState:
    """How far the run is, from its record."""
    state = RunState(num_versions)
    for line in read_record(run) if (run / RECORD).exists() else ():
        state.time = line.get("time", state.time)
        state.version = line["version"] if line["event"] == "version" else state.version
        state.accuracy = line["accuracy"] if line["event"] == "evaluation" else state.accuracy
        state.accepted += line.get("status") == "accepted"
        state.rejected += line.get("status") == "rejected"
        state.lost += line.get("status") == "lost"
        state.staleness_sum += line["staleness"] if line.get("status") == "accepted" else 0
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/flower-digits"))
    parser.add_argument("--versions", type=int, default=30)
    told = parser.parse_args()
    run, logs = told.out.absolute(), Path(tempfile.mkdtemp(prefix="flower-digits-"))
    print(f"six nodes on this machine; what they print is in {logs}", file=sys.stderr)
    with LocalFederation(logs) as federation, LiveProgress(Console(stderr=True)) as progress:
        for client in range(6):
            federation.start_node(client, {"pause-s": PAUSES[client]} if client in PAUSES else None)
        number = federation.control.submit(Path(__file__).parent, {"out": str(run), "versions": told.versions})
        while (status := federation.control.status(number))[0] != DONE:
            if status[0] in FAILED:
                raise LaunchError(f"the run is {status[0]}: {status[1]}; see {logs / 'superlink.log'}")
            progress.update(run.name, watched(run, told.versions))
            time.sleep(3)
        progress.update(run.name, watched(run, told.versions))
    summary = Summary.read(run)
    print(f"accuracy {100 * summary.last10_accuracy:.2f} % (mean of the last 10 evaluations) in {summary.real_s:.0f} s;")
    print(f"staleness {summary.mean_staleness:.2f} on average, {summary.max_staleness} at most; the run is in {told.out}")


if __name__ == "__main__":
    try:
        main()
    except LaunchError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped; start it again with the same --out to go on")
