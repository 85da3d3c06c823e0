"""Nothing of its own: the server must cope."""

from fedecho.flower import make_server_app

app = make_server_app()
