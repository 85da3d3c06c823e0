"""From a description to a finished run: configuration, composition, the record and the recipes."""
