"""Networks of the built-in tasks."""
