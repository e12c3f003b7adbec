"""What the tests share: start processes as a user does, with a time limit; make small data; read what was written."""
import ast
import contextlib
import fcntl
import functools
import gzip
import io
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zlib
from concurrent.futures import ThreadPoolExecutor

import runtime
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA_ROOT = os.environ.get("DATA_ROOT", "")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                      "OMP_NUM_THREADS", "PYTHONWARNINGS", "SLURM_STEP_NUM_TASKS", "TORCHELASTIC_RUN_ID",
                      "GLOO_SOCKET_IFNAME")

# Three runs that several tests look at. They are made at the same time, which must work (case 3).
AT_ONCE = (("ddp_spawn.py", "-g", "2"), ("ddp_spawn.py", "-n", "1", "-g", "2"),
           ("ddp_spawn.py", "-g", "2", "--grad_sync", "manual"))

needs_data = unittest.skipUnless(os.path.isdir(DATA_ROOT), "DATA_ROOT does not name a folder with MNIST/raw and Subj")


def launcher(processes, *options):
    """torchrun, of the Python that runs the tests."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *options]


def start(command, cwd=ROOT, stdout=subprocess.PIPE, **environment):
    """A command in the project's folder, in a process group of its own."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    env.update(environment)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.join(ROOT, "tests", "site"), env.get("PYTHONPATH")]))
    command = [sys.executable, *command] if command[0].endswith(".py") else command
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, start_new_session=True,
                            stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE)


def finish(process, timeout=300):
    """Return (exit code, standard output, standard error). Everything that the command started is ended with it."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{process.args} was not done after {timeout} s\n{out}\n{err}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def run(*command, timeout=300, **environment):
    return finish(start(list(command), **environment), timeout)


def wait_until(happened, what, timeout=150):
    """Wait until `happened()` is true, and return its value; `what` names it."""
    deadline = time.monotonic() + timeout
    while not (result := happened()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout} s")
        time.sleep(0.05)
    return result


def project(folder, *edits):
    """Copy the scripts, and replace texts in them: (file, text, other text)."""
    for name in ("common.py", "runtime.py", "dp_example.py", "ddp_spawn.py", "ddp_launch.py"):
        shutil.copy(os.path.join(ROOT, name), folder)
    for name, text, other in edits:
        with open(os.path.join(folder, name)) as file:
            content = file.read()
        assert content.count(text) == 1, f"{name} should have once: {text}"
        with open(os.path.join(folder, name), "w") as file:
            file.write(content.replace(text, other))
    return folder


def replace_functions(path, lines):
    """Put `lines` into a file: functions in place of those of the same name, all else before the first of them."""
    with open(path) as file:
        content = original = file.read()
    new = {node.name: ast.get_source_segment(lines, node) for node in ast.parse(lines).body}
    for node in ast.parse(original).body:
        if isinstance(node, ast.FunctionDef) and node.name in new:
            wanted = [new.pop(name) for name in list(new) if name[0].isupper() or name == node.name]
            content = content.replace(ast.get_source_segment(original, node), "\n\n\n".join(wanted))
    assert not new, new
    with open(path, "w") as file:
        file.write(content)


class Run:
    """A training run that ended with exit code 0: what it printed, its metrics and its checkpoint.

    A command, or a script's module to run in this process, with its options."""

    def __init__(self, *command, timeout=300, **environment):
        with tempfile.TemporaryDirectory() as folder:
            files = ["--checkpoint", os.path.join(folder, "c.pt"), "--metrics", os.path.join(folder, "m.jsonl")]
            if isinstance(command[0], str):
                code, self.out, self.err = run(*command, *files, timeout=timeout, **environment)
            else:
                code, self.out, self.err = call(*command, *files, **environment)
            if code:
                raise AssertionError(f"{command} ended with {code}\n{self.out}\n{self.err}")
            self.files = sorted(os.listdir(folder))
            with open(files[3]) as file:
                self.metrics = [json.loads(line) for line in file]
            # To the CPU: a test process that holds a GPU would keep out those that it starts, in exclusive mode.
            self.checkpoint = (torch.load(files[1], map_location="cpu", weights_only=True)
                               if os.path.exists(files[1]) else None)

    @property
    def weights(self):
        return self.checkpoint["model"]

    def difference(self, other):
        """The largest difference between the weights of two runs."""
        assert list(self.weights) == list(other.weights)
        return max((self.weights[key] - other.weights[key]).abs().max().item() for key in self.weights)


def once(key, make):
    """What make() returns, which is called once for a key, however many test processes ask for it."""
    if "TESTS_FOLDER" not in os.environ:
        return make()
    path = os.path.join(os.environ["TESTS_FOLDER"], f"{zlib.crc32(repr(key).encode()):08x}.pt")
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until another process has made it, which has a time limit
        if not os.path.exists(path):
            torch.save(make(), path)
        return torch.load(path, weights_only=True)


@functools.lru_cache(maxsize=None)
def trained(*command):
    """A Run that is made once, however many tests look at it, in this process or in others."""
    if not isinstance(command[0], str):
        return Run(*command)
    commands = AT_ONCE if command in AT_ONCE else (command,)

    def make():
        with ThreadPoolExecutor(len(commands)) as pool:
            return list(map(vars, pool.map(lambda command: Run(*command), commands)))

    result = Run.__new__(Run)
    vars(result).update(once(commands, make)[commands.index(command)])
    return result


def call(module, *options, **environment):
    """Call a script's main() in this process: (exit code, standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    saved_argv, saved_environment = sys.argv, dict(os.environ)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.argv, code = [module.__file__, *options], 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runtime.run(module.main)
    except SystemExit as exit:
        code = exit.code
    finally:
        sys.argv = saved_argv
        os.environ.clear()
        os.environ.update(saved_environment)
    return code, out.getvalue(), err.getvalue()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class FolderTest(unittest.TestCase):
    """A test with its own folder."""

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, *names):
        return os.path.join(self.folder, *names)


def idx(shape, content):
    return struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape) + bytes(content)


def write_mnist(folder, train, test, compress=False):
    """Write MNIST files with that many images to folder/MNIST/raw. Each image is one grey that tells its class."""
    raw = os.path.join(folder, "MNIST", "raw")
    os.makedirs(raw, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        labels = [i % 10 for i in range(count)]
        files = {f"{name}-images-idx3-ubyte": idx((count, 28, 28), b"".join(bytes([25 * i] * 784) for i in labels)),
                 f"{name}-labels-idx1-ubyte": idx((count,), labels)}
        for file_name, content in files.items():
            with (gzip.open if compress else open)(os.path.join(raw, file_name + ".gz" * compress), "wb") as file:
                file.write(content)


def write_subj(folder, plot, quote):
    """Write two Subj files with these bytes to folder/Subj."""
    os.makedirs(os.path.join(folder, "Subj"), exist_ok=True)
    for name, content in (("plot.tok.gt9.5000", plot), ("quote.tok.gt9.5000", quote)):
        with open(os.path.join(folder, "Subj", name), "wb") as file:
            file.write(content)


def options(*given):
    """The options of a training script, as common's functions take them."""
    return runtime.make_parser(None).parse_args(list(given))
