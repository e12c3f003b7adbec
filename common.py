"""What the three scripts share: errors, options, data, models, collectives, the two loops, checkpoints and reports.

Every function works with a process group and without one. Import this module before torch, as it imports torch in half
the time; that is all that importing it does.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import gzip
import io
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from array import array
from collections import Counter
from pathlib import Path
from typing import IO, Any, Callable, Iterator, Optional, Sequence

PARENT = os.getppid()  # the launcher, if there is one; early, as it could be gone by the time that torch is imported

gc.disable()  # it would look through all that torch is made of, again and again: that is half of the start-up time
with warnings.catch_warnings():  # imported without numpy, which nothing here needs, torch warns
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch
import torch.distributed as dist
import torch.distributed.nn  # or DDP does later: defaults of its functions then hold the process group for ever
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
gc.freeze()  # nor shall it look through that later
gc.enable()


# ---- Errors ----------------------------------------------------------------------------------------
class UsageError(Exception):
    """A wrong option or an unusable file: one line that says what is wrong and what to do."""


def run(main: Callable[[], None]) -> None:
    """Call `main`; a UsageError becomes one line on standard error and exit code 2."""
    try:
        main()
    except UsageError as error:
        # All processes of a node find the same mistake. Those whose local rank is not 0 let the first say so; then the
        # launcher ends them.
        if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")).strip("0").isdecimal():
            time.sleep(5)
        say(f"error: {error}")
        sys.exit(2)


def say(text: str) -> None:
    """Print one line on standard error, which may be gone."""
    with contextlib.suppress(OSError):
        print(f"{os.path.basename(sys.argv[0])}: {' '.join(text.split())}", file=sys.stderr, flush=True)


# ---- Options ---------------------------------------------------------------------------------------
DATASETS = ("synthetic", "MNIST", "Subj")
LEARNING_RATES = {"adam": 0.005, "sgd": 0.05}


class Parser(argparse.ArgumentParser):
    """Takes --long_names with dashes too, names each default, and reports a mistake as a UsageError, in one line."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        if settings.get("default") not in (None, argparse.SUPPRESS):
            settings["help"] += " (default: %(default)s)"
        return super().add_argument(*names, *[name.replace("_", "-") for name in names if "_" in name], **settings)

    def error(self, message: str) -> Any:
        raise UsageError(f"{message} (--help lists the options)")


def number(kind: Callable[[str], Any], low: float, high: float = 2**31 - 1) -> Callable[[str], Any]:
    """An option type: an int or a float, as `kind` says, from `low` to `high`."""
    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number from {low} to {high}")
    return parse


COUNT, COUNT_OR_NONE, POSITIVE = number(int, 1), number(int, 0), number(float, 1e-9, 1e9)


