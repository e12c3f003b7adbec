"""Training gives the same result for any number of processes, and under every launcher."""
import math
import unittest

import common
import torch
from torch.utils.data.distributed import DistributedSampler

import ddp_launch
from tests.helpers import FolderTest, Run, launcher, options, trained, write_mnist

ROUNDING = 2e-5  # of weights of order 1, after two epochs in float32


def one_process(batch_size, *options):
    return trained(ddp_launch, "--batch_size", str(batch_size), *options)


class SameBitsTest(unittest.TestCase):
    def test_spawn_and_torchrun(self):
        spawn, torchrun = trained("ddp_spawn.py", "-g", "2"), trained(*launcher(2), "ddp_launch.py")
        self.assertEqual(spawn.difference(torchrun), 0.0)
        for a, b in zip(spawn.metrics, torchrun.metrics):
            self.assertEqual({key: a[key] for key in a if key not in ("seconds", "samples_per_second")},
                             {key: b[key] for key in b if key not in ("seconds", "samples_per_second")})

    def test_run_to_run(self):
        again = trained("ddp_spawn.py", "-n", "1", "-g", "2")  # with `-n 1`, to be another entry of the cache
        self.assertEqual(trained("ddp_spawn.py", "-g", "2").difference(again), 0.0)


class OneProcessOrSeveralTest(unittest.TestCase):
    def assertSame(self, first, second):
        self.assertLess(first.difference(second), ROUNDING)
        for a, b in zip(first.metrics, second.metrics):
            for key in ("train_loss", "valid_loss", "valid_accuracy", "test_loss", "test_accuracy"):
                if key in a:
                    self.assertAlmostEqual(a[key], b[key], places=5)

    def test_ddp(self):
        """Fails where gradients stay local, add up over steps, or are averaged a step too early."""
        self.assertSame(one_process(200), trained("ddp_spawn.py", "-g", "2"))

    def test_manual(self):
        self.assertSame(one_process(200), trained("ddp_spawn.py", "-g", "2", "--grad_sync", "manual"))

    def test_data_parallel(self):
        self.assertSame(one_process(200), trained("dp_example.py", "--epochs", "2", "--batch_size", "200"))

    def test_accumulation_where_nothing_divides(self):
        """4,000 samples in three shards, micro-batches of 23, windows of 2 with a shorter last one. Repeated samples
        have no weight, and all real ones have the same weight."""
        options = ("--max_grad_norm", "0.5", "--optimizer", "sgd")
        run = trained("ddp_spawn.py", "-g", "3", "--batch_size", "23", "--accumulation_steps", "2", *options)
        self.assertSame(one_process(3 * 23 * 2, *options), run)

    def test_bf16_is_near_and_not_the_same(self):
        difference = one_process(200, "--precision", "bf16").difference(one_process(200))
        self.assertTrue(ROUNDING < difference < 0.1, difference)


class BatchNormTest(FolderTest):
    def test_the_model_that_is_saved_has_the_statistics_of_all_ranks(self):
        """One step of 9 images on each of two ranks: the statistics move a tenth of the way to each rank's own."""
        write_mnist(self.folder, 20, 2)
        given = ["--dataset", "MNIST", "--data_root", self.folder, "--batch_size", "9", "--epochs", "1"]
        found = Run("ddp_spawn.py", "-g", "2", *given).weights["layers.1.running_mean"]
        train = common.load_data(options(*given))[0]
        torch.manual_seed(0)
        first = common.build_model(options(*given), train).layers[0]
        order = torch.randperm(18, generator=torch.Generator().manual_seed(0))
        means = []
        for rank in range(2):
            images = train[order[rank::2]][0]
            means.append(first((images.float() / 255 - 0.1307) / 0.3081).mean((0, 2, 3)))
        self.assertGreater((means[0] - means[1]).abs().max().item(), 0.01)
        torch.testing.assert_close(found, 0.1 * (means[0] + means[1]).detach() / 2, atol=1e-5, rtol=1e-4)


class OrderTest(unittest.TestCase):
    def test_three_epochs_have_three_orders_and_ranks_share_no_sample(self):
        """As the scripts make the sampler (case 6)."""
        epochs = []
        for epoch in range(3):
            shards = []
            for rank in range(2):
                sampler = DistributedSampler(range(9), num_replicas=2, rank=rank, seed=0)
                sampler.set_epoch(epoch)
                shards.append(list(sampler))
            self.assertEqual(len(set(shards[0]) & set(shards[1])), 1)  # the one that is repeated
            epochs.append(tuple(shards[0]))
        self.assertEqual(len(set(epochs)), 3)

    def test_the_scripts_train_in_another_order_in_each_epoch(self):
        """Two epochs of two steps, repeated by hand: order, clearing and clipping of gradients, learning rates."""
        result = one_process(2000, "--optimizer", "sgd", "--learning_rate", "0.1", "--max_grad_norm", "0.5")
        train = common.load_data(options())[0]
        torch.manual_seed(0)
        model = common.build_model(options(), train)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            order = torch.randperm(4000, generator=torch.Generator().manual_seed(step // 2))  # the seed plus the epoch
            inputs, targets = train[order[2000 * (step % 2):2000 * (step % 2 + 1)]]
            optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / 4))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in model.parameters()))
            self.assertGreater(norm, 0.5)
            for parameter in model.parameters():
                parameter.grad *= 0.5 / norm
            optimizer.step()
        for key, value in model.state_dict().items():
            self.assertLess((value - result.weights[key]).abs().max().item(), ROUNDING)
