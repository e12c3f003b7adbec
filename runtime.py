"""Everything around training: options, launchers, roll call, the steps of an epoch, checkpoints, reports, --check."""
from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import gc
import json
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from argparse import Namespace
from datetime import timedelta
from typing import Any, Callable, Iterator, Optional, Sequence

import common
import torch
import torch.distributed as dist
from common import UsageError, checksum, keep_freed_memory, rank_and_world_size
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

PARENT = os.getppid()  # the launcher, if there is one; read it now, as it may end later
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # torch before 2.13 needs it


# ---- Processes and errors --------------------------------------------------------------------------
@contextlib.contextmanager
def errors_in_one_line(local_rank: int = 0) -> Iterator[None]:
    """Report a UsageError as one line on standard error, and exit with its code."""
    gc.freeze()  # the collector then skips what was imported, also at the end: a fifth of a short run's CPU time
    with contextlib.suppress(AttributeError):  # standard output may be closed
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        yield
    except UsageError as error:
        time.sleep(5 if local_rank else 0)  # local rank 0 prints the same error; its launcher then ends this process
        if local_rank == 0 or not error.on_all_ranks:
            say(f"error: {error}")
        sys.exit(error.exit_code)
    except (RuntimeError, ValueError) as error:
        if re.match("(?is)(?!.*timed out).*(gloo|nccl|connection)", str(error)):
            time.sleep(2)  # a lost connection: the rank that failed must end first, as launchers report the first
        for text, hint in (("finished reduction", "--grad_sync manual allows parameters without a gradient in a step"),
                           ("more than 1 value per channel", "--drop_last leaves out a last batch of one sample")):
            error.args = (f"{error}\n{hint}",) if text in str(error) else error.args
        raise


def run(main: Callable[[], None]) -> None:
    """Call a script's `main`, and report its errors in one line."""
    local_ranks = [os.environ.get(variables[1], "") for variables in LAUNCHERS.values()]
    with errors_in_one_line(next((int(text) for text in local_ranks if text.isdecimal()), 0)):
        main()


def say(text: str) -> None:
    """Print one line on standard error, which may be closed."""
    with contextlib.suppress(OSError):
        print(f"{os.path.basename(sys.argv[0])}: {' '.join(text.split())}", file=sys.stderr, flush=True)


