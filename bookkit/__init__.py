"""What the pages of the book need, and no server does: pictures, sliders, claims, clocks.

    from bookkit.plot import draw_tables, curves     # pictures from live objects
    from bookkit.explorer import explore             # sliders, with a kernel or without
    from bookkit.evidence import claim               # a line of the evidence register
    from bookkit.timing import bench, ratio          # the book's only timer
    from bookkit.compile_only import compile_only    # kernels for a GPU that is not here

Importing `bookkit` itself loads nothing.
"""
