"""An app as Flower users have it. Only its server knows of FedEcho."""
