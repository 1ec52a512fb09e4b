"""The small package that the chapters of *Paged Attention, Block by Block* build, piece by piece.

Import what you need from its modules, in the order in which the book builds them::

    from labcore.blocks import BlockAllocator, BlockTables       # chapters 2 and 3
    from labcore.gpt2 import load_gpt2                           # chapter 4
    from labcore.caches import PagedKV, StaticKV                 # chapters 5 and 4
    from labcore.decode import generate, prefill_paged           # chapter 5
    from labcore.simulator import simulate                       # chapter 7
    from labcore.admission import paged, reserve_max             # chapter 8

Importing `labcore` itself loads nothing else. `blocks` needs only Python; `gpt2`, `attention`,
`caches` and `decode` need torch; the rest needs NumPy at most, until something is drawn.
"""

__version__ = "0.1.0"
