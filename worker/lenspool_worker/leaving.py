"""How vLLM's processes end: at once.

Left alone, each goes through its whole heap for garbage, some times, and then takes its interpreter apart: seconds of
work, one process after the other, for memory that the system takes back anyway.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from multiprocessing.util import Finalize


def spare_the_heap() -> None:
    """Have what is here now passed over by the collections of garbage that follow."""
    gc.freeze()


def leave_at_the_end() -> None:
    """End this process, if vLLM started it, when it has done all but take its interpreter apart."""
    Finalize(None, leave, exitpriority=-1000)  # behind all others


def leave() -> None:
    """End this process now, if vLLM started it."""
    if multiprocessing.parent_process() is None:
        return
    error = sys.exc_info()[1]
    fine = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0 if fine else 1)
