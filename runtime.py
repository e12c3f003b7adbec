"""What is around a run: options, launchers, joining and leaving, an epoch's steps, checkpoints, reports, --check."""
from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import io
import itertools
import json
import math
import os
import platform
import re
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional, Sequence

import common
import torch
import torch.distributed as dist
from common import UsageError, rank_and_world_size
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

PARENT = os.getppid()  # the launcher, if there is one; later it could be gone
# Its new name, forward_sync_buffers, is unknown before torch 2.13.
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")


# ---- Errors and signals ----------------------------------------------------------------------------
class Failure(Exception):
    """A failure while running that one line explains better than a traceback."""


@contextlib.contextmanager
def one_line_errors(local_rank: int = 0) -> Iterator[None]:
    """Report a UsageError as one line on standard error and exit code 2, a Failure as one line and exit code 1."""
    try:
        yield
    except (UsageError, Failure) as error:
        if local_rank > 0:  # all processes of a node find the same mistake: local rank 0 says it, and the launcher ends
            time.sleep(5)   # the others
        say(f"error: {error}")
        sys.exit(2 if isinstance(error, UsageError) else 1)


def run(main: Callable[[], None]) -> None:
    """Call `main`, with errors in one line."""
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    with one_line_errors(int(local_rank) if local_rank.isdecimal() else 0):
        main()


def say(text: str) -> None:
    """Print one line on standard error, which may be gone."""
    with contextlib.suppress(OSError):
        print(f"{os.path.basename(sys.argv[0])}: {' '.join(text.split())}", file=sys.stderr, flush=True)


def end_on_signals() -> None:
    """Have Ctrl-C end this process at once, without a traceback; files stay whole."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_with(parent: int) -> None:
    """Have Linux end this process when the one that started it ends: a launcher that is killed cannot do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was too late
            os._exit(1)


def keep_freed_memory() -> None:
    """Have glibc keep the memory of tensors that come and go in each step: the next step need not clear new pages."""
    if platform.libc_ver()[0] == "glibc" and not any(name.startswith("MALLOC_") for name in os.environ):
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD


HINTS = {  # what torch's errors do not say: expression in the error, line to put below it
    "Expected to have finished reduction": "--grad_sync manual can train a model with parameters that get no gradient "
                                           "in some steps",
    "Expected more than 1 value per channel": "BatchNorm cannot train on a batch of one sample: --drop_last leaves out "
                                              "the last, shorter batch of each shard, or choose another --batch_size",
}


@contextlib.contextmanager
def hints() -> Iterator[None]:
    """Put a line below an error of torch's for which there is an option."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        found = [hint for expression, hint in HINTS.items() if re.search(expression, str(error))]
        if found:
            error.args = ("\n".join([str(error), *found]),)
        raise


# ---- Options ---------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """Reports a mistake as a UsageError, in one line."""

    def error(self, message: str) -> Any:
        raise UsageError(f"{message} (--help lists the options)")


def add_option(group: Any, *names: str, **settings: Any) -> None:
    """Add an option; its name is taken with dashes too, and --help shows its default."""
    if settings.get("default") is not None:
        settings["help"] += " (default: %(default)s)"
    group.add_argument(*names, **settings)
    for name in names:
        if "_" in name:
            settings.update(dest=name.lstrip("-"), help=argparse.SUPPRESS, default=argparse.SUPPRESS)
            group.add_argument(name.replace("_", "-"), **settings)


def number(kind: Callable[[str], Any], low: float, high: float = 2**31 - 1) -> Callable[[str], Any]:
    """An option type: an int or a float, as `kind` says, from `low` to `high`."""
    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number from {low} to {high}")
    return parse


COUNT, COUNT_OR_NONE, POSITIVE = number(int, 1), number(int, 0), number(float, 1e-9, 1e9)


def dataset_name(text: str) -> str:
    """The data set's name as it is written here, whatever the case of `text`."""
    return {name.lower(): name for name in common.DATASETS}.get(text.lower(), text)


