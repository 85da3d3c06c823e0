"""The server's state machine, shared by the simulator and the deployment. Imports no other subpackage."""
