"""A run that is killed and started again with --resume ends with the bits of one that was not."""
import copy
import json
import math
import os
import random
import re
import signal
import time
import unittest
from unittest import mock

import common
import ddp_launch
import runtime
import torch

from tests.helpers import FolderTest, call, finish, launcher, options, project, run, start, trained, wait_until
from tests.test_failures import STEP, gone

# Random numbers within the model, whose state a resumed run must have as well.
DROPOUT = ("common.py", "nn.Linear(20, 64), nn.ReLU(), nn", "nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.3), nn")
SPAWN, TORCHRUN = ["ddp_spawn.py", "-g", "3"], [*launcher(3), "--max-restarts=3", "ddp_launch.py"]
LONG = [(command, ["--epochs", "4", *options]) for command in (SPAWN, TORCHRUN) for options in (
    [], ["--grad_sync", "manual"], ["--accumulation_steps", "2"], ["--num_workers", "2"], ["--precision", "bf16"])]


class ResumeTest(FolderTest):
    edits, more = [DROPOUT], []

    def setUp(self):
        super().setUp()
        self.project()

    def project(self, *more):
        project(self.folder, *self.edits, *more)

    def start(self, name, command, options, **environment):
        with open(self.path(name + ".out"), "a") as file:
            return start([*command, *options, "--resume", "--checkpoint", self.path(name + ".pt"), "--metrics",
                          self.path(name + ".jsonl")], cwd=self.folder, stdout=file, **environment)

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

    def begun(self, name, times):
        """Wait until it has started to train, for so many times in all."""
        def started():
            with open(self.path(name + ".out")) as file:
                return file.read().count("\nbackend ") == times

        wait_until(started, f"{name} has begun")

    def kill(self, name, process):
        """Kill all at once; the workers of torchrun are in groups of their own, and end by themselves."""
        os.killpg(process.pid, signal.SIGKILL)
        finish(process)
        with open(self.path(name + ".out")) as file:
            pids = re.findall(r", pid (\d+)$", file.read(), re.M)
        wait_until(lambda: all(gone(pid) for pid in pids), f"the ranks of {name} have ended")

    @unittest.skipUnless(os.environ.get("LONG_TESTS"), "kills at random moments take minutes: LONG_TESTS=1")
    def test_killed_at_random_moments(self):
        """Each run is killed up to three times, within a third of the time that a whole one trains."""
        hits, after = 0, "        if ends_step:\n            state.step, state.samples"
        self.project(("runtime.py", after, f"        time.sleep(0.02)\n{after}"))  # or it is over too soon
        for i, (command, options) in enumerate(LONG):
            whole, killed, options = f"whole{i}", f"killed{i}", [*options, *self.more]
            run = self.start(whole, command, options)
            self.begun(whole, 1)
            started = time.monotonic()
            self.assertEqual(finish(run)[0], 0)
            length = time.monotonic() - started
            for kills in range(3):
                run = self.start(killed, command, options)
                self.begun(killed, kills + 1)
                time.sleep(random.uniform(0, length / 3))
                hits += run.poll() is None
                self.kill(killed, run)
            self.assertEqual(finish(self.start(killed, command, options))[0], 0)
            with self.subTest(command=command, options=options):
                self.check_equal(killed, whole)
        print(f"{hits} kills")
        self.assertGreaterEqual(hits, 2 * len(LONG))


