"""No run replaces another's files, no finished epoch is lost, and a run that diverges says so."""
import json
import math
import os
import subprocess
import sys
import time
from unittest import mock

import common
import ddp_launch
import runtime
import torch

from tests.helpers import ROOT, FolderTest, call, finish, options, project, run, start, wait_until


class OthersFilesTest(FolderTest):
    def check_refused(self, *given, expected):
        before = {name: os.lstat(self.path(name)) for name in os.listdir(self.folder)}
        code, out, err = call(ddp_launch, *given)
        self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
        for text in expected:
            self.assertIn(text, err)
        self.assertEqual({name: os.lstat(self.path(name))[:9] for name in before},
                         {name: found[:9] for name, found in before.items()})
        self.assertEqual(set(os.listdir(self.folder)), set(before))

    def test_a_file_that_this_run_does_not_continue(self):
        for name in "c.pt", "m":
            with open(self.path(name), "w") as file:
                file.write("somebody's")
        self.check_refused("--checkpoint", self.path("c.pt"), expected=["--checkpoint", "exists", "--resume"])
        self.check_refused("--metrics", self.path("m"), expected=["--metrics", "exists", "--resume"])
        # Nothing to resume: this run would start, and replace the metrics of another.
        self.check_refused("--metrics", self.path("m"), "--resume", "--checkpoint", self.path("new.pt"),
                           expected=["--metrics", "exists: name another file\n"])

    def test_what_is_no_file_and_one_name_for_both(self):
        """Case 28: replacing a device by a file can break the machine."""
        os.mkfifo(self.path("pipe"))
        names = ["pipe"]
        if not os.getuid():
            os.mknod(self.path("null"), 0o20666, os.makedev(1, 3))
            names.append("null")
        for name in names:
            for option in "--metrics", "--checkpoint":
                self.check_refused(option, self.path(name), expected=[option, "exists"])
        self.check_refused("--metrics", self.path("x"), "--checkpoint", self.path(".", "x"), expected=["two files"])

    def test_a_temporary_name_that_is_a_link_to_somebodys_file(self):
        with open(self.path("precious"), "w") as file:
            file.write("precious")
        os.symlink(self.path("precious"), self.path("m.tmp"))
        self.assertEqual(call(ddp_launch, "--epochs", "1", "--metrics", self.path("m"))[0], 0)
        with open(self.path("precious")) as file:
            self.assertEqual(file.read(), "precious")
        self.assertEqual(sorted(os.listdir(self.folder)), ["m", "precious"])

    def test_two_runs_that_write_one_checkpoint(self):
        """Case 35: also before the first has saved, and when the first was killed."""
        project(self.folder, ("runtime.py", "    def save(self", "    def save_soon(self"), (
            "ddp_launch.py", "            state.save(args.checkpoint)\n",
            "            while not os.path.exists('go'): __import__('time').sleep(0.01)\n"
            "            state.save_soon(args.checkpoint)\n"))
        command = ["ddp_launch.py", "--epochs", "100000", "--checkpoint", "c.pt", "--resume"]
        with open(self.path("out"), "w") as out:
            first = start(command, cwd=self.folder, stdout=out)
        self.addCleanup(first.stderr.close)
        self.addCleanup(first.kill)
        wait_until(lambda: os.path.getsize(self.path("out")), "the first run")
        time.sleep(1)
        for existing in (False, True):
            self.assertEqual(os.path.exists(self.path("c.pt")), existing)
            code, out, err = run(*command, cwd=self.folder)
            self.assertEqual((code, err.count("\n"), "epoch" in out), (2, 1, False), err)
            self.assertIn("another process is writing", err)
            open(self.path("go"), "w").close()
            wait_until(lambda: os.path.exists(self.path("c.pt")), "a checkpoint")
        for _ in range(50):
            torch.load(self.path("c.pt"), weights_only=True)
        first.kill()
        finish(first)
        command[2] = "1"
        self.assertEqual(run(*command, cwd=self.folder)[0], 0)

    def test_where_there_are_no_locks(self):
        with mock.patch("fcntl.flock", side_effect=OSError("no locks available")):
            code, out, err = call(ddp_launch, "--epochs", "1", "--checkpoint", self.path("c.pt"))
        self.assertEqual((code, err.count("\n"), "file locks do not work" in err), (0, 1, True), err)


