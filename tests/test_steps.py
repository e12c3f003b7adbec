"""The cost of a step besides computing: collectives, waits for the device, threads. It is counted, not timed."""
import shutil
import unittest

import common
import ddp_launch
import runtime
import torch
from torch.overrides import TorchFunctionMode

from tests.helpers import FolderTest, Run, options, project, run, trained
from tests.test_collectives import CollectivesTest

WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__repr__",
         "__format__", "__contains__"}


class CollectivesPerStepTest(CollectivesTest):
    def test_one_for_a_step_and_one_for_an_epoch_but_none_for_metrics_or_buffers(self):
        """Windows of 2, 2 and 1 micro-batches, with BatchNorm: DDP talks only in the last of each. By hand, 5 steps."""
        for _, _, found in self.each("step_cases"):
            self.assertEqual(found, {"accumulated": {"gloo:all_reduce": 3 + 1}, "manual": {"gloo:all_reduce": 5 + 1}})


class BucketsTest(CollectivesTest):
    def test_they_are_those_of_ddp_or_25_mib_each(self):
        """Three steps with 32.2 MB of gradients, against the same loop with nothing but DDP."""
        for _, _, found in self.each("communication_cases"):
            bare = found["bare"]
            self.assertGreater(bare["gloo:all_reduce"], 3)  # DDP has several buckets, and asks how all ranks cut them
            self.assertEqual(found["ddp"], {**bare, "gloo:all_reduce": bare["gloo:all_reduce"] + 1})
            self.assertEqual(found["manual"], {"gloo:all_reduce": 3 * 2 + 1})


class Waits(TorchFunctionMode):
    """Records every call that would wait for a GPU to finish its work."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        self.found += [name] * (name in WAITS)
        return function(*args, **kwargs or {})


class WaitsTest(unittest.TestCase):
    def test_one_for_an_epoch_and_one_for_an_evaluation(self):
        args = options("--optimizer", "sgd", "--max_grad_norm", "1", "--accumulation_steps", "2")
        data = common.load_data(args)[0]
        model = common.build_model(args, data)
        loader = common.make_loader(data, range(len(data)), args, torch.device("cpu"))
        state = runtime.TrainState(model, args)
        for call_once, at_the_end in ((lambda: ddp_launch.train_one_epoch(model, loader, state, args), "item"),
                                      (lambda: common.evaluate(model, loader), "tolist")):
            with Waits() as waits:
                call_once()
            self.assertEqual(waits.found, ["item", at_the_end])  # the first is DataLoader's seed, on the CPU


class ThreadsTest(unittest.TestCase):
    def test_processes_share_the_cores(self):
        each = max(1, torch.get_num_threads() // 2)
        self.assertIn(f", {each} threads per process", trained("ddp_spawn.py", "-g", "2").out)

    def test_the_users_number_wins(self):
        cores = str(torch.get_num_threads())
        code, out, err = run("ddp_spawn.py", "-g", "2", "--epochs", "0", OMP_NUM_THREADS=cores)
        self.assertEqual(code, 0, err)
        self.assertIn(f", {cores} threads per process", out)


@unittest.skipUnless(shutil.which("g++") or shutil.which("c++"), "torch.compile needs a C++ compiler here: no g++")
class CompileTest(FolderTest):
    def test_the_same_weights_under_the_same_names(self):
        then, tell = "    # DDP 6:", "    is_main and print('DDP of', type(model.module).__name__)\n"
        project(self.folder, ("ddp_spawn.py", then, tell + then))
        compiled = Run("ddp_spawn.py", "-g", "2", "--compile", cwd=self.folder)
        self.assertIn("DDP of OptimizedModule\n", compiled.out)
        self.assertLess(compiled.difference(trained("ddp_spawn.py", "-g", "2")), 2e-5)
