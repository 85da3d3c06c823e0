"""``python -m fedecho`` is ``fedecho``."""

from fedecho.cli import main

if __name__ == "__main__":
    main()
