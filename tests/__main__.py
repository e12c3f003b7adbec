"""python -m tests [test_numbers ...]: run the tests. The last line counts them; the exit code is 1 if any failed.

Without a name, on Linux, each file's tests run in their own process. One more runs at once than there
are cores, because some tests only wait for a time limit and need no core meanwhile.
"""
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import unittest

LONGEST = ("test_slurm", "test_resume", "test_two_hosts", "test_patterns", "test_roll_call", "test_task",
           "test_failures", "test_launchers", "test_steps", "test_files", "test_checkpoints")


def run(suite):
    """Run the tests; return (passed, failed, skipped)."""
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    return max(0, result.testsRun - failed - len(result.skipped)), failed, len(result.skipped)


def start(suite, out):
    """Run the tests in a forked process, because importing torch takes seconds. Its output goes to a file."""
    pid = os.fork()
    if pid:
        return pid
    with open(out, "w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    counts = run(suite)
    print(json.dumps(counts), flush=True)
    gc.freeze()  # otherwise Python frees each of torch's objects at the end
    sys.exit()


def run_all(suites, folder):
    """Run each suite in its own process; return the sum of (passed, failed, skipped)."""
    os.environ["TESTS_FOLDER"] = folder  # for helpers.trained
    waiting, running, total = list(suites.items()), {}, (0, 0, 0)
    while waiting or running:
        while waiting and len(running) < 1 + (os.cpu_count() or 1):
            name, suite = waiting.pop(0)
            running[start(suite, os.path.join(folder, name))] = name
        name = running.pop(os.wait()[0])
        with open(os.path.join(folder, name)) as file:
            *lines, last = file.read().splitlines() or [""]
        try:
            counts = json.loads(last)
        except ValueError:  # the process itself has failed
            lines, counts = [*lines, last, f"{name} did not end"], (0, 1, 0)
        print(f"{name}\n" + "\n".join(lines), flush=True)
        total = tuple(map(sum, zip(total, counts)))
    return total


# A shell's background job ignores Ctrl-C. Without this, all processes that the tests start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)
loader, here, started = unittest.TestLoader(), os.path.dirname(os.path.abspath(__file__)), time.monotonic()
names = sys.argv[1:] or sorted((name[:-3] for name in os.listdir(here) if name.startswith("test_")), key=lambda name: (
    LONGEST.index(name) if name in LONGEST else len(LONGEST), name))
if sys.argv[1:] or sys.platform != "linux":  # elsewhere, a forked process cannot use every library
    passed, failed, skipped = run(loader.loadTestsFromNames([f"tests.{name}" for name in names]))
else:
    folder = tempfile.mkdtemp()
    passed, failed, skipped = run_all({name: loader.loadTestsFromName(f"tests.{name}") for name in names}, folder)
    shutil.rmtree(folder)  # not with a `with` block, because each forked process would leave it too
print(f"in {time.monotonic() - started:.0f} s")
print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
sys.exit(1 if failed or not passed else 0)
