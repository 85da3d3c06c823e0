"""Write constraints-hashes.txt: the versions of constraints.txt, each with the sha256 of its file for this Python and platform.

    make lock
    pip install --require-hashes --no-deps -r constraints-hashes.txt      installs those files and no others

torch is left out: its build differs by platform and accelerator, and is chosen by whoever installs it.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
LEFT_OUT = {"torch"}


def pins(text: str) -> dict[str, str]:
    """Normal name to version."""
    rows = (line.split("#")[0].split(";")[0].split() for line in text.splitlines() if not line.startswith((" ", "#", "--")))
    pairs = (row[0].split("==") for row in rows if row)
    return {name.lower().replace("_", "-").replace(".", "-"): version for name, version in pairs}


def hashes(pinned: dict[str, str]) -> dict[str, str]:
    """What the installer would take, asked without installing anything."""
    with TemporaryDirectory() as folder:
        wanted, report = Path(folder) / "wanted.txt", Path(folder) / "report.json"
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in pinned.items()))
        ask = ["install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", str(report), "-r", str(wanted)]
        subprocess.run([sys.executable, "-m", "pip", *ask], check=True)  # noqa: S603 (our own arguments)
        found = json.loads(report.read_text())["install"]
    return {
        next(iter(pins(f"{item['metadata']['name']}==0"))): item["download_info"]["archive_info"]["hashes"]["sha256"]
        for item in found
    }


def main() -> None:
    pinned = {name: v for name, v in pins((ROOT / "constraints.txt").read_text()).items() if name not in LEFT_OUT}
    known = hashes(pinned)
    python = ".".join(map(str, sys.version_info[:2]))
    head = f"# By `make lock`, for CPython {python} on {sys.platform}; torch is left out.\n"
    rows = (f"{name}=={version} \\\n    --hash=sha256:{known[name]}\n" for name, version in sorted(pinned.items()))
    (ROOT / "constraints-hashes.txt").write_text(head + "".join(rows))
    print(f"constraints-hashes.txt: {len(pinned)} packages")


if __name__ == "__main__":
    main()
