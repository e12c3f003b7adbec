"""The task (data, model, losses, scores), which you replace with your own; data loading, files and collectives."""
from __future__ import annotations

import contextlib
import ctypes
import functools
import gzip
import hashlib
import io
import ipaddress
import json
import math
import os
import random
import re
import signal
import socket
import sys
import tarfile
import tempfile
import time
import urllib.request
import warnings
import zlib
from argparse import Namespace
from array import array
from collections import Counter
from typing import IO, Any, Callable, Iterator, NamedTuple, Optional, Sequence

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # nothing here needs NumPy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info


class UsageError(Exception):
    """An error that one line explains: a wrong option or unusable file (exit code 2), or a failure of the run (1)."""

    def __init__(self, text: str, on_all_ranks: bool = False, exit_code: int = 2) -> None:
        super().__init__(text)
        self.on_all_ranks, self.exit_code = on_all_ranks, exit_code  # on all ranks: only local rank 0 prints it


# ---- The task: replace these four functions with your own ------------------------------------------
DATASETS = ("synthetic", "MNIST", "Subj")


def load_data(args: Namespace) -> tuple[Dataset, Dataset, Dataset]:
    """Return three map-style data sets (training, validation, test) of samples (input, target): tensors, or tuples,
    lists or dicts of tensors. All ranks must load the same data; here, it depends only on the files and --seed."""
    generator = torch.Generator().manual_seed(args.seed)
    if args.dataset == "synthetic":  # ten Gaussian clusters in 20 dimensions
        targets = torch.randint(10, (5500,), generator=generator)
        inputs = 1.5 * torch.randn(10, 20, generator=generator)[targets] + torch.randn(5500, 20, generator=generator)
        return tuple(Rows(inputs[a:b], targets[a:b]) for a, b in ((0, 4000), (4000, 4500), (4500, 5500)))
    folder = os.path.join(args.data_root, *("MNIST", "raw") if args.dataset == "MNIST" else ("Subj",))
    if args.download:
        download(args.dataset, folder, args.timeout)
    return load_mnist(folder, generator) if args.dataset == "MNIST" else load_subj(folder, generator)


def build_model(args: Namespace, train: Dataset) -> nn.Module:
    """Return a module that maps a batch of inputs to logits [batch, classes]; `train` is the training data set."""
    if args.dataset == "MNIST":
        return ConvNet().to(memory_format=torch.channels_last)  # faster; images of one channel need no conversion
    if args.dataset == "Subj":  # the mean of the words' embeddings, without the padding, and a linear layer
        words = nn.EmbeddingBag(int(train.tensors[0].max()) + 1, 96, mode="mean", padding_idx=0)
        nn.init.normal_(words.weight, 0, 0.1)
        return nn.Sequential(words, nn.Linear(96, 2))
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))


def losses(outputs: Any, targets: Any) -> Tensor:
    """Return the loss of each sample, [batch]: the cross-entropy of logits [batch, classes] and classes [batch]."""
    # By default, torch silently gives samples of class -100 no loss. Here, that class is an error.
    return F.cross_entropy(outputs, targets, reduction="none", ignore_index=-2**62)


def scores(outputs: Any, targets: Any) -> Optional[Tensor]:
    """Return the score of each sample, [batch], higher is better; or None if the task reports only the loss."""
    return outputs.argmax(1) == targets


# Name: class, settings, default learning rate. Each entry is a value of --optimizer.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "adam": (torch.optim.Adam, {"fused": True}, 0.005),  # fused: one pass over the memory, faster on CPUs too
    "adamw": (torch.optim.AdamW, {"fused": True}, 0.005),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}, 0.05)}  # fused, it goes wrong if fp16 skips the first step


def schedule(share: float) -> float:
    """Return the factor of the learning rate when `share` (0 to 1) of all training is done: a half cosine to 0."""
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, share))


