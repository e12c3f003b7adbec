"""A user's own task: data, model, loss, score and optimizer are replaced, and everything else keeps working."""
import contextlib
import json
import math
import os
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import common
import ddp_launch
import ddp_spawn
import dp_example
import runtime
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, IterableDataset, Subset, random_split

from tests.helpers import (FolderTest, Run, call, finish, free_port, launcher, options, project, replace_functions, run,
                           start)
from tests.test_collectives import CollectivesTest, results

ROUNDING = 2e-5  # of weights of order 1, as in test_numbers
CPU = torch.device("cpu")


def flat(value, where=""):
    """The tensors and numbers in a checkpoint or in metrics, with their places, but without times."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, item in items if "second" not in str(key) for found in flat(item, f"{where}/{key}")]
    return [(where, value.tolist() if isinstance(value, torch.Tensor) else value)]


def by_hand(model, optimizer, epochs, loss_of):
    """Train as a plain loop would; `epochs` are lists of batches, which are lists of rows, and loss_of(model, rows) is
    the mean loss of one. Returns for each epoch the mean over its rows."""
    rate, means = optimizer.param_groups[0]["lr"], []
    for epoch, batches in enumerate(epochs):
        total, done, length = 0.0, 0, sum(map(len, batches))
        for rows in batches:
            share = (epoch + done / length) / len(epochs)
            optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * share))
            optimizer.zero_grad()
            loss = loss_of(model, rows)
            loss.backward()
            optimizer.step()
            total, done = total + loss.item() * len(rows), done + len(rows)
        means.append(total / length)
    return means


def cut(rows, size):
    return [rows[at:at + size] for at in range(0, len(rows), size)]


def shuffled(rows, epoch=0):
    """The order in which all ranks together take so many rows, with the default seed."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(epoch)).tolist()


def difference(weights, others):
    """The largest difference between two state dicts of the same names."""
    assert list(weights) == list(others)
    return max((weights[key] - others[key]).abs().max().item() for key in weights if key[-11:] != "extra_state")


@contextlib.contextmanager
def task(**functions):
    """The functions of the task are these, in this process."""
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(common, name, function))
        yield


def linear_data(args):
    """Three parts of rows with 4 numbers and one of 3 classes: 41, 13 and 7."""
    torch.manual_seed(5)
    targets = torch.randint(3, (61,))
    data = common.Rows(torch.randn(61, 4) + targets[:, None], targets)
    return [common.Rows(*data[a:b]) for a, b in ((0, 41), (41, 54), (54, 61))]


# ---- A copy of the project, edited as a user would ---------------------------------------------------
REGRESSION = '''
def load_data(args):
    """A random split of rows with two targets each."""
    generator = torch.Generator().manual_seed(args.seed)
    inputs, noise = torch.randn(90, 6, generator=generator), torch.randn(90, 2, generator=generator)
    targets = inputs[:, :2] * torch.tensor([1.0, -2.0]) + 0.5 + noise
    return torch.utils.data.random_split(Rows(inputs, targets), [31, 40, 19], generator=generator)


def build_model(args, train):
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def losses(outputs, targets):
    return F.mse_loss(outputs, targets, reduction="none").mean(1)


def scores(outputs, targets):
    return None
'''
TAGGER = '''
class Words(Dataset):
    """Sentences of 7 words: a token and 3 numbers for each word, and a tag for each."""

    def __init__(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens, self.numbers = torch.randint(20, (rows, 7), generator=generator), torch.randn(
            rows, 7, 3, generator=generator)
        self.tags = (self.tokens % 3 + (self.numbers[..., 0] > 0)) % 3

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"a": self.tokens[i], "b": self.numbers[i]}, self.tags[i]


class Tagger(nn.Module):
    """The second head is there for training alone, and counts for less in each step."""

    def __init__(self):
        super().__init__()
        self.words, self.tags, self.second, self.calls = nn.Embedding(20, 8), nn.Linear(11, 3), nn.Linear(11, 3), 0
        self.register_buffer("scale", torch.tensor([0.5]).expand(3), persistent=False)

    def forward(self, inputs):
        words = torch.cat([self.words(inputs["a"]), inputs["b"]], 2)
        outputs = {"logits": self.tags(words)}
        if self.training:
            self.calls += 1
            outputs["second"] = self.second(words) * self.scale, 1 / self.calls
        return outputs

    def get_extra_state(self):
        return torch.ones(self.calls)  # of another shape after each step

    def set_extra_state(self, state):
        self.calls = len(state)


def load_data(args):
    return Words(47, 1), Words(21, 2), Words(11, 3)


def build_model(args, train):
    return Tagger()


def losses(outputs, targets):
    found = F.cross_entropy(outputs["logits"].transpose(1, 2), targets, reduction="none").mean(1)
    if "second" in outputs:
        guess, share = outputs["second"]
        found = found + share * F.cross_entropy(guess.transpose(1, 2), 2 - targets, reduction="none").mean(1)
    return found


def scores(outputs, targets):
    return (outputs["logits"].argmax(2) == targets).float().mean(1)
'''


