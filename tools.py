"""What a run does besides training: wait for the others, leave them, --download, the first report, and --check."""
import contextlib
import ctypes
import gc
import hashlib
import io
import os
import re
import signal
import socket
import statistics
import sys
import tarfile
import threading
import time
import traceback
import urllib.request
from argparse import Namespace
from collections import Counter
from typing import Any, Iterator, Optional

import common  # before torch
import torch
import torch.distributed as dist


# ---- Processes -------------------------------------------------------------------------------------
@contextlib.contextmanager
def joining(rank: int, world_size: int, address: str, port: int, timeout: float) -> Iterator[None]:
    """Around what joins the others at address:port: it says after 4 s what it waits for, and gives up after `timeout`.
    Torch's own limits start anew for each of several waits, and gloo's is five times as long."""
    import torch._dynamo  # noqa: F401 - or DDP's constructor does, while ranks that are there already wait for it
    where, limit = f"rank {rank} of {world_size} at {address}:{port}", f"{timeout:g} s at most (--timeout)"
    alone = (f"{where} waited in vain, {limit}: start all ranks, with one address, port, number of nodes and number of "
             "processes; where hosts have several networks, set GLOO_SOCKET_IFNAME to the interface of the right one")
    timers = (threading.Timer(4, common.say, [f"{where} waits for the others, {limit}"]),
              threading.Timer(timeout + 1, lambda: (common.say(f"error: {alone}"), os._exit(1))))
    for timer in timers:
        timer.daemon = True
        timer.start()
    choose_interface(address, int(port))
    try:
        yield
    except (RuntimeError, OSError) as error:
        if re.search("EADDRINUSE|address already in use", str(error), re.I):
            raise common.UsageError(f"port {port} is taken: choose another one, in MASTER_PORT") from None
        raise ConnectionError(f"{alone} ({str(error).splitlines()[0]})") from None
    finally:
        for timer in timers:
            timer.cancel()


def choose_interface(address: str, port: int) -> None:
    """Gloo tells the others the address of this host's own name. Where that is 127.0.1.1, as Debian's installer has it,
    have gloo take the interface that leads to node 0, at address:port; on node 0 itself, the first but loopback."""
    loopback, own = r"localhost$|127\.|::1$", "127.0.0.1"  # which gloo takes if the name stands for nothing
    with contextlib.suppress(OSError, ValueError):
        own = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
    on_one_node = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE") or re.match(loopback, address)
    if on_one_node or "GLOO_SOCKET_IFNAME" in os.environ or not re.match(loopback, own):
        return
    with contextlib.suppress(OSError, ValueError, ImportError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        import fcntl  # not on Windows
        probe.connect((address, port))  # sends nothing, but chooses the address to send from
        source = probe.getsockname()[0]
        for _, name in reversed(socket.if_nameindex()):
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, 0x8915, name.encode().ljust(256, b"\0"))  # SIOCGIFADDR
                own = socket.inet_ntoa(found[20:24])
                if not own.startswith("127.") and (own == source or source.startswith("127.")):
                    os.environ["GLOO_SOCKET_IFNAME"] = name


