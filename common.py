"""The task (data, model, losses, scores), which you replace by your own, and collectives, with or without a group."""
from __future__ import annotations

import contextlib
import ctypes
import functools
import gzip
import hashlib
import io
import ipaddress
import itertools
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

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # which nothing here needs
import torch
import torch.distributed as dist
# Imported now; if DDP imports it later, the default arguments of its functions keep the process group alive for ever.
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info


class UsageError(Exception):
    """What one line explains: a wrong option or an unusable file (exit code 2), or a failure while running (1)."""

    def __init__(self, text: str, on_all_ranks: bool = False, exit_code: int = 2) -> None:
        super().__init__(text)
        self.on_all_ranks, self.exit_code = on_all_ranks, exit_code  # on all ranks: local rank 0 alone prints it


# ---- The task: replace these four functions by your own --------------------------------------------
DATASETS = ("synthetic", "MNIST", "Subj")


def load_data(args: Namespace) -> tuple[Dataset, Dataset, Dataset]:
    """Three map-style data sets, for training, validation and test, of samples (input, target): tensors, or tuples,
    lists or dicts of tensors. All ranks must get the same data: here it depends on the files and on --seed alone."""
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
    """A module that maps a batch of inputs to logits [batch, classes]; `train` is the training data set."""
    if args.dataset == "MNIST":
        return ConvNet().to(memory_format=torch.channels_last)  # faster; an input of one channel needs no conversion
    if args.dataset == "Subj":  # the mean of the words' embeddings, without the padding, and a linear layer
        words = nn.EmbeddingBag(int(train.tensors[0].max()) + 1, 96, mode="mean", padding_idx=0)
        nn.init.normal_(words.weight, 0, 0.1)
        return nn.Sequential(words, nn.Linear(96, 2))
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))


def losses(outputs: Any, targets: Any) -> Tensor:
    """The loss of each sample, [batch]: cross-entropy of logits [batch, classes], for classes [batch]."""
    # torch leaves out samples of class -100, which silently changes what the mean is taken over. Here it is an error.
    return F.cross_entropy(outputs, targets, reduction="none", ignore_index=-2**62)


def scores(outputs: Any, targets: Any) -> Optional[Tensor]:
    """The score of each sample, [batch], higher is better; None for a task that reports nothing but the loss."""
    return outputs.argmax(1) == targets


# Name: class, settings, default learning rate. What is added here is an --optimizer.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "adam": (torch.optim.Adam, {"fused": True}, 0.005),  # fused: one pass over the memory, faster on CPUs too
    "adamw": (torch.optim.AdamW, {"fused": True}, 0.005),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}, 0.05)}  # fused, it goes wrong if fp16 skips the first step


def schedule(share: float) -> float:
    """What the learning rate is multiplied by when `share` (0 to 1) of all training is done: half a cosine to 0."""
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, share))


