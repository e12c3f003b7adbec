"""The READMEs: their lines for your own task and for changes work; their links, tests and messages exist."""
import json
import os
import re
import subprocess
import sys
import unittest

import ddp_launch
import torch
from torch import nn

from tests.helpers import ROOT, FolderTest, call, launcher, project, replace_functions, run, write_subj
from tests.test_task import ROUNDING, by_hand, cut, difference, shuffled

FILES = ("README.md", "slurm/README.md", "benchmarks/README.md")
# In the first column of "When something goes wrong", what torch and Python say, and one message of two pieces that
# tests/test_failures.py has. All others are texts of the project.
OTHERS = ("rank 0 of 4 … waits for ranks 2, 3 of 4", "Gloo connectFullMesh failed",
          "Expected to have finished reduction", "No module named 'common'",
          "EADDRINUSE", "unable to allocate shared memory", "Bus error", "terminated with signal SIGKILL",
          "SignalException: Process … got signal: 1", "Connection closed by peer", "Connection reset by peer",
          "Timed out waiting 600000ms for recv", "torchrun --nnodes=2", "DistStoreError",
          "Setting OMP_NUM_THREADS … to be 1")


def read(*names):
    with open(os.path.join(ROOT, *names), encoding="utf-8") as file:
        return file.read()


def section(heading):
    """The text below a heading of README.md."""
    return re.search(rf"(?ms)^## {heading}\n(.*?)(?=^## |\Z)", read("README.md")).group(1)


def table(text):
    """The rows of the first table in a text, as lists of cells."""
    lines = re.search(r"(?m)^\| ---.*\n((?:\|.*\n)+)", text).group(1).splitlines()
    return [re.split(r" \| ", line.strip("| ")) for line in lines]


def code(cell):
    return re.findall("`([^`]+)`", cell)


class OwnTaskTest(FolderTest):
    def test_the_lines_of_the_readme(self):
        """A run that is killed after its first epoch and resumed by another launcher, against a plain loop."""
        save = "            state.save(args.checkpoint)\n"
        project(self.folder, ("ddp_spawn.py", save, f"{save}            if 'killed' in args.checkpoint:\n"
                              "                os.kill(os.getpid(), 9)\n"))
        replace_functions(self.path("common.py"), re.search("```python\n(.*?)```", section("Your own task"), re.S)[1])
        parts = {}
        for part, rows in (("train", 101), ("valid", 13), ("test", 7)):
            targets = torch.arange(rows) % 3
            inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)) + targets[:, None]
            with open(self.path(f"{part}.csv"), "w") as file:
                file.writelines(f"{','.join(map(str, row))},{target}\n" for row, target in
                                zip(inputs.tolist(), targets.tolist()))
            parts[part] = inputs, targets
        given = ["--data_root", self.folder, "--epochs", "3", "--batch_size", "10", "--metrics", "killed.jsonl",
                 "--checkpoint", "killed.pt"]
        exit_code, _, err = run("ddp_spawn.py", "-g", "2", *given, cwd=self.folder)
        self.assertEqual((exit_code, "terminated with signal SIGKILL" in err), (1, True), err)
        exit_code, out, err = run(*launcher(2), "ddp_launch.py", *given, "--resume", cwd=self.folder)
        self.assertEqual((exit_code, "after epoch 1" in out), (0, True), err)
        content = torch.load(self.path("killed.pt"), weights_only=True)
        with open(self.path("killed.jsonl")) as file:
            metrics = [json.loads(line) for line in file]
        torch.manual_seed(0)
        model, (inputs, targets) = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)), parts["train"]
        means = by_hand(model, torch.optim.Adam(model.parameters(), lr=0.005),
                        [cut(shuffled(101, epoch), 20) for epoch in range(3)],
                        lambda model, rows: nn.functional.cross_entropy(model(inputs[rows]), targets[rows]))
        self.assertLess(difference(model.state_dict(), content["model"]), ROUNDING)
        self.assertEqual(len(metrics), 4)
        for line, mean in zip(metrics, means):
            self.assertAlmostEqual(line["train_loss"], mean, places=5)
        model.load_state_dict(content["best_model"])
        hits = {part: (model(inputs).argmax(1) == targets).sum().item() for part, (inputs, targets) in parts.items()}
        self.assertEqual(metrics[-1]["test_accuracy"], hits["test"] / 7)
        self.assertEqual(max(line["valid_accuracy"] for line in metrics[:-1]), hits["valid"] / 13)
        self.assertGreater(hits["valid"], 6)


