"""Checkpoints and metrics: what is in them, who writes them, and that each script reads the others'."""
import json
import os
import pickle
import random
import resource
import signal
import sys
import time
from unittest import mock

import common
import runtime
import torch

import ddp_launch
import dp_example
from tests.helpers import FolderTest, call, launcher, options, run, trained

SCRIPTS = {"dp": ("dp_example.py", "--epochs", "2", "--batch_size", "200"), "spawn": ("ddp_spawn.py", "-g", "2"),
           "launch": (*launcher(2), "ddp_launch.py")}
KEYS = ["0.weight", "0.bias", "2.weight", "2.bias"]  # of the plain module


class ContentTest(FolderTest):
    def test_plain_names_and_plain_content(self):
        """Cases 5 and 15: trained() reads each file with weights_only=True."""
        for name, command in SCRIPTS.items():
            run = trained(*command)
            self.assertEqual(list(run.weights), KEYS, name)
            self.assertEqual(run.checkpoint["epoch"], 2)
            self.assertTrue({"optimizer", "step", "best_model"} <= set(run.checkpoint))
            self.assertEqual(run.files, ["c.pt", "m.jsonl"])  # and nothing temporary

    def test_metrics(self):
        metrics = trained(*SCRIPTS["spawn"]).metrics
        self.assertEqual([set(line) for line in metrics], 2 * [
            {"epoch", "train_loss", "valid_loss", "valid_accuracy", "samples_per_second", "seconds",
             "learning_rate"}] + [
            {"test_loss", "test_accuracy", "world_size"}])
        self.assertEqual([line["epoch"] for line in metrics[:2]], [0, 1])
        for line in metrics[:2]:
            self.assertAlmostEqual(line["samples_per_second"] * line["seconds"], 4000, places=3)

    def test_the_test_line_is_for_the_best_weights(self):
        """The second of three epochs is made the best in validation; its weights are those that are tested."""
        for module in (ddp_launch, dp_example):
            accuracies, seen = [0.5, 0.7, 0.6, 0.1], []

            def evaluate(model, loader):
                seen.append({key: value.clone() for key, value in common.unwrap(model).state_dict().items()})
                return 1.0, accuracies[len(seen) - 1]

            with mock.patch.object(common, "evaluate", evaluate):
                code, out, err = call(module, "--epochs", "3", "--batch_size", "500")
            self.assertEqual((code, err), (0, ""))
            self.assertIn("test accuracy 10.00%, weights of epoch 2", out)
            equal = [all(torch.equal(epoch[key], seen[3][key]) for key in KEYS) for epoch in seen[:3]]
            self.assertEqual(equal, [False, True, False])


class ResumeTest(FolderTest):
    def save(self, content):
        torch.save(content, self.path("c.pt"))
        return ["--checkpoint", self.path("c.pt"), "--resume", "--metrics", self.path("m.jsonl")]

    def test_each_script_goes_on_from_the_others_files(self):
        """Case 5. Files of two epochs; the third is another script's. dp_example.py and one process run here."""
        resumes = {"dp": lambda *more: call(dp_example, "--batch_size", "200", *more),
                   "launch": lambda *more: call(ddp_launch, *more),
                   "spawn": lambda *more: run("ddp_spawn.py", "-g", "1", *more)}
        for writer, command in SCRIPTS.items():
            for reader in set(resumes) - {writer}:
                with self.subTest(writer=writer, reader=reader):
                    out = self.goes_on(resumes[reader], trained(*command).checkpoint)
                    self.assertEqual("bit-identical" in out, writer != "dp")  # which is one process, as each reader
        prefixed = dict(trained(*SCRIPTS["dp"]).checkpoint)
        for part in ("model", "best_model"):
            prefixed[part] = {f"module._orig_mod.{key}": value for key, value in prefixed[part].items()}
        self.goes_on(resumes["launch"], prefixed)

    def goes_on(self, resume, checkpoint):
        code, out, err = resume(*self.save(checkpoint), "--epochs", "3")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(out.count(f"going on from {self.path('c.pt')}, after epoch 2\n"), 1)
        self.assertEqual([f"epoch {epoch}/3" in out for epoch in (1, 2, 3)], [False, False, True])
        with open(self.path("m.jsonl")) as file:
            self.assertEqual([json.loads(line).get("epoch") for line in file], [0, 1, 2, None])
        checkpoint = torch.load(self.path("c.pt"), weights_only=True)
        self.assertEqual((list(checkpoint["model"]), checkpoint["epoch"]), (KEYS, 3))
        return out

    def test_a_run_that_was_broken_off_ends_with_the_bits_of_a_whole_one(self):
        save, weights = runtime.TrainState.save, []
        for broken in (False, True):
            options = ["--checkpoint", self.path(f"{broken}.pt"), "--resume", "--epochs", "3", "--max_grad_norm", "1"]
            if broken:
                def save_and_break(state, path):
                    save(state, path)
                    raise InterruptedError("after the first epoch")
                with mock.patch.object(runtime.TrainState, "save", save_and_break), self.assertRaises(InterruptedError):
                    call(ddp_launch, *options)
            code, out, err = call(ddp_launch, *options)
            self.assertEqual((code, "epoch 1/3" in out), (0, not broken), err)
            weights.append(torch.load(self.path(f"{broken}.pt"), weights_only=True)["model"])
        for key, value in weights[0].items():
            self.assertTrue(torch.equal(value, weights[1][key]), key)

    def test_without_a_file_it_starts(self):
        code, out, err = call(ddp_launch, "--checkpoint", self.path("new.pt"), "--resume", "--epochs", "1")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(os.listdir(self.folder), ["new.pt"])

    def test_files_that_cannot_be_resumed_are_left_as_they_are(self):
        good = trained(*SCRIPTS["spawn"]).checkpoint
        other_model = dict(good, model=torch.nn.Linear(2, 2).state_dict())
        other_data = dict(good, made_with={"dataset": "MNIST", "optimizer": "adam"})
        for content in (other_model, other_data, torch.zeros(3), {"model": good["model"]}, ("a", "b")):
            self.refused(self.save(content))
        with open(self.path("c.pt"), "rb") as file:
            whole = file.read()
        for content in (whole[:-50], whole[:100], b"", b"text", pickle.dumps(Malicious(self.path("executed")))):
            with open(self.path("c.pt"), "wb") as file:
                file.write(content)
            self.refused(["--checkpoint", self.path("c.pt"), "--resume"])
        self.assertEqual(sorted(os.listdir(self.folder)), ["c.pt"])

    def refused(self, options):
        with open(self.path("c.pt"), "rb") as file:
            before = file.read()
        for module, more in ((ddp_launch, []), (dp_example, ["--epochs", "2"])):
            code, out, err = call(module, *options, *more)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
            self.assertIn(self.path("c.pt"), err)
        with open(self.path("c.pt"), "rb") as file:
            self.assertEqual(file.read(), before)