class CurveTest(FolderTest):
    """The learning rate follows the share of training done, whatever the number of steps was before (case 21)."""

    def rates(self, epochs, steps, first=0):
        """Of the last step of each epoch, with Adam's default."""
        return [0.0025 * (1 + math.cos(math.pi * (epoch + 1 - 1 / steps) / epochs)) for epoch in range(first, epochs)]

    def check(self, *parts):
        """Each part continues the one before: options, epochs in all, steps per epoch. Returns what each prints."""
        files = ["--checkpoint", self.path("c.pt"), "--metrics", self.path("m"), "--resume"]
        done, lines, out = 0, [], []
        for given, epochs, steps in parts:
            command = [*given, "--epochs", str(epochs), *files]
            code, text, err = run("ddp_spawn.py", *command) if "-g" in given else call(ddp_launch, *command)
            self.assertEqual(code, 0, err)
            with open(self.path("m")) as file:
                lines = [json.loads(line) for line in file][:-1]
            self.assertEqual(len(lines), epochs)
            for line, expected in zip(lines[done:], self.rates(epochs, steps, done)):
                self.assertAlmostEqual(line["learning_rate"], expected, places=12)
            done, out = epochs, [*out, text]
        self.assertEqual(len({line["train_loss"] for line in lines}), done)  # weights go on changing, in every epoch
        os.remove(self.path("c.pt"))
        os.remove(self.path("m"))
        return out

    def test_another_number_of_processes_batch_size_accumulation_and_epochs(self):
        out = self.check(([], 2, 40), (["-g", "4"], 5, 10), ([], 8, 40))
        self.assertIn("4 process(es), was 1", out[1])
        self.assertIn("1 process(es), was 4", out[2])
        accumulate = ["--accumulation_steps", "4"]
        for given, epochs, steps, expected in ((["--batch_size", "500"], 5, 8, "--batch_size is 500, was 100"),
                                               (accumulate, 3, 10, "--accumulation_steps is 4, was 1"),
                                               ([], 6, 40, "--epochs is 6, was 2")):
            self.assertIn(expected, self.check(([], 2, 40), (given, epochs, steps))[1])

    def test_the_steps_of_a_changed_run_by_hand(self):
        """Weights, of an epoch of two steps and then one of four; the learning rate given now counts (case 37)."""
        files = ["--checkpoint", self.path("c.pt"), "--resume", "--optimizer", "sgd"]
        call(ddp_launch, *files, "--epochs", "1", "--batch_size", "2000", "--learning_rate", "0.1")
        out = call(ddp_launch, *files, "--epochs", "2", "--batch_size", "1000", "--learning_rate", "0.2")[1]
        self.assertIn("--learning_rate is 0.2, was 0.1", out)
        train = common.load_data(options())[0]
        torch.manual_seed(0)
        model = common.build_model(options(), train)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for epoch, epochs, size, rate in ((0, 1, 2000, 0.1), (1, 2, 1000, 0.2)):
            order = torch.randperm(4000, generator=torch.Generator().manual_seed(epoch))
            for at in range(0, 4000, size):
                share = (epoch + at / 4000) / epochs
                optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * share))
                inputs, targets = train[order[at:at + size]]
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        weights = torch.load(self.path("c.pt"), weights_only=True)["model"]
        for key, value in model.state_dict().items():
            self.assertLess((value - weights[key]).abs().max().item(), 2e-5)


class OtherOptionsTest(FolderTest):
    def test_what_must_be_as_it_was_and_what_is_reported(self):
        files = ["--checkpoint", self.path("c.pt"), "--resume"]
        self.assertEqual(call(ddp_launch, *files, "--epochs", "1")[0], 0)
        for option, value, expected in (("--seed", "1", "seed 0, and this run has 1"),
                                        ("--optimizer", "sgd", "optimizer adam, and this run has sgd")):
            code, out, err = call(ddp_launch, *files, "--epochs", "2", option, value)
            self.assertEqual((code, out, err.count("\n"), expected in err), (2, "", 1, True), err)
        train, valid, test = common.load_data(options())
        with mock.patch.object(common, "load_data", return_value=(train, common.Rows(*valid[:499]), test)):
            code, _, err = call(ddp_launch, *files, "--epochs", "2")
        self.assertEqual((code, "lengths [4000, 500, 1000], and this run has [4000, 499, 1000]" in err), (2, True), err)
        for option, value in (("--precision", "bf16"), ("--grad_sync", "manual"), ("--max_grad_norm", "5.0"),
                              ("--weight_decay", "0.01"), ("--drop_last", None)):
            with open(self.path("c.pt"), "rb") as file:
                before = file.read()
            code, out, err = call(ddp_launch, *files, "--epochs", "2", *([option, value] if value else [option]))
            self.assertEqual(code, 0, err)
            self.assertRegex(out, rf"(?m)^.*{option} is {value or True}, was .*: the bits will differ")
            with open(self.path("c.pt"), "wb") as file:
                file.write(before)

    def test_an_optimizer_that_was_fused_or_not(self):
        """The file's setting must not override what this machine supports."""
        for fused in (True, False):
            content = trained("ddp_launch.py").checkpoint
            content = {**content, "optimizer": copy.deepcopy(content["optimizer"])}
            content["optimizer"]["param_groups"][0].update(fused=fused, lr=123.0)
            torch.save(content, self.path("c.pt"))
            code, _, err = call(ddp_launch, "--checkpoint", self.path("c.pt"), "--resume", "--epochs", "3")
            self.assertEqual(code, 0, err)
            group = torch.load(self.path("c.pt"), weights_only=True)["optimizer"]["param_groups"][0]
            own = common.make_optimizer(torch.nn.Linear(1, 1), options()).param_groups[0]
            self.assertEqual((group.get("fused"), group["lr"] < 0.005), (own.get("fused"), True))

    def test_momentum_in_another_memory_layout(self):
        """As it comes from rank 0, or from a machine without channels_last: fused steps go by the place in memory."""
        weights = []
        for contiguous in (False, True):
            model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
            torch.nn.init.ones_(model.weight)
            state = runtime.TrainState(model, options())
            model(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))).square().sum().backward()
            state.optimizer_step()
            content = copy.deepcopy(state.state_dict())
            if contiguous:
                content["optimizer"] = common.map_tensors(torch.Tensor.contiguous, content["optimizer"])
            state.load_state_dict(content.__getitem__)
            state.optimizer_step()
            weights.append(model.weight.detach().clone())
        self.assertTrue(torch.equal(*weights))


