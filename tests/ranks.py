"""Started by torchrun: each rank calls the collectives and evaluate(), and saves the results, which the tests check.

Every input depends only on the rank, so that the tests can work out the right results by hand.
"""
import contextlib
import copy
import gc
import io
import os
import random
import sys
import warnings
from datetime import timedelta
from unittest import mock

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
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # as in runtime.py


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
    sizes = [5_000_000, 3, 7_000_000, 20_000_000]  # 20 MB, 12 bytes, 28 MB and 80 MB in float32
    model = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
    for i, parameter in enumerate(model):
        parameter.grad = torch.full_like(parameter, float(10 * i + rank))
    with Count() as count:
        common.average_gradients(model)
    yield "large", [(p.grad.min().item(), p.grad.max().item()) for p in model]
    yield "large, collectives", count.bytes
    for number, size in ((200, 100), (10, 1_250_000)):
        model = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(number))
        for parameter in model:
            parameter.grad = torch.ones(size)
        with Count() as count:
            common.average_gradients(model)
        yield f"{number} of {size}, collectives", len(count.bytes)


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
    """Weights after two epochs on so few rows that ranks have batches of different sizes, or only a repeated row.

    One process trains on the whole batch, as two and three processes do together."""
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
    """The calls of gloo in three steps with 32.2 MB of gradients: by a loop with nothing but DDP, and by ours."""
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


def step_cases(rank, world_size):
    """The calls of gloo in the second epoch of ddp_launch.py's train(), with BatchNorm; 5 batches on each rank."""
    original, found = ddp_launch.train_one_epoch, {}
    data = [common.Rows(torch.randn(25 * world_size, 4), torch.randint(3, (25 * world_size,))) for _ in range(3)]

    def profiled(*given):
        with torch.profiler.profile() as profile:
            figures = original(*given)
        found[name] = {event.key: event.count for event in profile.key_averages() if "gloo:" in event.key}
        return figures

    with mock.patch.object(ddp_launch, "train_one_epoch", profiled):
        for name, given in (("accumulated", ["--accumulation_steps", "2"]), ("manual", ["--grad_sync", "manual"])):
            model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
            train(rank, world_size, model, data, "--batch_size", "5", *given)
    yield from found.items()


def buffers(rank, world_size):
    norm = nn.BatchNorm1d(2)
    norm.running_mean += rank
    common.average_batch_norm(norm, torch.zeros((), dtype=torch.float64))
    yield "running mean", norm.running_mean


def layout_cases(rank, world_size):
    """Gradients that are missing, not contiguous, expanded, conjugate or negated, in buckets of any size."""
    # Only one rank has gradients, and the others get them. Then an optimizer steps that needs the parameter's layout.
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
    model.transposed = nn.Parameter(torch.randn(3, 2).t())
    if rank == 0:
        (model.weight * torch.randn(4, 3, 3, 3) + model.transposed.sum() ** 2).sum().backward()
        yield "first", gradients(model)
    common.average_gradients(model)
    yield "strides", [(p.stride(), p.grad.stride()) for p in model.parameters()]
    yield "missing elsewhere", gradients(model)
    common.make_optimizer(model, runtime.make_parser(None).parse_args(["--learning_rate", "0.5"])).step()
    yield "stepped", [p.detach().contiguous() for p in model.parameters()]

    model = nn.ParameterList(nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in
                             (torch.float32, torch.float32, torch.complex64, torch.float32))
    model[0].grad = torch.tensor([1.0 + rank]).expand(3)
    model[1].grad = torch.tensor([1.0]).expand(3) if rank == 0 else torch.full((3,), 1.0 + rank)
    model[2].grad = torch.tensor([1 + 2j, 3, rank * 1j]).conj()
    model[3].grad = torch.tensor([1j, 2j, rank * 1j]).conj().imag
    common.average_gradients(model)
    yield "views", gradients(model)

    for size in (4, 8, 12, 16, 52, 10**6):
        with mock.patch.object(common, "BUCKET_BYTES", size):
            torch.manual_seed(7)
            values = [torch.randn(shape) for shape in ((3,), (2, 5), (7,), (), (4, 2), (6,), (3, 4), (5,))]
            model = nn.ParameterList(nn.Parameter(torch.zeros_like(value)) for value in values)
            for parameter, value in zip(model, values):
                parameter.grad = value * (1 + rank)
            if rank == 1:
                model[1].grad = model[1].grad.t().contiguous().t()
                model[6].grad = torch.cat([model[6].grad, model[6].grad], 1)[:, :4]
            if rank == 0:
                model[2].grad = model[4].grad = model[3].grad = None
            else:
                model[4].grad = model[4].grad.to_sparse(1)
            model[5].grad = None
            model[7].grad = model[7].grad[:1].expand(5)
            common.average_gradients(model)
            yield f"buckets of {size}", [None if p.grad is None else p.grad.to_dense() for p in model.parameters()]