class OrderTest(FolderTest):
    def test_an_epoch_that_could_not_be_printed_is_in_the_files(self):
        """Case 34: standard output is closed after the first lines."""
        command = [sys.executable, "ddp_launch.py", "--epochs", "3", "--checkpoint", self.path("c.pt"), "--metrics",
                   self.path("m")]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.assertIn("rank 0 of 1", process.stdout.readline())
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        self.assertNotEqual(process.wait(60), 0)
        self.assertIn("BrokenPipeError", err)
        self.assertEqual(torch.load(self.path("c.pt"), weights_only=True)["epoch"], 1)
        with open(self.path("m")) as file:
            self.assertEqual([json.loads(line)["epoch"] for line in file], [0])

    def test_metrics_are_completed_by_a_resume(self):
        """A run that was killed after the checkpoint, and before the metrics."""
        given = ["--checkpoint", self.path("c.pt"), "--metrics", self.path("m"), "--resume", "--epochs", "2"]
        def killed(*_):
            raise InterruptedError

        with mock.patch.object(runtime, "log", killed), self.assertRaises(InterruptedError):
            call(ddp_launch, *given)
        self.assertFalse(os.path.exists(self.path("m")))
        self.assertEqual(call(ddp_launch, *given)[0], 0)
        with open(self.path("m")) as file:
            self.assertEqual([json.loads(line).get("epoch") for line in file], [0, 1, None])


class DivergenceTest(FolderTest):
    def test_a_loss_that_is_not_finite_ends_the_run(self):
        """In training, at the end of an epoch and within one, and in validation; the last finite checkpoint stays."""
        files = ["--checkpoint", self.path("c.pt"), "--resume"]
        call(ddp_launch, *files, "--epochs", "1")
        with open(self.path("c.pt"), "rb") as file:
            good = file.read()
        losses, calls = common.losses, []

        def diverging(outputs, targets):
            calls.append(torch.is_grad_enabled())
            return losses(outputs, targets) * (math.nan if calls.count(training) > after else 1)

        for training, after, more, name in ((True, 30, [], "training loss of epoch 2"),
                                            (False, 0, [], "validation loss of epoch 2"),
                                            (True, 3, ["--checkpoint_steps", "10"], "training loss of epoch 2")):
            calls.clear()
            with self.subTest(name), mock.patch.object(common, "losses", diverging):
                code, out, err = call(ddp_launch, *files, "--epochs", "3", *more)
                self.assertEqual((code, err.count("\n"), "epoch 2/3" in out), (1, 1, False), out + err)
                for text in name, "nan", "--learning_rate", "--max_grad_norm", "--precision":
                    self.assertIn(text, err)
                with open(self.path("c.pt"), "rb") as file:
                    self.assertEqual(file.read(), good)

    def test_all_ranks_end_with_one_line(self):
        code, out, err = run("ddp_spawn.py", "-g", "2", "--optimizer", "sgd", "--learning_rate", "1e9")
        self.assertEqual((code, "epoch 1" in out, err.count("error: "), "Traceback" in err), (1, False, 1, False), err)


class LabelsTest(FolderTest):
    def test_a_label_that_is_no_class(self):
        """-100, which torch leaves out silently, and a number above the last class."""
        train, valid, test = common.load_data(options())
        for label in (-100, -1, 10):
            targets = train.tensors[1].clone()
            targets[7] = label
            data = common.Rows(train.tensors[0], targets), valid, test
            with mock.patch.object(common, "load_data", return_value=data), self.assertRaises(IndexError):
                call(ddp_launch, "--epochs", "1")