# ---- The three data sets ---------------------------------------------------------------------------
class Rows(TensorDataset):
    """Samples in memory: inputs [n, ...] and targets [n, ...]."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """What DataLoader asks for, also through a Subset: a list of samples, or a tuple that is a whole batch."""
        own_samples = type(self).__getitem__ is not TensorDataset.__getitem__
        return [self[i] for i in indices] if own_samples else self.batch(indices)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """A whole batch at once: one copy, instead of one for each sample."""
        rows = torch.frombuffer(array("q", indices), dtype=torch.int64)  # a fifth of torch.tensor's time
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)


class Sentences(Rows):
    """Token ids [n, longest sentence] and targets [n], padded with 0; a batch is cut to its own longest sentence."""

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        tokens, targets = super().batch(indices)
        return tokens[:, :max(1, int(tokens.any(0).sum()))], targets


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
    sentences, targets = [], []
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


SOURCES = {"MNIST": "https://ossci-datasets.s3.amazonaws.com/mnist",
           "Subj": "https://www.cs.cornell.edu/people/pabo/movie-review-data/rotten_imdb.tar.gz"}
# SHA-256: for MNIST of the .gz files, for Subj of the lines, each ended by one newline, as copies differ in that.
CHECKSUMS = {"MNIST": {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"}, "Subj": {
    "plot.tok.gt9.5000": "5ddc9b44dc60d64d651347fcd7bdd489b0c70661e3f768215c16eea36f51204a",
    "quote.tok.gt9.5000": "73a2dcf8dc3cbcc7f068a70ef9f021c86b2a8e4dac81566b7fd015b3e938f2c5"}}


def download(dataset: str, folder: str, timeout: float) -> None:
    """Fetch the missing files of `dataset` into `folder`, each whole and checked or not at all."""
    variable, in_archive = f"{dataset.upper()}_URL", dataset == "Subj"
    source = os.environ.get(variable, SOURCES[dataset])
    try:
        os.makedirs(folder, exist_ok=True)
        with lock(folder, timeout):  # one process of a node fetches; the others then find the files there
            for name, checksum in CHECKSUMS[dataset].items():
                path = os.path.join(folder, name)
                if os.path.exists(path) or os.path.exists(path + ".gz"):
                    continue
                url = source if in_archive else f"{source}/{name}.gz"
                content = urllib.request.urlopen(url, timeout=timeout).read()
                if in_archive:
                    with tarfile.open(fileobj=io.BytesIO(content)) as tar:  # one file is read, none is unpacked
                        content = b"".join(line + b"\n" for line in tar.extractfile(name).read().splitlines())
                if hashlib.sha256(content).hexdigest() != checksum:
                    raise ValueError(f"{name} from {url} has a wrong checksum and was thrown away")
                replace_file(path if in_archive else path + ".gz", lambda file: file.write(content))
    except Exception as error:  # of the network, the archive or the file system
        raise UsageError(f"--download: {type(error).__name__}: {error}; put the files into {folder} by hand, or name "
                         f"another source in {variable}") from None


def lock(path: str, timeout: float = 0) -> Any:
    """Lock `path` against other processes of this machine, until what is returned is closed or this process ends.
    Raises UsageError if another has it for `timeout` seconds; where there are no locks, says so and goes on."""
    name, deadline = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16], time.monotonic() + timeout
    try:
        import fcntl  # not on Windows
        file = open(os.path.join(tempfile.gettempdir(), f"ddp-{name}.lock"), "ab")
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            if time.monotonic() >= deadline:
                raise UsageError(f"another process writes {path} now: wait for its end, or name another")
            time.sleep(0.1)
    except (ImportError, OSError) as error:
        print(f"no locks here ({error}): make sure that no other process writes {path}", file=sys.stderr)
        return contextlib.nullcontext()


def replace_file(path: str, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file whole or not at all: under another name, to the disk, then in place of the old one."""
    path = os.path.realpath(path)
    temporary = path + ".tmp"
    if os.path.islink(temporary):  # it would lead to somebody's file
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
    """The optimizer that --optimizer names; fused only where that works."""
    kind, settings, rate = OPTIMIZERS[args.optimizer]
    settings = {**settings, "lr": args.learning_rate or rate}
    if args.weight_decay is not None:
        settings["weight_decay"] = args.weight_decay
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    if settings.get("fused") and not sparse and not any(map(torch.is_complex, model.parameters())):
        with contextlib.suppress(RuntimeError):  # not in this torch, or not for this device
            return kind(model.parameters(), **settings)
    settings.pop("fused", None)
    return kind(model.parameters(), **settings)


def end_with(parent: int, _: int = 0) -> None:
    """Have Linux end this process when the one that started it ends: a launcher that is killed cannot do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was too late
            os._exit(1)


def keep_freed_memory() -> None:
    """Have glibc keep the memory of tensors that come and go in each step: new pages would have to be cleared."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt") and not any(name.startswith("MALLOC_") for name in os.environ):  # musl has none
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD


# ---- Loaders, batches and wrappers -----------------------------------------------------------------
def seed(*numbers: int) -> None:
    """Seed torch and Python's `random`: with one number itself, with several (seed, epoch, rank, …) with a mix."""
    number = numbers[0] if len(numbers) == 1 else random.Random(repr(numbers)).getrandbits(56)
    torch.manual_seed(number)
    random.seed(number)


class Batches(torch.utils.data.BatchSampler):
    """The batches of a shard from `skip` samples on: for DataLoader, what to read, and what reads it. A worker seeds
    itself for each batch: random numbers depend neither on the workers nor on where a run was resumed."""

    dataset, seed, skip = None, 0, 0

    def __len__(self) -> int:
        left = max(0, len(self.sampler) - self.skip)
        return left // self.batch_size if self.drop_last else math.ceil(left / self.batch_size)

    def __iter__(self) -> Iterator[tuple]:
        numbers = (self.seed, getattr(self.sampler, "epoch", 0), rank_and_world_size()[0])
        indices = itertools.islice(self.sampler, self.skip, None)
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
    """A batch of a list of samples; what Rows returns is one already."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


def make_loader(dataset: Dataset, sampler: Any, args: Namespace, device: torch.device,
                drop_last: bool = False) -> DataLoader:
    """Batches of the samples that `sampler` (any sized iterable of indices) names."""
    workers = args.num_workers > 0
    if drop_last and len(sampler) < args.batch_size:
        raise UsageError(f"--drop_last leaves no batch of {args.batch_size}: a shard has {len(sampler)} samples")
    batches = Batches(sampler, args.batch_size, drop_last)
    batches.dataset, batches.seed = dataset, args.seed
    return DataLoader(batches, batch_sampler=batches, collate_fn=getattr(dataset, "collate_fn", collate),
                      pin_memory=device.type == "cuda", num_workers=args.num_workers, timeout=workers * args.timeout,
                      worker_init_fn=functools.partial(end_with, os.getpid()),
                      # Processes of mp.spawn would spawn their workers, which import torch again.
                      multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
                      # Keep workers alive between epochs: forking again while old threads end sometimes hangs.
                      persistent_workers=workers,
                      # A generator of its own: starting workers then does not change the numbers that dropout draws.
                      generator=torch.Generator().manual_seed(args.seed + rank_and_world_size()[0]))


def split_batch(batch: Any, device: torch.device) -> tuple[Any, Any]:
    """(inputs, targets) of a batch, on the device. If samples are no pairs, but dicts for instance, both are all."""
    batch = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
    return batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, batch)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` applied to each tensor in its tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def checksum(value: Any, crc: int = 0) -> int:
    """A checksum of what a data set has in memory: its tensors, and numbers and texts in lists and dicts."""
    if isinstance(value, Tensor):
        row = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        crc = zlib.crc32(repr((value.dtype, list(value.shape))).encode(), crc)
        return zlib.crc32((ctypes.c_char * len(row)).from_address(row.data_ptr()), crc) if len(row) else crc
    value = vars(value) if isinstance(value, Dataset) else value
    with contextlib.suppress(TypeError, ValueError):
        return zlib.crc32(json.dumps(value).encode(), crc)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ():
        crc = checksum(item, crc)
    return crc


def check_one_per_sample(name: str, values: Any, samples: int) -> None:
    """Raise ValueError unless `values`, from losses() or scores(), has one number for each of so many samples."""
    shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != [samples]:
        raise ValueError(f"{name}() must return one number per sample, shape [{samples}] here; it returned {shape}")


class Batch(NamedTuple):
    """What a training step needs of one micro-batch, on the device of the model."""
    inputs: Any
    targets: Any
    weights: Tensor  # [batch], to be multiplied with the losses: see runtime.batches
    ends_step: bool  # whether the optimizer steps after this micro-batch
    counted: slice  # the samples whose weight is not 0
    loss_sum: Tensor  # of this rank, on the device, as reading it would wait for it

    def record(self, losses: Tensor) -> None:
        """Add the losses to those of the epoch. Raises ValueError unless they are [batch], one for each sample."""
        check_one_per_sample("losses", losses, len(self.weights))
        self.loss_sum.add_(losses.detach()[self.counted].sum(dtype=torch.float64))


class Autocast(nn.Module):
    """Runs a module in bf16 or fp16 where that is safe; what it returns is float32. It is a module, and inside
    DataParallel, since the dtype of autocast is not passed on to the threads that DataParallel starts."""

    def __init__(self, module: nn.Module, precision: str) -> None:
        super().__init__()
        self.module, self.dtype = module, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self.device_type = next(module.parameters()).device.type

    def forward(self, *inputs: Any) -> Any:
        with torch.autocast(self.device_type, self.dtype):
            outputs = self.module(*inputs)
        return map_tensors(lambda tensor: tensor.float() if tensor.dtype == self.dtype else tensor, outputs)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DataParallel, DDP, Autocast and torch.compile, however nested."""
    while isinstance(model, (nn.DataParallel, DDP, Autocast)) or "_orig_mod" in model._modules:
        model = model._orig_mod if "_orig_mod" in model._modules else model.module
    return model