# ---- The three data sets ---------------------------------------------------------------------------
class Rows(TensorDataset):
    """Samples in memory: inputs [n, ...] and targets [n, ...]."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a whole batch as a tuple, or a list of samples. DataLoader calls it, also through a Subset."""
        own_samples = type(self).__getitem__ is not TensorDataset.__getitem__
        return [self[i] for i in indices] if own_samples else self.batch(indices)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return a whole batch: one copy per tensor instead of one per sample."""
        rows = torch.frombuffer(array("q", indices), dtype=torch.int64)  # takes a fifth of torch.tensor's time
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)


class Sentences(Rows):
    """Token ids [n, longest sentence], padded with 0, and targets [n]. A batch is cut to its own longest sentence."""

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        tokens, targets = super().batch(indices)
        return tokens[:, :max(1, int(tokens.any(0).sum()))], targets


def load_mnist(folder: str, generator: torch.Generator) -> tuple[Rows, Rows, Rows]:
    """Return images [n, 1, 28, 28] uint8 with labels [n]. A tenth of the training file is the validation part."""
    parts = []
    for name in ("train", "t10k"):
        images = read_idx(os.path.join(folder, f"{name}-images-idx3-ubyte"), (28, 28)).unsqueeze(1)
        labels = read_idx(os.path.join(folder, f"{name}-labels-idx1-ubyte"), ()).long()
        if len(images) != len(labels) or labels.max() > 9 or len(images) < 2 and name == "train":
            raise UsageError(f"{folder}: {name} has {len(images)} images, {len(labels)} labels up to {labels.max()}; "
                             "expected a label from 0 to 9 for each image, and two images or more for training")
        parts.append(Rows(images, labels))
    order, tenth = torch.randperm(len(parts[0]), generator=generator), max(1, len(parts[0]) // 10)
    return Rows(*parts[0][order[tenth:]]), Rows(*parts[0][order[:tenth]]), parts[1]


def read_idx(path: str, shape: tuple[int, ...]) -> Tensor:
    """Return the bytes of an IDX file, [n, *shape] uint8, n >= 1. Format: http://yann.lecun.com/exdb/mnist/"""
    path += ".gz" * (not os.path.exists(path) and os.path.exists(path + ".gz"))
    what = "an IDX file of MNIST, with 28x28 images" if shape else "an IDX file of MNIST, with labels"
    content, header, size = bytearray(read_file(path, what)), 4 * (2 + len(shape)), math.prod(shape)
    count = (len(content) - header) // size
    if (count < 1 or len(content) != header + count * size
            or content[:header] != b"".join(n.to_bytes(4, "big") for n in (0x0801 + len(shape), count, *shape))):
        raise UsageError(f"{path} is malformed, empty or truncated: expected {what}; fetch it again")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).reshape(-1, *shape)


def load_subj(folder: str, generator: torch.Generator) -> tuple[Sentences, Sentences, Sentences]:
    """Return objective (0) and subjective (1) sentences, split 80/10/10. Source: Pang and Lee, ACL 2004."""
    sentences, targets = [], []
    for target, name in enumerate(("plot.tok.gt9.5000", "quote.tok.gt9.5000")):
        what = "text of the subjectivity data set, one sentence per line"
        content = read_file(os.path.join(folder, name), what)
        # Words stay bytes: the files are in windows-1252, and a decoded byte 0x85 could end a line.
        lines = [line.split() for line in content.split(b"\n")]
        if b"\0" in content or not any(lines):
            raise UsageError(f"{os.path.join(folder, name)} is malformed or empty: expected {what}")
        sentences += filter(None, lines)  # blank lines are not samples
        targets += [target] * (len(sentences) - len(targets))
    if len(sentences) < 3:
        raise UsageError(f"{folder}: {len(sentences)} sentences; at least 3 are needed, one for each part")
    order, tenth = torch.randperm(len(sentences), generator=generator).tolist(), max(1, len(sentences) // 10)
    parts = (order[2 * tenth:], order[tenth:2 * tenth], order[:tenth])
    # Only the training part gives the vocabulary. It is sorted, because a set's order differs between processes.
    counts = Counter(word for i in parts[0] for word in sentences[i])
    ids = {word: 1 + i for i, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)))}
    rows = [torch.tensor([ids[word] for word in words if word in ids], dtype=torch.int64) for words in sentences]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tuple(Sentences(tokens[part], torch.tensor(targets)[part]) for part in parts)