class WithinEpochTest(ResumeTest):
    """--checkpoint_steps: killed within an epoch, continued by the other launcher, the same bits and figures."""
    NORM = ("common.py", "nn.Linear(20, 64), nn.ReLU(), nn",
            "nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn")
    # Augmentation, so that data-loading workers draw random numbers too.
    NOISE = ("common.py", "        rows = torch.frombuffer(array", "        if len(self) == 4000:\n"
             "            noise = 0.1 * torch.randn(len(indices), 20)\n"
             "            return self.tensors[0][list(indices)] + noise, self.tensors[1][list(indices)]\n"
             "        rows = torch.frombuffer(array")

    # A place to wait for the kill, one step after a checkpoint. A restart by torchrun does not wait again.
    HOLD = ("runtime.py", STEP, f'{STEP}        if os.environ.get("HOLD") == f"{{state.epoch + 1}} {{state.step}}":\n'
            '            if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":\n'
            "                time.sleep(600)\n")
    edits, more = [NORM, NOISE, HOLD], ["--checkpoint_steps", "3"]

    def hold(self, command, options, epoch):
        """A run that waits after four steps of an epoch, counted from 1; a checkpoint of three is there."""
        run = self.start("killed", command, options, HOLD=f"{epoch} 4")

        def seen():
            with open(self.path("killed.out")) as file:
                return f"\nepoch {epoch}/3, step 3," in file.read()

        wait_until(seen, f"steps of epoch {epoch}")
        checkpoint = torch.load(self.path("killed.pt"), weights_only=True)
        self.assertEqual((checkpoint["epoch"], checkpoint["step"]), (epoch - 1, 3))
        return run

    def check_killed(self, run, command, options, kills):
        """The run ends as one does that nobody kills."""
        code, _, err = finish(run)
        self.assertEqual(code, 0, err)
        code, _, err = finish(self.start("whole", command, options))
        self.assertEqual(code, 0, err)
        self.check_equal("killed", "whole")
        with open(self.path("killed.out")) as file:
            out = file.read()
        self.assertEqual(len(re.findall(r"(?m)^going on from \S+, after epoch \d, step \d+$", out)), kills)
        self.assertNotIn("bit-identical", out)  # which tells of another number of processes
        self.assertEqual(out.count("\nbackend "), kills + 1)  # torchrun has not restarted it more often than that

    def test_killed_and_continued_by_the_other_launcher_and_by_torchrun_itself(self):
        """All processes under spawn, in the first epoch; in the second, one worker of torchrun, which restarts all.

        With three ranks, as two numbers have one sum, but three depend on the order in which DDP's buckets add them.
        """
        options = ["--epochs", "3", *self.more, "--accumulation_steps", "2", "--num_workers", "1",
                   "--precision", "bf16", "--optimizer", "sgd", "--max_grad_norm", "1"]
        self.kill("killed", self.hold(SPAWN, options, 1))
        run = self.hold(TORCHRUN, options, 2)
        with open(self.path("killed.out")) as file:
            os.kill(int(re.findall(r"rank 1 of 3.*, pid (\d+)$", file.read(), re.M)[-1]), signal.SIGKILL)
        self.check_killed(run, SPAWN, options, 2)

    def test_killed_with_gradients_averaged_by_hand(self):
        """Two ranks are enough here: the buckets of average_gradients are the same in every run."""
        options, spawn = ["--epochs", "3", *self.more, "--grad_sync", "manual", "--batch_size", "50"], [*SPAWN[:2], "2"]
        self.kill("killed", self.hold([*launcher(2), "ddp_launch.py"], options, 2))
        self.check_killed(self.start("killed", spawn, options), spawn, options, 1)

    def test_one_collective_and_one_write_for_each_checkpoint_and_none_without(self):
        counts = {}
        for steps in ("", "10"):
            calls, saves, original = [], [], torch.save
            given = ["--checkpoint_steps", steps] if steps else []
            with mock.patch.object(common, "average_batch_norm", lambda model, loss_sum: calls.append(1)), \
                    mock.patch.object(torch, "save", lambda *a: saves.append(1) or original(*a)):
                code, out, err = call(ddp_launch, "--epochs", "1", "--checkpoint", self.path(f"{steps}.pt"), *given)
            self.assertEqual(code, 0, err)
            counts[steps] = len(calls), len(saves), len(re.findall("^epoch 1/1, step ", out, re.M))
        self.assertEqual(counts, {"": (1, 1, 0), "10": (1 + 3, 1 + 3, 3)})  # of 40 steps; the last is the epoch's own

    def test_continued_with_other_processes_each_sample_counts_once(self):
        """One process and micro-batches of 200 up to the fourth step, then three ranks with 37."""
        given = ["--epochs", "1", "--checkpoint_steps", "4", "--checkpoint", self.path("c.pt"), "--resume", "--metrics",
                 self.path("m")]
        save = runtime.TrainState.save

        def save_and_break(state, path):
            save(state, path)
            raise InterruptedError("after the fourth step")

        with mock.patch.object(runtime.TrainState, "save", save_and_break), self.assertRaises(InterruptedError):
            call(ddp_launch, "--batch_size", "200", *given)
        then = "        self.loss_sum.add_((losses.detach()"
        project(self.folder, ("common.py", then, f"        losses = losses * 0 + 1\n{then}"))
        content = torch.load(self.path("c.pt"), weights_only=True)
        self.assertEqual((content["samples"], content["step"]), (800, 4))
        content["loss_total"] = 800.0
        torch.save(content, self.path("c.pt"))
        code, out, err = run("ddp_spawn.py", "-g", "3", "--batch_size", "37", *given, cwd=self.folder)
        self.assertEqual(code, 0, err)
        with open(self.path("m")) as file:
            self.assertEqual(json.loads(file.readline())["train_loss"], 1.0)


