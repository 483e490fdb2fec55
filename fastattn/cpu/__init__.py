"""The CPU backend: kernels written in Python, translated by Numba, called through a C interface."""