def end_on_signals() -> None:
    """Make Ctrl-C and SIGTERM end this process at once, without a traceback. Files stay complete."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    child = os.fork() if os.getpid() == 1 else 0  # in a container: process 1 ignores signals by default
    if child:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(child, number))
        status = os.waitpid(child, 0)[1]
        os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


# ---- Options ---------------------------------------------------------------------------------------
def number(kind: Callable[[str], Any], low: float, high: float = 2**31 - 1) -> Callable[[str], Any]:
    """Return an option type: a `kind` (int or float) from `low` to `high`."""
    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number from {low} to {high}")
    return parse


COUNT, COUNT_OR_NONE, POSITIVE = number(int, 1), number(int, 0), number(float, 1e-9, 1e9)
RATES = ", ".join(f"{rate} for {name}" for name, (_, _, rate) in common.OPTIMIZERS.items())
FLAG, FILE = {"action": "store_true"}, {"metavar": "FILE"}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "data": {
        "--dataset": dict(type=lambda text: next((n for n in common.DATASETS if n.lower() == text.lower()), text),
                          choices=common.DATASETS, default="synthetic", help="upper or lower case"),
        "--data_root": dict(metavar="DIR", default="data", help="holds MNIST/raw and Subj"),
        "--download": dict(FLAG, help="fetch missing files, once per node; MNIST_URL and SUBJ_URL name other sources"),
        "--num_workers": dict(type=COUNT_OR_NONE, default=0, help="data-loading processes per training process")},
    "training": {
        "--epochs": dict(type=COUNT_OR_NONE, default=2, help="passes over the training data"),
        "--batch_size": dict(type=COUNT, default=100, help="samples per process and step"),
        "--drop_last": dict(FLAG, help="leave out the last, shorter batch of each shard, in training only"),
        "--accumulation_steps": dict(type=COUNT, default=1, help="micro-batches of --batch_size per optimizer step"),
        "--optimizer": dict(choices=tuple(common.OPTIMIZERS), default="adam", help="sgd has a momentum of 0.9"),
        "--learning_rate": dict(type=POSITIVE, metavar="LR", help=f"falls to 0 along a half cosine (default: {RATES})"),
        "--weight_decay": dict(type=number(float, 0, 1e9), metavar="X", help="(default: the optimizer's own)"),
        "--max_grad_norm": dict(type=POSITIVE, metavar="X", help="clip the averaged gradients' norm (default: off)"),
        "--precision": dict(choices=("fp32", "bf16", "fp16"), default="fp32", help="autocast; fp16 needs a GPU"),
        "--compile": dict(FLAG, help="torch.compile the model: slower start, then faster steps if it is large"),
        "--grad_sync": dict(choices=("ddp", "manual"), default="ddp", help="manual: average_gradients, no DDP wrapper"),
        "--seed": dict(type=COUNT_OR_NONE, default=0, help="random seed for split, weights, order and dropout")},
    "devices and processes": {
        "--device": dict(choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs, if each rank can have one"),
        "--backend": dict(choices=("auto", "nccl", "gloo"), default="auto", help="auto: nccl on GPUs, gloo on CPUs"),
        "--timeout": dict(type=number(float, 1, 2e6), metavar="SECONDS", default=600, help="how many seconds to wait"),
        "--check": dict(FLAG, help="instead of training: where is each rank, are all-reduces right, how fast")},
    "files": {
        "--checkpoint": dict(FILE, help="written after every epoch (default: none)"),
        "--checkpoint_steps": dict(type=COUNT, help="written after every N steps of an epoch as well (default: off)"),
        "--resume": dict(FLAG, help="continue from --checkpoint if that file exists"),
        "--metrics": dict(FILE, help="JSON Lines: an object per epoch, then the test result (default: none)")}}
DDP_ONLY = {"backend": "auto", "grad_sync": "ddp", "compile": False, "check": False}


def add_option(group: Any, *names: str, **settings: Any) -> None:
    """Add an option, which may also be spelled with dashes; --help shows its default."""
    if settings.get("action") or settings.get("default") is not None:
        settings["help"] += " (default: off)" if settings.get("action") else " (default: %(default)s)"
    settings = {"metavar": "N", **settings} if "type" in settings and "choices" not in settings else settings
    group.add_argument(*names, **settings)
    if "_" in names[-1]:
        settings.update(dest=names[-1][2:], help=argparse.SUPPRESS, default=argparse.SUPPRESS)
        group.add_argument(names[-1].replace("_", "-"), **settings)


def make_parser(description: Optional[str], ddp: bool = True) -> argparse.ArgumentParser:
    """Return a parser for the options of all three scripts; `ddp` adds those that need several processes."""
    parser = argparse.ArgumentParser(
        description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options]", epilog="Long options may have dashes: --batch-size 50.")
    def refuse(message: str) -> None:
        raise UsageError(f"{message} (--help lists the options)")
    parser.error = refuse
    parser.set_defaults(**DDP_ONLY)
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, settings in options.items():
            if ddp or name[2:] not in DDP_ONLY:
                add_option(group, name, **settings)
    return parser


LAUNCHERS = {  # variables of rank, local rank, world size and local world size; the first launcher that fits is used
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "mpirun of Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE",
                           "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpirun of MPICH": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")}


def find_launcher() -> str:
    """Return the launcher that has started this process as one of several (torchrun: or as the only one), or ""."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return "torchrun"
    found = [name for name, (_, _, size, _) in LAUNCHERS.items() if os.environ.get(size, "1") != "1"]
    if found[:1] == ["mpirun of MPICH"] and "MPI_LOCALRANKID" not in os.environ and "srun" in found:
        return "srun"  # with --mpi=pmi2, which sets some of MPICH's variables
    return (found or [""])[0]


def launched_ranks(args: Namespace) -> tuple:
    """Return (rank, local rank, world size, local world size) from the launcher's variables, or () without a launcher.
    Sets MASTER_ADDR and MASTER_PORT if the launcher does not. Raises UsageError if a variable is missing or wrong."""
    env, name = os.environ, find_launcher()
    if not name:
        return ()
    rank, local_rank, size, local_size = (env.get(variable) for variable in LAUNCHERS[name])
    try:
        if name == "torchrun":  # Kubernetes and others, with one process per pod, leave out the local ones
            local_rank = local_rank or args.local_rank or 0
            local_size = local_size or int(local_rank) + 1
        elif name == "srun":
            # "2(x3),1" means 2, 2, 2, 1; the list "rack[1-2]n[07-09,12],x" begins with rack1n07.
            per_node = re.findall(r"(\d+)(?:\(x(\d+)\))?", local_size)
            local_size = [tasks for tasks, times in per_node for _ in range(int(times or 1))][int(env["SLURM_NODEID"])]
            env.setdefault("MASTER_ADDR", re.sub(r"\[(\d+)[^]]*\]|,.*", r"\1", env["SLURM_STEP_NODELIST"]))
            port = int(env["SLURM_JOB_ID"]) + 7919 * int(env.get("SLURM_STEP_ID", 0))  # steps can run at once
            env.setdefault("MASTER_PORT", str(15000 + port % 15000))
        elif local_size == size:  # one node: all ranks have the same parent
            env.setdefault("MASTER_ADDR", "127.0.0.1")
            env.setdefault("MASTER_PORT", str(10000 + PARENT % 20000))
        elif not env.get("MASTER_ADDR") or not env.get("MASTER_PORT"):
            raise UsageError(f"{name} on several nodes needs MASTER_ADDR and MASTER_PORT of rank 0: export them; with "
                             "Open MPI, use mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 …")
        ranks = int(rank), int(local_rank), int(size), int(local_size)
        fits = 0 <= ranks[0] < ranks[2] and 0 <= ranks[1] < ranks[3] and 0 < int(env["MASTER_PORT"]) < 65536
        if not fits or not env["MASTER_ADDR"]:
            raise ValueError(f"rank {rank} of {size}, local rank {local_rank} of {local_size}, {env['MASTER_PORT']}")
        return ranks
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise UsageError(f"the variables {', '.join(LAUNCHERS[name])}, MASTER_ADDR and MASTER_PORT must be set, and "
                         f"agree ({type(error).__name__}: {error}); or start with torchrun") from None


