"""The client: trains what it is sent. The default experiment is the recipe that pyproject.toml names."""

from fedecho.flower import make_client_app

app = make_client_app()
