"""A step neither waits for the device nor uses a wrong one. No GPU is needed: torch's `meta` device replaces it.

Its tensors have shapes but no values. As on a GPU, an operation that mixes devices fails. An operation that reads a
value would wait for the GPU; here it is counted, and returns a value that the test chooses.
"""
import contextlib
import io
import sys
import unittest
import warnings
from unittest import mock

import common
import ddp_launch
import runtime
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.data.distributed import DistributedSampler

from tests.helpers import FolderTest, options

META, CPU = torch.device("meta"), torch.device("cpu")
EPOCHS, BATCHES = 2, 5
FUSED = "_get_fused_kernels_supported_devices"


class Watch(TorchDispatchMode):
    """Sees every operation, also those of backward, the optimizer and autograd.

    `reads` lists the operations that wait for the device; `sent` says for each copy to it whether it does not wait."""

    def __init__(self, answer=lambda shape: torch.ones(shape)):
        super().__init__()
        self.reads, self.sent, self.answer, self.constants = [], [], answer, Constants(self)

    def __enter__(self):
        self.constants.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.constants.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        tensors = [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, torch.Tensor)]
        there, here = [[one for one in tensors if (one.device == META) is on_meta] for on_meta in (True, False)]
        if there and name == "_local_scalar_dense":
            self.reads.append("a number")
            return self.answer(()).to(there[0].dtype).item()
        if there and name == "_to_copy" and kwargs.get("device", META) == CPU:
            self.reads.append("a tensor")
            return self.answer(there[0].shape).to(kwargs.get("dtype") or there[0].dtype)
        if name == "copy_" and there and args[0].device == CPU:
            self.reads.append("a tensor")
            return args[0]
        if name == "copy_" and there and here:
            self.sent.append(len(args) > 2 and args[2])
        elif name == "_to_copy" and here and kwargs.get("device", CPU) == META:
            self.sent.append(kwargs.get("non_blocking", False))
        elif there and here and (args[0] is here[0] or any(one.dim() for one in here)):  # a number may come along
            raise AssertionError(f"{name} of tensors on {[str(one.device) for one in tensors]}")
        elif there and name.startswith(("_fused_", "_amp_")):  # kernels that there are for GPUs, but not for `meta`
            return args[0] if name == "_amp_update_scale_" else None
        return function(*args, **kwargs)


class Constants(TorchFunctionMode):
    """Records tensors made on the device from Python numbers: copies that wait, and that `Watch` does not see."""

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and result.device == META:
            self.watch.sent.append(False)
        return result


@contextlib.contextmanager
def world_of_two():
    """A process group of two on nccl, of which this is rank 0. Its collectives change nothing."""
    shapes = []

    def collective(tensor, *_, async_op=False, **more):
        assert tensor.device == META, f"a collective of a tensor on {tensor.device}, with nccl"
        shapes.append(tuple(tensor.shape))
        return mock.Mock() if async_op else None

    with mock.patch.multiple(dist, is_initialized=lambda: True, get_rank=lambda: 0, get_world_size=lambda: 2,
                             get_backend=lambda: "nccl", all_reduce=collective, broadcast=collective):
        assert common.comm_device().type == "cuda"
        with mock.patch.object(common, "comm_device", lambda: META):
            yield shapes


WORLDS = (1, contextlib.nullcontext), (2, world_of_two)


def build_model(*_):
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def rows(count):
    return common.Rows(torch.randn(count, 4), torch.randint(3, (count,)))