def address_of_node_0(args: Namespace) -> tuple[str, int]:
    """Return the address and port where the processes of ddp_spawn.py meet. On one node, port 0 means any free one."""
    if args.nr >= args.nodes:
        raise UsageError(f"-nr {args.nr}: with -n {args.nodes}, the node rank must be 0 to {args.nodes - 1}")
    if args.nodes == 1:
        return "127.0.0.1", args.master_port or 0
    address = args.master_addr or os.environ.get("MASTER_ADDR")
    port = str(args.master_port or os.environ.get("MASTER_PORT"))
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"-n {args.nodes} needs --master_addr and --master_port, or MASTER_ADDR and MASTER_PORT")
    return address, int(port)


# ---- Joining, leaving and the roll call ------------------------------------------------------------
def make_store(address: str, port: int, timeout: float, is_master: bool) -> dist.TCPStore:
    """Return the store in which ranks meet, or a connection to it. Port 0 means a free one; loopback, loopback only."""
    address, listening = address.strip("[]"), {}
    try:
        if is_master and re.match(common.LOOPBACK, address):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, port), family=family, backlog=1024)
            port = listener.getsockname()[1]
            listening["master_listen_fd"] = listener.detach()  # the store closes it
        return dist.TCPStore(address, port, is_master=is_master, wait_for_workers=False,
                             timeout=timedelta(seconds=timeout), **listening)
    except (OSError, RuntimeError) as error:
        if is_master and re.search("in use|denied", str(error), re.I):
            raise UsageError(f"port {port} is taken: choose another, with --master_port or in MASTER_PORT") from None
        raise


def launched_store(launched: tuple, address: str, port: int, timeout: float) -> dist.Store:
    """Return the store at the launcher's address and port. torchrun hosts it, or else rank 0. A prefix keeps runs
    apart: Slurm steps, mpiruns, and torchrun's attempts, since a restart by torchrun keeps the store."""
    (rank, _, world_size, local_world_size), env, run = launched, os.environ, ""
    if find_launcher() == "srun":
        run = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID')}"
    elif world_size == local_world_size:  # parents and attempt numbers may differ between nodes
        run = env.get("TORCHELASTIC_RESTART_COUNT", "") if find_launcher() == "torchrun" else str(PARENT)
    is_master = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return dist.PrefixStore(run, make_store(address, port, timeout, is_master))


class Joining:
    """A time limit for joining the other ranks: names the missing ones after 4 s, gives up after `timeout` seconds.
    torch's own limits restart with each wait, gloo's is five times as long, and nccl's first wait has none."""

    def __init__(self, rank: int, world_size: int, address: str, port: int, timeout: float) -> None:
        self.rank, self.world_size, self.address, self.port, self.timeout = rank, world_size, address, port, timeout
        self.missing = f"rank 0 of {world_size}"  # until the store answers, as rank 0 hosts it
        self.limit, self.over = timedelta(seconds=timeout), threading.Event()

    def __enter__(self) -> Joining:
        import torch._dynamo, torch.distributed.nn  # if DDP does so later, ranks wait, and the group stays alive
        gc.freeze()  # once more, for what this has imported; see errors_in_one_line
        self.started = time.monotonic()
        threading.Thread(target=self.watch, daemon=True).start()
        common.choose_interface(self.address)
        return self

    def watch(self) -> None:
        if not self.over.wait(min(4, self.timeout + 1)):
            say(self.text("waits"))
        if not self.over.wait(max(0, self.started + self.timeout + 1 - time.monotonic())):
            say(f"error: {self.text('waited in vain')}")
            os._exit(1)

    def __exit__(self, kind: Any, error: Optional[BaseException], _: Any) -> None:
        self.over.set()
        if isinstance(error, (RuntimeError, OSError)):
            raise ConnectionError(f"{self.text('waited in vain')} ({str(error).splitlines()[0]})") from None

    def text(self, waits: str) -> str:
        return (f"rank {self.rank} of {self.world_size} at {self.address}:{self.port} {waits} for {self.missing}, "
                f"{self.timeout:g} s at most (--timeout): start all ranks with the same address, port and world size; "
                "if nodes have several networks, set GLOO_SOCKET_IFNAME to the interface of the right one")

    def wait(self, store: dist.Store, key: str) -> bytes:
        """Return the value of a key that another rank sets. While it waits, it finds out which ranks are missing."""
        for pause in (max(0.1, self.started + 3.5 - time.monotonic()), self.timeout):
            with contextlib.suppress(RuntimeError):  # the pause is over; a lost connection fails again below
                store.wait([key], timedelta(seconds=pause))
                break
            there = store.get("present").decode().split()
            missing = [str(rank) for rank in range(self.world_size) if str(rank) not in there]
            self.missing = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {self.world_size}"
        return store.get(key)

    def decide(self, store: dist.Store, own: dict[str, Any]) -> dict[str, Any]:
        """Return rank 0's answer: the device of each rank, or an error at the first difference."""
        ranks: dict[int, dict[str, Any]] = {}
        try:
            for arrival in range(1, self.world_size + 1):
                other = json.loads(self.wait(store, f"arrival {arrival}")[:2**16])
                where = f"rank {other['rank']} on {other['host']}"
                if other["rank"] in ranks:
                    raise UsageError(f"{where} is also on {ranks[other['rank']]['host']}: give each node its own rank")
                if other["refusal"]:
                    raise UsageError(other["refusal"])
                for name, value in own["alike"].items():
                    if (its := other["alike"].get(name)) != value:
                        raise UsageError(f"{where} has {name} {its}, rank 0 has {value}: all ranks need the same")
                ranks[other["rank"]] = other
            return assign_devices([ranks[rank] for rank in range(self.world_size)])
        except UsageError as error:
            return {"error": str(error)}