def end_with(parent: int) -> None:
    """Have Linux end this process when the one that started it ends: a launcher that is killed cannot do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was too late
            os._exit(1)


def let_the_first_speak(error: Optional[BaseException], timeout: float) -> None:
    """Wait if `error` is a lost connection: the launcher ends all when one rank has ended, and reports that one."""
    if isinstance(error, RuntimeError) and re.match("(?is)(?!.*timed out).*(gloo|nccl|connection)", str(error)):
        time.sleep(min(5, timeout / 2))


def drop_references() -> None:
    """Let go of what holds the process group, so that destroy_process_group ends it, and its threads with it."""
    traceback.clear_frames(sys.exc_info()[2])
    gc.collect()
    time.sleep(0.1)  # its threads drop the last tensors: for that they need the GIL, which old torch would not give up


# ---- Data ------------------------------------------------------------------------------------------
SOURCES = {"MNIST": "https://ossci-datasets.s3.amazonaws.com/mnist",
           "Subj": "https://www.cs.cornell.edu/people/pabo/movie-review-data/rotten_imdb.tar.gz"}
# SHA-256: for MNIST of the .gz files, for Subj of the lines, each ended by one newline, as copies differ in that.
CHECKSUMS = {"MNIST": {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}, "Subj": {
    "plot.tok.gt9.5000": "5ddc9b44dc60d64d651347fcd7bdd489b0c70661e3f768215c16eea36f51204a",
    "quote.tok.gt9.5000": "73a2dcf8dc3cbcc7f068a70ef9f021c86b2a8e4dac81566b7fd015b3e938f2c5",
}}


def download(dataset: str, folder: str, timeout: float) -> None:
    """Fetch the missing files of `dataset` into `folder`, each whole and checked or not at all."""
    import fcntl  # not on Windows
    variable, deadline = f"{dataset.upper()}_URL", time.monotonic() + timeout
    source = os.environ.get(variable, SOURCES[dataset])
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(folder, exist_ok=True)
            lock = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, lock)
            while True:  # one process of a node fetches; the others then find the files there
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has been downloading for {timeout:g} s (--timeout)")
                time.sleep(0.1)
            for name, checksum in CHECKSUMS[dataset].items():
                path = os.path.join(folder, name)
                if os.path.exists(path) or os.path.exists(path + ".gz"):
                    continue
                url = source if dataset == "Subj" else f"{source}/{name}.gz"
                content = urllib.request.urlopen(url, timeout=timeout).read()
                if dataset == "Subj":
                    with tarfile.open(fileobj=io.BytesIO(content)) as tar:  # one file is read, none is unpacked
                        content = b"".join(line + b"\n" for line in tar.extractfile(name).read().splitlines())
                if hashlib.sha256(content).hexdigest() != checksum:
                    raise ValueError(f"{name} from {url} has a wrong checksum and was thrown away")
                common.replace_file(path if dataset == "Subj" else path + ".gz", lambda file: file.write(content))
        except Exception as error:  # of the network, the archive or the file system
            raise common.UsageError(f"--download: {type(error).__name__}: {error}; put the files into {folder} by "
                                    f"hand, or name another source in {variable}") from None


# ---- Reports ---------------------------------------------------------------------------------------
def report_processes(local_rank: int, device: torch.device, args: Namespace) -> None:
    """Rank 0 prints who is where, a line for each rank, and what they use."""
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    line = f"host {socket.gethostname()}, local rank {local_rank}, device {name}, pid {os.getpid()}"
    lines = common.gather_text(line + f", torch {torch.__version__}, {torch.get_num_threads()} threads" * args.check)
    if common.rank_and_world_size()[0] == 0:
        for rank, line in enumerate(lines):
            print(f"rank {rank} of {len(lines)}: {line}")
        print(f"backend {dist.get_backend() if dist.is_initialized() else 'none'}, torch {torch.__version__}, "
              f"{torch.get_num_threads()} threads per process, "
              f"global batch {args.batch_size * len(lines) * args.accumulation_steps}", flush=True)
        if device.type == "cpu" and args.device == "auto" and torch.cuda.is_available():
            print("on the CPU, as there are fewer GPUs than processes on this node", flush=True)


def check(rank: int, local_rank: int, world_size: int, device: torch.device, _: Any, args: Namespace) -> None:
    """Say, in place of training, who is where, whether they fit together, and whether all-reduces are right and fast.

    Bus bandwidth as in NCCL's tests: bytes / time * 2 (n - 1) / n with n ranks. It is what each rank's link has to
    carry, to be compared with what the hardware can, whatever n is. The exit code is 1 if anything is wrong.
    """
    report_processes(local_rank, device, args)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    facts = common.gather_text(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {kind}")
    problems = [f"rank {other} has {fact}, but rank 0 has {facts[0]}" for other, fact in enumerate(facts)
                if fact != facts[0]]
    places = Counter(common.gather_text(f"{device} of host {socket.gethostname()}"))
    problems += [f"{count} ranks share {place}" for place, count in places.items() if count > 1 and "cuda" in place]
    for size, name in (2**10, "1 KB"), (2**20, "1 MB"), (2**26, "64 MB"):
        ramp, seconds, right = torch.arange(size // 4, dtype=torch.float32, device=device) % 1000, [], True
        for _ in range(6):
            summed = ramp + rank
            common.reduce_mean(0)  # so that all begin together
            started = time.perf_counter()
            if dist.is_initialized():
                dist.all_reduce(summed)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            right &= torch.equal(summed, ramp * world_size + world_size * (world_size - 1) / 2)
        wrong = [other for other, text in enumerate(common.gather_text(str(right))) if text != "True"]
        problems += [f"all-reduce of {name}: wrong sums on rank {other}" for other in wrong]
        second = common.reduce_mean(statistics.median(seconds[1:])).item()  # the first one opens connections
        if rank == 0:
            print(f"all-reduce of {name:>5}: {1000 * second:8.3f} ms, bus bandwidth "
                  f"{size / second * 2 * (world_size - 1) / world_size / 1e9:7.3f} GB/s", flush=True)
    if rank == 0:
        print("\n".join(problems or ["all is well"]), flush=True)
    if problems:
        raise RuntimeError(f"--check: {'; '.join(problems)}")