def make_parser(description: Optional[str], ddp: bool = True) -> Parser:
    """The options of all three scripts; `ddp` adds those that need several processes."""
    parser = Parser(description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = {name.lower(): name for name in DATASETS}
    add("--dataset", type=lambda text: names.get(text.lower(), text), choices=DATASETS, default="synthetic",
        help="in upper or lower case")
    add("--data_root", default="data", metavar="DIR", help="holds MNIST/raw and Subj")
    add("--download", action="store_true", help="fetch missing files, once per node, and check them; the variables "
        "MNIST_URL and SUBJ_URL may name the folder and the archive to fetch from (default: off)")
    add("--epochs", type=COUNT_OR_NONE, default=2 if ddp else None, metavar="N", help="over the training data" if ddp
        else "train, so many times over the data (default: none; random vectors are passed through)")
    add("--batch_size", type=COUNT, default=100, metavar="N", help=f"samples per step{' and process' * ddp}")
    add("--learning_rate", type=POSITIVE, metavar="LR", help="falls to 0 along a half cosine (default: "
        f"{LEARNING_RATES['adam']} for adam, {LEARNING_RATES['sgd']} for sgd)")
    add("--optimizer", choices=tuple(LEARNING_RATES), default="adam", help="SGD has a momentum of 0.9")
    add("--num_workers", type=COUNT_OR_NONE, default=0, metavar="N", help="data-loading processes per training process")
    add("--seed", type=COUNT_OR_NONE, default=0, metavar="N", help="of split, weights and order")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs, if each process can have one")
    if ddp:
        add("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="auto: nccl on GPUs, gloo on CPUs")
        add("--grad_sync", choices=("ddp", "manual"), default="ddp", help="manual: average_gradients, no DDP wrapper")
        add("--compile", action="store_true", help="torch.compile the model: a longer start, then faster steps for all "
            "but small models (default: off)")
        add("--check", action="store_true", help="instead of training, say who is where, and whether all-reduces are "
            "right, and how fast (default: off)")
    add("--timeout", type=POSITIVE, default=600, metavar="SECONDS",
        help="how many seconds to wait for other ranks, a download or a data-loading process, before an error")
    add("--accumulation_steps", type=COUNT, default=1, metavar="N", help="micro-batches of --batch_size per step")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="autocast; fp16 needs a GPU")
    add("--max_grad_norm", type=POSITIVE, metavar="X", help="clip the norm of the averaged gradients (default: off)")
    add("--checkpoint", metavar="FILE", help="written after every epoch (default: none)")
    add("--resume", action="store_true", help="go on from --checkpoint if that file exists (default: off)")
    add("--metrics", metavar="FILE", help="JSON Lines: an object per epoch, then the test result (default: none)")
    if not ddp:
        parser.set_defaults(backend="auto", grad_sync="ddp", compile=False, check=False)
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


# ---- Data ------------------------------------------------------------------------------------------
class Rows(TensorDataset):
    """Samples in memory: inputs [n, ...] and targets [n] int64."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """A DataLoader asks for a whole batch where it finds this: one copy, instead of one for each sample."""
        rows = torch.frombuffer(array("q", indices), dtype=torch.int64)  # a fifth of torch.tensor's time
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)

    @staticmethod
    def collate_fn(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return batch


class Sentences(Rows):
    """Token ids [n, longest sentence] and targets [n], padded with 0; a batch is cut to its own longest sentence."""

    @staticmethod
    def collate_fn(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return batch[0][:, :max(1, int(batch[0].any(0).sum()))], batch[1]


def load_data(args: Namespace) -> tuple[Dataset, Dataset, Dataset]:
    """Training, validation and test part, equal on every rank, as only files and --seed decide.
    For your own data, return three map-style data sets of (input, class number)."""
    generator = torch.Generator().manual_seed(args.seed)
    if args.dataset == "synthetic":  # ten Gaussian clusters in 20 dimensions
        targets = torch.randint(10, (5500,), generator=generator)
        inputs = 1.5 * torch.randn(10, 20, generator=generator)[targets] + torch.randn(5500, 20, generator=generator)
        return tuple(Rows(inputs[a:b], targets[a:b]) for a, b in ((0, 4000), (4000, 4500), (4500, 5500)))
    folder = os.path.join(args.data_root, *("MNIST", "raw") if args.dataset == "MNIST" else ("Subj",))
    if args.download:
        import tools
        tools.download(args.dataset, folder, args.timeout)
    return load_mnist(folder, generator) if args.dataset == "MNIST" else load_subj(folder, generator)


def load_mnist(folder: str, generator: torch.Generator) -> tuple[Rows, Rows, Rows]:
    """Images [n, 1, 28, 28] uint8; a tenth of the training file is the validation part."""
    parts = []
    for name in ("train", "t10k"):
        images = read_idx(os.path.join(folder, f"{name}-images-idx3-ubyte"), (28, 28)).unsqueeze(1)
        labels = read_idx(os.path.join(folder, f"{name}-labels-idx1-ubyte"), ()).long()
        if len(images) != len(labels) or labels.max() > 9 or len(images) < 2 and name == "train":
            raise UsageError(f"{folder}: {name} has {len(images)} images, {len(labels)} labels up to {labels.max()}; "
                             "expected are a label from 0 to 9 for each image, and two images or more to train with")
        parts.append(Rows(images, labels))
    order, tenth = torch.randperm(len(parts[0]), generator=generator), max(1, len(parts[0]) // 10)
    return Rows(*parts[0][order[tenth:]]), Rows(*parts[0][order[:tenth]]), parts[1]


def read_idx(path: str, shape: tuple[int, ...]) -> Tensor:
    """The bytes of an IDX file, [n, *shape] uint8, n >= 1. Format: http://yann.lecun.com/exdb/mnist/"""
    path += ".gz" * (not os.path.exists(path) and os.path.exists(path + ".gz"))
    what = "an IDX file of MNIST, with 28x28 images" if shape else "an IDX file of MNIST, with labels"
    content, header, size = bytearray(read_file(path, what)), 4 * (2 + len(shape)), math.prod(shape)
    count = (len(content) - header) // size
    if (count < 1 or len(content) != header + count * size
            or content[:header] != b"".join(n.to_bytes(4, "big") for n in (0x0801 + len(shape), count, *shape))):
        raise UsageError(f"{path} is malformed, empty or truncated: {what} is expected there; fetch it again")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).reshape(-1, *shape)