class StandInTest(unittest.TestCase):
    """Watch sees what the other tests count."""

    def test_reads(self):
        tensor, here = torch.ones(3, device=META), torch.ones(3)
        for reads in (lambda: tensor.sum().item(), tensor.tolist, tensor.cpu, lambda: tensor.to("cpu", torch.float64),
                      lambda: bool(tensor[0] > 0), lambda: 1 if tensor.any() else 0, lambda: float(tensor[1]),
                      lambda: int(tensor[1]), lambda: range(tensor[1].long()), lambda: here.copy_(tensor),
                      lambda: torch.full((2,), tensor[0]), lambda: tensor[0].to("cpu", non_blocking=True)):
            with Watch() as watch:
                reads()
            self.assertEqual(len(watch.reads), 1)
        for fails in (tensor.nonzero, tensor.numpy, tensor.unique, lambda: tensor[tensor > 0],
                      lambda: torch.equal(tensor, tensor), lambda: f"{tensor[0]:.2f}"):
            with Watch(), self.assertRaises((NotImplementedError, TypeError, RuntimeError)):
                fails()

    def test_devices(self):
        there, here = torch.ones(2, 2, device=META), torch.ones(2, 2)
        for mixes in (lambda: there * here, lambda: here @ there, lambda: torch.cat([there, here]),
                      lambda: nn.functional.linear(there, here), lambda: here[0, 0].add_(there[0, 0]),
                      lambda: torch.where(there > 0, there, here), lambda: here[there.long()]):
            with Watch(), self.assertRaises(AssertionError):
                mixes()
        with Watch() as watch:
            there * here[0, 0]
            here.to(META, non_blocking=True)
            self.assertEqual((watch.reads, watch.sent), ([], [True]))
            there.copy_(here), here.to(META), torch.tensor([1.0], device=META)
            self.assertEqual((watch.reads, watch.sent), ([], [True, False, False, False]))


