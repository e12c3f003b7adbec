"""Python imports this first in every process that the tests start, because PYTHONPATH names this folder.

Garbage collection takes a third of a short process's time: importing torch creates a million objects. Python searches
them repeatedly during the import, and frees each of them at the end.
"""
import atexit
import gc
import sys


def leave_memory_to_the_system():
    torch = sys.modules.get("torch")
    if torch is not None and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):  # newer ones report leaks
        gc.freeze()


gc.set_threshold(1_000_000, 50, 50)
atexit.register(leave_memory_to_the_system)