def load_subj(folder: str, generator: torch.Generator) -> tuple[Sentences, Sentences, Sentences]:
    """Objective (0) and subjective (1) sentences, 80/10/10. Source: Pang and Lee, ACL 2004."""
    sentences: list[list[bytes]] = []
    targets: list[int] = []
    for target, name in enumerate(("plot.tok.gt9.5000", "quote.tok.gt9.5000")):
        what = "text of the subjectivity data set, one sentence a line,"
        content = read_file(os.path.join(folder, name), what)
        # Words stay bytes: no encoding to get wrong (it is windows-1252), no 0x85 that would end a line once decoded.
        lines = [line.split() for line in content.split(b"\n")]
        if b"\0" in content or not any(lines):
            raise UsageError(f"{os.path.join(folder, name)} is malformed or empty: {what} is expected there")
        sentences += filter(None, lines)  # a blank line is no sample
        targets += [target] * (len(sentences) - len(targets))
    if len(sentences) < 3:
        raise UsageError(f"{folder}: {len(sentences)} sentences; at least 3 are needed, one for each part")
    order, tenth = torch.randperm(len(sentences), generator=generator).tolist(), max(1, len(sentences) // 10)
    parts = (order[2 * tenth:], order[tenth:2 * tenth], order[:tenth])
    # From the training part alone, by frequency and then by the word: walking a set differs from process to process.
    counts = Counter(word for i in parts[0] for word in sentences[i])
    ids = {word: 1 + i for i, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)))}
    rows = [torch.tensor([ids[word] for word in words if word in ids], dtype=torch.int64) for words in sentences]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tuple(Sentences(tokens[part], torch.tensor(targets)[part]) for part in parts)


def read_file(path: str, what: str) -> bytes:
    """The bytes of a file, unpacked if it is a .gz; raises UsageError, with `what` is expected there."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            return file.read()
    except Exception as error:  # of the file system, or of gzip
        raise UsageError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}): {what} is expected "
                         "there; set --data_root, or fetch it, with --download for instance") from None


def make_loader(dataset: Dataset, sampler: Any, args: Namespace, device: torch.device) -> DataLoader:
    """Batches of the samples that `sampler` (any sized iterable of indices) names."""
    workers = args.num_workers > 0
    return DataLoader(dataset, args.batch_size, sampler=sampler, collate_fn=getattr(dataset, "collate_fn", None),
                      pin_memory=device.type == "cuda", num_workers=args.num_workers, timeout=workers * args.timeout,
                      # Processes of mp.spawn would spawn their workers, which import torch again.
                      multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
                      # Not forked anew in each epoch, while threads of the last one end: that hangs now and then. And
                      # seeded apart, so that whether they are started now or not does not change dropout.
                      persistent_workers=workers,
                      generator=torch.Generator().manual_seed(args.seed + rank_and_world_size()[0]))


# ---- Models ----------------------------------------------------------------------------------------
class ConvNet(nn.Module):
    """[batch, 1, 28, 28] uint8 to [batch, 10]; yangkky.github.io/2019/07/08/distributed-pytorch-tutorial.html."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(7 * 7 * 32, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers((images.float() / 255 - 0.1307) / 0.3081)  # mean and deviation of MNIST's pixels