class DevicesTest(FolderTest):
    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(mock.patch.object(common, "build_model", build_model))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # no terminal, and so no line of progress
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # that it has no values is on purpose
        for name, module in sorted(sys.modules.items()):
            if name.startswith("torch.optim.") and hasattr(module, FUSED):
                devices = [*getattr(module, FUSED)(), "meta"]
                stack.enter_context(mock.patch.object(module, FUSED, lambda devices=devices: devices))

    def options(self, *given):
        return options("--batch_size", "6", "--epochs", str(EPOCHS), *given)

    def check_state(self, state):
        found = [*state.model.parameters(), *state.model.buffers(), state.loss_sum]
        found += [value for values in state.optimizer.state.values() for name, value in values.items()
                  if isinstance(value, torch.Tensor) and name != "step"]  # which unfused optimizers keep on the CPU
        self.assertEqual({tensor.device for tensor in found}, {META})
        self.assertGreater(len(found), 10)

    def test_an_epoch_reads_one_number(self):
        for given in ([], ["--optimizer", "sgd"], ["--max_grad_norm", "1", "--precision", "fp16"],
                      ["--grad_sync", "manual", "--accumulation_steps", "2"]):
            for world_size, world in WORLDS:
                with self.subTest(given, world_size=world_size), world() as collectives:
                    args, model, data = self.options(*given), build_model().to(META), rows(BATCHES * 6 * world_size - 1)
                    sampler = DistributedSampler(data, num_replicas=world_size, rank=0)
                    loader = common.make_loader(data, sampler, args, META)
                    with Watch() as watch:
                        state = runtime.TrainState(model, args)
                        self.assertEqual((watch.reads, watch.sent), ([], []))
                        ddp_launch.train_one_epoch(model, loader, state, args)
                    self.assertEqual(watch.reads, ["a number"])
                    self.assertEqual(watch.sent, 2 * BATCHES * [True])  # inputs and targets
                    self.check_state(state)
                    if world_size == 2:
                        self.assertEqual(len(collectives), 1 + (3 if "manual" in given else 0))

    def test_evaluation_reads_one_tensor(self):
        for _, world in WORLDS:
            model, args = build_model().to(META), self.options()
            loader = common.make_loader(rows(27), range(27), args, META)
            with world(), Watch(lambda shape: torch.tensor([6.0, 4, 3, 4])) as watch:
                self.assertEqual(common.evaluate(model, loader), (6 / 4, 3 / 4))
            self.assertEqual((watch.reads, watch.sent), (["a tensor"], 2 * BATCHES * [True]))

    def test_gradients_are_read_only_if_one_is_missing(self):
        for missing in (False, True):
            model = build_model().to(META)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            if missing:
                model[0].weight.grad = None
            flags = torch.arange(2).eq(0).view(2, 1).expand(2, 6)  # each one is there on some rank, and none is sparse
            with world_of_two() as collectives, Watch(lambda shape: flags) as watch:
                common.average_gradients(model)
            self.assertEqual((watch.reads, watch.sent), (["a tensor"] * missing, []))
            self.assertEqual(collectives, [(4 * 8 + 3 * 8 + 8 * 3 + 3 + 2 * 6,)])
            self.assertEqual({parameter.grad.device for parameter in model.parameters()}, {META})

    def test_a_mean_stays_on_its_device(self):
        for value, device, reads in ((torch.ones(3, device=META), META, 0), (torch.ones(3), CPU, 1), (2.5, CPU, 1)):
            with world_of_two() as collectives, Watch() as watch:
                self.assertEqual(common.reduce_mean(value).device, device)
            self.assertEqual((len(watch.reads), len(collectives)), (reads, 1))

    def run_training(self, name, device, world_size, world, *given):
        """Train; return the state, and the reads before and after the first epoch begins."""
        data, start = [rows(count) for count in (24, 7, 8)], runtime.start_or_resume
        args = self.options("--grad_sync", "manual", "--checkpoint", self.path(name), "--resume", *given)
        states = []

        def begin(args, state, loader):
            start(args, state, loader)
            states.append(state)
            watch.reads.append("begins")

        with world(), Watch() as watch, mock.patch.object(runtime, "start_or_resume", begin):
            ddp_launch.train(0, world_size, device, data, args)
        states[0].lock = None  # lets go of the checkpoint
        at = watch.reads.index("begins")
        return states[0], watch.reads[:at], watch.reads[at + 1:]

    def test_a_run_that_is_resumed(self):
        """It begins on a CPU. On the device, an epoch and its evaluation, and the test."""
        for optimizer in ("adam", "sgd"):
            for world_size, world in WORLDS:
                with self.subTest(optimizer, world_size=world_size):
                    name, given = f"{optimizer}{world_size}", ["--optimizer", optimizer, "--max_grad_norm", "1"]
                    self.run_training(name, CPU, 1, contextlib.nullcontext, *given, "--epochs", "1")
                    saved = torch.load(self.path(name), weights_only=True)
                    state, before, after = self.run_training(name, META, world_size, world, *given)
                    self.assertEqual(after, ["a number", "a tensor"] + ["a tensor"])
                    self.assertEqual(bool(before), world_size == 2)  # rank 0 has what it sends to the others
                    self.check_state(state)
                    self.assertEqual(state.epoch, 2)
                    self.assertEqual(list(torch.load(self.path(name), weights_only=True)), list(saved))

    def test_a_whole_run(self):
        """Two epochs of four steps, and a checkpoint within each, for which the loss is read as well."""
        state, before, after = self.run_training("whole", META, 1, contextlib.nullcontext, "--checkpoint_steps", "2")
        self.assertEqual((before, after), ([], 2 * ["a number", "a number", "a tensor"] + ["a tensor"]))
        self.check_state(state)
        self.assertEqual({value.device for value in state.best_model.values()}, {META})
        self.assertEqual([list(line) for line in state.history], 2 * [[
            "epoch", "train_loss", "valid_loss", "valid_accuracy", "samples_per_second", "seconds", "learning_rate"]])

    def test_what_is_loaded_is_put_on_the_device(self):
        """Before the first step, and of each optimizer: also where the file has it on the CPU."""
        for optimizer in ("adam", "sgd"):
            args, states = self.options("--optimizer", optimizer), []
            for device in (CPU, META):
                model = build_model().to(device)
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                with Watch():
                    states.append(runtime.TrainState(model, args))
                    states[-1].optimizer_step()
            states[0].save(self.path(optimizer))
            content = torch.load(self.path(optimizer), weights_only=True)
            with Watch() as watch:
                states[1].load_state_dict(content.__getitem__)
            self.assertEqual(watch.reads, [])
            self.check_state(states[1])
