"""The server: an experiment over whoever is connected."""

from fedecho.flower import make_server_app

app = make_server_app()
