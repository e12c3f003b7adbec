"""A run that is killed and started again with --resume ends with the bits of one that was not."""
import json
import os
import random
import re
import signal
import time
import unittest

import torch

from tests.helpers import FolderTest, finish, launcher, project, start, wait_until

# Random numbers within the model, whose state a resumed run must have as well.
DROPOUT = ("common.py", "nn.Linear(20, 64), nn.ReLU(), nn", "nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.3), nn")
SPAWN, TORCHRUN = ["ddp_spawn.py", "-g", "3"], [*launcher(3), "--max-restarts=3", "ddp_launch.py"]
ALL_AT_ONCE = ["--epochs", "4", "--accumulation_steps", "3", "--precision", "bf16", "--optimizer",
               "sgd", "--max_grad_norm", "1"]
WORKERS = ["--num_workers", "2"]  # change nothing
LONG = [(command, ["--epochs", "4", *options]) for command in (SPAWN, TORCHRUN) for options in (
    [], ["--grad_sync", "manual"], ["--accumulation_steps", "2"], ["--num_workers", "2"], ["--precision", "bf16"])]


class ResumeTest(FolderTest):
    def setUp(self):
        super().setUp()
        project(self.folder, DROPOUT)

    def start(self, name, command, options):
        with open(self.path(name + ".out"), "a") as file:
            return start([*command, *options, "--resume", "--checkpoint", self.path(name + ".pt"), "--metrics",
                          self.path(name + ".jsonl")], cwd=self.folder, stdout=file)

    def result(self, name):
        """What a run leaves: weights, optimizer and the rest, the metrics without times, the last line."""
        checkpoint = torch.load(self.path(name + ".pt"), weights_only=True)
        for line in checkpoint["history"]:
            del line["seconds"], line["samples_per_second"]
        with open(self.path(name + ".jsonl")) as file:
            metrics = [{key: value for key, value in json.loads(line).items() if "second" not in key} for line in file]
        with open(self.path(name + ".out")) as file:
            return checkpoint, metrics, file.read().splitlines()[-1]

    def check_equal(self, name, other):
        (checkpoint, metrics, last), expected = self.result(name), self.result(other)
        self.assertEqual(metrics, expected[1])
        self.assertEqual([line.get("epoch") for line in metrics], [*range(len(metrics) - 1), None])
        self.assertEqual(last, expected[2])
        self.check_same(checkpoint, expected[0], "checkpoint")
        self.assertFalse(os.path.exists(self.path(name + ".pt.tmp")))

    def check_same(self, value, other, where):
        if isinstance(value, torch.Tensor):
            self.assertTrue(torch.equal(value, other), where)
        elif isinstance(value, dict):
            self.assertEqual(list(value), list(other), where)
            for key in value:
                self.check_same(value[key], other[key], f"{where}.{key}")
        else:
            self.assertEqual(value, other, where)

    def epochs_done(self, name):
        with open(self.path(name + ".out")) as file:
            return len(re.findall("^epoch ", file.read(), re.M))

    def test_killed_and_started_again(self):
        """All processes of one run by SIGKILL; one worker of another, under torchrun, which restarts all by itself.

        With three ranks, as two numbers have one sum, but three depend on the order in which DDP's buckets add them.
        """
        runs = {"torchrun": self.start("torchrun", TORCHRUN, ALL_AT_ONCE)}
        wait_until(lambda: self.epochs_done("torchrun"), "an epoch")
        with open(self.path("torchrun.out")) as file:
            os.kill(int(re.findall(r", pid (\d+)$", file.read(), re.M)[1]), signal.SIGKILL)
        whole, killed = self.start("whole", SPAWN, ALL_AT_ONCE), self.start("spawn", SPAWN, [*ALL_AT_ONCE, *WORKERS])
        wait_until(lambda: self.epochs_done("spawn"), "an epoch")
        os.killpg(killed.pid, signal.SIGKILL)
        finish(killed)
        runs["spawn"] = self.start("spawn", SPAWN, [*ALL_AT_ONCE, *WORKERS])
        code, _, err = finish(whole)
        self.assertEqual(code, 0, err)
        for name, run in runs.items():
            with self.subTest(name):
                code, _, err = finish(run)
                self.assertEqual(code, 0, err)
                self.check_equal(name, "whole")
                with open(self.path(name + ".out")) as file:
                    self.assertEqual(file.read().count("rank 1 of 3"), 2)  # it was started twice

    @unittest.skipUnless(os.environ.get("LONG_TESTS"), "kills at 30 random moments take minutes: LONG_TESTS=1")
    def test_killed_at_random_moments(self):
        kills = 0
        for i, (command, options) in enumerate(LONG):
            self.assertEqual(finish(self.start(f"whole{i}", command, options))[0], 0)
            attempts = 0
            while True:
                run = self.start(f"killed{i}", command, options)
                time.sleep(random.uniform(3, 6))
                attempts += 1
                if attempts > 3:
                    self.assertEqual(finish(run)[0], 0)
                    break
                kills += run.poll() is None
                os.killpg(run.pid, signal.SIGKILL)
                finish(run)
                time.sleep(1)  # the workers of torchrun are in groups of their own, and end by themselves
            with self.subTest(command=command, options=options):
                self.check_equal(f"killed{i}", f"whole{i}")
        print(f"{kills} kills")