def load_weights(model: nn.Module, weights: Optional[dict[str, Any]]) -> None:
    """Load a state dict, if there is one, but for expanded buffers, which cannot be written to and stay as they are."""
    own = unwrap(model).state_dict()
    fixed = {name for name, value in own.items() if isinstance(value, Tensor) and 0 in value.stride()}
    unwrap(model).load_state_dict({name: weights[name] for name in set(weights or ()) - fixed}, strict=False)


# ---- Collectives -----------------------------------------------------------------------------------
BUCKET_BYTES = 25 * 1024 * 1024  # as DDP's own buckets
LOOPBACK = r"localhost$|127\.|\[?::1"


def rank_and_world_size() -> tuple[int, int]:
    """(0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def comm_device() -> torch.device:
    """Where a tensor must be for the process group to take it: for nccl on the current GPU."""
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


def reduce_mean(value: Any, nprocs: Optional[int] = None) -> Tensor:
    """The mean of `value`, a real tensor of any shape or a Python number, over all ranks, which must all call it, as a
    new, detached tensor on the device of `value`: floating tensors in their own dtype, all else in float64. Raises
    TypeError for complex numbers, and ValueError if `nprocs`, an argument of the notes, is not the world size."""
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


@torch.inference_mode(False)  # or what it makes could not be used outside of that mode
@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by the mean of all ranks' gradients, after backward (DDP has done so by then). One that is
    missing on some ranks counts as zero there; one missing on all stays None. Half precision is summed in float32, so
    that nothing overflows. A sparse gradient stays sparse, but travels dense. Needs the gradients' memory once more."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters() if rank_and_world_size()[1] > 1 else ():  # a shared parameter comes once
        if parameter.requires_grad:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for parameters in kinds.values():
        # Every rank sends every parameter, and whether it has a gradient, and a sparse one: ranks that left some out
        # would pair up different tensors, and asking first would cost a collective.
        yes, no = parameters[0].new_ones(1), parameters[0].new_zeros(1)
        present = [parameter.grad is not None for parameter in parameters]
        sparse = [parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters]
        grads = [dense_gradient(parameter) for parameter in parameters]
        row = torch.cat([*(grad.reshape(-1) for grad in grads), *(yes if flag else no for flag in present + sparse)])
        row = row.to(torch.promote_types(row.dtype, torch.float32))
        works = [dist.all_reduce(piece, async_op=True) for piece in row.split(BUCKET_BYTES // row.element_size())]
        for work in works:
            work.wait()
        *means, flags = row.div_(dist.get_world_size()).split([*(grad.numel() for grad in grads), 2 * len(grads)])
        torch._foreach_copy_(grads, [mean.view(grad.shape) for mean, grad in zip(means, grads)])
        if not all(present):  # this waits for the device
            present, sparse = (flags.view(2, -1) != 0).tolist()
        for parameter, grad, on_some_rank, is_sparse in zip(parameters, grads, present, sparse):
            grad = grad.to_sparse(1) if is_sparse else grad  # whole rows, as an embedding's
            parameter.grad = grad if on_some_rank else None


def dense_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, or a copy if the means can't be written into it; zeros if there is none."""
    grad = parameter.grad
    if grad is not None and grad.is_sparse:
        return grad.to_dense()
    if grad is not None and 0 not in grad.stride() and not grad.is_conj() and not grad.is_neg():
        return grad
    zeros = torch.zeros_like(parameter)  # with its layout, by which fused optimizers go
    return zeros if grad is None else zeros.copy_(grad)  # an expanded one has many elements in one place