RATES = ", ".join(f"{rate} for {name}" for name, (_, _, rate) in common.OPTIMIZERS.items())
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "data": {
        "--dataset": dict(type=dataset_name, choices=common.DATASETS, default="synthetic",
                          help="in upper or lower case"),
        "--data_root": dict(metavar="DIR", default="data", help="holds MNIST/raw and Subj"),
        "--download": dict(action="store_true", help="fetch missing files, once per node, and check them; MNIST_URL "
                           "and SUBJ_URL may name the folder and the archive to fetch from (default: off)"),
        "--num_workers": dict(type=COUNT_OR_NONE, metavar="N", default=0,
                              help="data-loading processes per training process")},
    "training": {
        "--epochs": dict(type=COUNT_OR_NONE, metavar="N", default=2, help="passes over the training data"),
        "--batch_size": dict(type=COUNT, metavar="N", default=100, help="samples per process and step"),
        "--drop_last": dict(action="store_true", help="in training, leave out the last, shorter batch of each shard "
                            "(default: off)"),
        "--accumulation_steps": dict(type=COUNT, metavar="N", default=1, help="micro-batches of --batch_size per "
                                     "optimizer step"),
        "--optimizer": dict(choices=tuple(common.OPTIMIZERS), default="adam", help="sgd has a momentum of 0.9"),
        "--learning_rate": dict(type=POSITIVE, metavar="LR", help=f"falls to 0 along a half cosine (default: {RATES})"),
        "--weight_decay": dict(type=number(float, 0, 1e9), metavar="X", help="(default: the optimizer's own)"),
        "--max_grad_norm": dict(type=POSITIVE, metavar="X", help="clip the norm of the averaged gradients (default: "
                                "off)"),
        "--precision": dict(choices=("fp32", "bf16", "fp16"), default="fp32", help="autocast; fp16 needs a GPU"),
        "--compile": dict(action="store_true", help="torch.compile the model: a longer start, then faster steps for "
                          "all but small models (default: off)"),
        "--grad_sync": dict(choices=("ddp", "manual"), default="ddp", help="manual: average_gradients, no DDP wrapper"),
        "--seed": dict(type=COUNT_OR_NONE, metavar="N", default=0, help="random seed for split, weights, order and "
                       "dropout")},
    "devices and processes": {
        "--device": dict(choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs, if each process can have "
                         "one"),
        "--backend": dict(choices=("auto", "nccl", "gloo"), default="auto", help="auto: nccl on GPUs, gloo on CPUs"),
        "--timeout": dict(type=number(float, 1, 2_000_000), metavar="SECONDS", default=600, help="how many seconds to "
                          "wait for other ranks, a download or a data-loading process, before an error"),
        "--check": dict(action="store_true", help="in place of training, say who is where, and whether all-reduces are "
                        "right, and how fast (default: off)")},
    "files": {
        "--checkpoint": dict(metavar="FILE", help="written after every epoch (default: none)"),
        "--checkpoint_steps": dict(type=COUNT, metavar="N", help="written after every N steps of an epoch as well "
                                   "(default: off)"),
        "--resume": dict(action="store_true", help="continue from --checkpoint if that file exists (default: off)"),
        "--metrics": dict(metavar="FILE", help="JSON Lines: an object per epoch, then the test result (default: "
                          "none)")},
}
DDP_ONLY = {"--backend": "auto", "--grad_sync": "ddp", "--compile": False, "--check": False}


def make_parser(description: Optional[str], ddp: bool = True) -> Parser:
    """The options of all three scripts; `ddp` adds those that need several processes."""
    parser = Parser(description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                    usage="%(prog)s [options]", epilog="Long options may have dashes: --batch-size 50.")
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, settings in options.items():
            if ddp or name not in DDP_ONLY:
                add_option(group, name, **settings)
            else:
                parser.set_defaults(**{name[2:]: DDP_ONLY[name]})
    return parser