def build_model(args: Namespace, train: Dataset) -> nn.Module:
    """The network for what `load_data` returned: [batch, classes] from a batch of inputs. Put your own here."""
    if args.dataset == "MNIST":
        return ConvNet()
    if args.dataset == "Subj":  # the mean of the words' embeddings, without the padding, and a linear layer
        words = nn.EmbeddingBag(int(train.tensors[0].max()) + 1, 256, mode="mean", padding_idx=0)
        nn.init.normal_(words.weight, 0, 0.1)
        return nn.Sequential(words, nn.Linear(256, 2))
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DataParallel, DistributedDataParallel and torch.compile, however nested."""
    while isinstance(model, (nn.DataParallel, DDP)) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, (nn.DataParallel, DDP)) else model._orig_mod
    return model


# DDP would broadcast buffers in each forward; average_buffers does it once an epoch. torch 2.13 renamed the option.
NO_BUFFER_SYNC = {"forward_sync_buffers" if "forward_sync_buffers" in DDP.__init__.__code__.co_varnames
                  else "broadcast_buffers": False}


# ---- Collectives -----------------------------------------------------------------------------------
BUCKET_BYTES = 25 * 1024 * 1024  # as DDP's own buckets


def rank_and_world_size() -> tuple[int, int]:
    """(0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def comm_device() -> torch.device:
    """Where a tensor must lie for the process group to take it: for nccl on the current GPU."""
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


def reduce_mean(value: Any, nprocs: Optional[int] = None) -> Tensor:
    """The mean of `value`, a tensor of any shape or a Python number, over all ranks.

    Returns a new, detached tensor on the device of `value`: floating tensors in their own dtype, everything else
    in float64. Every rank must call it, with the same shape; dtypes may differ, as the sum is made in float64.
    `nprocs` is kept from the notes. Raises ValueError if it is given and is not the world size.
    """
    world_size = rank_and_world_size()[1]
    if nprocs is not None and nprocs != world_size:
        raise ValueError(f"reduce_mean: nprocs is {nprocs}, but the world size is {world_size}")
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    result = tensor.to(comm_device()).to(torch.float64, memory_format=torch.contiguous_format, copy=True)
    if dist.is_initialized():
        dist.all_reduce(result)
        result /= world_size
    return result.to(tensor.device, tensor.dtype if tensor.is_floating_point() else torch.float64)


@functools.lru_cache(maxsize=2)  # new memory in each step would cost more time than filling it
def bucket_row(turn: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The memory of a bucket; `turn`, 0 or 1, as two are in use at a time."""
    return torch.empty(size, dtype=dtype, device=device)


@functools.lru_cache(maxsize=64)  # copied to a GPU once, as a copy waits for what the GPU does
def constant(values: tuple[bool, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values as a tensor, which is not to be changed."""
    return torch.tensor(values, dtype=dtype, device=device)


def gradient_buckets(model: nn.Module) -> Iterator[tuple[Tensor, list[tuple[nn.Parameter, int, int]]]]:
    """Lay the trainable parameters end to end, those of one device and dtype in one row, and cut it into buckets: lists
    of (parameter, start, end). Alike on all ranks, whatever gradients they have. With each comes the memory for it."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():  # a shared parameter comes once
        if parameter.requires_grad:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    turns = itertools.cycle((0, 1))
    for (device, dtype), parameters in kinds.items():
        dtype = torch.promote_types(dtype, torch.float32)  # half precision is summed in float32
        size = BUCKET_BYTES // dtype.itemsize
        starts = [0, *itertools.accumulate(parameter.numel() for parameter in parameters)]  # of each, all in one row
        for at in range(0, starts[-1], size):
            yield bucket_row(next(turns), min(size, starts[-1]) + 2 * len(parameters), dtype, device), [
                (parameter, max(0, at - start), min(parameter.numel(), at + size - start))
                for parameter, start in zip(parameters, starts) if at - parameter.numel() < start < at + size]


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by the mean of all ranks' gradients; call it after backward and before the step.

    A gradient that is missing on some ranks counts as zero there; one missing on all stays None. Half precision is
    summed in float32, so that nothing overflows. A sparse gradient stays sparse, but travels dense. Without a process
    group there is nothing to do. Not needed with DDP, which has averaged by the end of backward. Takes the memory of
    two buckets, 50 MiB at most, and keeps it for the next call.
    """
    world_size = rank_and_world_size()[1]
    if world_size == 1:
        return
    dense: dict[nn.Parameter, Tensor] = {}  # each gradient as one row: a view of it, if it is dense and contiguous
    flying: list[Any] = []
    for row, bucket in gradient_buckets(model):
        pieces, flags = [], []
        for parameter, start, end in bucket:
            grad = parameter.grad
            if start == 0:
                whole = torch.zeros_like(parameter) if grad is None else grad.to_dense() if grad.is_sparse else grad
                dense[parameter] = whole.reshape(-1)
            pieces.append(dense[parameter][start:end])
            # Every rank sends every parameter, and along with it whether it has a gradient: ranks that left some out
            # would pair up different tensors, and asking first would cost a collective.
            flags += grad is not None, grad is not None and grad.is_sparse
        flat = row[:sum(end - start for _, start, end in bucket) + len(flags)]
        torch.cat([*pieces, constant(tuple(flags), row.dtype, row.device)], out=flat)
        flying.append((dist.all_reduce(flat, async_op=True), bucket, pieces, flat))
        if len(flying) == 2:  # while this bucket travels, the one before is unpacked and the next is packed
            put_means(*flying.pop(0), dense, world_size)
    for last in flying:
        put_means(*last, dense, world_size)


def put_means(work: Any, bucket: list, pieces: list[Tensor], flat: Tensor, dense: dict[nn.Parameter, Tensor],
              world_size: int) -> None:
    """Wait for the sums of a bucket, and put the means where its pieces came from."""
    work.wait()
    sums, flags = flat.split([len(flat) - 2 * len(bucket), 2 * len(bucket)])
    torch._foreach_copy_(pieces, sums.div_(world_size).split([end - start for _, start, end in bucket]))
    for i, (parameter, _, end) in enumerate(bucket):
        if end < parameter.numel():  # the rest of it comes with the next bucket
            continue
        mean, grad = dense.pop(parameter), parameter.grad
        if grad is None:
            somewhere, sparse = flags[2 * i:2 * i + 2].tolist()  # waits for the device: only where one is missing
            if somewhere:
                mean = mean.view(parameter.shape)
                parameter.grad = mean.to_sparse(1) if sparse else mean
        elif grad.is_sparse:
            parameter.grad = mean.view(parameter.shape).to_sparse(grad.sparse_dim())
        elif mean.data_ptr() != grad.data_ptr():  # of a gradient that is not contiguous, `dense` has a copy
            grad.copy_(mean.view(parameter.shape))


def average_buffers(model: nn.Module) -> None:
    """Give all ranks the mean of BatchNorm's statistics, which each has from its own shard: one model is evaluated."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(reduce_mean(buffer))


def gather_text(text: str) -> list[str]:
    """The `text` of every rank, by rank, cut to 200 bytes. As bytes, not objects: nothing is unpickled."""
    if not dist.is_initialized():
        return [text]
    row = torch.tensor(list(text.encode()[:200].ljust(200)), dtype=torch.uint8, device=comm_device())
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [bytes(row.tolist()).decode(errors="ignore").rstrip() for row in rows]


# ---- The two loops ---------------------------------------------------------------------------------
def autocast(args: Namespace, device: torch.device) -> Any:
    """The context for a forward in --precision."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, dtypes[args.precision]) if args.precision in dtypes else contextlib.nullcontext()


def train_one_epoch(model: nn.Module, loader: DataLoader, state: TrainState, args: Namespace) -> dict[str, float]:
    """Train on this rank's shard; returns train_loss, samples_per_second and seconds of all ranks together.

    DistributedSampler gives a rank every world_size-th sample, and repeats some to make the shards even. Each real one
    gets the weight 1 / (samples of all ranks in this step), a repeated one none: as with one process and whole batches.
    """
    (rank, world_size), device = rank_and_world_size(), next(model.parameters()).device
    samples, batch_size = len(loader.dataset), args.batch_size
    per_step = batch_size * world_size * args.accumulation_steps
    show_progress, shown = rank == 0 and sys.stdout.isatty(), time.monotonic()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    started = time.perf_counter()
    model.train()
    for i, (inputs, targets) in enumerate(loader):
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        ends_step = (i + 1) % args.accumulation_steps == 0 or i + 1 == len(loader)
        in_this_step = min(per_step, samples - i // args.accumulation_steps * per_step)
        real = min(batch_size, len(range(rank + i * batch_size * world_size, samples, world_size)))
        # DDP communicates in backward; before the last micro-batch of a step that would be wasted.
        quiet = isinstance(model, DDP) and not ends_step
        with model.no_sync() if quiet else contextlib.nullcontext():
            with autocast(args, device):
                outputs = model(inputs)
                if real < len(targets):
                    outputs, targets = outputs[:real], targets[:real]
                loss = F.cross_entropy(outputs, targets, reduction="sum")
            # Backward's argument is the weight of each sample: in a step of 200, 1/200, times the world size, by which
            # DDP divides. To multiply the loss by it would come to the same, and take longer.
            state.scaler.scale(loss).backward(loss.new_full((), world_size / in_this_step))
        loss_sum += loss.detach()  # stays on the device: reading it would wait for it
        if ends_step:
            if args.grad_sync == "manual":
                average_gradients(model)  # after backward: before it, there are only the gradients of the last step
            state.optimizer_step(args.max_grad_norm)
        if show_progress and time.monotonic() > shown + 0.5:
            shown, mean = time.monotonic(), loss.item() / max(1, real)  # waits for the device, twice a second at most
            print(f"\repoch {state.epoch + 1}, batch {i + 1}/{len(loader)}, loss {mean:.4f} ", end="", flush=True)
    if show_progress:
        print("\r\033[K", end="", flush=True)
    if dist.is_initialized():
        dist.all_reduce(loss_sum)
    train_loss, seconds = loss_sum.item() / samples, time.perf_counter() - started
    return {"train_loss": train_loss, "samples_per_second": samples / seconds, "seconds": seconds}


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Mean loss and accuracy (0 to 1) over all samples of all ranks' loaders; these may differ in length."""
    model = unwrap(model)  # a forward of DDP may communicate, and would wait for ranks that have no batch left
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, hits, samples
    for inputs, targets in loader:
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        outputs = model(inputs)
        sums[0] += F.cross_entropy(outputs, targets, reduction="none").sum(dtype=torch.float64)
        sums[1] += (outputs.argmax(1) == targets).sum()
        sums[2] += len(targets)
    model.train(was_training)
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, hits, samples = sums.tolist()
    return loss / samples, hits / samples


# ---- Checkpoints and reports -----------------------------------------------------------------------
class TrainState:
    """All that training changes, and so all that a checkpoint holds. `batches` is per epoch and rank."""

    def __init__(self, model: nn.Module, args: Namespace, batches: int) -> None:
        self.model = model
        kind, more = (torch.optim.Adam, {}) if args.optimizer == "adam" else (torch.optim.SGD, {"momentum": 0.9})
        more["lr"] = args.learning_rate or LEARNING_RATES[args.optimizer]
        try:  # in one pass over the memory: even on a CPU that makes Subj's training almost twice as fast
            self.optimizer = kind(model.parameters(), fused=True, **more)
        except (TypeError, RuntimeError):  # not in this torch, or not for this device
            self.optimizer = kind(model.parameters(), **more)
        steps = max(1, args.epochs * math.ceil(batches / args.accumulation_steps))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))
        scaler = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)  # it moved in torch 2.3
        self.scaler = scaler(enabled=args.precision == "fp16")
        self.made_with = {"dataset": args.dataset, "optimizer": args.optimizer}  # to be the same in a resume
        self.world_size = rank_and_world_size()[1]
        self.epoch = self.best_epoch = 0  # epochs are counted as they are done
        self.best_accuracy, self.best_model = -1.0, None
        self.history: list[dict[str, Any]] = []  # the lines of --metrics

    def optimizer_step(self, max_grad_norm: Optional[float]) -> None:
        """Clip, step, and clear the gradients, which would add up otherwise."""
        if max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()  # also where fp16 overflowed and this step was left out: to ask is to wait for the device
        self.optimizer.zero_grad()

    def end_epoch(self, train: dict[str, float], valid_loss: float, valid_accuracy: float) -> None:
        """Count the epoch, and keep a copy of the weights if they are the best so far."""
        self.history.append({"epoch": self.epoch, "train_loss": train.pop("train_loss"), "valid_loss": valid_loss,
                             "valid_accuracy": valid_accuracy, **train})
        self.epoch += 1
        if valid_accuracy > self.best_accuracy:
            self.best_accuracy, self.best_epoch = valid_accuracy, self.epoch
            self.best_model = {key: value.clone() for key, value in unwrap(self.model).state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings, lists and dicts only, so that weights_only=True can read it."""
        return {name: value.state_dict() if hasattr(value, "state_dict") else value
                for name, value in {**vars(self), "model": unwrap(self.model)}.items()}

    def save(self, path: Optional[str]) -> None:
        """Write a checkpoint, on rank 0 of the world alone; do nothing without a path."""
        try:
            if path is not None:
                replace_file(path, lambda file: torch.save(self.state_dict(), file))
        except (OSError, RuntimeError) as error:
            while error.__context__ and not isinstance(error, OSError):  # torch's "unexpected pos" hides the disk's own
                error = error.__context__
            raise OSError(f"--checkpoint {path} could not be written ({error}); what was there before is whole: make "
                          "room, and go on with --resume") from None

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for name, value in {**vars(self), "model": unwrap(self.model)}.items():
            if hasattr(value, "state_dict"):
                value.load_state_dict(content[name])
            else:
                setattr(self, name, content[name])


def replace_file(path: str, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file whole or not at all: under another name, to the disk, then in place of the old one."""
    path = os.path.realpath(path)
    temporary = path + ".tmp"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


def read_checkpoint(path: str, content: bytes, state: TrainState) -> dict[str, Any]:
    """The checkpoint in `content`; raises UsageError unless it fits the model, the data set and the optimizer."""
    try:
        with warnings.catch_warnings(record=True):
            loaded, own = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True), state.state_dict()
        if set(loaded) != set(own) or loaded["made_with"] != own["made_with"]:
            raise ValueError(f"it does not hold what a run with {own['made_with']} saves")
        for part in ("model", "best_model"):
            if set(loaded[part] or own["model"]) != set(own["model"]):  # made elsewhere, from the wrapper
                loaded[part] = {re.sub(r"^((module|_orig_mod)\.)+", "", k): v for k, v in loaded[part].items()}
            shapes = {k: v.shape for k, v in (loaded[part] or own["model"]).items()}
            if shapes != {k: v.shape for k, v in own["model"].items()}:
                raise ValueError("it is of another model, or of another vocabulary")
        return loaded
    except Exception as error:  # whatever is wrong, it cannot be resumed; torch's own words advise to trust the file
        reason = error if type(error) is ValueError else f"it cannot be read, {type(error).__name__}"
        raise UsageError(f"--resume: {path} is not a checkpoint of this run ({reason}); it was left as it is: "
                         "name another file, or start without --resume") from None


