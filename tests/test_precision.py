"""fp16 and its loss scaling: the scripts' own loop on CPUs, with one rank and with two, against steps by hand.

The scripts refuse fp16 without a GPU, as it is slow there, but torch has it on CPUs since 2.3. The tests get past the
refusal; all else is as on a GPU. Two ranks run this file: see its end.
"""
import contextlib
import functools
import io
import math
import os
import shutil
import sys
import tempfile
import unittest
from datetime import timedelta
from unittest import mock

import common
import ddp_launch
import dp_example
import runtime
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler

from tests import test_resume
from tests.helpers import Run, launcher, options, run
from tests.test_steps import Waits

needs_fp16 = unittest.skipUnless(hasattr(torch.amp, "GradScaler"), "torch has fp16 on CPUs since 2.3")
ROWS, SIZE, EPOCHS, CLIP, GROWTH = 21, 3, 3, 0.5, 4
CASES = {"sgd": [], "adam": [], "sgd, clipped": [], "sgd, clipped, accumulated": [], "adam, clipped, accumulated": []}
for case, given in CASES.items():
    given += ["--optimizer", case[:4].strip(","), "--batch_size", str(SIZE), "--epochs", str(EPOCHS)]
    given += ["--max_grad_norm", str(CLIP)] * ("clipped" in case)
    given += ["--accumulation_steps", "2"] * ("accumulated" in case)


def small():
    """A model, and rows for it. Of two ranks, only the second has the row for which the first step overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs, targets = torch.randn(ROWS, 4), torch.randint(3, (ROWS,))
    inputs[1] *= 10
    targets[1] = model(inputs[1]).argmin()
    return model, inputs, targets


def train(rank, world_size):
    """Train in each case; return weights, losses, Adam's step counts and the scale."""
    results = {}
    for case, given in CASES.items():
        for grad_sync in ("ddp", "manual")[:world_size]:
            args = options(*given, "--precision", "fp16", "--grad_sync", grad_sync)
            plain, *data = small()
            model = common.Autocast(plain, args.precision)
            model = DDP(model) if (world_size, grad_sync) == (2, "ddp") else model
            data = common.Rows(*data)
            sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=False)
            loader = common.make_loader(data, sampler, args, torch.device("cpu"))
            state, losses = runtime.TrainState(model, args), []
            state.scaler.set_growth_interval(GROWTH)
            # Memory that is not initialised is often 0 by chance, which is right for momentum.
            with mock.patch.object(torch, "empty_like", lambda *one, **more: torch.full_like(*one, math.nan, **more)):
                for state.epoch in range(EPOCHS):
                    losses.append(ddp_launch.train_one_epoch(model, loader, state, args)["train_loss"])
            steps = {int(values["step"]) for values in state.optimizer.state.values() if "step" in values}
            results[f"{case}, {grad_sync}"] = {"weights": plain.state_dict(), "losses": losses, "steps": sorted(steps),
                                               "scale": state.scaler.get_scale()}
    return results