def pick_device(args: Namespace, local_rank: int = 0, local_world_size: int = 1) -> tuple[torch.device, str]:
    """GPU number `local_rank` and nccl, or the CPU and gloo; raises UsageError if GPUs are asked for and not there."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpu = args.device != "cpu" and gpus >= max(local_world_size, local_rank + 1)
    if args.device == "cuda" and not on_gpu:
        raise UsageError(f"--device cuda: {gpus} GPU(s) here for {local_world_size} process(es); start fewer, or use "
                         "--device cpu")
    if not on_gpu and (args.precision == "fp16" or args.backend == "nccl"):
        raise UsageError("--precision fp16 and --backend nccl need a GPU for each process; use bf16 and gloo on CPUs")
    backend = args.backend if args.backend != "auto" else "nccl" if on_gpu else "gloo"
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu"), backend


# ---- Launchers, joining and leaving ----------------------------------------------------------------
def launched_ranks(args: Namespace) -> tuple:
    """(rank, local_rank, world_size, local_world_size) from a launcher's variables; () without one."""
    env = os.environ
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            local = int(env.get("LOCAL_RANK", args.local_rank))
            ranks = int(env["RANK"]), local, int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", local + 1))
        # The variables of a step. A job has SLURM_NTASKS too, but what is started in it without srun is alone.
        elif int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            # "2(x3),1" is 2, 2, 2, 1; the list "rack[1-2]n[07-09,12],x" begins with rack1n07.
            per_node = re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"])
            per_node = [int(tasks) for tasks, times in per_node for _ in range(int(times or 1))]
            ranks = (int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), int(env["SLURM_STEP_NUM_TASKS"]),
                     per_node[int(env["SLURM_NODEID"])])
            env.setdefault("MASTER_ADDR", re.sub(r"\[(\d+)[^]]*\]|,.*", r"\1", env["SLURM_STEP_NODELIST"]))
            env.setdefault("MASTER_PORT", str(15000 + int(env["SLURM_JOB_ID"]) % 15000))
        else:
            return ()
        port_fits = env["MASTER_ADDR"] and 0 < int(env["MASTER_PORT"]) < 65536
        if not port_fits or not 0 <= ranks[0] < ranks[2] or not 0 <= ranks[1] < ranks[3]:
            raise ValueError(f"rank {ranks[0]} of {ranks[2]}, local rank {ranks[1]} of {ranks[3]}")
        return ranks
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise UsageError("the launcher's variables RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
                                f"do not fit together ({error!r}): unset them, or start with torchrun") from None


@contextlib.contextmanager
def joining(rank: int, world_size: int, address: str, port: int, timeout: float) -> Iterator[None]:
    """Around what joins the others at address:port: it says after 4 s what it waits for, and gives up after `timeout`.
    Torch's own limits start anew for each of several waits, and gloo's is five times as long."""
    import torch._dynamo  # noqa: F401 - or DDP's constructor does, while ranks that are there already wait for it
    where, limit = f"rank {rank} of {world_size} at {address}:{port}", f"{timeout:g} s at most (--timeout)"
    alone = (f"{where} waited in vain, {limit}: start all ranks, with one address, port, number of nodes and number of "
             "processes; where hosts have several networks, set GLOO_SOCKET_IFNAME to the interface of the right one")
    timers = (threading.Timer(4, say, [f"{where} waits for the others, {limit}"]),
              threading.Timer(timeout + 1, lambda: (say(f"error: {alone}"), os._exit(1))))
    for timer in timers:
        timer.daemon = True
        timer.start()
    choose_interface(address, int(port))
    try:
        yield
    except (RuntimeError, OSError) as error:
        if re.search("EADDRINUSE|address already in use", str(error), re.I):
            raise UsageError(f"port {port} is taken: choose another one, in MASTER_PORT") from None
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


def let_the_first_speak(error: Optional[BaseException], timeout: float) -> None:
    """Wait if `error` is a lost connection: the launcher ends all when one rank has ended, and reports that one."""
    if isinstance(error, RuntimeError) and re.match("(?is)(?!.*timed out).*(gloo|nccl|connection)", str(error)):
        time.sleep(min(5, timeout / 2))


