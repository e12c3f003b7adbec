"""Started by torchrun: each rank calls the collectives and evaluate(), and saves what came out, for the tests to check.

Every input follows from the rank, so that the tests can work out the right result by hand.
"""
import copy
import gc
import os
import sys
import warnings
from datetime import timedelta

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import common
import ddp_launch
import runtime
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler

warnings.simplefilter("error")


class Count:
    """Counts the collectives, and the bytes of each."""

    def __enter__(self):
        self.original, self.bytes = dist.all_reduce, []
        def counted(tensor, *args, **kwargs):
            self.bytes.append(tensor.numel() * tensor.element_size())
            return self.original(tensor, *args, **kwargs)
        dist.all_reduce = counted
        return self

    def __exit__(self, *_):
        dist.all_reduce = self.original


def reduce_mean_cases(rank, world_size):
    yield "count", common.reduce_mean(torch.tensor(3 + rank))
    yield "python int", common.reduce_mean(3 + rank)
    yield "python float", common.reduce_mean(0.5 + rank)
    yield "bool", common.reduce_mean(torch.tensor([rank == 0, True]))
    yield "int here, float there", common.reduce_mean(0 if rank == 0 else torch.tensor(1.5))
    yield "float16", common.reduce_mean(torch.tensor([60000.0, 1.0], dtype=torch.float16))
    yield "bfloat16", common.reduce_mean(torch.tensor([256.0, 1.0 + rank], dtype=torch.bfloat16))
    yield "non-contiguous", common.reduce_mean((torch.arange(6.0).view(2, 3) + rank).t())
    yield "large and small", common.reduce_mean(torch.tensor(2.0 ** 24 if rank == 0 else 1.0))
    yield "empty", common.reduce_mean(torch.zeros(0, 2))
    value = torch.arange(3.0) + rank
    common.reduce_mean(value, nprocs=world_size)
    yield "input", value
    try:
        common.reduce_mean(value, nprocs=world_size + 1)
    except ValueError as error:
        yield "wrong nprocs", str(error)
    # Case 19: w = 2 and 6, loss = w * w.
    w = torch.tensor(2.0 + 4 * rank, requires_grad=True)
    loss = w * w
    mean = common.reduce_mean(loss)
    loss.backward()
    yield "loss", (mean, loss.detach(), w.grad)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def average_gradients_cases(rank, world_size):
    # Case 10: a and c on rank 0, b and c on the others; input rank + 1; d is used by none, e by the last rank alone.
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(5))
    used = [model[0], model[2]] if rank == 0 else [model[1], model[2]]
    used += [model[4]] if rank == world_size - 1 else []
    for layer in used:
        layer(torch.tensor([[1.0 + rank]])).sum().backward()
    common.average_gradients(model)
    yield "missing", gradients(model)

    model = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "frozen": nn.Linear(2, 2, bias=False)})
    model["two"] = model["one"]  # shared
    model["frozen"].weight.requires_grad_(False)
    model["frozen"].weight.grad = torch.full((2, 2), float(rank))
    (model["one"](torch.ones(1, 2)) + model["two"](torch.ones(1, 2)) * rank).sum().backward()
    before = model["one"].weight.grad
    common.average_gradients(model)
    yield "shared and frozen", gradients(model)
    yield "in place", before is model["one"].weight.grad

    model = nn.ParameterList(nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in
                             (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64))
    for parameter in model:
        parameter.grad = torch.full_like(parameter, 40000 + 64 * rank)
    common.average_gradients(model)
    yield "dtypes", gradients(model)

    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = (torch.arange(6.0).view(3, 2) * (rank + 1)).t()
    if rank == 1:
        parameter.grad = parameter.grad.contiguous()  # ranks may differ in how it lies
    grad = parameter.grad
    common.average_gradients(nn.ParameterList([parameter]))
    yield "non-contiguous", parameter.grad.clone()
    yield "non-contiguous in place", grad is parameter.grad

    model = nn.ModuleList(nn.EmbeddingBag(4, 2, mode="sum", sparse=True) for _ in range(2))
    model[0](torch.tensor([[rank, 3, 3]])).sum().backward()
    if rank == 0:
        model[1](torch.tensor([[1]])).sum().backward()
    common.average_gradients(model)
    yield "sparse", [p.grad.to_dense() for p in model.parameters()]
    yield "stays sparse", [p.grad.is_sparse for p in model.parameters()]

    if dist.is_initialized():
        model = DDP(nn.Linear(1, 1, bias=False))
        model(torch.tensor([[1.0 + rank]])).sum().backward()
        common.average_gradients(model)
        yield "ddp", gradients(model)


