"""Attention that reads keys and values through a block table.

`kernels.reference` is the oracle: plain torch in float64. `kernels.paged_attention` checks, plans
and launches the Triton kernels of `kernels.split_kv`; `kernels.compile_only` compiles them for a
GPU that is not here. Importing `kernels` loads nothing.
"""