@torch.no_grad()
def average_batch_norm(model: nn.Module, loss_sum: Tensor) -> None:
    """Give all ranks the mean of BatchNorm's running statistics, which each has from its own shard, and the sum of
    `loss_sum`, a float64 number: in place, by one all-reduce. No other buffer is touched."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    statistics = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    values = [buffer for buffer in statistics if buffer is not None] + [loss_sum]
    if dist.is_initialized():
        row = torch.cat([value.reshape(-1).double() for value in values]).to(comm_device())
        dist.all_reduce(row)
        for value, total in zip(values, row.to(loss_sum.device).split([value.numel() for value in values])):
            value.copy_(total.view(value.shape) if value is loss_sum else total / dist.get_world_size())


def broadcast(value: Any) -> Any:
    """Rank 0's `value` (tensors, numbers, strings, in dicts and lists) on every rank, a piece of 25 MiB at a time."""
    if not dist.is_initialized():
        return value
    def send(row: Tensor) -> None:
        for piece in row.split(BUCKET_BYTES):
            moved = piece.to(comm_device())
            dist.broadcast(moved, src=0)
            piece.copy_(moved)
    # First the structure, in which a dense tensor is one element that is expanded to its shape; then what is in them.
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
    """One backward pass, whose result is dropped. After its first one DDP puts the gradients into other buckets, and so
    three ranks sum them in another order. A resumed run must begin with these, as the one that was interrupted had."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if 0 not in buffer.stride()]  # none is expanded
    inputs, targets = split_batch(next(iter(loader)), next(model.parameters()).device)
    losses(model.train()(inputs), targets).sum().backward()
    model.zero_grad()
    for buffer, value in buffers:
        buffer.detach().copy_(value)


def choose_interface(address: str) -> None:
    """Gloo tells the others the address of this host's own name, which may be 127.0.1.1, as Debian's installer has it,
    or none. Have it take the network interface that leads to node 0, by Linux's tables of routes."""
    on_one_node = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE") or re.match(LOOPBACK, address)
    if on_one_node or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with contextlib.suppress(OSError, ValueError):  # another system, or a name that is unknown
        node_0 = ipaddress.ip_address(socket.getaddrinfo(address.strip("[]"), None)[0][4][0])
        with open("/proc/net/route") as ipv4, open("/proc/net/ipv6_route") as ipv6:
            routes = [(ipaddress.ip_network((bytes.fromhex(row[0]), int(row[1], 16))), row[-1])
                      for row in map(str.split, ipv6)]
            for name, *digits in map(str.split, ipv4.readlines()[1:]):
                network, mask = (ipaddress.ip_address(bytes.fromhex(digits[i])[::-1]) for i in (0, 6))
                routes.append((ipaddress.ip_network(f"{network}/{mask}"), name))
        found = [(node_0 in network, network.prefixlen, name) for network, name in routes if name != "lo"]
        os.environ["GLOO_SOCKET_IFNAME"] = max(found)[2]  # the longest prefix is that of the nearest network


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> tuple[float, Optional[float]]:
    """Mean loss and mean score, or None, over all samples of all ranks' loaders, which may differ in length."""
    while isinstance(model, (nn.DataParallel, DDP)):  # a forward of DDP may communicate, and would wait for ranks that
        model = model.module  # have no batch left
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # losses, samples, scores, samples that have one
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
