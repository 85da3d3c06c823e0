"""A Flower app whose server and clients are FedEcho's."""