class OwnTaskTest(FolderTest):
    """Two processes, killed after the first epoch and resumed by the other launcher; one with the whole batch."""

    def train(self, lines, *given):
        """Returns the module `common` of the copy, the checkpoint, and the metrics."""
        save = "            state.save(args.checkpoint)\n"
        project(self.folder, ("ddp_spawn.py", save, f"{save}            if 'killed' in args.checkpoint:\n"
                              "                os.kill(os.getpid(), signal.SIGKILL)\n"),
                ("ddp_spawn.py", "import sys\n", "import signal\nimport sys\n"))
        replace_functions(self.path("common.py"), lines)

        def begin(name, *command):
            return start([*command, *given, "--checkpoint", f"{name}.pt", "--metrics", f"{name}.jsonl"],
                         cwd=self.folder, OMP_NUM_THREADS="1")

        killed = begin("killed", "ddp_spawn.py", "-g", "2", "--batch_size", "5")
        with open(self.path("common.py")) as file:
            copy = {"__name__": "common_of_the_copy"}
            exec(compile(file.read(), "common.py", "exec"), copy)
        with task(**{name: copy[name] for name in ("load_data", "build_model", "losses", "scores")}):
            alone = Run(ddp_launch, *given, "--batch_size", "10")
        code, out, err = finish(killed)
        self.assertEqual((code, "SIGKILL" in err), (1, True), err)
        self.assertEqual(torch.load(self.path("killed.pt"), weights_only=True)["epoch"], 1)
        code, out, err = finish(begin("killed", *launcher(2), "ddp_launch.py", "--batch_size", "5", "--resume"))
        self.assertEqual(code, 0, err)
        self.assertIn("going on from killed.pt, after epoch 1\n", out)
        with open(self.path("killed.jsonl")) as file:
            metrics = [json.loads(line) for line in file]
        found = torch.load(self.path("killed.pt"), weights_only=True)
        self.assertLess(difference(found["model"], alone.weights), ROUNDING)
        self.assertEqual(found["best_epoch"], alone.checkpoint["best_epoch"])
        for line, other in zip(metrics, alone.metrics):
            self.assertEqual(list(line), list(other))
            for key in line:
                if key.endswith(("loss", "accuracy")):
                    self.assertAlmostEqual(line[key], other[key], places=5)
        return copy, found, metrics

    def figures(self, copy, weights, part):
        """Mean loss and mean score of the weights for one part (0 to 2) of the data, in one batch."""
        model = copy["build_model"](options(), None).eval()
        model.load_state_dict(weights)
        data = copy["load_data"](options())[part]
        inputs, targets = copy["split_batch"](common.default_collate([data[i] for i in range(len(data))]), CPU)
        with torch.no_grad():
            outputs = model(inputs)
            scores = copy["scores"](outputs, targets)
            return (copy["losses"](outputs, targets).double().mean().item(),
                    None if scores is None else scores.double().mean().item())

    def test_regression_without_a_score_of_a_random_split_with_adamw(self):
        """It overfits: the best epoch is neither the first nor the last, and is the one of the lowest loss."""
        given = "--epochs", "6", "--optimizer", "adamw", "--weight_decay", "0.5", "--learning_rate", "0.1"
        copy, checkpoint, metrics = self.train(REGRESSION, *given)
        self.assertEqual([key for line in metrics for key in line if "accuracy" in key], [])
        losses = [line["valid_loss"] for line in metrics[:-1]]
        best = losses.index(min(losses))
        self.assertTrue(0 < best < 5, losses)
        self.assertEqual(checkpoint["best_epoch"], best + 1)
        valid, test = [self.figures(copy, checkpoint["best_model"], part)[0] for part in (1, 2)]
        self.assertAlmostEqual(valid, losses[best], places=6)
        self.assertAlmostEqual(test, metrics[-1]["test_loss"], places=6)
        train, *_ = copy["load_data"](options())
        torch.manual_seed(0)
        model = copy["build_model"](options(), train)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        rows = [torch.stack(part) for part in zip(*[train[i] for i in range(31)])]
        found = by_hand(model, optimizer, [cut(shuffled(31, epoch), 10) for epoch in range(6)],
                        lambda model, batch: (model(rows[0][batch]) - rows[1][batch]).square().mean())
        self.assertLess(difference(model.state_dict(), checkpoint["model"]), ROUNDING)
        for line, mean in zip(metrics, found):
            self.assertAlmostEqual(line["train_loss"], mean, places=5)

    def test_a_tagger_with_inputs_in_a_dict_and_a_head_that_only_training_uses(self):
        """A target for each position. The module has a state of its own as well, without which the second head would
        count for more after the resume, and a buffer that cannot be written to."""
        copy, checkpoint, metrics = self.train(TAGGER, "--epochs", "3", "--learning_rate", "0.05")
        self.assertEqual(checkpoint["model"]["_extra_state"].tolist(), [1.0] * 3 * 5)
        torch.manual_seed(0)
        start = copy["build_model"](options(), None)
        self.assertGreater((start.second.weight - checkpoint["model"]["second.weight"]).abs().max().item(), 0.01)
        loss, score = self.figures(copy, checkpoint["best_model"], 2)
        self.assertTrue(0.4 < score < 1, score)
        self.assertAlmostEqual(metrics[-1]["test_loss"], loss, places=6)
        self.assertAlmostEqual(metrics[-1]["test_accuracy"], score, places=6)


