"""Kernels on tensor cores, for 16-bit types."""
