"""Pages that come with other parts of the project have their place in the menu as soon as they are there."""

from pathlib import Path
from typing import Any

PLACES = {"Use": [("Deployment", "deployment.md"), ("Text and language models", "text.md")]}


def on_config(config: Any) -> Any:
    for entry in config["nav"]:
        for heading, pages in PLACES.items():
            if heading in entry:
                entry[heading] += [{title: name} for title, name in pages if (Path(config["docs_dir"]) / name).is_file()]
    return config