def drop_references() -> None:
    """Let go of what holds the process group, so that destroy_process_group ends it, and its threads with it."""
    traceback.clear_frames(sys.exc_info()[2])
    gc.collect()
    time.sleep(0.1)  # its threads drop the last tensors: for that they need the GIL, which old torch would not give up


# ---- The steps of an epoch -------------------------------------------------------------------------
@dataclass
class Batch:
    """What a training step needs of one micro-batch, on the device of the model."""
    inputs: Any
    targets: Any
    weights: Tensor  # [batch], to be multiplied with the losses: see `batches`
    ends_step: bool  # whether the optimizer steps after this micro-batch
    counted: slice  # the samples that count; others are there twice
    loss_sum: Tensor

    def record(self, losses: Tensor) -> None:
        """Add the losses, [batch], to those of the epoch; they stay on the device, as reading them would wait for it.
        Raises ValueError if they are not one number per sample."""
        common.check_one_per_sample("losses", losses, len(self.weights))
        self.loss_sum += losses.detach()[self.counted].sum(dtype=torch.float64)


def batches(loader: DataLoader, state: TrainState, args: Namespace) -> Iterator[Batch]:
    """The micro-batches of this rank's shard, from where `state` is in its epoch.

    The weight of a sample is world_size / (samples of all ranks in this step): DDP then divides the sum by world_size,
    which leaves the mean over the step, as with one process and whole batches. DistributedSampler repeats samples to
    make the shards equally long; those have the weight 0.
    """
    (rank, world_size), sampler = rank_and_world_size(), loader.batch_sampler
    done = state.samples
    sampler.skip = done // world_size  # of this rank's shard
    shard = sampler.skip + len(sampler) * args.batch_size if sampler.drop_last else len(sampler.sampler)
    # Samples are numbered in the order in which all ranks together take them: rank, rank + world_size, …
    first, state.epoch_samples = sampler.skip * world_size, shard * world_size
    if isinstance(sampler.sampler, DistributedSampler):
        state.epoch_samples = min(state.epoch_samples, len(sampler.sampler.dataset))
    micro = args.batch_size * world_size  # a micro-batch of all ranks
    progress, count, device = Progress(state), len(loader), next(state.model.parameters()).device
    state.started, state.samples_before = time.perf_counter(), done
    state.new_random_numbers()
    for i, batch in enumerate(loader):
        inputs, targets = common.split_batch(batch, device)
        step_begins = first + i // args.accumulation_steps * args.accumulation_steps * micro
        step_ends = min(step_begins + args.accumulation_steps * micro, state.epoch_samples)
        own = range(first + i * micro + rank, min(first + (i + 1) * micro, shard * world_size), world_size)
        counted = slice(len(range(own.start, done, world_size)), len(range(own.start, state.epoch_samples, world_size)))
        weights = torch.full((len(own),), world_size / (step_ends - max(done, step_begins)), device=device)
        weights[:counted.start] = weights[counted.stop:] = 0
        if args.precision == "fp16":
            weights = state.scaler.scale(weights)  # so that small gradients do not become 0; unscaled before the step
        ends_step = (i + 1) % args.accumulation_steps == 0 or i + 1 == count
        yield Batch(inputs, targets, weights, ends_step, counted, state.loss_sum)
        progress.show(i + 1, count)
        if ends_step:
            state.step, state.samples = state.step + 1, step_ends
            if args.checkpoint_steps and state.step % args.checkpoint_steps == 0 and i + 1 < count:
                state.checkpoint_within_epoch()
    progress.clear()


class Progress:
    """A line that is updated in place, on rank 0, if standard output is a terminal."""

    def __init__(self, state: TrainState) -> None:
        self.state, self.shown = state, time.monotonic()
        self.on = rank_and_world_size()[0] == 0 and sys.stdout.isatty()

    def show(self, i: int, count: int) -> None:
        if self.on and time.monotonic() > self.shown + 0.5:  # reading the loss waits for the device
            self.shown, done = time.monotonic(), max(1, self.state.samples - self.state.samples_before)
            mean = self.state.loss_sum.item() * rank_and_world_size()[1] / done
            print(f"\repoch {self.state.epoch + 1}, batch {i}/{count}, loss {mean:.4f} ", end="", flush=True)

    def clear(self) -> None:
        if self.on:
            print("\r\033[K", end="", flush=True)


