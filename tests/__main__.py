"""python -m tests [test_numbers ...]: run the tests. The last line counts them; the exit code is 1 if any failed."""
import os
import signal
import sys
import time
import unittest

# A shell's background job ignores Ctrl-C. Without this, all processes that the tests start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)
names = [f"tests.{name}" for name in sys.argv[1:]]
loader = unittest.TestLoader()
here = os.path.dirname(os.path.abspath(__file__))
suite = loader.loadTestsFromNames(names) if names else loader.discover(here, top_level_dir=os.path.dirname(here))
started = time.monotonic()
result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
skipped = len(result.skipped)
passed = max(0, result.testsRun - failed - skipped)
print(f"in {time.monotonic() - started:.0f} s")
print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
sys.exit(1 if failed or not passed else 0)
