"""On a GPU, what the other tests show on CPUs: skipped where torch finds none. One GPU is enough."""
import unittest
import warnings

from tests.helpers import FolderTest, Run, finish, free_port, options, start, trained

import common
import ddp_launch
import runtime
import torch
from torch import nn

GPU = ("--device", "cuda")


@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU, and torch finds none here")
class GpuTest(FolderTest):
    def check(self, run, device="cuda:0"):
        """It learns as on a CPU, from the same weights and batches."""
        self.assertIn(f"device {device}", run.out)
        cpu = trained("ddp_launch.py", "--device", "cpu").metrics[-1]["test_accuracy"]
        self.assertAlmostEqual(run.metrics[-1]["test_accuracy"], cpu, delta=0.01)

    def test_one_rank_with_nccl_in_every_precision(self):
        for precision in ("fp32", "bf16", "fp16"):
            with self.subTest(precision=precision):
                run = Run("ddp_spawn.py", *GPU, "--precision", precision, "--max_grad_norm", "5")
                self.assertIn("backend nccl", run.out)
                self.check(run)

    def test_gradients_averaged_by_hand(self):
        more = ["--grad_sync", "manual", "--accumulation_steps", "2", "--batch_size", "50"]
        self.check(Run("ddp_spawn.py", *GPU, *more))

    def test_two_ranks_do_not_share_a_gpu(self):
        """As two nodes of one process: nccl could not, and with gloo it would be slower than one rank."""
        where = ["--master_addr", "127.0.0.1", "--master_port", free_port(), "--backend", "gloo", "--batch_size", "50"]
        nodes = [start(["ddp_spawn.py", "-n", "2", "-nr", str(nr), *GPU, *where]) for nr in (0, 1)]
        for code, _, err in map(finish, nodes):
            self.assertEqual((code, "have 1 GPU for 2 process(es)" in err), (2, True), err)

    def test_data_parallel(self):
        self.check(Run("dp_example.py", "--epochs", "2", "--batch_size", "100", *GPU))
        model = nn.Linear(3, 2).cuda()
        inputs = torch.ones(6, 3, device="cuda")
        torch.testing.assert_close(nn.DataParallel(model, device_ids=[0, 0])(inputs), model(inputs))

    def test_a_step_does_not_wait_for_the_gpu(self):
        args = options("--max_grad_norm", "5")
        data, device = common.load_data(args)[0], torch.device("cuda", 0)
        model = common.build_model(args, data).to(device)
        loader = common.make_loader(data, range(len(data)), args, device)
        state = runtime.TrainState(model, args)
        ddp_launch.train_one_epoch(model, loader, state, args)
        torch.cuda.set_sync_debug_mode("warn")
        self.addCleanup(torch.cuda.set_sync_debug_mode, "default")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp_launch.train_one_epoch(model, loader, state, args)
        waits = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
        self.assertLessEqual(len(waits), 2, waits)  # for the epoch's loss, and not for each of 40 batches