# ---- Training state and checkpoints ----------------------------------------------------------------
class TrainState:
    """All that training changes, and so all that a checkpoint holds."""

    def __init__(self, model: nn.Module, args: Namespace, data: Sequence[Dataset] = ()) -> None:
        """`data`: the three parts, of which a checkpoint keeps the lengths."""
        self.model, self.args, self.optimizer = model, args, common.make_optimizer(model, args)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        device = next(model.parameters()).device
        if device.type == "cpu":
            keep_freed_memory()
        scaler = getattr(torch.amp, "GradScaler", lambda _, **more: torch.cuda.amp.GradScaler(**more))  # before 2.3
        self.scaler = scaler(device.type, enabled=args.precision == "fp16")
        self.made_with = {**made_with(args, data), "world_size": rank_and_world_size()[1]}
        self.epoch = self.step = self.samples = 0  # epochs done; of the next, steps, and samples of all ranks in them
        self.epoch_samples = 1  # of the whole epoch, repeated ones not counted
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # this rank's, not yet in loss_total
        self.loss_total = 0.0  # the sum of the losses of all ranks in this epoch
        self.best_epoch, self.best_score, self.best_loss = 0, -math.inf, math.inf
        self.best_model: Optional[dict[str, Any]] = None
        self.history: list[dict[str, Any]] = []  # the lines of --metrics

    def new_random_numbers(self) -> None:
        """Other random numbers (dropout) on each rank, and such as a resumed run will have again from here on."""
        common.seed(self.args.seed, self.epoch, self.step, rank_and_world_size()[0])

    def optimizer_step(self) -> None:
        """Set the learning rate by the share of training that is done, clip the gradients, and step."""
        if isinstance(self.model, DDP):
            missing = [name for name, parameter in common.unwrap(self.model).named_parameters()
                       if parameter.requires_grad and parameter.grad is None]
            if missing:  # DDP would raise its error one forward later: after a step on gradients that are not averaged
                raise RuntimeError(f"Expected to have finished reduction: no gradient in this step for {missing}")
        share = (self.epoch + self.samples / self.epoch_samples) / self.args.epochs
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * common.schedule(share)
        if self.args.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def synchronize(self) -> float:
        """Sum the losses of all ranks and average BatchNorm's statistics, by one all-reduce; returns the mean loss of
        this epoch so far. Raises Failure if it is not finite."""
        common.average_batch_norm(self.model, self.loss_sum)
        self.loss_total += self.loss_sum.item()
        self.loss_sum.zero_()
        return self.require_finite("training", self.loss_total / max(1, self.samples))

    def require_finite(self, what: str, loss: float) -> float:
        if not math.isfinite(loss):
            raise Failure(f"epoch {self.epoch + 1}: the {what} loss is {loss}: training has diverged. Try a lower "
                          "--learning_rate, --max_grad_norm 1, or another --precision; a checkpoint was not replaced")
        return loss

    def end_training(self) -> dict[str, float]:
        """To be called when the batches of an epoch are done: its figures, of all ranks together."""
        loss, seconds = self.synchronize(), time.perf_counter() - self.started
        trained, self.samples, self.step, self.loss_total = self.samples - self.samples_before, 0, 0, 0.0
        return {"train_loss": loss, "samples_per_second": trained / seconds, "seconds": seconds,
                "learning_rate": self.optimizer.param_groups[0]["lr"]}

    def end_epoch(self, train: dict[str, float], valid_loss: float, valid_score: Optional[float]) -> None:
        """Count the epoch, and keep a copy of the weights if they are the best so far."""
        self.require_finite("validation", valid_loss)
        score = {} if valid_score is None else {"valid_accuracy": valid_score}
        self.history.append({"epoch": self.epoch, "train_loss": train.pop("train_loss"), "valid_loss": valid_loss,
                             **score, **train})
        self.epoch += 1
        valid_score = 0.0 if valid_score is None else valid_score
        if (valid_score, -valid_loss) > (self.best_score, -self.best_loss):  # the lower loss on a tie
            self.best_epoch, self.best_score, self.best_loss = self.epoch, valid_score, valid_loss
            self.best_model = copy.deepcopy(common.unwrap(self.model).state_dict())

    def load_best(self) -> None:
        """Put the weights of the best epoch into the model."""
        if self.best_model:
            common.unwrap(self.model).load_state_dict(self.best_model)

    SAVED = ("epoch", "step", "samples", "loss_total", "best_epoch", "best_score", "best_loss", "best_model", "history",
             "made_with")

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings, lists and dicts only, so that weights_only=True can read it."""
        return {"model": common.unwrap(self.model).state_dict(), "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(), **{name: getattr(self, name) for name in self.SAVED}}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """The inverse of `state_dict`. The optimizer's settings (learning rate, fused, …) stay this run's own."""
        common.unwrap(self.model).load_state_dict(content["model"])
        own = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({**content["optimizer"], "param_groups": own})
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():  # laid out as its parameter: fused optimizers go by the place in memory
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if content["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(content["scaler"])
        for name in self.SAVED[:-1]:
            setattr(self, name, content[name])

    def save(self, path: Optional[str]) -> None:
        """Write a checkpoint, on rank 0 of the world alone; do nothing without a path."""
        try:
            if path is not None:
                common.replace_file(path, lambda file: torch.save(self.state_dict(), file))
        except (OSError, RuntimeError) as error:
            while error.__context__ and not isinstance(error, OSError):  # torch's "unexpected pos" hides the disk's own
                error = error.__context__
            raise OSError(f"--checkpoint {path} could not be written ({error}); what was there before is whole: make "
                          "room, and continue with --resume") from None

    def checkpoint_within_epoch(self) -> None:
        """Save, and go on as a run will that is resumed from here."""
        loss = self.synchronize()
        if rank_and_world_size()[0] == 0:
            self.save(self.args.checkpoint)
            show(f"epoch {self.epoch + 1}/{self.args.epochs}, {self.samples} of {self.epoch_samples} samples, step "
                 f"{self.step}: mean loss {loss:.4f}, learning rate {self.optimizer.param_groups[0]['lr']:.3g}")
        self.new_random_numbers()


# What a resumed run must have as it was, and what may differ; all else changes nothing, or is about one machine.
FIXED = ("lengths", "dataset", "seed", "optimizer")
VARIABLE = ("batch_size", "accumulation_steps", "drop_last", "precision", "grad_sync", "compile", "max_grad_norm",
            "weight_decay", "learning_rate", "epochs", "checkpoint_steps")


def made_with(args: Namespace, data: Sequence[Dataset]) -> dict[str, Any]:
    """What a checkpoint says of the run that made it."""
    return {"lengths": lengths(data), **{name: getattr(args, name) for name in (*FIXED[1:], *VARIABLE)}}


def read_checkpoint(path: str, own: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The checkpoint in a file, mapped into memory; raises UsageError unless a run that is `made_with` this, and has
    this model, can continue it."""
    try:
        with warnings.catch_warnings(record=True):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(loaded, dict) or set(loaded) != {"model", "optimizer", "scaler", *TrainState.SAVED}:
            raise ValueError("it does not hold what these scripts save")
        for name in FIXED:
            if loaded["made_with"].get(name) != own[name]:
                raise ValueError(f"it was made with {name} {loaded['made_with'].get(name)}, this run has "
                                 f"{own[name]}")
        weights = common.unwrap(model).state_dict()
        for part in ("model", "best_model"):
            loaded[part] = loaded[part] and {re.sub(r"^((module|_orig_mod)\.)+", "", key): value
                                             for key, value in loaded[part].items()}  # made elsewhere, from a wrapper
            if loaded[part] and shapes(loaded[part]) != shapes(weights):
                raise ValueError("it is of another model, or of another vocabulary")
        return loaded
    except Exception as error:  # whatever is wrong, it cannot be resumed; torch's own words advise to trust the file
        reason = error if type(error) is ValueError else f"it cannot be read, {type(error).__name__}"
        raise UsageError(f"--resume: {path} is not a checkpoint of this run ({reason}); it was left as it is: "
                         "name another file, or start without --resume") from None


