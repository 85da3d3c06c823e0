"""Round trip of a ResNet-18 (45 MB each way) through real Flower processes, with and without the persistent worker.

    python -m benchmarks.flower_roundtrip [REPEATS]

One SuperLink, one SuperNode, one run; the two kinds alternate message by message, so that a busy machine hurts both alike. A
SuperNode looks for messages every three seconds, so single round trips differ by that much; means are compared.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean

from fedecho.flower.local_federation import LocalFederation

APP = Path(__file__).parent / "roundtrip_app"


def measured(repeats: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        with LocalFederation(Path(folder) / "logs") as federation:
            federation.start_node(0)
            federation.control.follow(federation.control.submit(APP, {"out": str(out), "repeats": repeats}), every_s=1)
        seconds: dict[str, list[float]] = json.loads(out.read_text())
        return seconds


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    seconds = measured(repeats)
    ours, theirs = mean(seconds["with"]), mean(seconds["without"])
    print(f"ResNet-18, {repeats} round trips of each kind, alternating: {json.dumps(seconds)}")
    print(f"  without the worker {theirs:.2f} s, with it {ours:.2f} s: ratio {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