class SaveTest(FolderTest):
    def test_killed_at_any_moment_of_a_save(self):
        """Processes that do nothing but save are killed; what is there must be one whole checkpoint, of one epoch."""
        state = runtime.TrainState(torch.nn.Linear(1000, 500), options())
        caught = 0
        for _ in range(100 if os.environ.get("LONG_TESTS") else 20):
            first = state.epoch
            pid = os.fork()
            if not pid:
                torch.set_num_threads(1)  # the threads were not forked
                try:
                    while True:
                        state.epoch += 1
                        torch.nn.init.constant_(state.model.weight, state.epoch)
                        state.save(self.path("c.pt"))
                finally:
                    os._exit(1)
            time.sleep(random.uniform(0.01, 0.1))
            os.kill(pid, signal.SIGKILL)
            self.assertEqual(os.waitpid(pid, 0)[1], signal.SIGKILL)
            caught += os.path.exists(self.path("c.pt.tmp"))
            if os.path.exists(self.path("c.pt")):
                checkpoint = torch.load(self.path("c.pt"), weights_only=True)
                self.assertTrue((checkpoint["model"]["weight"] == checkpoint["epoch"]).all())
                self.assertGreaterEqual(checkpoint["epoch"], first)
                state.epoch = checkpoint["epoch"]
        self.assertGreater(caught, 0)  # some were killed in the middle
        state.save(self.path("c.pt"))
        self.assertEqual(os.listdir(self.folder), ["c.pt"])

    def test_no_room(self):
        """A limit on the size of files is met as a full disk is: in the middle of a file."""
        torch.save(trained(*SCRIPTS["spawn"]).checkpoint, self.path("c.pt"))
        with open(self.path("c.pt"), "rb") as file:
            before = file.read()
        code, out, err = run("bash", "-c", f"ulimit -f 8; exec '{sys.executable}' ddp_spawn.py -g 2 --epochs 3 "
                             f"--resume --checkpoint '{self.path('c.pt')}' --metrics '{self.path('m.jsonl')}'")
        self.assertEqual((code, "epoch 3/3" in out, "test accuracy" in out), (1, False, False), err)
        self.assertIn(f"--checkpoint {self.path('c.pt')} could not be written ([Errno 27] File too large)", err)
        self.assertEqual(sorted(os.listdir(self.folder)), ["c.pt", "m.jsonl"])
        with open(self.path("c.pt"), "rb") as file:
            self.assertEqual(file.read(), before)

    def test_no_room_for_metrics(self):
        """Training goes on, and says what is missing; what was written before is whole."""
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limit[1]))
        try:
            code, out, err = call(ddp_launch, "--epochs", "9", "--metrics", self.path("m.jsonl"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        self.assertEqual((code, "test accuracy" in out), (0, True), err)
        with open(self.path("m.jsonl")) as file:
            epochs = [json.loads(line)["epoch"] for line in file]
        self.assertEqual(epochs, list(range(len(epochs))))
        self.assertTrue(0 < len(epochs) < 9)
        self.assertEqual(err, (9 + 1 - len(epochs)) * f"ddp_launch.py: --metrics {self.path('m.jsonl')} could not be "
                         "written (File too large); the training goes on\n")
        self.assertEqual(os.listdir(self.folder), ["m.jsonl"])


class Malicious:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")
