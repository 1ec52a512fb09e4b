"""What the chapters of *Paged Attention, Block by Block* build, in their order::

    from labcore.blocks import BlockAllocator, BlockTables       # chapters 2 and 3
    from labcore.gpt2 import load_gpt2                           # chapter 4
    from labcore.caches import PagedKV, StaticKV                 # chapters 5 and 4
    from labcore.decode import generate, prefill_paged           # chapter 5
    from kernels.paged_attention import paged_attention          # chapter 6
    from labcore.simulator import simulate                       # chapter 7
    from labcore.admission import paged, reserve_max             # chapters 7, 8a and 8b
    from labcore.engine import Engine                            # chapter 8a
    from labcore.swap import HostPool                            # chapter 8b
    from labcore.beams import beam_search                        # chapter 9a
    from labcore.prefix import PrefixCache                       # chapter 9b
    from labcore.capacity import Plan, read_kv_shape             # chapter 11

Importing `labcore` loads none of these. Up to `decode`, `blocks` apart, they need torch, and so do
`engine`, `swap` and `beams`; the others need NumPy at most.
"""

__version__ = "1.0.0"