class SamplesTest(FolderTest):
    """What a sample may be, in one process that joins a process group of one."""

    def run_here(self, name, *given):
        where = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": free_port()}
        code, out, err = call(ddp_launch, *given, "--checkpoint", self.path(f"{name}.pt"), "--epochs", "2", **where)
        self.assertEqual(code, 0, err)
        return torch.load(self.path(f"{name}.pt"), weights_only=True)

    def train(self, data, forward, losses, scores):
        """Train a Linear(3, 2), `model`, by forward(model, batch); whole, and with a resume after the first epoch.
        Returns the checkpoint, and what losses() got."""
        class Model(nn.Linear):
            def forward(self, batch):
                return forward(super().forward, batch)

        seen, save = [], runtime.TrainState.save

        def losses_seen(outputs, targets):
            seen.append(targets)
            return losses(outputs, targets)

        def save_and_break(state, path):
            save(state, path)
            raise InterruptedError("after the first epoch")

        with task(load_data=lambda args: data, build_model=lambda args, train: Model(3, 2), losses=losses_seen,
                  scores=scores):
            whole = self.run_here("whole", "--batch_size", "4")
            with mock.patch.object(runtime.TrainState, "save", save_and_break), self.assertRaises(InterruptedError):
                self.run_here("broken", "--batch_size", "4")
            resumed = self.run_here("broken", "--batch_size", "4", "--resume")
        self.assertEqual(flat(whole), flat(resumed))
        return whole, seen

    def check(self, checkpoint, x, y):
        """Against a plain loop."""
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        means = by_hand(model, torch.optim.Adam(model.parameters(), lr=0.005), [cut(shuffled(9, e), 4) for e in (0, 1)],
                        lambda model, rows: F.cross_entropy(model(x[rows]), y[rows]))
        self.assertLess(difference(model.state_dict(), checkpoint["model"]), 1e-6)
        for line, mean in zip(checkpoint["history"], means):
            self.assertAlmostEqual(line["train_loss"], mean, places=6)
            self.assertTrue(0 <= line["valid_accuracy"] <= 1)

    def test_the_model_gets_what_a_sample_has(self):
        """Dicts, which are no pairs, go whole to the model and to the loss; tuples and lists within a pair."""
        torch.manual_seed(3)
        x, y = torch.randn(9, 3), torch.randint(2, (9,))
        dicts = [{"name": str(i) * 5, "x": x[i], "y": y[i]} for i in range(9)]
        checkpoint, seen = self.train(
            3 * [dicts], lambda linear, batch: linear(batch["x"]),
            lambda outputs, batch: F.cross_entropy(outputs, batch["y"], reduction="none"),
            lambda outputs, batch: outputs.argmax(1) == batch["y"])
        self.check(checkpoint, x, y)
        self.assertEqual(sorted(seen[0]), ["name", "x", "y"])
        pairs = [((x[i, :1], [x[i, 1:]]), {"class": (y[i], y[i])}) for i in range(9)]
        os.remove(self.path("whole.pt"))
        os.remove(self.path("broken.pt"))
        checkpoint, _ = self.train(
            3 * [pairs], lambda linear, batch: (linear(torch.cat([batch[0], batch[1][0]], 1)), "a text"),
            lambda outputs, targets: F.cross_entropy(outputs[0], targets["class"][1], reduction="none"),
            lambda outputs, targets: outputs[0].argmax(1) == targets["class"][1])
        self.check(checkpoint, x, y)


# ---- Losses and scores -------------------------------------------------------------------------------
class OnePerSampleTest(unittest.TestCase):
    """The first batch raises an error that shows the shape which it got and the one that is needed."""

    def raised(self, module, **functions):
        calls = []

        def counted(function):
            return lambda *given: (calls.append(function), function(*given))[1]

        functions = {name: counted(function) for name, function in functions.items()}
        with task(load_data=linear_data, build_model=lambda args, train: nn.Linear(4, 3), **functions), \
                self.assertRaises(ValueError) as caught:
            call(module, "--batch_size", "10", "--epochs", "1")
        self.assertEqual(len(calls), 1)
        return str(caught.exception)

    def test_losses(self):
        for module in (ddp_launch, dp_example):
            for losses, shape in ((lambda outputs, targets: outputs.square(), r"[10, 3]"),
                                  (lambda outputs, targets: F.cross_entropy(outputs, targets), "[]"),
                                  (lambda outputs, targets: outputs[:, :1], "[10, 1]"),
                                  (lambda outputs, targets: outputs[:9, 0], "[9]"),
                                  (lambda outputs, targets: 0.5, "float")):
                message = self.raised(module, losses=losses)
                with self.subTest(message):
                    self.assertRegex(message, r"^losses\(\) .* \[10\] ")
                    self.assertIn(f" returned {shape}", message)

    def test_functions_may_be_objects(self):
        """As torch's own losses are."""
        with task(load_data=linear_data, build_model=lambda args, train: nn.Linear(4, 3),
                  losses=nn.CrossEntropyLoss(reduction="none")):
            self.assertIn("valid_accuracy", Run(ddp_launch, "--epochs", "1").metrics[0])

    def test_scores(self):
        """With their 13 rows of validation the first batch has 10."""
        for scores, shape in ((lambda outputs, targets: outputs > 0, "[10, 3]"),
                              (lambda outputs, targets: (outputs.argmax(1) == targets).float().mean(), "[]"),
                              (lambda outputs, targets: 12.0, "float")):
            message = self.raised(ddp_launch, scores=scores)
            with self.subTest(message):
                self.assertRegex(message, r"^scores\(\) .* \[10\] ")
                self.assertIn(f" returned {shape}", message)


