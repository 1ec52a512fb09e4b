"""What tests/test_sweep.py sweeps: in a module of its own, which a new process imports quickly."""

import os
import signal
from pathlib import Path
from time import sleep


def count(log, n):
    """Note the call in a file, and return how many notes of `n` there are."""
    with open(log, "a") as notes:
        notes.write(f"{n}\n")
    return Path(log).read_text().split().count(str(n))


def squares(n, late=0):
    """The later rows end first where `late` is above 0."""
    sleep(max(0, late - n) / 50)
    return {"square": n * n, "half": n / 2}


def moody(n, log):
    """Row 2 kills its first worker, row 4 all of them, row 6 fails."""
    tries = count(log, n)
    sleep(0.05)
    if n == 4 or (n == 2 and tries == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if n == 6:
        raise ValueError("six")
    return tries


def fragile(n, log):
    """Row 5 kills its first worker."""
    tries = count(log, n)
    sleep(0.05)
    if n == 5 and tries == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return n * n
