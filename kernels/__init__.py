"""Attention that reads keys and values through a block table.

`kernels.reference` is the oracle: plain torch in float64. `kernels.paged_attention` checks, plans
and launches the Triton kernels of `kernels.split_kv`. Importing `kernels` loads nothing.
"""