def resume(args: Namespace, state: TrainState, loader: DataLoader) -> None:
    """Go on from --checkpoint if it exists. Rank 0 alone reads it, so no shared file system is needed."""
    rank, world_size = rank_and_world_size()
    content = bytearray(Path(args.checkpoint).read_bytes() if rank == 0 and os.path.exists(args.checkpoint) else b"")
    size = round(reduce_mean(len(content)).item() * world_size)  # the other ranks have 0 bytes
    if not size:
        return
    if world_size > 1:
        content = content or bytearray(size)
        received = torch.frombuffer(content, dtype=torch.uint8).to(comm_device())
        dist.broadcast(received, src=0)
        torch.frombuffer(content, dtype=torch.uint8).copy_(received)
    state.load_state_dict(read_checkpoint(args.checkpoint, content, state))
    if rank == 0:
        print(f"going on from {args.checkpoint}, after epoch {state.epoch}", flush=True)
        if state.world_size != world_size:
            print(f"{world_size} process(es) go on from a checkpoint of {state.world_size}: the result will not be "
                  "bit-identical to that of a run that was not interrupted", flush=True)
    state.world_size = world_size
    if isinstance(state.model, DDP):
        # After its first backward DDP puts the gradients into other buckets, in which three ranks or more sum them in
        # another order. A run that goes on has them from its first step, by one backward that changes nothing else.
        device = next(state.model.parameters()).device
        inputs, targets = next(iter(loader))
        with autocast(args, device):
            F.cross_entropy(state.model.eval()(inputs.to(device)), targets.to(device)).backward()
        state.optimizer.zero_grad()


