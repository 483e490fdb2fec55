"""Workloads, contenders and contests: what `python -m fastattn bench` and bench/ measure with."""