class MemoryTest(FolderTest):
    @unittest.skipUnless(os.environ.get("LONG_TESTS"), "a checkpoint of 400 MB takes a while: LONG_TESTS=1")
    def test_a_resume_holds_one_copy_on_rank_0_and_none_on_the_others(self):
        layers = "nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)"
        then = "    for epoch in range(state.epoch, args.epochs):\n"
        peak = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024"
        project(self.folder, ("common.py", layers, "nn.Linear(20, 5000), nn.Linear(5000, 5000), nn.Linear(5000, 10)"),
                ("ddp_spawn.py", then, f"    import resource\n    print(f'{{rank}} {{{peak}}} MB\\n', end='')\n{then}"))
        given = ["ddp_spawn.py", "-g", "2", "--checkpoint", "c.pt", "--batch_size", "2000"]
        self.assertEqual(run(*given, "--epochs", "1", cwd=self.folder, timeout=300)[0], 0)
        fresh = run(*given[:3], "--epochs", "0", cwd=self.folder)[1]
        code, out, err = run(*given, "--epochs", "1", "--resume", cwd=self.folder, timeout=300)
        self.assertEqual(code, 0, err)
        size = os.path.getsize(self.path("c.pt")) / 2**20
        before, after = [dict(map(lambda line: map(int, line), re.findall(r"^(\d) (\d+) MB", text, re.M)))
                         for text in (fresh, out)]
        print(f"checkpoint {size:.0f} MB; peak before training {before}, after a resume {after}")
        own = 3 / 4 * size  # the optimizer's state and the best model; a fresh run has the weights
        self.assertLess(after[0] - before[0], own + 1.2 * size)
        self.assertLess(after[1] - before[1], own + 0.5 * size)