def inference_cases(rank, world_size):
    """Later calls can use what a first call, in inference mode, has created."""
    for kept in vars(common).values():
        getattr(kept, "cache_clear", int)()
    model = nn.ParameterList([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4)), nn.Parameter(
        torch.zeros(2, 2))])
    for inference in (True, False):
        model[0].grad = torch.full((3,), 1.0 + rank)
        model[1].grad = torch.full((4,), 3.0) if rank == 0 else None
        model[2].grad = torch.full((2, 2), 3.0).to_sparse(1) if rank == 0 else None
        with torch.inference_mode(inference):
            common.average_gradients(model)
        for parameter in model:
            parameter.grad *= 2  # as clipping does, and what an inference tensor would refuse
        yield ("inside", "outside")[not inference], [grad.to_dense() for grad in gradients(model)]


def broadcast_cases(rank, world_size):
    value = {"text": {"name": "a", "numbers": [1, 2.5, None], "flag": True}, "sparse": torch.tensor(
        [[0, 0], [1.5, 2], [0, 0]]).to_sparse(1), "tensors": [torch.arange(6).view(2, 3).t(), torch.zeros(
            0, 3, dtype=torch.bfloat16), torch.tensor(7), torch.tensor([1j, 2])]}
    with mock.patch.object(common, "BUCKET_BYTES", 16):
        yield from common.broadcast(value if rank == 0 else None).items()


class Waves(nn.Module):
    """Complex parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


class OfDict(nn.Linear):
    """Takes a whole sample, which is a dict."""

    def forward(self, batch):
        return super().forward(batch["x"])


def train(rank, world_size, model, data, *given, **functions):
    """Two epochs as ddp_launch.py trains, with a global batch of 12: the history, on rank 0, and the model."""
    args = runtime.make_parser(None).parse_args(["--batch_size", str(12 // world_size), *given])
    lines = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(mock.patch.object(runtime, "log", lambda args, state, *_: lines.append(state.history[-1])))
        for name, function in {"build_model": lambda args, train: model, **functions}.items():
            stack.enter_context(mock.patch.object(common, name, function))
        ddp_launch.train(rank, world_size, torch.device("cpu"), data, args)
    return lines[:2], model


def task_cases(rank, world_size):
    torch.manual_seed(0)
    x, y, tokens = torch.randn(50, 4), torch.randint(3, (50,)), torch.randint(9, (50, 5))
    cuts = (0, 31), (31, 43), (43, 50)
    rows, sentences = [[common.Rows(inputs[a:b], y[a:b]) for a, b in cuts] for inputs in (x, tokens)]
    dicts = [[{"x": x[i], "y": y[i]} for i in range(a, b)] for a, b in cuts]
    losses, scores = common.losses, common.scores
    of_dict = {"losses": lambda outputs, batch: losses(outputs, batch["y"]),
               "scores": lambda outputs, batch: scores(outputs, batch["y"])}
    sparse = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(20, 3))
    for name, model, data, functions, given in (
            ("complex", Waves(), rows, {}, ()), ("dicts", OfDict(4, 3), dicts, of_dict, ()),
            ("sparse", sparse, sentences, {}, ("--optimizer", "sgd"))):
        for how in ("ddp", "manual"):
            history, trained = train(rank, world_size, copy.deepcopy(model), data, "--grad_sync", how, *given,
                                     **functions)
            yield f"{name}, {how}", (trained.state_dict(), history)


def buffer_cases(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model.register_buffer("sized", torch.arange(2.0 + rank))
    model.register_buffer("expanded", torch.tensor([rank + 0.5]).expand(3))
    model.register_buffer("own", torch.tensor([rank + 0.1], dtype=torch.float64))
    model.register_buffer("count", torch.tensor(10 * rank))
    data = [common.Rows(torch.randn(24, 4), torch.randint(3, (24,))) for _ in range(3)]
    train(rank, world_size, model, data, "--epochs", "1")
    yield from {"sized": model.sized, "expanded": model.expanded.clone(), "own": model.own, "count": model.count,
                "mean": model[1].running_mean}.items()

    more = nn.Sequential(nn.BatchNorm2d(5), nn.BatchNorm1d(6, track_running_stats=False))
    model = nn.Sequential(nn.BatchNorm1d(4), more)
    model[0].running_mean += rank
    model[0].running_var += rank
    loss_sum = torch.tensor(0.1 * rank, dtype=torch.float64)
    with Count() as count:
        common.average_batch_norm(model, loss_sum)
    yield "statistics", torch.cat([buffer for buffer in model.buffers() if buffer.is_floating_point()])
    yield "loss sum", loss_sum
    yield "collectives", count.bytes


class Draws(torch.utils.data.Dataset):
    """Samples that Python's random draws."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.tensor([random.random()], dtype=torch.float64), i