def shapes(weights: dict[str, Any]) -> dict[str, Any]:
    return {key: getattr(value, "shape", None) for key, value in weights.items()}


def start_or_resume(args: Namespace, state: TrainState, loader: DataLoader) -> None:
    """With --resume, continue --checkpoint if it exists. Rank 0 alone reads it: no shared file system is needed."""
    rank, world_size = rank_and_world_size()
    loaded: Any = None
    if args.resume and rank == 0 and os.path.exists(args.checkpoint):
        try:
            loaded = read_checkpoint(args.checkpoint, state.made_with, state.model)
        except UsageError as error:
            loaded = str(error)
    loaded = common.broadcast(loaded) if args.resume else None
    if isinstance(loaded, str):
        raise UsageError(loaded)
    if loaded is None:
        return
    if isinstance(state.model, DDP):
        warm_up(state.model, loader)
    state.load_state_dict(loaded)
    if rank == 0:
        within = f", step {state.step} of the next" * bool(state.step)
        show(f"going on from {args.checkpoint}, after epoch {state.epoch}{within}")
        was, now = loaded["made_with"], state.made_with
        changed = [f"{name} is {now[name]}, was {was.get(name)}" for name in VARIABLE if was.get(name) != now[name]]
        if changed:
            show(f"{'; '.join(changed)}: the bits will not be those of a run that was not interrupted")
        if was["world_size"] != world_size:
            show(f"{world_size} process(es) go on from a checkpoint of {was['world_size']}: the result will not be "
                 "bit-identical to that of a run that was not interrupted")
        write_metrics(args, state.history)