def read_file(path: str, what: str) -> bytes:
    """Return the bytes of a file, unpacked if it is a .gz file. Raises UsageError, which names `what` is expected."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            return file.read()
    except Exception as error:  # from the file system or from gzip
        raise UsageError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}): expected "
                         f"{what}; set --data_root, or fetch it, for example with --download") from None


class ConvNet(nn.Module):
    """Maps [batch, 1, 28, 28] uint8 to logits [batch, 10]. yangkky.github.io/2019/07/08/distributed-pytorch-tutorial"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(7 * 7 * 32, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers((images.float() / 255 - 0.1307) / 0.3081)  # mean and deviation of MNIST's pixels


SOURCES = {"MNIST": "https://ossci-datasets.s3.amazonaws.com/mnist",
           "Subj": "https://www.cs.cornell.edu/people/pabo/movie-review-data/rotten_imdb.tar.gz"}
# SHA-256 of MNIST's .gz files, and of Subj's lines, each ended by one newline (copies have different line ends).
CHECKSUMS = {"MNIST": {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"}, "Subj": {
    "plot.tok.gt9.5000": "5ddc9b44dc60d64d651347fcd7bdd489b0c70661e3f768215c16eea36f51204a",
    "quote.tok.gt9.5000": "73a2dcf8dc3cbcc7f068a70ef9f021c86b2a8e4dac81566b7fd015b3e938f2c5"}}


def download(dataset: str, folder: str, timeout: float) -> None:
    """Fetch the missing files of `dataset` into `folder`. Each is stored complete and checked, or not at all."""
    variable, in_archive = f"{dataset.upper()}_URL", dataset == "Subj"
    source = os.environ.get(variable, SOURCES[dataset])
    try:
        os.makedirs(folder, exist_ok=True)
        with lock(folder, timeout):  # one process per node fetches; the others then find the files
            for name, checksum in CHECKSUMS[dataset].items():
                path = os.path.join(folder, name)
                if os.path.exists(path) or os.path.exists(path + ".gz"):
                    continue
                url = source if in_archive else f"{source}/{name}.gz"
                content = urllib.request.urlopen(url, timeout=timeout).read()
                if in_archive:
                    with tarfile.open(fileobj=io.BytesIO(content)) as tar:  # reads one file, and unpacks none to disk
                        content = b"".join(line + b"\n" for line in tar.extractfile(name).read().splitlines())
                if hashlib.sha256(content).hexdigest() != checksum:
                    raise ValueError(f"{name} from {url} has a wrong checksum and was discarded")
                replace_file(path if in_archive else path + ".gz", lambda file: file.write(content))
    except Exception as error:  # from the network, the archive or the file system
        raise UsageError(f"--download: {type(error).__name__}: {error}; put the files into {folder} by hand, or set "
                         f"{variable} to another source") from None


def lock(path: str, timeout: float = 0) -> Any:
    """Lock `path` against other processes on this node, until the returned file is closed or this process ends. Raises
    UsageError if another process keeps the lock for `timeout` seconds. Where locks do not work, prints a warning."""
    name, deadline = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16], time.monotonic() + timeout
    try:
        import fcntl  # not on Windows
        file = open(os.path.join(tempfile.gettempdir(), f"ddp-{name}.lock"), "ab")
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            if time.monotonic() >= deadline:
                raise UsageError(f"another process is writing {path}: wait until it ends, or name another file")
            time.sleep(0.1)
    except (ImportError, OSError) as error:
        print(f"file locks do not work here ({error}): make sure that no other process writes {path}", file=sys.stderr)
        return contextlib.nullcontext()


