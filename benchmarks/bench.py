"""Measures the README's figures: ratios of two things that take turns in one run.

    python benchmarks/bench.py                    # all tables, in about ten minutes on two cores
    python benchmarks/bench.py step startup   # some of: input average step gains choices scaling threads startup memory
    python benchmarks/bench.py gpu            # one rank per GPU; gpu-trial runs the same code with two ranks on the CPU

Each figure is a median of at least five rounds, in which the candidates take turns, after one that does not count.
"""
import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any, Callable

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import common
import ddp_launch
import runtime
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.helpers import write_mnist

CPU = torch.device("cpu")  # in a rank, common.comm_device() is where the models and the gradients are
LIMIT = timedelta(minutes=5)  # for each wait, and each command


def synchronize() -> None:
    """Wait for all ranks, and for this one's GPU, which works on after a call has returned."""
    if dist.is_initialized():
        dist.barrier()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def alternate(candidates: dict[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    """Return the median seconds of each candidate. Every other round runs them in the opposite order."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(rounds + 1):
        for name in list(candidates)[::1 if i % 2 else -1]:
            synchronize()
            started = time.perf_counter()
            candidates[name]()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if i:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in seconds.items()}


def show(title: str, *rows: tuple) -> None:
    """Print a table; its title names the columns."""
    if common.rank_and_world_size()[0] == 0:
        if title:
            print(f"\n{title}")
        for name, *figures in rows:
            print(f"  {name:<96}", *[f"{figure:>9.2f}" for figure in figures], flush=True)


def options(*given: str) -> Any:
    return runtime.make_parser(None).parse_args(["--optimizer", "sgd", *given])


def in_memory(name: str, samples: int) -> common.Rows:
    """Return random samples in the form of the data set of that name."""
    if name == "Subj":
        return common.Sentences(torch.randint(1, 20_000, (samples, 24)), torch.randint(2, (samples,)))
    images = name == "MNIST"
    inputs = torch.randint(256, (samples, 1, 28, 28), dtype=torch.uint8) if images else torch.randn(samples, 20)
    return common.Rows(inputs, torch.randint(10, (samples,)))


NAMES = {"synthetic": "small MLP", "MNIST": "MNIST network", "Subj": "Subj network"}


# ---- Input -----------------------------------------------------------------------------------------
def fetching() -> None:
    """A pass over the data: whole batches, as common.py fetches them, against DataLoader's default, one by one."""
    rows = []
    for name, title in (("synthetic", "60,000 rows of 20 floats"), ("MNIST", "60,000 images of 28x28 bytes")):
        data = in_memory(name, 60_000)
        sampler = DistributedSampler(data, num_replicas=1, rank=0)
        rows.append(passes(title, data, sampler, DataLoader(TensorDataset(*data.tensors), 100, sampler=sampler)))
    words = [torch.randint(1, 20_000, (length,)) for length in torch.randint(3, 40, (10_000,)).tolist()]
    targets = torch.randint(2, (10_000,))

    def pad(batch: list) -> tuple:
        return nn.utils.rnn.pad_sequence([tokens for tokens, _ in batch], True), torch.stack([t for _, t in batch])

    sampler = DistributedSampler(targets, num_replicas=1, rank=0)
    plain = DataLoader(list(zip(words, targets)), 100, sampler=sampler, collate_fn=pad)
    sentences = common.Sentences(nn.utils.rnn.pad_sequence(words, True), targets)
    rows.append(passes("10,000 sentences of 3 to 39 words, padded for each batch", sentences, sampler, plain))
    show("Input: times the samples per second of DataLoader's default batching", *rows)


def passes(title: str, data: common.Rows, sampler: Any, plain: DataLoader) -> tuple:
    ours = common.make_loader(data, sampler, options(), CPU)
    found = alternate({"ours": lambda: all(True for _ in ours), "plain": lambda: all(True for _ in plain)})
    return title, found["plain"] / found["ours"]


# ---- In several ranks ------------------------------------------------------------------------------
def rank(local_rank: int, world_size: int, port: int, name: str, backend: str) -> None:
    torch.set_num_threads(1)
    common.keep_freed_memory()  # as in a training run on CPUs; the comparisons get it too
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=local_rank, world_size=world_size, timeout=LIMIT)
    globals()[name]()
    dist.barrier()
    os._exit(0)  # skips the teardown of what was measured


def in_ranks(name: str, world_size: int = 2, backend: str = "gloo") -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(rank, args=(world_size, store.port, name, backend), nprocs=world_size)


def average_one_by_one(model: nn.Module) -> None:
    """As in the notes."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def average(rounds: int = 25) -> None:
    rows = []
    for title, shapes in (("60 tensors, 11 million parameters", [(512, 512)] * 40 + [(512,)] * 19 + [(500, 1000)]),
                          ("200 tensors of 100", [(100,)] * 200)):
        model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes).to(common.comm_device())
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in model])
        found = alternate({"ours": lambda: common.average_gradients(model), "flat": lambda: dist.all_reduce(flat),
                           "one by one": lambda: average_one_by_one(model)}, rounds)
        rows.append((title, found["ours"] / found["flat"], found["one by one"] / found["ours"]))
    show("average_gradients: its time by that of one flat all-reduce; that of one for each tensor by its time", *rows)


class Loops:
    """Four loops over the same shards; each runs one epoch. Those with DDP train one model, because the place of its
    memory changes its speed."""

    def __init__(self, name: str, samples: int) -> None:
        self.args, self.data, self.device = options("--dataset", name), in_memory(name, samples), common.comm_device()
        self.sampler = DistributedSampler(self.data, *common.rank_and_world_size()[::-1])
        self.loader = common.make_loader(self.data, self.sampler, self.args, self.device)
        self.plain_loader = DataLoader(TensorDataset(*self.data.tensors), self.args.batch_size, sampler=self.sampler)
        model, alone = (common.build_model(self.args, self.data).to(self.device) for _ in range(2))
        model = DDP(model, broadcast_buffers=False, gradient_as_bucket_view=True)
        self.state, self.alone = runtime.TrainState(model, self.args), runtime.TrainState(alone, self.args)

    def ours(self) -> None:
        ddp_launch.train_one_epoch(self.state.model, self.loader, self.state, self.args)

    def silent(self) -> None:
        """Ours, without DDP: ranks do not communicate."""
        ddp_launch.train_one_epoch(self.alone.model, self.loader, self.alone, self.args)

    def bare(self) -> None:
        """Batches cut by index, DDP, and nothing else."""
        model, optimizer = self.state.model, self.state.optimizer
        for indices in torch.tensor(list(self.sampler)).split(self.args.batch_size):
            inputs, targets = self.data.tensors[0][indices], self.data.tensors[1][indices]
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(self.device)), targets.to(self.device)).backward()
            optimizer.step()

    def notes(self) -> None:
        """DDP and average_gradients for each parameter, metrics reduced in every step."""
        model, optimizer = self.state.model, self.state.optimizer
        for inputs, targets in self.plain_loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
            loss.backward()
            average_one_by_one(model)
            optimizer.step()
            for value in loss.detach().clone(), (outputs.argmax(1) == targets).float().mean():
                dist.barrier()
                dist.all_reduce(value)
                value.item()


def step() -> None:
    """Five times, each with a new model."""
    rows = []
    for name, samples, rounds in (("synthetic", 20_000, 21), ("MNIST", 4000, 7)):
        ratios = []
        for _ in range(5):
            loops = Loops(name, samples)
            found = alternate({"ours": loops.ours, "bare": loops.bare}, rounds)
            ratios.append(found["bare"] / found["ours"])
        notes = alternate({"ours": loops.ours, "notes": loops.notes})
        rows.append((NAMES[name], statistics.median(ratios), min(ratios), max(ratios), notes["notes"] / notes["ours"]))
    show("Training loop, two ranks: times the steps per second of a bare loop (median, least, most of five), of the "
         "notes' loop", *rows)


def gains() -> None:
    """A step of two ranks, forward, backward and optimizer, in two forms of the same network."""
    rows = []
    torch.manual_seed(0)  # all ranks need one vocabulary
    wide = nn.Sequential(nn.EmbeddingBag(20_000, 256, mode="mean", padding_idx=0), nn.Linear(256, 2))
    for name, title, other in (("MNIST", "MNIST network, channels_last, by contiguous", lambda model: model.to(
            memory_format=torch.contiguous_format)), ("Subj", "Subj network, 96-wide, by 256-wide", lambda _: wide)):
        data, steps = in_memory(name, 100), {}
        for form, change in ("ours", lambda model: model), ("other", other):
            model = DDP(change(common.build_model(options("--dataset", name), data)), broadcast_buffers=False,
                        gradient_as_bucket_view=True)
            optimizer = torch.optim.Adam(model.parameters(), fused=True)

            def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                F.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
                optimizer.step()

            steps[form] = step
        found = alternate(steps, 21)
        rows.append((title, found["other"] / found["ours"]))
    show("Choices of the networks, two ranks: times the steps per second", *rows)


def choices() -> None:
    """Optional choices, in one process: the fused optimizer, and torch.compile."""
    rows, compiled_rows = [], []
    for name, title in NAMES.items():
        data = in_memory(name, 100)
        for optimizer in torch.optim.Adam, torch.optim.SGD:
            steps = {}
            for kind, more in ("default", {}), ("foreach", {"foreach": True}), ("fused", {"fused": True}):
                model = common.build_model(options("--dataset", name), data)
                F.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
                steps[kind] = optimizer(model.parameters(), lr=0.01, **more).step
            found = alternate(steps, 51)
            rows.append((f"{title}, {optimizer.__name__}", found["default"] / found["foreach"],
                         found["default"] / found["fused"]))
        if shutil.which("g++") and name != "Subj":
            compiled = torch.compile(model)
            found = alternate({which: lambda m=m: F.cross_entropy(m(data.tensors[0]), data.tensors[1]).backward()
                               for which, m in (("plain", model), ("compiled", compiled))}, 51)
            compiled_rows.append((title, found["plain"] / found["compiled"]))
    show("Optimizer step: times the steps per second of torch's default on CPUs; foreach; fused", *rows)
    show("Forward and backward: times the speed without --compile", *compiled_rows)


def scaling_rank() -> None:
    rows, world_size = [], common.rank_and_world_size()[1]
    for name, samples in (("synthetic", 20_000), ("MNIST", 4000)):
        loops = Loops(name, samples)
        loop = loops.ours if world_size > 1 else loops.silent  # one process, as in `python ddp_launch.py`
        found = alternate({"loop": loop, "silent": loops.silent}, 9)
        size = 4 * sum(parameter.numel() for parameter in loops.state.model.parameters())
        steps = len(loops.loader) / found["loop"]
        rows.append((f"{NAMES[name]}, {world_size} process(es)", samples / found["loop"],
                     max(0, 1 - found["silent"] / found["loop"]), steps, size / 1000, 2 * size * steps / 1e6))
    show("", *rows)


def scaling() -> None:
    """Processes of one thread each. The difference between the loop with and without DDP is the communication."""
    print("\nScaling: samples per second; share of communication; steps per second; KB of gradients per step; MB/s "
          "that each link of many machines would carry at this rate")
    for processes in (1, 2, 4, 8):
        in_ranks("scaling_rank", processes)


# ---- On GPUs ---------------------------------------------------------------------------------------
def gpu_rank() -> None:
    on_gpu, world_size = common.comm_device().type == "cuda", common.rank_and_world_size()[1]
    what = torch.cuda.get_device_name() if on_gpu else "a trial on the CPU"
    rows = []
    for name, steps in (("synthetic", 50), ("MNIST", 20)) if on_gpu else (("synthetic", 5), ("MNIST", 2)):
        loops = Loops(name, 100 * steps * world_size)
        found = alternate({"ours": loops.ours, "bare": loops.bare})
        rows.append((f"{NAMES[name]}, {steps} steps an epoch", found["bare"] / found["ours"], steps / found["ours"]))
    show(f"Training loop, {world_size} x {what}: times the steps per second of a bare loop; steps per second", *rows)
    if world_size > 1:
        overlap(*(4096, 8, 512) if on_gpu else (128, 4, 16))
        average(25 if on_gpu else 1)
    else:
        print("\nOne GPU: there is nothing to all-reduce")


def overlap(width: int, layers: int, samples: int) -> None:
    """A step of DDP, of the same model without communication, and one all-reduce of as many gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(common.comm_device())
    flat = torch.cat([torch.zeros_like(parameter).reshape(-1) for parameter in model.parameters()])
    inputs, ddp = torch.randn(samples, width, device=flat.device), DDP(model, gradient_as_bucket_view=True)

    def step() -> None:
        ddp.zero_grad(set_to_none=False)
        ddp(inputs).square().mean().backward()

    def silent() -> None:
        with ddp.no_sync():
            step()

    found = alternate({"ddp": step, "silent": silent, "flat": lambda: dist.all_reduce(flat)}, 15)
    hidden = 1 - (found["ddp"] - found["silent"]) / found["flat"]
    show("DDP's forward and backward: milliseconds; without communication; of an all-reduce of the gradients; share of "
         "that which backward hides", (f"{layers} layers of {width} x {width}, {flat.numel() / 1e6:.0f} million "
                                       f"gradients", *(1000 * seconds for seconds in found.values()),
                                       min(1.0, max(0.0, hidden))))


def gpus() -> None:
    if torch.cuda.is_available():
        in_ranks("gpu_rank", torch.cuda.device_count(), "nccl")
    else:
        print("\nOn GPUs: torch finds none here")


# ---- Whole commands --------------------------------------------------------------------------------
BARE = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if "train" in sys.argv:
    from torch.nn.parallel import DistributedDataParallel as DDP
    inputs, targets = torch.randn(5500, 20), torch.randint(10, (5500,))
    model = DDP(torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    torch.nn.functional.cross_entropy(model(inputs[:100]), targets[:100]).backward()
    optimizer.step()
    dist.barrier()
    os._exit(0)  # DDP leaves gloo's threads behind, which sometimes abort the interpreter at exit
dist.destroy_process_group()
"""


@contextlib.contextmanager
def bare_script():
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "bare.py"), "w") as file:
            file.write(BARE)
        yield file.name


def command(*words: str, **environment: str) -> str:
    """Run a command in the project's folder; return what it printed."""
    env = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.run(words, cwd=ROOT, env=env, check=True, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, timeout=LIMIT.total_seconds()).stdout


def torchrun(processes: int, *words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *words]


def startup() -> None:
    with bare_script() as bare:
        found = alternate({
            "one": lambda: command(*torchrun(2, "ddp_launch.py", "--epochs", "1", "--batch_size", "2000")),
            "bare": lambda: command(*torchrun(2, bare)), "bare step": lambda: command(*torchrun(2, bare, "train"))}, 5)
    answers = alternate({"help": lambda: command(sys.executable, "ddp_launch.py", "--help"),
                         "error": lambda: subprocess.run([sys.executable, "ddp_spawn.py", "-g", "0"], cwd=ROOT,
                                                         stderr=subprocess.DEVNULL, timeout=60),
                         "import": lambda: command(sys.executable, "-c", "import torch")})
    show("Start-up: wall time, by that of another command",
         ("torchrun ddp_launch.py, one step and the evaluation, by a script that joins and all-reduces once",
          found["one"] / found["bare"]),
         ("the same, by a script that takes one step with DDP", found["one"] / found["bare step"]),
         ("ddp_launch.py --help, by `import torch`", answers["help"] / answers["import"]),
         ("an option error of ddp_spawn.py, by `import torch`", answers["error"] / answers["import"]))


def peak(*words: str) -> float:
    """Return the peak memory, in MB, of the largest process of a command."""
    code = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, "
            "stderr=subprocess.DEVNULL); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)")
    return float(command(sys.executable, "-c", code, *words))


def memory() -> None:
    with bare_script() as bare:
        rows = [[peak(*torchrun(2, *words)) for words in (["ddp_launch.py"], [bare, "train"], [bare])]
                for _ in range(5)]
    ours, step, joined = (statistics.median(column) for column in zip(*rows))
    show("Memory: peak of a rank of `torchrun ddp_launch.py`",
         ("by that of a script with data, DDP model, gradients and optimizer", ours / step),
         ("by that of a script that joins and all-reduces once, and imports no more than that", ours / joined))
    in_ranks("bucket_memory")


def bucket_memory() -> None:
    """The memory that average_gradients takes for 400 MB of gradients. (Only Linux can reset the peak.)"""
    model = nn.ParameterList(nn.Parameter(torch.zeros(1_000_000)) for _ in range(100))
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)

    def status(key: str) -> int:
        with open("/proc/self/status") as file:
            return int(re.search(rf"{key}:\s+(\d+) kB", file.read()).group(1)) * 1024

    works = [dist.all_reduce(torch.ones(common.BUCKET_BYTES // 4), async_op=True) for _ in range(4)]
    for work in works:  # first, so that gloo has allocated its own memory
        work.wait()
    del works, work
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    common.average_gradients(model)
    show("Memory of average_gradients, beyond model and gradients",
         ("100 tensors of a million, by the memory of the gradients", (status("VmHWM") - before) / 4e8))


def threads() -> None:
    """One process with one thread, and with all; two that share the cores, or that use all of them each."""
    cores, found = str(os.cpu_count()), {}
    one, spawn, two = [sys.executable, "ddp_launch.py"], [sys.executable, "ddp_spawn.py", "-g", "2"], torchrun(
        2, "ddp_launch.py")
    default = {"MALLOC_TOP_PAD_": "131072"}  # glibc's default; with any such variable, the script leaves glibc alone
    commands = {"OMP_NUM_THREADS=1 python ddp_launch.py": (one, {"OMP_NUM_THREADS": "1"}),
                "python ddp_launch.py": (one, {}), "python ddp_spawn.py -g 2": (spawn, {}),
                "torchrun --nproc_per_node=2 ddp_launch.py": (two, {}),
                f"OMP_NUM_THREADS={cores} python ddp_spawn.py -g 2": (spawn, {"OMP_NUM_THREADS": cores}),
                "python ddp_spawn.py -g 2, where glibc gives back freed memory": (spawn, default)}
    with tempfile.TemporaryDirectory() as folder:
        write_mnist(folder, 4000, 10)
        more = ["--dataset", "MNIST", "--data_root", folder, "--epochs", "5"]
        for _ in range(5):
            for name, (words, environment) in commands.items():
                speed = re.findall(r"(\d+) samples/s", command(*words, *more, **environment))[-1]
                found.setdefault(name, []).append(float(speed))
    first, *_ = (statistics.median(speeds) for speeds in found.values())
    show(f"Threads: samples per second of the MNIST network, by those of the first row; {cores} cores",
         *((name, statistics.median(speeds) / first) for name, speeds in found.items()))


TABLES = {"input": fetching, "average": lambda: in_ranks("average"), "step": lambda: in_ranks("step"),
          "choices": lambda: in_ranks("choices", 1), "gains": lambda: in_ranks("gains"), "scaling": scaling,
          "threads": threads,
          "startup": startup, "memory": memory, "gpu": gpus, "gpu-trial": lambda: in_ranks("gpu_rank")}

if __name__ == "__main__":
    names = sys.argv[1:] or [name for name in TABLES if name != "gpu-trial"]
    if not set(names) <= set(TABLES):
        sys.exit(f"bench.py: the tables are {' '.join(TABLES)}")
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    for name in names:
        TABLES[name]()