def drop_references() -> None:
    """Drop all references to the process group, so that destroy_process_group can end its threads. Raises the error of
    a rank that has failed alone: nccl would wait there for the other ranks, and they wait for this one."""
    if sys.exc_info()[0] not in (None, UsageError) and common.comm_device().type == "cuda":
        atexit.register(os._exit, 1)  # once the traceback is printed; Python's own end would destroy the group too
        raise
    traceback.clear_frames(sys.exc_info()[2])
    gc.collect()
    time.sleep(0.1)  # lets its threads drop their last tensors: they need the GIL, which older torch does not release


OF_ONE_MACHINE = {"nr", "local_rank", "master_addr", "master_port", "data_root", "download", "checkpoint", "metrics",
                  "num_workers", "device", "timeout"}  # ranks may differ in these options only


def describe(rank: int, local_rank: int, world_size: int, args: Namespace, data: Sequence[Dataset]) -> dict[str, Any]:
    """Return what a rank reports in the roll call; `alike` must be the same on all ranks."""
    alike = {"torch": torch.__version__, "a world size of": world_size}
    alike.update({f"--{name}": value for name, value in vars(args).items() if name not in OF_ONE_MACHINE})
    alike["--learning_rate"] = args.learning_rate or common.OPTIMIZERS[args.optimizer][2]
    for path in filter(os.path.isfile, (sys.argv[0], __file__, common.__file__)):
        alike[os.path.basename(path)] = f"checksum {checksum(common.read_file(path, 'code').decode()):08x}"
    own = {"rank": rank, "local_rank": local_rank, "host": socket.gethostname(), "pid": os.getpid(), "alike": alike,
           "threads": torch.get_num_threads(), "device": args.device, "gpus": visible_gpus(), "refusal": ""}
    try:
        check_files(args, data, writes=rank == 0)
        for part, samples in zip(("training", "validation", "test"), data):
            alike[f"{part} data of"] = f"{len(samples)} samples, checksum {checksum(samples):08x}"
    except UsageError as error:
        own["refusal"] = str(error)
    return own


def roll_call(joining: Any, store: Any, local_rank: int, args: Namespace, data: Sequence[Dataset]) -> tuple:
    """Compare options, data, code and torch version of all ranks, and choose their devices. Without a store, this is
    the only rank. Returns the device, the backend and harmless differences. Raises UsageError on every rank."""
    rank, world_size = (joining.rank, joining.world_size) if joining else (0, 1)
    own = describe(rank, local_rank, world_size, args, data)
    if joining is None:
        answer = assign_devices([own])
    else:
        arrival = store.add("arrivals", 1)  # not the rank, since two processes may have the same one
        store.set(f"arrival {arrival}", json.dumps(own))
        store.append("present", f"{rank} ")
        if rank == 0:
            store.set("answer", json.dumps(joining.decide(store, own)))
        answer = json.loads(joining.wait(store, "answer"))
        joining.missing = "the connections to the other ranks, which have all reported"
        if "error" in answer:
            time.sleep(0 if rank else 3)  # rank 0 or its parent hosts the store: let others read first
            raise UsageError(answer["error"], on_all_ranks=True)
    if rank == 0:
        print("\n".join([*answer["report"], *(() if args.check else answer["unlike"]), ""]), end="")  # in one write
    device = torch.device("cpu") if answer["devices"] is None else torch.device("cuda", answer["devices"][rank])
    return device, answer["backend"], answer["unlike"]


