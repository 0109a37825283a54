"""Loops over rows and slots: Numba on the CPU, Triton on a GPU, bit for bit the same."""