TASK = '''
def load_data(args):
    """Noise: a model learns the 20 rows by heart, and the loss in validation grows."""
    numbers = torch.randn(60, 6, generator=torch.Generator().manual_seed(args.seed))
    return [Rows(numbers[a:b, :4], numbers[a:b, 4:]) for a, b in ((0, 20), (20, 40), (40, 60))]


def build_model(args, train):
    return nn.Sequential(nn.Linear(4, args.width), nn.Tanh(), nn.Linear(args.width, 2))
'''
TENSORBOARD = '''
import sys


class SummaryWriter:
    def add_scalar(self, *values):
        with open("scalars", "a") as file:
            print(*values, file=file)


sys.modules["torch.utils.tensorboard"] = sys.modules[__name__]
'''
PYPLOT = '''
import json

plots = []


def plot(values, label):
    plots.append([label, values])


def legend():
    plots.append("legend")


def savefig(path):
    with open(path, "w") as file:
        json.dump(plots, file)
'''


class ChangesTest(FolderTest):
    """The section "Changing it", with packages in place of TensorBoard and matplotlib that need not be installed."""

    def setUp(self):
        super().setUp()
        text = section("Changing it")
        self.lines = {row[0].split()[-1].strip("`"): code(row[2]) for row in table(text)}
        self.curve, self.predict = re.findall("```python\n(.*?)```", text, re.S)
        self.keep_ids, = re.findall(r"`(Sentences[^`]*)`", text)

    def edit(self):
        """Copy the project, and put all lines where the table says."""
        lines, edits = self.lines, []
        loss, score = lines.pop("metric")
        schedule, = lines.pop("schedule")
        optimizer, = lines.pop("rmsprop")
        edits.append(("common.py", '    "sgd": (', f'    {optimizer}\n    "sgd": ('))
        width, = lines.pop("args.width")
        edits.append(("runtime.py", '        "--epochs": dict(', f'        {width}\n        "--epochs": dict('))
        stop, = lines.pop("stopping")
        imported, writer, add = lines.pop("TensorBoard")
        norm, = lines.pop("SyncBatchNorm")
        for script in ("ddp_spawn.py", "ddp_launch.py"):
            edits += [(script, "import torch\n", f"import torch\nimport fake_tensorboard\n{imported}\n"),
                      (script, "    model = common.build_model(args, train_data).to(device)\n",
                       f"    model = common.build_model(args, train_data).to(device)\n    {norm}\n"),
                      (script, "    for epoch in range(state.epoch, args.epochs):\n",
                       f"    {writer}\n    for epoch in range(state.epoch, args.epochs):\n        {stop}\n"),
                      (script, "            runtime.log(args, state)\n",
                       f"            runtime.log(args, state)\n            {add}\n")]
        project(self.folder, *edits)
        functions = {"losses(outputs, targets)": loss, "scores(outputs, targets)": score, "schedule(share)": schedule}
        replace_functions(self.path("common.py"), TASK + "".join(
            f"\n\ndef {head}:\n    {line}\n" for head, line in functions.items()))
        model = nn.BatchNorm1d(3)
        names = {"torch": torch, "model": model}
        exec(norm, names)
        self.assertIsInstance(names["model"], nn.SyncBatchNorm)
        self.write("fake_tensorboard.py", TENSORBOARD)

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w") as file:
            file.write(text)

    def metrics(self):
        with open(self.path("run.jsonl")) as file:
            return [json.loads(line) for line in file]

    def test_the_lines_of_the_table(self):
        self.edit()
        clipping, = self.lines.pop("clipping")
        self.assertEqual(sorted(self.lines), ["curve", "inference"])  # all others are in place
        given = ["--optimizer", "rmsprop", "--width", "16", "--epochs", "100", "--learning_rate", "0.01", "--resume",
                 *clipping.split(), "--metrics", "run.jsonl", "--checkpoint", "run.pt"]
        exit_code, out, err = run("ddp_spawn.py", "-g", "2", "--batch_size", "10", *given, cwd=self.folder)
        self.assertEqual(exit_code, 0, err)
        *epochs, test = self.metrics()
        content = torch.load(self.path("run.pt"), weights_only=True)
        self.assertEqual((len(epochs), 5 < len(epochs) < 60), (content["best_epoch"] + 5, True))
        for i, line in enumerate(epochs):  # of one step
            share = i / 100
            self.assertAlmostEqual(line["learning_rate"], 0.01 * min(1, 0.01 + share / 0.05) * (1 - share), places=9)
        self.assertIn("square_avg", content["optimizer"]["state"][0])
        numbers = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        model.load_state_dict(content["best_model"])
        difference = model(numbers[40:, :4]) - numbers[40:, 4:]
        self.assertAlmostEqual(test["test_loss"], difference.square().mean().item(), places=5)
        self.assertAlmostEqual(test["test_accuracy"], -difference.abs().mean().item(), places=5)
        with open(self.path("scalars")) as file:  # of rank 0 alone
            self.assertEqual(file.read(), "".join(f"loss {line['valid_loss']} {line['epoch']}\n" for line in epochs))
        # What has stopped early stays so.
        exit_code, out, err = run("ddp_launch.py", "--batch_size", "20", *given, cwd=self.folder)
        self.assertEqual((exit_code, f"after epoch {len(epochs)}\n" in out), (0, True), err)
        again, lines = self.metrics()[-1], len(self.metrics())
        self.assertEqual(lines, len(epochs) + 1)
        self.assertAlmostEqual(again["test_loss"], test["test_loss"], places=6)  # another batch, so not the same bits
        self.check_curve(epochs)

    def check_curve(self, epochs):
        self.write("matplotlib/__init__.py", "")
        self.write("matplotlib/pyplot.py", PYPLOT)
        self.write("curve.py", self.curve)
        subprocess.run([sys.executable, "-W", "ignore", "curve.py"], cwd=self.folder, check=True, timeout=60)
        with open(self.path("curve.png")) as file:
            self.assertEqual(json.load(file), [*([name, [line[name] for line in epochs]] for name in
                                                 ("train_loss", "valid_loss")), "legend"])

    def test_inference(self):
        """The vocabulary is kept after training here."""
        write_subj(self.path("data"), b"the hero leaves a town\n" * 20, b"a moving and funny film\n" * 20)
        exit_code, _, err = call(ddp_launch, "--dataset", "Subj", "--data_root", self.path("data"), "--batch_size", "8",
                                 "--epochs", "10", "--checkpoint", self.path("run.pt"))
        self.assertEqual(exit_code, 0, err)
        last = "    return tuple(Sentences("
        project(self.folder, ("common.py", last, f"    {self.keep_ids}\n{last}"))
        self.write("predict.py", self.predict)
        exit_code, out, err = run("predict.py", cwd=self.folder)
        self.assertEqual(exit_code, 0, err)
        (objective, subjective), = json.loads(out)
        self.assertAlmostEqual(objective + subjective, 1, places=5)
        self.assertGreater(subjective, 0.6)