def replace_file(path: str, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file completely or not at all: write a temporary file, flush it to disk, and move it over `path`."""
    path = os.path.realpath(path)
    temporary = path + ".tmp"
    if os.path.islink(temporary):  # writing through it would change another file
        os.remove(temporary)
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """Return the optimizer that --optimizer names, fused only where that works."""
    kind, settings, rate = OPTIMIZERS[args.optimizer]
    settings = {**settings, "lr": args.learning_rate or rate}
    if args.weight_decay is not None:
        settings["weight_decay"] = args.weight_decay
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    if settings.get("fused") and not sparse and not any(map(torch.is_complex, model.parameters())):
        with contextlib.suppress(RuntimeError):  # this torch or device does not support it
            return kind(model.parameters(), **settings)
    settings.pop("fused", None)
    return kind(model.parameters(), **settings)


def end_with(parent: int, _: int = 0) -> None:
    """On Linux, end this process when its parent ends: a launcher that is killed cannot end its processes itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent had already ended
            os._exit(1)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the tensors of the next step: the kernel would have to clear new pages."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt") and not any(name.startswith("MALLOC_") for name in os.environ):  # musl lacks it
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD


# ---- Loaders, batches and wrappers -----------------------------------------------------------------
def seed(*numbers: int) -> None:
    """Seed torch and Python's `random` with one number, or with a mix of several (seed, epoch, rank, …)."""
    number = numbers[0] if len(numbers) == 1 else random.Random(repr(numbers)).getrandbits(56)
    torch.manual_seed(number)
    random.seed(number)


class Batches(torch.utils.data.BatchSampler):
    """The batches of a shard after its first `skip` samples: DataLoader's batch sampler and data set in one. A worker
    seeds itself for each batch, so random numbers depend neither on the workers nor on where a run was resumed."""
    dataset, seed, skip = None, 0, 0

    def __len__(self) -> int:
        left = max(0, len(self.sampler) - self.skip)
        return left // self.batch_size if self.drop_last else math.ceil(left / self.batch_size)

    def __iter__(self) -> Iterator[tuple]:
        numbers = (self.seed, getattr(self.sampler, "epoch", 0), rank_and_world_size()[0])
        indices = list(self.sampler)[self.skip:]
        for batch in torch.utils.data.BatchSampler(indices, self.batch_size, self.drop_last):
            yield (*numbers, *batch), batch

    def __getitems__(self, request: tuple) -> Any:
        numbers, indices = request
        if get_worker_info() is not None:
            seed(*numbers)
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(indices)
        return [self.dataset[i] for i in indices]