def random_cases(rank, world_size):
    """The random numbers of a rank in two epochs: twice with one seed, with another, from the second's 5th sample.

    Finally, those that the training process itself draws in its first step, as dropout does."""
    own = []

    def drawn(seed, workers, epoch=0, samples=0):
        args = runtime.make_parser(None).parse_args(["--seed", str(seed), "--num_workers", str(workers),
                                                     "--batch_size", "2"])
        sampler = DistributedSampler(range(12), num_replicas=world_size, rank=rank, seed=seed)
        loader = common.make_loader(Draws(), sampler, args, torch.device("cpu"))
        state, found = runtime.TrainState(nn.Linear(1, 1), args), []
        state.epoch, state.samples, state.step = epoch, samples, samples // 4
        while state.epoch < 2:
            sampler.set_epoch(state.epoch)
            found.append([])
            for batch in runtime.batches(loader, state, args):
                if not found[-1]:
                    own.append(random.random())
                found[-1] += batch.inputs.flatten().tolist()
            state.end_training()
            state.epoch += 1
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DataLoader, where there are fewer cores; of Python, that it forks
        for workers in (0, 2):
            runs = [drawn(0, workers), drawn(0, workers), drawn(1, workers), drawn(0, workers, 1, 8)[0]]
            yield workers, [*runs, own[:6]]
            own.clear()


def sampler_cases(rank, world_size):
    """Two epochs on 17 rows, of which the sampler or the loader leaves some out."""
    torch.manual_seed(0)
    inputs, targets, start = torch.randn(17, 4), torch.randint(3, (17,)), nn.Linear(4, 3)
    data = common.Rows(inputs, targets)
    args = runtime.make_parser(None).parse_args(["--optimizer", "sgd", "--batch_size", "4"])
    kind = {"num_replicas": world_size, "rank": rank, "seed": 0}
    for name, sampler in (("over 9", DistributedSampler(range(9), **kind)),
                          ("drop_last", DistributedSampler(data, drop_last=True, **kind)),
                          ("--drop_last", DistributedSampler(data, **kind))):
        loader = common.make_loader(data, sampler, args, torch.device("cpu"), drop_last=name == "--drop_last")
        model, figures = copy.deepcopy(start), []
        state = runtime.TrainState(DDP(model) if dist.is_initialized() else model, args)
        for state.epoch in range(2):
            sampler.set_epoch(state.epoch)
            figures.append(ddp_launch.train_one_epoch(state.model, loader, state, args))
        yield name, (model.state_dict(), figures)


def main(folder):
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = common.rank_and_world_size()
    results = {}
    functions = [evaluate_cases]
    if world_size <= 3:
        functions += [reduce_mean_cases, average_gradients_cases, bucket_cases, training_cases, buffers, layout_cases,
                      task_cases, sampler_cases]
    if 1 < world_size <= 3:
        functions += [communication_cases, step_cases, inference_cases, buffer_cases, broadcast_cases]
    if world_size == 2:
        functions += [random_cases]
    for cases in functions:
        results[cases.__name__] = dict(cases(rank, world_size))
    torch.save(results, f"{folder}/{rank}.pt")
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
