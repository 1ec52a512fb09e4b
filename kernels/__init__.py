"""Attention that reads keys and values through a block table.

`kernels.reference` is the oracle: plain torch in float64. Importing `kernels` loads nothing.
"""
