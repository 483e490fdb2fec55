"""What fastattn is held against, by its tests and by `python -m fastattn verify`."""