class BestEpochTest(unittest.TestCase):
    def best(self, *figures):
        """The number of the epoch that is tested, if validation has these losses and scores."""
        figures, seen = [*figures, (1.0, None)], []

        def evaluate(model, loader):
            seen.append(model.weight.detach().clone())
            return figures[len(seen) - 1]

        with task(load_data=linear_data, build_model=lambda args, train: nn.Linear(4, 3), evaluate=evaluate):
            code, out, err = call(ddp_launch, "--epochs", str(len(figures) - 1))
        self.assertEqual((code, err), (0, ""))
        equal = [torch.equal(weight, seen[-1]) for weight in seen[:-1]]
        self.assertEqual(equal.count(True), 1)
        best = 1 + equal.index(True)
        self.assertIn(f", weights of epoch {best}\n", out)
        return best

    def test_the_highest_score_and_on_a_tie_the_lowest_loss(self):
        self.assertEqual(self.best((0.1, 0.5), (0.9, 0.7), (0.5, 0.6)), 2)
        self.assertEqual(self.best((0.9, 0.7), (0.5, 0.7), (0.6, 0.7), (0.1, 0.6)), 2)
        self.assertEqual(self.best((0.5, 0.7), (0.5, 0.7)), 1)
        self.assertEqual(self.best((0.5, -3.0), (0.4, -2.0), (0.3, -4.0)), 2)  # a score may be a negative error

    def test_without_a_score_the_lowest_loss(self):
        self.assertEqual(self.best((0.9, None), (0.4, None), (0.6, None)), 2)
        self.assertEqual(self.best((-0.1, None), (-0.2, None), (0.0, None)), 2)


class PrecisionTest(unittest.TestCase):
    def test_it_is_that_of_evaluation_too(self):
        for precision in ("bf16", "fp32"):
            with task(load_data=linear_data, build_model=lambda args, train: nn.Linear(4, 3)):
                result = Run(ddp_launch, "--epochs", "1", "--precision", precision, "--batch_size", "41")
            model = nn.Linear(4, 3)
            model.load_state_dict(result.weights)
            for part, key in ((1, "valid_loss"), (2, "test_loss")):
                inputs, targets = linear_data(None)[part].tensors
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                    rounded = model(inputs).float()
                with torch.no_grad():
                    losses = {"bf16": F.cross_entropy(rounded, targets, reduction="none").double().mean().item(),
                              "fp32": F.cross_entropy(model(inputs), targets, reduction="none").double().mean().item()}
                self.assertGreater(abs(losses["bf16"] - losses["fp32"]), 1e-5)
                found = [line[key] for line in result.metrics if key in line]
                self.assertAlmostEqual(found[0], losses[precision], places=7)

    def test_it_is_that_of_the_threads_that_data_parallel_starts(self):
        """A new thread does not inherit autocast's dtype. Here, DataParallel starts one, as it does for each GPU."""
        dtypes = []

        class Tells(nn.Linear):
            def forward(self, inputs):
                outputs = super().forward(inputs)
                dtypes.append(outputs.dtype)
                return outputs

        def forward(self, *inputs):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self.module, *inputs).result()

        with task(load_data=linear_data, build_model=lambda args, train: Tells(4, 3)), \
                mock.patch.object(nn.DataParallel, "forward", forward):
            Run(dp_example, "--epochs", "1", "--precision", "bf16")
        self.assertEqual(set(dtypes), {torch.bfloat16})


