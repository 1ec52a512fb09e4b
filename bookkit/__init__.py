"""What the pages of the book are given: pictures, sliders, claims, clocks, traces, sweeps.

    from bookkit.plot import draw_tables, curves     # pictures from live objects
    from bookkit.explorer import explore             # sliders, with a kernel or without
    from bookkit.evidence import claim               # a line of the evidence register
    from bookkit.timing import bench, ratio          # the book's only timer
    from bookkit.check import check                  # what an exercise tells its reader
    from bookkit.traces import read_trace            # Azure's and Mooncake's requests
    from bookkit.quantiles import draw_quantiles     # requests like those of a trace
    from bookkit.engine_log import read_engine_log   # what a real engine did with them
    from bookkit.contiguous import Buddy, FirstFit   # memory in one piece, to compare with
    from bookkit.sweep import sweep                  # grids of runs, on all cores or a cluster
    from bookkit.compile_only import compile_only    # kernels for a GPU that is not here

Chapters build `labcore` and `kernels`; nothing there needs `bookkit`. Importing `bookkit` itself
loads nothing.
"""
