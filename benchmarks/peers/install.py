"""Install each peer into its own environment, with the torch version that we use.

    python -m benchmarks.peers.install [appfl flgo flower nvflare pfl] [--into .peers] [--python python3.11]

What is there already is left alone. A peer that cannot be installed is said so, and the others go on.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".peers"
PEERS = {
    "appfl": ["appfl==1.12.0"],
    "flgo": ["flgo==0.4.4"],
    "flower": ["flwr[simulation]==1.41.0"],
    "nvflare": ["nvflare[PT]==2.9.0"],
    "pfl": ["pfl[pytorch]==0.6.0"],
}


def pinned(name: str) -> str:
    """Our own version of a package, so that a peer's arithmetic is the same code as ours."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def python_of(peer: str, folder: Path = FOLDER) -> Path:
    return folder / peer / "bin" / "python"


def install(peer: str, folder: Path, python: str) -> bool:
    """Whether the peer is there. The stamp is written last: half an environment is none."""
    stamp = folder / peer / "installed"
    if stamp.exists():
        return True
    print(f"{peer}: {' '.join(PEERS[peer])}", flush=True)
    commands = [
        [python, "-m", "venv", "--clear", folder / peer],
        [python_of(peer, folder), "-m", "pip", "install", "--quiet", pinned("torch"), *PEERS[peer]],
    ]
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            print(f"{peer}: could not be installed", flush=True)
            return False
    stamp.write_text(" ".join(PEERS[peer]) + "\n")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", help=f"all by default: {', '.join(PEERS)}")
    parser.add_argument("--into", type=Path, default=FOLDER)
    parser.add_argument("--python", default=sys.executable, help="pfl needs 3.10 to 3.12")
    options = parser.parse_args()
    unknown = sorted(set(options.peers) - set(PEERS))
    if unknown:
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    there = [install(peer, options.into, options.python) for peer in options.peers or PEERS]
    sys.exit(0 if all(there) else 1)


if __name__ == "__main__":
    main()