def collate(batch: Any) -> Any:
    """Make a batch of a list of samples. What Rows returns is a batch already."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


def make_loader(dataset: Dataset, sampler: Any, args: Namespace, device: torch.device,
                drop_last: bool = False) -> DataLoader:
    """Return a loader of batches of the samples whose indices `sampler` (any sized iterable) yields."""
    workers = args.num_workers > 0
    if drop_last and len(sampler) < args.batch_size:
        raise UsageError(f"--drop_last leaves no batch of {args.batch_size}: a shard has {len(sampler)} samples")
    batches = Batches(sampler, args.batch_size, drop_last)
    batches.dataset, batches.seed = dataset, args.seed
    return DataLoader(batches, batch_sampler=batches, collate_fn=getattr(dataset, "collate_fn", collate),
                      pin_memory=device.type == "cuda", num_workers=args.num_workers, timeout=workers * args.timeout,
                      worker_init_fn=functools.partial(end_with, os.getpid()),
                      # Under mp.spawn, the default would be to spawn workers, which import torch again.
                      multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
                      # Keep workers alive between epochs: forking again while old threads end sometimes hangs.
                      persistent_workers=workers,
                      # It has its own generator, so that starting workers does not change what dropout draws.
                      generator=torch.Generator().manual_seed(args.seed + rank_and_world_size()[0]))


def split_batch(batch: Any, device: torch.device) -> tuple[Any, Any]:
    """Return (inputs, targets) of a batch, on the device. If samples are not pairs, both are the whole batch."""
    batch = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
    return batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, batch)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `function` applied to each tensor in its tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def checksum(value: Any, crc: int = 0) -> int:
    """Return a checksum of what a data set holds in memory: tensors, arrays, numbers, strings, and lists and dicts."""
    if isinstance(value, Tensor):
        row = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        crc = zlib.crc32(repr((value.dtype, list(value.shape))).encode(), crc)
        return zlib.crc32((ctypes.c_char * len(row)).from_address(row.data_ptr()), crc) if len(row) else crc
    with contextlib.suppress(TypeError, ValueError):
        view = memoryview(value)  # of bytes or a NumPy array
        if "O" not in view.format and type(value).__name__ != "memmap":  # addresses differ; a file is not in memory
            return zlib.crc32(view if view.c_contiguous else view.tobytes(), crc)
    value = vars(value) if isinstance(value, Dataset) else value
    with contextlib.suppress(TypeError, ValueError):
        return zlib.crc32(json.dumps(value).encode(), crc)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ():
        crc = checksum(item, crc)
    return crc


def check_one_per_sample(name: str, values: Any, samples: int) -> None:
    """Raise ValueError unless `values`, from losses() or scores(), has the shape [samples]."""
    shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != [samples]:
        raise ValueError(f"{name}() must return one number per sample, shape [{samples}] here; it returned {shape}")


class Batch(NamedTuple):
    """One micro-batch, with what the training step needs, on the model's device."""
    inputs: Any
    targets: Any
    weights: Tensor  # [batch], factors of the losses; see runtime.batches
    ends_step: bool  # whether the optimizer steps after this micro-batch
    counted: Tensor  # [batch], float64: 0 for samples whose weight is 0, 1 for the others
    loss_sum: Tensor  # this rank's; it stays on the device, because reading it would wait

    def record(self, losses: Tensor) -> None:
        """Add the losses to the sum of the epoch. Raises ValueError unless their shape is [batch]."""
        check_one_per_sample("losses", losses, len(self.weights))
        self.loss_sum.add_((losses.detach() * self.counted).sum())


