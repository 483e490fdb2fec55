"""Kernels for NVIDIA GPUs: Numba translates them to PTX, the driver does the rest."""