def warm_up(model: DDP, loader: DataLoader) -> None:
    """One backward pass, whose result is dropped, before a checkpoint is loaded.

    After its first backward DDP puts the gradients into other buckets, in which three ranks or more sum them in another
    order. A resumed run must have these buckets from its first step, as the run had that was interrupted."""
    device = next(model.parameters()).device
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # some may not be in the checkpoint
    inputs, targets = common.split_batch(next(iter(loader)), device)
    common.losses(model.train()(inputs), targets).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


# ---- Files and reports -----------------------------------------------------------------------------
def check_files(args: Namespace, data: Sequence[Dataset]) -> None:
    """Before anything starts, on rank 0: raise UsageError if the data or a file to write or to continue is unusable."""
    own = made_with(args, data)
    for option, path in (("--checkpoint", args.checkpoint), ("--metrics", args.metrics)):
        try:
            if path:
                tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
                if os.path.isdir(path) or os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK):
                    raise OSError("not a file that may be read and written")
        except OSError as error:
            raise UsageError(f"{option} {path}: cannot write there ({error.strerror or error}); name a file in a folder"
                             " that exists and is writable") from None
    if args.resume and not args.checkpoint:
        raise UsageError("--resume needs --checkpoint FILE, the file to continue from")
    if args.resume and os.path.exists(args.checkpoint):
        read_checkpoint(args.checkpoint, own, common.build_model(args, data[0]))


def lengths(data: Sequence[Dataset]) -> list[int]:
    """The lengths of the three parts of the data; raises UsageError if one is unusable."""
    if any(isinstance(part, IterableDataset) for part in data):
        raise UsageError("load_data returned an IterableDataset, which has no indices to share out among the ranks: "
                         "return map-style data sets, with __len__ and __getitem__")
    found = [len(part) for part in data]
    if not all(found):
        raise UsageError(f"training, validation and test need a sample each; they have {found}")
    return found


def show(text: str) -> None:
    """Print a line of results."""
    print(text, flush=True)