def visible_gpus() -> list[list[str]]:
    """Return [UUID, name] of each GPU that this process sees. Where torch has no UUID, host and number replace it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") + [str(i) for i in range(count)]
    gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    return [[str(getattr(gpu, "uuid", f"{socket.gethostname()} {n}")), gpu.name] for gpu, n in zip(gpus, numbers)]


def assign_devices(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Choose GPUs if each rank can have its own (that of its local rank, or the only one that it sees), else the CPU
    for all. Returns the choice and the report. Raises UsageError if --device cuda is not possible."""
    options, wishes, devices, users, reason = ranks[0]["alike"], {rank["device"] for rank in ranks}, [], {}, ""
    for rank in ranks:
        if rank["refusal"]:  # of a single process; `decide` has checked several
            raise UsageError(rank["refusal"])
        gpus, device = rank["gpus"], rank["local_rank"] if len(rank["gpus"]) != 1 else 0
        devices.append(device)
        if device >= len(gpus):
            reason = reason or f"rank {rank['rank']} on {rank['host']} has {len(gpus)} GPU(s), {len(ranks)} process(es)"
        elif users.setdefault(gpus[device][0], rank["rank"]) != rank["rank"]:
            reason = reason or f"ranks {users[gpus[device][0]]} and {rank['rank']} have 1 GPU for 2 process(es)"
    if reason and "cuda" in wishes:
        raise UsageError(f"--device cuda: {reason}; start fewer processes, or use --device cpu")
    on_cpu = bool(reason) or "cpu" in wishes
    if on_cpu and (options["--precision"] == "fp16" or options["--backend"] == "nccl"):
        raise UsageError("--precision fp16 and --backend nccl need a GPU for each process; use bf16 and gloo on CPUs")
    backend = options["--backend"] if options["--backend"] != "auto" else "gloo" if on_cpu else "nccl"
    report, setups = [], []
    for rank, device in zip(ranks, devices):
        kind = "a CPU" if on_cpu else rank["gpus"][device][1]
        setups.append(f"torch {options['torch']}, {rank['threads']} threads, {kind}")
        line = (f"rank {rank['rank']} of {len(ranks)}: host {rank['host']}, local rank {rank['local_rank']}, device "
                f"{'cpu' if on_cpu else f'cuda:{device} ({kind})'}, pid {rank['pid']}")
        report.append(f"{line}, torch {options['torch']}, {rank['threads']} threads" if options["--check"] else line)
    unlike = [f"rank {rank['rank']} has {setup}, but rank 0 has {setups[0]}"
              for rank, setup in zip(ranks, setups) if setup != setups[0]]
    batch = options["--batch_size"] * len(ranks) * options["--accumulation_steps"]
    report.append(f"backend {backend if len(ranks) > 1 else 'none'}, torch {options['torch']}, {ranks[0]['threads']} "
                  f"threads per process, global batch {batch}")
    if reason and wishes == {"auto"} and any(rank["gpus"] for rank in ranks):
        report.append(f"on the CPU: {reason}")
    return {"devices": None if on_cpu else devices, "backend": backend, "unlike": unlike, "report": report}


# ---- Training and checkpoints ----------------------------------------------------------------------
def batches(loader: DataLoader, state: TrainState, args: Namespace) -> Iterator[common.Batch]:
    """Yield the micro-batches of this rank's shard, from the position of `state` in its epoch. Each sample has the
    weight world_size / (samples of all ranks in the step). DDP divides the sum by world_size, which leaves the mean
    over the step, as with one process. Samples that DistributedSampler repeats to pad a shard have the weight 0."""
    (rank, world_size), sampler, done = rank_and_world_size(), loader.batch_sampler, state.samples
    sampler.skip = done // world_size  # samples of this rank's shard that are done
    shard = sampler.skip + len(sampler) * args.batch_size if sampler.drop_last else len(sampler.sampler)
    # Samples have numbers, in the order in which all ranks take them. This rank takes rank, rank + world_size, …
    first, state.epoch_samples = sampler.skip * world_size, shard * world_size
    if isinstance(sampler.sampler, DistributedSampler):
        state.epoch_samples = min(state.epoch_samples, len(sampler.sampler.dataset))
    count, micro, device = len(loader), args.batch_size * world_size, state.loss_sum.device
    numbers = first + rank + world_size * torch.arange(shard - sampler.skip, device=device)
    begins = numbers - (numbers - first) % (micro * args.accumulation_steps)  # the first sample of each one's step
    sizes = (begins + micro * args.accumulation_steps).clamp(max=state.epoch_samples) - begins.clamp(min=done)
    counted = ((numbers >= done) & (numbers < state.epoch_samples)).double()
    weights = (counted * world_size / sizes).float().split(args.batch_size)  # here, once per epoch, because tensor
    counted = counted.split(args.batch_size)  # operations in each step would slow down a small model
    terminal, shown = rank == 0 and sys.stdout.isatty(), time.monotonic()
    state.started, state.samples_before = time.perf_counter(), done
    common.seed(args.seed, state.epoch, state.step, rank)  # dropout differs by rank, and repeats after a resume
    for i, batch in enumerate(loader):
        inputs, targets = common.split_batch(batch, device)
        batch_weights = state.scaler.scale(weights[i])  # for fp16, keeps small gradients above 0; unscaled later
        ends_step = (i + 1) % args.accumulation_steps == 0 or i + 1 == count
        yield common.Batch(inputs, targets, batch_weights, ends_step, counted[i], state.loss_sum)
        if ends_step:
            state.step, state.samples = state.step + 1, min(first + (i + 1) * micro, state.epoch_samples)
            if args.checkpoint_steps and state.step % args.checkpoint_steps == 0 and i + 1 < count:
                state.checkpoint_within_epoch()
        if terminal and time.monotonic() > shown + 0.5:  # one line, updated in place; seldom, as reading the loss waits
            shown, mean = time.monotonic(), state.loss_sum.item() * world_size / max(1, state.samples - done)
            print(f"\repoch {state.epoch + 1}, batch {i + 1}/{count}, loss {mean:.4f} ", end="", flush=True)
    print("\r\033[K" * terminal, end="", flush=True)


