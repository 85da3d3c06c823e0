"""The command line: ``fedecho --help`` shows it."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedecho.cli.program import app


def main() -> None:
    """What takes seconds to import is imported here, so that Ctrl-C meanwhile is no traceback."""
    try:
        from fedecho.cli.program import run_program

        run_program()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'fedecho.cli' has no attribute {name!r}")
    from fedecho.cli.program import app

    return app


__all__ = ["app", "main"]
