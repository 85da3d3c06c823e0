"""Fill pages with numbers from a results file. A test compares the marked parts with the results."""

import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def filled(page: str, parts: Mapping[str, str]) -> str:
    """The page with every ``<!-- made: NAME -->`` ... ``<!-- end -->`` part replaced; a name too many or too few is an error."""
    found = re.findall(r"<!-- made: ([\w-]+) -->", page)
    if sorted(found) != sorted(parts):
        raise ValueError(f"the page has the parts {sorted(found)}, the results give {sorted(parts)}")
    for name, body in parts.items():
        part = re.compile(rf"(<!-- made: {name} -->\n).*?(<!-- end -->)", flags=re.DOTALL)
        page = part.sub(lambda match, body=body: f"{match[1]}\n{body.strip()}\n\n{match[2]}", page)
    return page


def fill(path: Path, parts: Mapping[str, str]) -> None:
    path.write_text(filled(path.read_text(), parts))


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, rule, *rows))


def machine() -> dict[str, str]:
    """What the numbers were made on."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    cores = f"{len(names)} cores of {names[0]}" if names else platform.processor()
    return {"cores": cores, "python": platform.python_version(), "torch": torch.__version__}


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def rounded(value: float, digits: int = 5) -> float:
    """Significant digits, for small files."""
    return float(f"{value:.{digits}g}")