class Autocast(nn.Module):
    """Runs a module in bf16 or fp16 where that is safe, and returns float32. It is a module inside DataParallel,
    because the threads that DataParallel starts do not inherit autocast's dtype."""

    def __init__(self, module: nn.Module, precision: str) -> None:
        super().__init__()
        self.module, self.dtype = module, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self.device_type = next(module.parameters()).device.type

    def forward(self, *inputs: Any) -> Any:
        with torch.autocast(self.device_type, self.dtype):
            outputs = self.module(*inputs)
        return map_tensors(lambda tensor: tensor.float() if tensor.dtype == self.dtype else tensor, outputs)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DataParallel, DDP, Autocast and torch.compile, however nested."""
    while isinstance(model, (nn.DataParallel, DDP, Autocast)) or "_orig_mod" in model._modules:
        model = model._orig_mod if "_orig_mod" in model._modules else model.module
    return model


def load_weights(model: nn.Module, weights: Optional[dict[str, Any]]) -> None:
    """Load a state dict, if there is one. Expanded buffers, which cannot be written to, stay as they are."""
    own = unwrap(model).state_dict()
    fixed = {name for name, value in own.items() if isinstance(value, Tensor) and 0 in value.stride()}
    unwrap(model).load_state_dict({name: weights[name] for name in set(weights or ()) - fixed}, strict=False)


# ---- Collectives -----------------------------------------------------------------------------------
BUCKET_BYTES = 25 * 1024 * 1024  # the size of DDP's own buckets
LOOPBACK = r"localhost$|127\.|\[?::1"


def rank_and_world_size() -> tuple[int, int]:
    """Return (rank, world size), which is (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def comm_device() -> torch.device:
    """Return the device on which the process group needs tensors: for nccl, the current GPU."""
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


def reduce_mean(value: Any, nprocs: Optional[int] = None) -> Tensor:
    """Return the mean of `value`, a real tensor of any shape or a Python number, over all ranks, which must all call
    it. The result is a new, detached tensor on the device of `value`, in its dtype if that is floating, else float64.
    Raises TypeError for complex numbers, and ValueError if `nprocs` (kept from the notes) is not the world size."""
    world_size = rank_and_world_size()[1]
    if nprocs is not None and nprocs != world_size:
        raise ValueError(f"reduce_mean: nprocs is {nprocs}, but the world size is {world_size}")
    if isinstance(value, complex) or isinstance(value, Tensor) and value.is_complex():
        raise TypeError("reduce_mean: complex numbers have no mean here; reduce torch.view_as_real(value)")
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    result = tensor.to(comm_device()).to(torch.float64, memory_format=torch.contiguous_format, copy=True)
    if dist.is_initialized():
        dist.all_reduce(result)
        result /= world_size
    return result.to(tensor.device, tensor.dtype if tensor.is_floating_point() else torch.float64)


@torch.inference_mode(False)  # tensors made in that mode cannot be used outside it
@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Replace each gradient with its mean over all ranks. Call it after backward; with DDP, backward does this itself.
    A gradient missing on some ranks counts as zero there; one missing on all stays None. Half precision is summed in
    float32 to avoid overflow. Sparse gradients stay sparse, but travel dense. Needs memory for one bucket."""
    buckets: dict[Any, list[nn.Parameter]] = {}  # of one device and dtype, 25 MiB or one larger parameter
    size = 0
    for parameter in model.parameters() if rank_and_world_size()[1] > 1 else ():  # yields a shared parameter once
        if parameter.requires_grad:
            size += parameter.nbytes
            buckets.setdefault((parameter.device, parameter.dtype, size // BUCKET_BYTES), []).append(parameter)
    for parameters in buckets.values():
        # Every rank sends every parameter, and two flags: has a gradient, is sparse. Ranks that left some out would
        # pair up different tensors, and agreeing on them first would need another collective.
        yes, no = parameters[0].new_ones(1), parameters[0].new_zeros(1)
        present = [parameter.grad is not None for parameter in parameters]
        sparse = [parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters]
        grads = [dense_gradient(parameter) for parameter in parameters]
        row = torch.cat([*(grad.reshape(-1) for grad in grads), *(yes if flag else no for flag in present + sparse)])
        row = row.to(torch.promote_types(row.dtype, torch.float32))
        dist.all_reduce(row)
        *means, flags = row.div_(dist.get_world_size()).split([*(grad.numel() for grad in grads), 2 * len(grads)])
        torch._foreach_copy_(grads, [mean.view(grad.shape) for mean, grad in zip(means, grads)])
        if not all(present):  # this waits for the device
            present, sparse = (flags.view(2, -1) != 0).tolist()
        for parameter, grad, on_some_rank, is_sparse in zip(parameters, grads, present, sparse):
            grad = grad.to_sparse(1) if is_sparse else grad  # in whole rows, like an embedding's
            parameter.grad = grad if on_some_rank else None


def dense_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient, a copy of it if the mean can't be written into it, or zeros if there is none."""
    grad = parameter.grad
    if grad is not None and grad.is_sparse:
        return grad.to_dense()
    if grad is not None and 0 not in grad.stride() and not grad.is_conj() and not grad.is_neg():
        return grad
    zeros = torch.zeros_like(parameter)  # in the parameter's memory layout, as fused optimizers need
    return zeros if grad is None else zeros.copy_(grad)  # elements of an expanded one share memory


@torch.no_grad()
def average_batch_norm(model: nn.Module, loss_sum: Tensor) -> None:
    """Average BatchNorm's running statistics, which each rank has from its own shard, over all ranks, and sum
    `loss_sum` (float64). Both are changed in place, by one all-reduce. No other buffer changes."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    statistics = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    values = [buffer for buffer in statistics if buffer is not None] + [loss_sum]
    if dist.is_initialized():
        row = torch.cat([value.reshape(-1).double() for value in values]).to(comm_device())
        dist.all_reduce(row)
        for value, total in zip(values, row.to(loss_sum.device).split([value.numel() for value in values])):
            value.copy_(total.view(value.shape) if value is loss_sum else total / dist.get_world_size())


def broadcast(value: Any) -> Any:
    """Return rank 0's `value` (tensors, numbers, strings, in dicts and lists) on every rank, sent in 25 MiB pieces."""
    if not dist.is_initialized():
        return value
    def send(row: Tensor) -> None:
        for piece in row.split(BUCKET_BYTES):
            moved = piece.to(comm_device())
            dist.broadcast(moved, src=0)
            piece.copy_(moved)
    # Send the structure first, with one expanded element in place of each dense tensor; then the tensors' contents.
    tensors, file = [], io.BytesIO()
    torch.save(map_tensors(lambda tensor: tensor if tensor.is_sparse else torch.zeros((), dtype=tensor.dtype).expand(
        tensor.shape), value), file)
    size = torch.tensor([file.tell()])
    send(size)
    structure = torch.frombuffer(bytearray(file.getvalue().ljust(int(size))), dtype=torch.uint8)[:int(size)]
    send(structure)
    if dist.get_rank() > 0:
        value = torch.load(io.BytesIO(bytes(structure.tolist())), weights_only=True)
        value = map_tensors(lambda one: one if one.is_sparse else torch.empty(one.shape, dtype=one.dtype), value)
    map_tensors(tensors.append, value)
    for tensor in tensors:
        if not tensor.is_sparse:
            send(tensor.contiguous().view(-1).view(torch.uint8))
    return value


def warm_up(model: nn.Module, loader: DataLoader) -> None:
    """Run one backward pass and drop its result. After the first backward, DDP rebuilds its buckets, so three ranks sum
    gradients in another order. A resumed run must begin with the rebuilt buckets, as the interrupted one had them."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if 0 not in buffer.stride()]  # not expanded
    inputs, targets = split_batch(next(iter(loader)), next(model.parameters()).device)
    losses(model.train()(inputs), targets).sum().backward()
    model.zero_grad()
    for buffer, value in buffers:
        buffer.detach().copy_(value)


def choose_interface(address: str) -> None:
    """Make gloo use the network interface that leads to node 0, by Linux's routing tables. By default, gloo announces
    the address of this host's own name, which may be missing, or 127.0.1.1, as Debian's installer sets it."""
    on_one_node = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE") or re.match(LOOPBACK, address)
    if on_one_node or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with contextlib.suppress(OSError, ValueError):  # not Linux, or an unknown name
        node_0 = ipaddress.ip_address(socket.getaddrinfo(address.strip("[]"), None)[0][4][0])
        with open("/proc/net/route") as ipv4, open("/proc/net/ipv6_route") as ipv6:
            routes = [(ipaddress.ip_network((bytes.fromhex(row[0]), int(row[1], 16))), row[-1])
                      for row in map(str.split, ipv6)]
            for name, *digits in map(str.split, ipv4.readlines()[1:]):
                network, mask = (ipaddress.ip_address(bytes.fromhex(digits[i])[::-1]) for i in (0, 6))
                routes.append((ipaddress.ip_network(f"{network}/{mask}"), name))
        found = [(node_0 in network, network.prefixlen, name) for network, name in routes if name != "lo"]
        os.environ["GLOO_SOCKET_IFNAME"] = max(found)[2]  # the longest prefix is the most specific route


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> tuple[float, Optional[float]]:
    """Return the mean loss and the mean score (or None) over all samples of all ranks. Loaders may differ in length."""
    while isinstance(model, (nn.DataParallel, DDP)):  # DDP's forward may communicate: it would wait for ranks that
        model = model.module  # have no batch left
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # losses, samples, scores, samples with a score
    for batch in loader:
        inputs, targets = split_batch(batch, device)
        outputs, tensors = model(inputs), []
        map_tensors(tensors.append, targets)
        samples = len(tensors[0])
        for i, name, values in ((0, "losses", losses(outputs, targets)), (2, "scores", scores(outputs, targets))):
            if values is not None:
                check_one_per_sample(name, values, samples)
                sums[i] += values.sum(dtype=torch.float64)
                sums[i + 1] += samples
    model.train(was_training)
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, samples, score, scored = sums.tolist()
    return loss / samples, score / scored if scored else None