def check_files(args: Namespace, data: Sequence[Dataset]) -> None:
    """Before anything starts, on rank 0: raise UsageError if a part of the data is empty, or a file to write or to go
    on from is unusable."""
    if not all(map(len, data)):
        raise UsageError(f"training, validation and test need a sample each; they have {[len(part) for part in data]}")
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
        raise UsageError("--resume needs --checkpoint FILE, the file to go on from")
    if args.resume and os.path.exists(args.checkpoint):
        state = TrainState(build_model(args, data[0]), args, batches=1)
        read_checkpoint(args.checkpoint, Path(args.checkpoint).read_bytes(), state)


def log(args: Namespace, state: TrainState, *test: float) -> None:
    """Print the figures of the epoch that has ended, or of the test (loss and accuracy), and write all to --metrics."""
    lines = list(state.history)
    if test:
        print("test loss {:.4f}, test accuracy {:.2%}, weights of epoch {}".format(*test, state.best_epoch), flush=True)
        lines.append({"test_loss": test[0], "test_accuracy": test[1], "world_size": state.world_size})
    else:
        epoch = ("epoch {}/{}: train loss {train_loss:.4f}, valid loss {valid_loss:.4f}, valid accuracy "
                 "{valid_accuracy:.2%}, {samples_per_second:.0f} samples/s")
        print(epoch.format(state.epoch, args.epochs, **lines[-1]), flush=True)
    if args.metrics:
        lines = [{k: v if math.isfinite(v) else None for k, v in line.items()} for line in lines]  # JSON has no nan
        try:
            replace_file(args.metrics, lambda file: file.writelines(f"{json.dumps(line)}\n".encode() for line in lines))
        except OSError as error:  # the training is worth more, and the next epoch writes these lines too
            say(f"--metrics {args.metrics} could not be written ({error.strerror}); the training goes on")