class PageTest(unittest.TestCase):
    def test_sizes(self):
        self.assertLessEqual(read("README.md").count("\n"), 300)
        self.assertLessEqual(len(table(section("Changing it"))), 10)

    def test_links_lead_to_files_headings_and_tests_that_are_there(self):
        """The title of a link to a test file, which a browser shows at the mouse pointer, is a test in it."""
        found = 0
        for name in FILES:
            headings = {re.sub("[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
                        for heading in re.findall("^#+ (.*)$", read(name), re.M)}
            for text, target, title in re.findall(r'\[([^\]]+)\]\(([^) ]+)(?: "([^"]*)")?\)', read(name)):
                with self.subTest(file=name, link=f"{text} -> {target}"):
                    found += 1
                    if target.startswith("#"):
                        self.assertIn(target[1:], headings)
                    elif not target.startswith("https://"):
                        path = os.path.normpath(os.path.join(os.path.dirname(name), target))
                        self.assertTrue(os.path.isfile(os.path.join(ROOT, path)), path)
                        if title:
                            self.assertIn(f"def {title}(self", read(path))
        self.assertGreater(found, 20)

    def test_messages_are_those_of_the_code(self):
        source = "".join(read(name) for name in os.listdir(ROOT) if name.endswith(".py"))
        source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts that go on in the next line
        for row in table(section("When something goes wrong")):
            for message in code(row[0]):
                if message not in OTHERS:
                    # "…" and what is between them, numbers and names, are put in when the program runs.
                    for part in filter(None, map(str.strip, re.split(r"…|\d[\d, ]*|hostb|run\.pt|nan|inf", message))):
                        with self.subTest(message=message):
                            self.assertTrue(part in source, f"{part!r} is in none of the scripts")