def log(args: Namespace, state: TrainState, *test: Optional[float]) -> None:
    """Write --metrics, and print the figures of the epoch that has ended, or of the test (loss and score)."""
    names = ("test_loss", "test_accuracy")
    line = {name: value for name, value in zip(names, test) if value is not None} if test else state.history[-1]
    write_metrics(args, [*state.history, *([{**line, "world_size": rank_and_world_size()[1]}] if test else [])])
    formats = {"train_loss": "train loss {:.4f}", "valid_loss": "valid loss {:.4f}", "test_loss": "test loss {:.4f}",
               "valid_accuracy": "valid accuracy {:.2%}", "test_accuracy": "test accuracy {:.2%}",
               "samples_per_second": "{:.0f} samples/s"}
    text = ", ".join(formats[name].format(value) for name, value in line.items() if name in formats)
    show(f"{text}, weights of epoch {state.best_epoch}" if test else f"epoch {state.epoch}/{args.epochs}: {text}")


def write_metrics(args: Namespace, lines: list[dict[str, Any]]) -> None:
    if args.metrics:
        lines = [{k: v if math.isfinite(v) else None for k, v in line.items()} for line in lines]  # JSON has no nan
        try:
            common.replace_file(args.metrics, lambda file: file.writelines(f"{json.dumps(line)}\n".encode()
                                                                           for line in lines))
        except OSError as error:  # the training is worth more, and the next epoch writes these lines too
            say(f"--metrics {args.metrics} could not be written ({error.strerror}); the training goes on")


def gather_text(text: str) -> list[str]:
    """The `text` of every rank, by rank, cut to 200 bytes. As bytes, not objects: nothing is unpickled."""
    if not dist.is_initialized():
        return [text]
    row = torch.tensor(list(text.encode()[:200].ljust(200)), dtype=torch.uint8, device=common.comm_device())
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [bytes(row.tolist()).decode(errors="ignore").rstrip() for row in rows]


def report_processes(local_rank: int, device: torch.device, args: Namespace) -> None:
    """Rank 0 prints who is where, a line for each rank, and what they use."""
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    line = f"host {socket.gethostname()}, local rank {local_rank}, device {name}, pid {os.getpid()}"
    lines = gather_text(line + f", torch {torch.__version__}, {torch.get_num_threads()} threads" * args.check)
    if rank_and_world_size()[0] == 0:
        for rank, line in enumerate(lines):
            print(f"rank {rank} of {len(lines)}: {line}")
        print(f"backend {dist.get_backend() if dist.is_initialized() else 'none'}, torch {torch.__version__}, "
              f"{torch.get_num_threads()} threads per process, "
              f"global batch {args.batch_size * len(lines) * args.accumulation_steps}", flush=True)
        if device.type == "cpu" and args.device == "auto" and torch.cuda.is_available():
            print("on the CPU, as there are fewer GPUs than processes on this node", flush=True)


def check(rank: int, local_rank: int, world_size: int, device: torch.device, args: Namespace) -> None:
    """Say, in place of training, who is where, whether they fit together, and whether all-reduces are right and fast.

    Bus bandwidth as in NCCL's tests: bytes / time * 2 (n - 1) / n with n ranks. It is what each rank's link has to
    carry, to be compared with what the hardware can, whatever n is. The exit code is 1 if anything is wrong.
    """
    report_processes(local_rank, device, args)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    facts = gather_text(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {kind}")
    problems = [f"rank {other} has {fact}, but rank 0 has {facts[0]}" for other, fact in enumerate(facts)
                if fact != facts[0]]
    places = Counter(gather_text(f"{device} of host {socket.gethostname()}"))
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
        wrong = [other for other, text in enumerate(gather_text(str(right))) if text != "True"]
        problems += [f"all-reduce of {name}: wrong sums on rank {other}" for other in wrong]
        second = common.reduce_mean(statistics.median(seconds[1:])).item()  # the first one opens connections
        if rank == 0:
            print(f"all-reduce of {name:>5}: {1000 * second:8.3f} ms, bus bandwidth "
                  f"{size / second * 2 * (world_size - 1) / world_size / 1e9:7.3f} GB/s", flush=True)
    if rank == 0:
        print("\n".join(problems or ["all is well"]), flush=True)
    if problems:
        raise RuntimeError(f"--check: {'; '.join(problems)}")
