"""The simulator: clients with random runtimes, faults and attacks on a virtual clock."""