def bucket_cases(rank, world_size):
    sizes = [5_000_000, 3, 7_000_000, 20_000_000]  # 128 MB in float32: 4.9 buckets of 25 MiB
    model = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
    for i, parameter in enumerate(model):
        parameter.grad = torch.full_like(parameter, float(10 * i + rank))
    with Count() as count:
        common.average_gradients(model)
    yield "large", [(p.grad.min().item(), p.grad.max().item()) for p in model]
    yield "large, collectives", count.bytes
    model = nn.ParameterList(nn.Parameter(torch.zeros(100)) for _ in range(200))
    for parameter in model:
        parameter.grad = torch.ones(100)
    with Count() as count:
        common.average_gradients(model)
    yield "many, collectives", len(count.bytes)


def evaluate_cases(rank, world_size):
    """Accuracy and loss of one fixed model for 1 to 10 samples, through a DDP wrapper that has buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = DDP(model) if dist.is_initialized() else model
    inputs, targets = torch.randn(10, 4), torch.randint(3, (10,))
    device = torch.device("cpu")
    for samples in range(1, 11):
        data = common.Rows(inputs[:samples], targets[:samples])
        args = runtime.make_parser(None).parse_args(["--batch_size", "2"])
        loader = common.make_loader(data, range(rank, samples, world_size), args, device)
        with Count() as count:
            loss, accuracy = common.evaluate(model, loader)
        yield f"{samples} samples", (loss, accuracy, len(count.bytes))


def training_cases(rank, world_size):
    """Weights after two epochs on so few rows that ranks have batches of different sizes, or a repeated row only.

    One process does what two and three would do together, with the whole batch."""
    torch.manual_seed(0)
    inputs, targets, start = torch.randn(17, 4), torch.randint(3, (17,)), nn.Linear(4, 3)
    for rows in (1, 2, 3, 5, 17):
        data = common.Rows(inputs[:rows], targets[:rows])
        for size in (1, 4):
            for grad_sync in ("ddp", "manual") if world_size > 1 else ("2", "3"):
                model = copy.deepcopy(start)
                options = ["--optimizer", "sgd", "--accumulation_steps", "2", "--epochs", "2"]
                if world_size > 1:
                    options += ["--grad_sync", grad_sync, "--batch_size", str(size)]
                    model = DDP(model) if grad_sync == "ddp" else model
                else:
                    options += ["--batch_size", str(size * int(grad_sync))]
                args = runtime.make_parser(None).parse_args(options)
                sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, seed=0)
                loader = common.make_loader(data, sampler, args, torch.device("cpu"))
                state = runtime.TrainState(model, args)
                losses = [ddp_launch.train_one_epoch(model, loader, state, args)["train_loss"] for _ in range(2)]
                yield f"{rows} rows, {size} each, {grad_sync}", (common.unwrap(model).weight.detach(), losses)


def communication_cases(rank, world_size):
    """What gloo is asked for in three steps with 32.2 MB of gradients: by a loop with nothing but DDP, and by ours."""
    start = nn.Sequential(nn.Linear(20, 2000), nn.ReLU(), nn.Linear(2000, 4000), nn.ReLU(), nn.Linear(4000, 10))
    data = common.Rows(torch.randn(6 * world_size, 20), torch.randint(10, (6 * world_size,)))
    for kind in "bare", "ddp", "manual":
        args = runtime.make_parser(None).parse_args(["--optimizer", "sgd", "--batch_size", "2"])
        args.grad_sync = "manual" if kind == "manual" else "ddp"
        model = DDP(copy.deepcopy(start)) if kind != "manual" else start
        loader = common.make_loader(data, range(rank, len(data), world_size), args, torch.device("cpu"))
        state = runtime.TrainState(model, args)
        with torch.profiler.profile() as profile:
            if kind == "bare":
                for inputs, targets in loader:
                    nn.functional.cross_entropy(model(inputs), targets).backward()
            else:
                ddp_launch.train_one_epoch(model, loader, state, args)
        yield kind, {event.key: event.count for event in profile.key_averages() if "gloo:" in event.key}


def buffers(rank, world_size):
    norm = nn.BatchNorm1d(2)
    norm.running_mean += rank
    common.average_batch_norm(norm)
    yield "running mean", norm.running_mean


def main(folder):
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = common.rank_and_world_size()
    results = {}
    functions = [evaluate_cases]
    if world_size <= 3:
        functions += [reduce_mean_cases, average_gradients_cases, bucket_cases, training_cases, buffers]
    if 1 < world_size <= 3:
        functions += [communication_cases]
    for cases in functions:
        results[cases.__name__] = dict(cases(rank, world_size))
    torch.save(results, f"{folder}/{rank}.pt")
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
