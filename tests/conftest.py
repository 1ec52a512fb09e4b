"""What every test, and every chapter that the tests run, finds set."""

import os

from labcore import teach

os.environ.pop("LABCORE_STATIC", None)  # set while the book is built; here explorers are live
teach.start("0.1")  # as in a chapter's first cell: Triton's interpreter where there is no GPU