def resumed(rank, world_size):
    """The last checkpoints of a run, and of runs that go on from what it has written before; on rank 0.

    The data is so large that the first steps overflow, until the scale fits, which resumed runs need as well."""
    data = [common.Rows(30 * inputs, targets) for inputs, targets in
            (part.tensors for part in common.load_data(options()))]
    save, found = runtime.TrainState.save, {}
    for name, steps, given in (("ddp", 8, ["--optimizer", "sgd", "--max_grad_norm", "1", "--accumulation_steps", "2"]),
                               ("manual", 15, ["--learning_rate", "0.001"])):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):

            def keep(state, path):
                save(state, path)
                shutil.copy(path, os.path.join(folder, f"{state.epoch}-{state.step}"))

            for start in ("whole", f"0-{steps}", "1-0", f"1-{steps}"):
                path = os.path.join(folder, start)
                args = options(*given, "--precision", "fp16", "--grad_sync", name, "--checkpoint", path, "--resume",
                               "--batch_size", str(100 // world_size), "--checkpoint_steps", str(steps))
                with mock.patch.object(runtime.TrainState, "save", keep if start == "whole" else save):
                    ddp_launch.train(rank, world_size, torch.device("cpu"), data, args)
                if rank == 0:
                    found.setdefault(name, []).append(torch.load(path, weights_only=True))
                    for line in found[name][-1]["history"]:
                        del line["seconds"], line["samples_per_second"]
    return found


class ByHand:
    """The same training without GradScaler, fused optimizer or processes: micro-batches of each rank take turns."""

    def __init__(self, case, world_size):
        self.case, self.world_size, self.sgd = case, world_size, "sgd" in case
        self.model, self.inputs, self.targets = small()
        self.rate = 0.05 if self.sgd else 0.005
        kind, settings = (torch.optim.SGD, {"momentum": 0.9}) if self.sgd else (torch.optim.Adam, {})
        self.optimizer = kind(self.model.parameters(), lr=self.rate, **settings)
        self.scale, self.steps, self.losses = 65536.0, "", []  # of a step a letter: skipped, clipped or taken
        size = SIZE * world_size * (2 if "accumulated" in case else 1)
        for epoch in range(EPOCHS):
            self.losses.append(0.0)
            for begin in range(0, ROWS, size):
                self.add_gradients(range(begin, min(begin + size, ROWS)))
                share = (epoch + begin / ROWS) / EPOCHS
                self.optimizer.param_groups[0]["lr"] = self.rate * (0.5 + 0.5 * math.cos(math.pi * share))
                self.step()
                self.optimizer.zero_grad()

    def add_gradients(self, rows):
        """Add a step's scaled gradients. They pass through fp16, so the scale decides whether they overflow."""
        micro = SIZE * self.world_size
        for batch in (rows[at:at + micro] for at in range(0, len(rows), micro)):
            for own in filter(None, (batch[rank::self.world_size] for rank in range(self.world_size))):
                with torch.autocast("cpu", torch.float16):
                    outputs = self.model(self.inputs[own])
                loss = nn.functional.cross_entropy(outputs.float(), self.targets[own], reduction="sum")
                (loss * (self.scale * self.world_size / len(rows))).backward()
                self.losses[-1] += loss.item() / ROWS

    def step(self):
        gradients = [parameter.grad / (self.scale * self.world_size) for parameter in self.model.parameters()]
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        if not math.isfinite(norm):
            self.steps += "s"
            self.scale /= 2
            return
        factor = min(1.0, CLIP / norm) if "clipped" in self.case else 1.0
        for parameter, gradient in zip(self.model.parameters(), gradients):
            parameter.grad = gradient * factor
        self.optimizer.step()
        self.steps += "c" if factor < 1 else "t"
        if len(self.steps.rpartition("s")[2]) % GROWTH == 0:
            self.scale *= 2


class OneThread:
    """On shared cores, a second thread makes the small products in fp16 25 times slower."""

    def setUp(self):
        super().setUp()
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)


@functools.lru_cache(maxsize=None)
def two_ranks():
    """What `train` and `resumed` return on each of two ranks, which run this file."""
    with tempfile.TemporaryDirectory() as folder:
        code, out, err = run(*launcher(2, "-m"), "tests.test_precision", folder)
        if code:
            raise AssertionError(f"the ranks ended with {code}\n{out}\n{err}")
        return [torch.load(os.path.join(folder, f"{rank}.pt"), weights_only=True) for rank in range(2)]


@needs_fp16
class StepsTest(OneThread, unittest.TestCase):
    """In each case the first step overflows, and others, in which the scale has grown too far."""

    def check(self, world_size, ranks):
        for name, found in ranks[0].items():
            expected = ByHand(name.rpartition(", ")[0], world_size)
            with self.subTest(name, world_size=world_size):
                self.assertRegex(expected.steps, "^s.*(c.*t|t.*c)" if "clipped" in name else "^s.*t")
                self.assertEqual(found["scale"], expected.scale)
                if not expected.sgd:  # Adam counts the steps that it has taken
                    self.assertEqual(found["steps"], [len(expected.steps.replace("s", ""))])
                for loss, by_hand in zip(found["losses"], expected.losses):
                    self.assertAlmostEqual(loss, by_hand, places=6)
                for key, value in expected.model.state_dict().items():
                    torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=2e-6)
                for other in ranks[1:]:
                    torch.testing.assert_close(other[name], found, rtol=0, atol=0)

    def test_one_rank(self):
        self.check(1, [train(0, 1)])

    def test_two_ranks(self):
        self.check(2, [found["steps"] for found in two_ranks()])

    def test_gradients_that_are_0_in_fp16_unless_scaled(self):
        """One step with 100 samples: against the same in fp32."""
        torch.manual_seed(0)
        inputs, targets, model = torch.randn(100, 4), torch.randint(3, (100,)), nn.Linear(4, 3)
        with torch.autocast("cpu", torch.float16):
            (1e-6 * nn.functional.cross_entropy(model(inputs).float(), targets)).backward()
        self.assertEqual(model.weight.grad.count_nonzero().item(), 0)
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        expected = model.weight.detach() - model.weight.grad
        args = options("--optimizer", "sgd", "--precision", "fp16", "--learning_rate", "1e6")
        wrapped, losses = common.Autocast(model, "fp16"), common.losses
        loader = common.make_loader(common.Rows(inputs, targets), range(100), args, torch.device("cpu"))
        state = runtime.TrainState(wrapped, args)
        state.optimizer.zero_grad()
        with mock.patch.object(common, "losses", lambda outputs, targets: 1e-6 * losses(outputs, targets)):
            ddp_launch.train_one_epoch(wrapped, loader, state, args)
        torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=1e-3)

    def test_scaling_costs_no_wait(self):
        """This holds for fused optimizers. The others read in each step whether to skip it."""
        counted = 0
        for given in CASES.values():
            model, *data = small()
            args, data = options(*given, "--precision", "fp16"), common.Rows(*data)
            model = common.Autocast(model, "fp16")
            loader = common.make_loader(data, range(ROWS), args, torch.device("cpu"))
            state = runtime.TrainState(model, args)
            if state.optimizer.param_groups[0].get("fused"):
                with Waits() as waits:
                    ddp_launch.train_one_epoch(model, loader, state, args)
                self.assertEqual(waits.found, ["item", "item"])  # DataLoader's seed, and the loss of the epoch
                counted += 1
        if not counted:
            self.skipTest("this torch has no fused optimizer for CPUs")


