"""From a description to a finished run: configuration, composition, record and summary."""