# Options that a resumed run must keep, and options that may differ. The others concern one node or change no result.
FIXED = ("dataset", "seed", "optimizer")
VARIABLE = [name[2:] for name in OPTIONS["training"] if name[2:] not in FIXED] + ["checkpoint_steps"]


class TrainState:
    """Everything that training changes, and so all that a checkpoint holds. Of `data`, it keeps the lengths."""
    SAVED = ("epoch", "step", "samples", "loss_total", "best_epoch", "best_score", "best_loss", "best_model", "history",
             "made_with")

    def __init__(self, model: nn.Module, args: Namespace, data: Sequence[Dataset] = ()) -> None:
        self.model, self.args, self.optimizer = model, args, common.make_optimizer(model, args)
        device = next(model.parameters()).device
        if device.type == "cpu":
            keep_freed_memory()
        scaler = getattr(torch.amp, "GradScaler", lambda _, **more: torch.cuda.amp.GradScaler(**more))  # torch < 2.3
        self.scaler = scaler(device.type, enabled=args.precision == "fp16")
        self.epoch = self.step = self.samples = 0  # epochs done; steps and samples (of all ranks) done in the next
        self.epoch_samples, self.loss_total = 1, 0.0  # in the whole epoch; sum of all ranks' losses in it
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # this rank's, not yet in loss_total
        self.best_epoch, self.best_score, self.best_loss, self.best_model = 0, -math.inf, math.inf, None
        self.history: list[dict[str, Any]] = []  # the lines of --metrics
        self.made_with = {"lengths": [len(part) for part in data], "world_size": rank_and_world_size()[1],
                          **{name: getattr(args, name) for name in (*FIXED, *VARIABLE)},
                          "learning_rate": self.optimizer.defaults["lr"]}

    def optimizer_step(self) -> None:
        """Set the learning rate for the share of training that is done, clip the gradients, and step."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self.model.reducer._rebuild_buckets()  # if DDP did not average all, raise now, not in the next forward
        share = (self.epoch + self.samples / self.epoch_samples) / self.args.epochs
        for group in self.optimizer.param_groups:
            group["lr"] = self.optimizer.defaults["lr"] * common.schedule(share)
        if self.args.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def synchronize(self) -> float:
        """Combine losses and BatchNorm's statistics of all ranks; return the mean loss of this epoch so far."""
        common.average_batch_norm(self.model, self.loss_sum)
        self.loss_total += self.loss_sum.item()
        self.loss_sum.zero_()
        return finite(self.loss_total / max(1, self.samples), f"training loss of epoch {self.epoch + 1}")

    def end_training(self) -> dict[str, float]:
        """Return the figures of an epoch over all ranks, after its last batch."""
        loss, seconds = self.synchronize(), time.perf_counter() - self.started
        samples, self.samples, self.step, self.loss_total = self.samples - self.samples_before, 0, 0, 0.0
        return {"train_loss": loss, "samples_per_second": samples / seconds, "seconds": seconds,
                "learning_rate": self.optimizer.param_groups[0]["lr"]}

    def end_epoch(self, train: dict[str, float], valid_loss: float, valid_score: Optional[float]) -> None:
        """Count the epoch; keep a copy of the best weights: those with the highest score, on a tie the lowest loss."""
        finite(valid_loss, f"validation loss of epoch {self.epoch + 1}")
        line = {"epoch": self.epoch, "train_loss": train.pop("train_loss"), "valid_loss": valid_loss}
        score = {} if valid_score is None else {"valid_accuracy": valid_score}
        self.history.append({**line, **score, **train})
        self.epoch += 1
        if (valid_score or 0.0, -valid_loss) > (self.best_score, -self.best_loss):
            self.best_epoch, self.best_score, self.best_loss = self.epoch, valid_score or 0.0, valid_loss
            self.best_model = copy.deepcopy(common.unwrap(self.model).state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers, strings, lists and dicts only, which weights_only=True can read."""
        return {"model": common.unwrap(self.model).state_dict(), "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(), **{name: getattr(self, name) for name in self.SAVED}}

    def load_state_dict(self, part: Callable[[str], Any]) -> None:
        """The inverse of `state_dict`; `part(name)` returns one item. The optimizer keeps this run's settings."""
        common.load_weights(self.model, part("model"))
        own = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({**part("optimizer"), "param_groups": own})
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():  # in its parameter's memory layout, as fused optimizers need
                if isinstance(value, Tensor) and not value.is_sparse and value.shape == parameter.shape:
                    values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if (scaler := part("scaler")) and self.scaler.is_enabled():
            self.scaler.load_state_dict(scaler)
        for name in self.SAVED[:-1]:
            setattr(self, name, part(name))

    def save(self, path: Optional[str]) -> None:
        """Write a checkpoint, or do nothing without a path. Only rank 0 of the world calls it."""
        try:
            if path is not None:
                common.replace_file(path, lambda file: torch.save(self.state_dict(), file))
        except (OSError, RuntimeError) as error:
            while error.__context__ and not isinstance(error, OSError):  # torch's error hides the disk's
                error = error.__context__
            raise OSError(f"--checkpoint {path} could not be written ({error}); the previous one is intact") from None

    def checkpoint_within_epoch(self) -> None:
        """Save a checkpoint, and seed as a run that resumes from it will."""
        loss, rank = self.synchronize(), rank_and_world_size()[0]
        if rank == 0:
            self.save(self.args.checkpoint)
            print(f"epoch {self.epoch + 1}/{self.args.epochs}, step {self.step}, {self.samples}/{self.epoch_samples} "
                  f"samples: mean loss {loss:.4f}, learning rate {self.optimizer.param_groups[0]['lr']:.3g}")
        common.seed(self.args.seed, self.epoch, self.step, rank)


def finite(loss: float, name: str) -> float:
    """The loss; raises UsageError if it is not finite."""
    if math.isfinite(loss):
        return loss
    raise UsageError(f"the {name} is {loss}: try another --learning_rate, --max_grad_norm or --precision", exit_code=1)


def read_checkpoint(path: str, state: TrainState) -> dict[str, Any]:
    """Return the checkpoint in a file, mapped into memory. Raises UsageError unless `state` can continue it."""
    def shapes(weights: dict[str, Any]) -> dict[str, Any]:
        return {name: getattr(value, "shape", None) for name, value in weights.items() if "_extra_state" not in name}
    try:
        with warnings.catch_warnings(record=True):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(loaded, dict) or set(loaded) != {"model", "optimizer", "scaler", *TrainState.SAVED}:
            raise ValueError("it does not hold what these scripts save")
        for name in (*FIXED, "lengths"):
            if (was := loaded["made_with"].get(name)) != (now := state.made_with[name]):
                raise ValueError(f"it was made with {name} {was}, and this run has {now}")
        own = shapes(common.unwrap(state.model).state_dict())
        for part in ("model", "best_model"):
            weights = {re.sub(r"^((module|_orig_mod)\.)+", "", name): value  # prefixes that wrappers add elsewhere
                       for name, value in (loaded[part] or {}).items()}
            if weights and own != shapes(weights):
                raise ValueError("it is from another model or vocabulary")
            loaded[part] = weights or None
        return loaded
    except Exception as error:  # of any kind; torch's own text would advise to trust the file
        reason = error if type(error) is ValueError else f"it cannot be read: {type(error).__name__}"
        raise UsageError(f"--resume: {path} is not a checkpoint of this run ({reason}); name another file") from None


def start_or_resume(args: Namespace, state: TrainState, loader: DataLoader) -> None:
    """Lock --checkpoint; with --resume, continue it. Only rank 0 reads it. All ranks raise UsageError together."""
    rank, loaded = rank_and_world_size()[0], None
    if rank == 0 and args.checkpoint:
        try:
            state.lock = common.lock(args.checkpoint)  # for as long as the state exists
            if args.resume and os.path.exists(args.checkpoint):
                loaded = read_checkpoint(args.checkpoint, state)
        except UsageError as error:
            loaded = f"--checkpoint: {error}"
    found = common.broadcast(loaded and (loaded if isinstance(loaded, str) else "a checkpoint"))
    if found is None:
        return
    if found != "a checkpoint":
        raise UsageError(found, on_all_ranks=True)
    if isinstance(state.model, nn.parallel.DistributedDataParallel):
        common.warm_up(state.model, loader)
    state.load_state_dict(lambda name: common.broadcast(loaded[name] if rank == 0 else None))  # in pieces: saves memory
    if rank == 0:
        write_metrics(args, state.history)
        was, now = loaded["made_with"], state.made_with
        print(f"going on from {args.checkpoint}, after epoch {state.epoch}" + f", step {state.step}" * bool(state.step))
        changed = [f"--{name} is {now[name]}, was {was.get(name)}" for name in VARIABLE if was.get(name) != now[name]]
        if changed:
            print(f"{'; '.join(changed)}: the bits will differ from those of an uninterrupted run")
        if was["world_size"] != now["world_size"]:
            print(f"{now['world_size']} process(es), was {was['world_size']}: the result will not be bit-identical")


# ---- Files and reports -----------------------------------------------------------------------------
def check_files(args: Namespace, data: Sequence[Dataset], writes: bool = True) -> None:
    """Raise UsageError, before anything starts, if the data or, on the rank that `writes`, a file is unusable."""
    lengths = ["IterableDataset" if isinstance(part, IterableDataset) else len(part) for part in data]
    if 0 in lengths or "IterableDataset" in lengths:
        raise UsageError(f"training, validation and test data need a sample each, and __getitem__; they have {lengths}")
    if not writes:
        return
    if (args.resume or args.checkpoint_steps) and not args.checkpoint:
        raise UsageError("--resume and --checkpoint_steps need --checkpoint FILE")
    if args.checkpoint and args.metrics and os.path.realpath(args.checkpoint) == os.path.realpath(args.metrics):
        raise UsageError(f"--checkpoint and --metrics are both {args.metrics}: name two files")
    continues = args.resume and os.path.exists(args.checkpoint)
    for option, path in (("--checkpoint", args.checkpoint), ("--metrics", args.metrics)):
        if path and os.path.exists(path) and not (continues and os.path.isfile(path)):
            raise UsageError(f"{option} {path} exists: name another file{', or use --resume' * (not args.resume)}")
        try:
            if path:  # replace_file will write there
                tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
        except OSError as error:
            raise UsageError(f"{option} {path}: cannot write into this folder: {error.strerror}") from None
    if continues:
        read_checkpoint(args.checkpoint, TrainState(common.build_model(args, data[0]), args, data))


def log(args: Namespace, state: TrainState, *test: Optional[float]) -> None:
    """Write --metrics, and print the figures of the last epoch or, if given, of the test (loss and score)."""
    lines = list(state.history)
    if test:
        lines.append({name: value for name, value in zip(("test_loss", "test_accuracy"), test) if value is not None})
        lines[-1]["world_size"] = rank_and_world_size()[1]
    write_metrics(args, lines)
    formats = {"train_loss": "train loss {:.4f}", "valid_loss": "valid loss {:.4f}", "test_loss": "test loss {:.4f}",
               "valid_accuracy": "valid accuracy {:.2%}", "test_accuracy": "test accuracy {:.2%}",
               "samples_per_second": "{:.0f} samples/s"}
    text = ", ".join(formats[name].format(value) for name, value in lines[-1].items() if name in formats)
    print(f"{text}, weights of epoch {state.best_epoch}" if test else f"epoch {state.epoch}/{args.epochs}: {text}")


def write_metrics(args: Namespace, lines: list[dict[str, Any]]) -> None:
    """Write --metrics. If that fails, training continues: it is worth more, and the next epoch writes all lines."""
    try:
        if args.metrics:
            content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
            common.replace_file(args.metrics, lambda file: file.write(content))
    except OSError as error:
        say(f"--metrics {args.metrics} could not be written ({error.strerror}); the training goes on")


def check(rank: int, world_size: int, device: torch.device, problems: list[str]) -> None:
    """Test and time all-reduces instead of training. Raises RuntimeError if a sum is wrong, or with `problems`. The bus
    bandwidth is that of NCCL's tests, bytes / time * 2 (n - 1) / n for n ranks: compare it with the hardware's."""
    for size, name in (2**10, "1 KB"), (2**20, "1 MB"), (2**26, "64 MB"):
        ramp = torch.arange(size // 4, dtype=torch.float32, device=device) % 1000
        seconds, wrong = [], torch.zeros(world_size)
        for _ in range(6):
            summed = ramp + rank
            common.reduce_mean(0)  # all ranks begin together
            started = time.perf_counter()
            if dist.is_initialized():
                dist.all_reduce(summed)
            summed[0].item()  # waits for a GPU
            seconds.append(time.perf_counter() - started)
            wrong[rank] += not torch.equal(summed, ramp * world_size + world_size * (world_size - 1) / 2)
        wrong_ranks = common.reduce_mean(wrong).nonzero().flatten().tolist()
        problems += [f"all-reduce of {name}: wrong sums on rank {other}" for other in wrong_ranks]
        second = common.reduce_mean(sorted(seconds[1:])[2]).item()  # median without the first, which connects
        bandwidth = size / second * 2 * (world_size - 1) / world_size / 1e9
        if rank == 0:
            print(f"all-reduce of {name:>5}: {1000 * second:8.3f} ms, bus bandwidth {bandwidth:7.3f} GB/s")
    if rank == 0:
        print("\n".join(problems or ["all is well"]))
    if problems:
        raise RuntimeError(f"--check: {'; '.join(problems)}")