def allowed():
    """Hide fp16 from the roll call, which refuses it on CPUs."""
    assign = runtime.assign_devices
    return mock.patch.object(runtime, "assign_devices", lambda ranks: assign(
        [{**rank, "alike": {**rank["alike"], "--precision": "fp32"}} for rank in ranks]))


@needs_fp16
class CommandTest(OneThread, unittest.TestCase):
    def test_it_learns_as_in_fp32_in_each_script_that_is_one_process(self):
        expected = Run(ddp_launch)
        with allowed():
            runs = [Run(module, "--epochs", "2", "--batch_size", "100", "--precision", "fp16")
                    for module in (ddp_launch, dp_example)]
        self.assertEqual(runs[0].difference(runs[1]), 0)
        self.assertTrue(0 < runs[0].difference(expected) < 0.02)
        for name, value in expected.metrics[-1].items():
            self.assertAlmostEqual(runs[0].metrics[-1][name], value, delta=0.005)
        growth = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        self.assertEqual(runs[0].checkpoint["scaler"], {"scale": 65536.0, "_growth_tracker": 80, **growth})


@needs_fp16
class ResumeTest(OneThread, unittest.TestCase):
    check_same = test_resume.ResumeTest.check_same

    def check(self, found):
        """Weights, optimizer, scaler and history of the run that was not interrupted, and of those that went on."""
        for name, (whole, *others) in found.items():
            with self.subTest(name):
                self.assertLess(whole["scaler"]["scale"], 65536)
                for other in others:
                    self.check_same(other, whole, name)
                for values in whole["optimizer"]["state"].values():
                    if "step" in values:  # of 80; each one that was skipped has halved the scale
                        self.assertEqual(whole["scaler"]["scale"], 65536 / 2 ** (80 - int(values["step"])))

    def test_one_rank(self):
        found = resumed(0, 1)
        self.assertEqual([len(checkpoints) for checkpoints in found.values()], [4, 4])
        self.check(found)

    def test_two_ranks(self):
        self.check(two_ranks()[0]["resumed"])


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {"steps": train(dist.get_rank(), 2), "resumed": resumed(dist.get_rank(), 2)}
    torch.save(results, os.path.join(sys.argv[1], f"{dist.get_rank()}.pt"))
    dist.destroy_process_group()