# ---- Optimizers --------------------------------------------------------------------------------------
class OptimizerTest(FolderTest):
    def test_an_entry_that_a_user_adds_is_the_one_that_trains(self):
        project(self.folder, ("common.py", '    "sgd": (torch', '    "rms": (torch.optim.RMSprop, {"alpha": 0.7}, '
                                           '0.02),\n    "sgd": (torch'))
        result = Run("ddp_launch.py", "--optimizer", "rms", "--weight_decay", "0.2", "--epochs", "2", "--batch_size",
                     "1000", cwd=self.folder)
        train = common.load_data(options())[0]
        torch.manual_seed(0)
        model = common.build_model(options(), train)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.02, alpha=0.7, weight_decay=0.2)
        means = by_hand(model, optimizer, [cut(shuffled(4000, epoch), 1000) for epoch in range(2)],
                        lambda model, rows: F.cross_entropy(model(train.tensors[0][rows]), train.tensors[1][rows]))
        self.assertLess(difference(model.state_dict(), result.weights), ROUNDING)
        for line, mean in zip(result.metrics, means):
            self.assertAlmostEqual(line["train_loss"], mean, places=5)

    def test_momentum_where_the_first_gradient_comes_late(self):
        """Steps of 0.1, and 0.1 + 0.9 * 0.1."""
        layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        for layer in layers:
            nn.init.ones_(layer.weight)
        args = options("--optimizer", "sgd", "--learning_rate", "0.1")
        optimizer = common.make_optimizer(nn.ModuleList(layers), args)
        for late in (None, torch.ones(1, 1)):
            layers[0].weight.grad, layers[1].weight.grad = torch.ones(1, 1), late
            optimizer.step()
        self.assertAlmostEqual(layers[0].weight.item(), 1 - 0.1 - 0.19, places=6)
        self.assertAlmostEqual(layers[1].weight.item(), 1 - 0.1, places=6)

    def test_settings(self):
        """A class, its settings and its learning rate; the options win. Without --weight_decay it is torch's own."""
        cases = ((["--optimizer", "adam"], torch.optim.Adam, {"lr": 0.005, "weight_decay": 0}),
                 (["--optimizer", "adamw"], torch.optim.AdamW, {"lr": 0.005, "weight_decay": 0.01}),
                 (["--optimizer", "adamw", "--weight_decay", "0"], torch.optim.AdamW, {"weight_decay": 0}),
                 (["--optimizer", "adam", "--weight-decay", "0.3"], torch.optim.Adam, {"weight_decay": 0.3}),
                 (["--optimizer", "sgd", "--weight_decay", "0.1", "--learning_rate", "0.7"], torch.optim.SGD,
                  {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.1}),
                 (["--optimizer", "sgd"], torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0}))
        for given, kind, settings in cases:
            with self.subTest(given):
                model = nn.Linear(2, 2)
                optimizer = common.make_optimizer(model, options(*given))
                self.assertIs(type(optimizer), kind)
                group, = optimizer.param_groups
                self.assertEqual({name: group[name] for name in settings}, settings)
                try:
                    kind(model.parameters(), fused=True)
                except (TypeError, RuntimeError):  # an older torch
                    continue
                # SGD's fused form fails with late gradients, and with fp16, where the first step can be left out.
                self.assertEqual(group["fused"], None if kind is torch.optim.SGD else True)

    def train(self, model, data, *given):
        """An epoch of three steps, here; then two, of which the second is of a resumed run."""
        start, found = [value.detach().clone() for value in model.parameters()], []

        def build_model(args, train):
            with torch.no_grad():
                for value, first in zip(model.parameters(), start):
                    value.copy_(first)
            model.zero_grad()
            return model

        save = runtime.TrainState.save

        def save_and_break(state, path):
            save(state, path)
            raise InterruptedError("after the first epoch")

        given = [*given, "--batch_size", "4"]
        with task(load_data=lambda args: 3 * [data], build_model=build_model):
            for name in ("whole", "broken"):
                files = ["--checkpoint", self.path(f"{name}.pt"), "--resume", "--epochs", "2"]
                if name == "broken":
                    with mock.patch.object(runtime.TrainState, "save", save_and_break), \
                            self.assertRaises(InterruptedError):
                        call(ddp_launch, *given, *files)
                code, _, err = call(ddp_launch, *given, *files)
                self.assertEqual(code, 0, err)
                found.append(torch.load(self.path(f"{name}.pt"), weights_only=True)["model"])
        for key, value in found[0].items():
            self.assertTrue(torch.equal(value, found[1][key]), key)
        build_model(None, None)
        return found[0]

    def check(self, model, optimizer, data, *given):
        """Against a plain loop with `optimizer`, a class, and its settings."""
        found = self.train(model, data, *given)
        kind, settings = optimizer
        inputs, targets = data.tensors
        by_hand(model, kind(model.parameters(), **settings), [cut(shuffled(11, epoch), 4) for epoch in range(2)],
                lambda model, rows: F.cross_entropy(model(inputs[rows]), targets[rows]))
        self.assertLess(difference(model.state_dict(), found), 1e-5)

    def test_complex_parameters(self):
        class Waves(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

            def forward(self, x):
                return (x.to(torch.complex64) @ self.weight).abs()

        torch.manual_seed(0)
        data = common.Rows(torch.randn(11, 4), torch.randint(3, (11,)))
        self.check(Waves(), (torch.optim.Adam, {"lr": 0.005}), data)
        os.remove(self.path("whole.pt"))
        os.remove(self.path("broken.pt"))
        self.check(Waves(), (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}), data, "--optimizer", "sgd")

    def test_sparse_gradients(self):
        torch.manual_seed(0)
        data = common.Rows(torch.randint(9, (11, 5)), torch.randint(3, (11,)))
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(20, 3))
        self.check(model, (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}), data, "--optimizer", "sgd")


# ---- Data sets and samplers --------------------------------------------------------------------------
class Doubled(common.Rows):
    """Rows that change on their way."""

    def __getitem__(self, i):
        inputs, target = super().__getitem__(i)
        return 2 * inputs, target


class RowsTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.inputs, self.targets = torch.randn(23, 4), torch.arange(23)

    def check(self, data, rows, factor=1, workers=0):
        """The batches of `data` are these rows, in order."""
        self.assertEqual(len(data), len(rows))
        order = shuffled(len(data))
        loader = common.make_loader(data, order, options("--batch_size", "5", "--num_workers", str(workers)), CPU)
        batches = list(loader)
        self.assertEqual(len(batches), math.ceil(len(data) / 5))
        for at, (inputs, targets) in zip(range(0, len(data), 5), batches):
            expected = [rows[i] for i in order[at:at + 5]]
            self.assertEqual(targets.tolist(), expected)
            self.assertTrue(torch.equal(inputs, factor * self.inputs[expected]))

    def test_parts_of_rows(self):
        data = common.Rows(self.inputs, self.targets)
        self.check(data, range(23))
        for part in random_split(data, [13, 10], generator=torch.Generator().manual_seed(1)):
            self.assertEqual(type(part), Subset)
            self.check(part, list(part.indices))
        first = Subset(data, [20, 3, 3, 11, 7, 0])
        self.check(first, [20, 3, 3, 11, 7, 0], workers=1)
        self.check(Subset(first, [5, 0, 4]), [0, 20, 7])
        self.check(Subset(Subset(first, torch.tensor([5, 0, 4])), range(2)), [0, 20])

    def test_rows_end_to_end(self):
        data = [common.Rows(self.inputs[a:b], self.targets[a:b]) for a, b in ((0, 9), (9, 23))]
        self.check(ConcatDataset(data), range(23))
        self.check(Subset(ConcatDataset(data), [22, 0, 9, 8]), [22, 0, 9, 8])
        self.check(ConcatDataset([Subset(data[1], [3, 1]), data[0]]), [12, 10, *range(9)])

    def test_a_subclass_is_asked(self):
        data = Doubled(self.inputs, self.targets)
        self.check(data, range(23), factor=2)
        self.check(Subset(Subset(data, range(3, 23)), [2, 0]), [5, 3], factor=2)
        self.check(ConcatDataset([data]), range(23), factor=2)

        class AllAtOnce(common.Rows):
            def __getitems__(self, rows):
                return [(2 * self.tensors[0][i], self.tensors[1][i]) for i in rows]

        self.check(AllAtOnce(self.inputs, self.targets), range(23), factor=2)

        class Tail(Subset):  # one that a user has written
            def __getitem__(self, i):
                return self.dataset[len(self.dataset) - 1 - self.indices[i]]

            def __getitems__(self, rows):
                return [self[i] for i in rows]

        self.check(Tail(common.Rows(self.inputs, self.targets), [0, 2]), [22, 20])

    def test_data_without_indices_is_an_error_in_one_line(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(common.Rows(torch.ones(4, 4), torch.ones(4)))

        started = AssertionError("a process was started")
        for module, given in ((ddp_spawn, []), (ddp_launch, []), (dp_example, ["--epochs", "1"])):
            for part in range(3):
                data = linear_data(None)
                data[part] = Stream()
                with task(load_data=lambda args: data), mock.patch("torch.multiprocessing.spawn", side_effect=started):
                    code, out, err = call(module, *given)
                self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
                for word in ("IterableDataset", "__getitem__"):
                    self.assertIn(word, err)


class SamplersTest(CollectivesTest):
    """tests/ranks.py trains for two epochs on 17 rows with a batch size of 4."""

    def test_one_that_covers_a_part_of_the_rows(self):
        torch.manual_seed(0)
        inputs, targets, start = torch.randn(17, 4), torch.randint(3, (17,)), nn.Linear(4, 3).state_dict()
        for world_size in (1, 2, 3):
            shard = math.ceil(17 / world_size)
            rows = {"over 9": (9, 9), "drop_last": (17, 17 // world_size * world_size),
                    "--drop_last": (17, min(17, shard // 4 * 4 * world_size))}
            self.assertEqual(rows["--drop_last"][1], (16, 16, 12)[world_size - 1])
            for name, (length, kept) in rows.items():
                model = nn.Linear(4, 3)
                model.load_state_dict(start)
                epochs = [cut(shuffled(length, epoch)[:kept], 4 * world_size) for epoch in range(2)]
                means = by_hand(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), epochs,
                                lambda model, rows: F.cross_entropy(model(inputs[rows]), targets[rows]))
                for rank, found in enumerate(results(world_size)):
                    with self.subTest(name, world_size=world_size, rank=rank):
                        weights, figures = found["sampler_cases"][name]
                        self.assertLess(difference(weights, model.state_dict()), 1e-6)
                        for line, mean in zip(figures, means):
                            self.assertAlmostEqual(line["train_loss"], mean, places=6)
                            self.assertAlmostEqual(line["samples_per_second"] * line["seconds"], kept, places=6)

    def test_a_random_one_of_torchs_own(self):
        """With so small a learning rate that the weights stay."""
        train = linear_data(None)[0]
        model = nn.Linear(4, 3)
        args = options("--batch_size", "4", "--learning_rate", "1e-9", "--optimizer", "sgd")
        rows = [3, 5, 8, 13, 21, 34, 40]
        loader = common.make_loader(train, torch.utils.data.SubsetRandomSampler(rows), args, CPU)
        with torch.no_grad():
            expected = F.cross_entropy(model(train.tensors[0][rows]), train.tensors[1][rows]).item()
        self.assertAlmostEqual(
            ddp_launch.train_one_epoch(model, loader, runtime.TrainState(model, args), args)["train_loss"],
            expected, places=6)


# ---- --drop_last, and what torch's errors do not say ---------------------------------------------------
class DropLastTest(unittest.TestCase):
    """41 rows, of which the last batch of 10 has one, on which BatchNorm cannot train."""

    def call(self, *given):
        with task(load_data=linear_data, build_model=lambda args, train: nn.Sequential(
                nn.Linear(4, 3), nn.BatchNorm1d(3))):
            return Run(ddp_launch, "--epochs", "1", "--learning_rate", "1e-9", "--optimizer", "sgd", *given)

    def test_a_last_batch_of_one_row(self):
        for size in ("10", "1"):
            with self.assertRaises(ValueError) as caught:
                self.call("--batch_size", size)
            self.assertRegex(str(caught.exception), "(?s)Expected more than 1 value per channel.*\n.*--drop_last")
        result = self.call("--batch_size", "10", "--drop_last")
        torch.manual_seed(0)
        first, norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        data = linear_data(None)
        inputs, targets = data[0].tensors
        with torch.no_grad():
            losses = [F.cross_entropy(norm(first(inputs[rows])), targets[rows]).item()
                      for rows in cut(shuffled(41)[:40], 10)]
            self.assertAlmostEqual(result.metrics[0]["train_loss"], sum(losses) / 4, places=6)
            norm.eval()
            for part, key in ((1, "valid"), (2, "test")):  # of all their rows, 13 and 7
                inputs, targets = data[part].tensors
                line, outputs = result.metrics[part - 1], norm(first(inputs))
                self.assertAlmostEqual(line[f"{key}_loss"], F.cross_entropy(outputs, targets).item(), places=5)
                self.assertEqual(line[f"{key}_accuracy"], (outputs.argmax(1) == targets).sum().item() / len(inputs))

    def test_no_batch_at_all_is_an_error(self):
        """In place of a run that trains nothing."""
        for module, given in ((ddp_launch, []), (dp_example, ["--epochs", "1"])):
            with task(load_data=linear_data, build_model=lambda args, train: nn.Linear(4, 3)):
                code, out, err = call(module, "--drop_last", "--batch_size", "42", *given)
            self.assertEqual((code, err.count("\n")), (2, 1), out + err)
            for word in ("--drop_last", "42", "41"):
                self.assertIn(word, err)


SKIPS = '''
class Skips(nn.Module):
    """Rank 1 does without the second layer in its second step; nobody uses the third."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.calls = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3), 0
        self.third.requires_grad_("third" in os.environ["TASK"])

    def forward(self, x):
        self.calls += 1
        outputs = self.first(x)
        return outputs if self.calls == 2 and rank_and_world_size()[0] == 1 else outputs + self.second(x)


def load_data(args):
    torch.manual_seed(5)
    targets = torch.randint(3, (30,))
    data = Rows(torch.randn(30, 4) + targets[:, None], targets)
    return [Rows(*data[a:b]) for a, b in ((0, 20), (20, 25), (25, 30))]


def build_model(args, train):
    return Skips()
'''


class MissingGradientsTest(FolderTest):
    def test_a_layer_that_is_skipped_or_never_used(self):
        """`--grad_sync ddp` fails, and names manual, which trains: what is missing counts as 0."""
        replace_functions(os.path.join(project(self.folder), "common.py"), SKIPS)
        given = ["-g", "2", "--optimizer", "sgd", "--batch_size", "5", "--epochs", "1"]
        runs = [start(["ddp_spawn.py", *given, *more], cwd=self.folder, TASK=name) for name, more in (
            ("skipped", []), ("third", ["--grad_sync", "manual", "--checkpoint", "c.pt"]))]
        (code, out, err), manual = [finish(process) for process in runs]
        self.assertEqual((code, "epoch 1/1" in out), (1, False), out + err)
        self.assertRegex(err, "(?s)Expected to have finished reduction.*\n.*--grad_sync manual")
        self.assertEqual(manual[0], 0, manual[2])
        found = torch.load(self.path("c.pt"), weights_only=True)["model"]
        torch.manual_seed(5)
        targets = torch.randint(3, (30,))
        inputs = torch.randn(30, 4) + targets[:, None]
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(4, 3) for name in ("first", "second", "third")})
        used, steps = torch.ones(10, 1), iter((1, 2))

        def loss_of(model, rows):
            used[1::2] = float(next(steps) == 1)  # of every second row, which are those of rank 1
            outputs = model["first"](inputs[rows]) + used * model["second"](inputs[rows])
            return F.cross_entropy(outputs, targets[rows])

        third = model["third"].weight.detach().clone()
        by_hand(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), [cut(shuffled(20), 10)], loss_of)
        self.assertLess(difference(model.state_dict(), found), 1e-6)
        self.assertTrue(torch.equal(found["third.weight"], third))

    def test_a_layer_that_is_never_used_in_a_world_of_one(self):
        model = nn.Linear(4, 3)
        model.other = nn.Linear(2, 2)
        with task(load_data=linear_data, build_model=lambda args, train: model):
            with self.assertRaises(RuntimeError) as caught:
                call(ddp_launch, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                     MASTER_PORT=free_port())
            self.assertRegex(str(caught.exception), r"(?s)Expected to have finished reduction.*\n.*--grad_sync manual")
            code, out, err = call(ddp_launch, "--grad_sync", "manual", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
        self.assertEqual((code, "epoch 2/2" in out), (0, True), err)

    def test_a_layer_that_only_the_first_micro_batch_of_a_step_uses(self):
        """In the only step of the run: there is no later forward in which DDP would find that nothing was averaged."""
        class Skips(nn.Linear):
            calls = 0

            def forward(self, x):
                self.calls += 1
                return super().forward(x) if self.calls % 2 else self.other(x)

        model = Skips(4, 3)
        model.other = nn.Linear(4, 3)
        with task(load_data=linear_data, build_model=lambda args, train: model):
            with self.assertRaises(RuntimeError) as caught:
                call(ddp_launch, "--batch_size", "30", "--accumulation_steps", "2", "--epochs", "1", "--checkpoint",
                     self.path("c.pt"), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                     MASTER_PORT=free_port())
        self.assertIn("--grad_sync manual", str(caught.exception))
        self.assertEqual(os.listdir(self.folder), [])


# ---- Several ranks: what tests/ranks.py has saved -----------------------------------------------------
class RanksTest(CollectivesTest):
    def test_tasks_train_as_in_one_process(self):
        """Dicts for samples, complex parameters, sparse gradients: with DDP and by hand, on one to three ranks."""
        alone = results(1)[0]["task_cases"]
        self.assertEqual(sorted(alone), [f"{name}, {how}" for name in ("complex", "dicts", "sparse")
                                         for how in ("ddp", "manual")])
        for world_size, rank, found in self.each("task_cases"):
            for name, (weights, history) in found.items():
                with self.subTest(name):
                    self.assertEqual(flat(weights), flat(results(world_size)[0]["task_cases"][name][0]))
                    self.assertLess(difference(weights, alone[name][0]), 1e-5)
                    self.assertEqual(len(history), 0 if rank else 2)
                    for line, other in zip(history, alone[name][1]):
                        for key in ("train_loss", "valid_loss", "valid_accuracy"):
                            self.assertAlmostEqual(line[key], other[key], places=5)

    def test_buffers_that_are_no_statistics_stay(self):
        """One whose size differs by rank, one that is expanded, and one of which each rank has its own."""
        for world_size, rank, found in self.each("buffer_cases"):
            self.assertEqual(found["sized"].tolist(), [float(i) for i in range(rank + 2)])
            self.assertEqual(found["expanded"].tolist(), [rank + 0.5] * 3)
            self.assertEqual(found["own"].tolist(), [rank + 0.1])
            self.assertEqual(found["count"].item(), 10 * rank)
            self.assertTrue(torch.equal(found["mean"], results(world_size)[0]["buffer_cases"]["mean"]))
            self.assertGreater(found["mean"].abs().max().item(), 0.01)

    def test_statistics_and_losses_by_one_all_reduce(self):
        for world_size, rank, found in self.each("buffer_cases"):
            middle = (world_size - 1) / 2
            self.assertEqual(found["statistics"].tolist(), [middle] * 4 + [1 + middle] * 4 + [0.0] * 5 + [1.0] * 5)
            self.assertEqual(found["loss sum"].item(), 0.1 * sum(range(world_size)))
            self.assertEqual(found["loss sum"].dtype, torch.float64)
            self.assertEqual(found["collectives"], [8 * (2 * 4 + 2 * 5 + 1)])

    def test_pythons_random_numbers_in_a_data_set(self):
        """Alike in two runs with one seed, and in one that is resumed; others in each epoch and on each rank."""
        for workers in (0, 2):
            everything = []
            for result in results(2):
                first, second, other, resumed, own = result["random_cases"][workers]
                self.assertEqual(first, second)
                self.assertEqual([len(epoch) for epoch in first], [6, 6])
                if workers:  # in the process itself, resumed or not, numbers begin anew at a checkpoint
                    self.assertEqual(resumed, first[1][4:])
                self.assertEqual(own[:2], own[2:4])
                everything += [draw for run in (first, other) for epoch in run for draw in epoch]
                everything += own[2:]
            self.assertEqual(len(set(everything)), 2 * (2 * 2 * 6 + 4))


# ---- Memory --------------------------------------------------------------------------------------------
class MemoryTest(unittest.TestCase):
    def told(self, platform="linux", **environment):
        """What glibc is told."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        with mock.patch("ctypes.CDLL") as library, mock.patch("sys.platform", platform), \
                mock.patch.dict(os.environ, {**kept, **environment}, clear=True):
            runtime.TrainState(nn.Linear(1, 1), options())
        return [tuple(map(int, given.args)) for given in library.return_value.mallopt.call_args_list]

    def test_glibc_keeps_what_is_freed_unless_the_user_has_told_it_something(self):
        self.assertEqual(sorted(self.told()), [(-3, 2**25), (-1, 2**30)])  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        self.assertEqual(self.told(MALLOC_TRIM_THRESHOLD_="1000"), [])
        self.assertEqual(self.told(MALLOC_ARENA_MAX="2"), [])
        self.assertEqual(self.told(platform="darwin"), [])
