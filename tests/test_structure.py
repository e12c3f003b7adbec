"""Three layers that import only downwards; sizes; and the recipe in each script."""
import ast
import glob
import inspect
import os
import re
import sys
import unittest

import ddp_launch
import ddp_spawn
import dp_example

from tests import test_gpu
from tests.helpers import ROOT, FolderTest, call, project

SCRIPTS = ("dp_example.py", "ddp_spawn.py", "ddp_launch.py")
FLOORS = {**{name: {"runtime", "common"} for name in SCRIPTS}, "runtime.py": {"common"}, "common.py": set()}


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return file.read()


def nodes(name, *kinds):
    return [node for node in ast.walk(ast.parse(read(name))) if isinstance(node, kinds)]


def imported(name):
    """The modules that a file imports, anywhere in it, without what is after the first dot."""
    found = {alias.name.split(".")[0] for node in nodes(name, ast.Import) for alias in node.names}
    relative = [node for node in nodes(name, ast.ImportFrom) if node.level]
    assert not relative, relative
    return found | {node.module.split(".")[0] for node in nodes(name, ast.ImportFrom)}


class FloorsTest(unittest.TestCase):
    def test_imports_go_downwards(self):
        files = {os.path.basename(path) for path in glob.glob(os.path.join(ROOT, "*.py"))}
        self.assertEqual(files, set(FLOORS))
        here = {name[:-3] for name in files}
        for name, below in FLOORS.items():
            self.assertEqual(imported(name) & (here | {"tests", "benchmarks"}), below, name)

    @unittest.skipIf(sys.version_info < (3, 10), "Python does not say which modules are its own before 3.10")
    def test_nothing_but_python_and_torch(self):
        tests = [os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, "tests", "*.py"))]
        for name in [*FLOORS, *tests, os.path.join("benchmarks", "bench.py")]:
            others = imported(name) - set(sys.stdlib_module_names) - {file[:-3] for file in FLOORS}
            self.assertLessEqual(others, {"torch"} if name in FLOORS else {"torch", "tests"}, name)

    def test_torch_and_the_collector_are_as_python_has_them(self):
        """No import has to come first or calls the garbage collector, and nothing switches the collector off."""
        for name in FLOORS:
            calls = [node for node in nodes(name, ast.Attribute) if getattr(node.value, "id", "") == "gc"]
            inside = {line for function in nodes(name, ast.FunctionDef)
                      for line in range(function.lineno, function.end_lineno + 1)}
            self.assertLessEqual({node.lineno for node in calls}, inside, name)
            self.assertLessEqual({node.attr for node in calls}, {"freeze", "collect"}, name)


class SizesTest(unittest.TestCase):
    def test_files(self):
        lines = {name: read(name).count("\n") for name in FLOORS}
        for name in SCRIPTS:
            self.assertTrue(60 <= lines[name] <= 160, f"{name}: {lines[name]} lines")
        for name in ("common.py", "runtime.py"):
            self.assertLessEqual(lines[name], 700, name)
        self.assertLessEqual(sum(lines.values()), 1700)

    def test_functions(self):
        for name in FLOORS:
            for function in nodes(name, ast.FunctionDef, ast.AsyncFunctionDef):
                self.assertLessEqual(function.end_lineno - function.lineno + 1, 50, f"{name}: {function.name}")

    def test_lines(self):
        for pattern in ("*.py", "*/*.py", "*/*.sh", "*.sh"):
            for path in glob.glob(os.path.join(ROOT, pattern)):
                name = os.path.relpath(path, ROOT)
                for number, line in enumerate(read(name).split("\n"), 1):
                    self.assertLessEqual(len(line), 120, f"{name}:{number}")


class StepTest(unittest.TestCase):
    """Each script contains forward, losses, backward, averaging by hand and the optimizer's step."""
    STEP = (r"outputs = model\(batch\.inputs\)", r"common\.losses\(outputs, batch\.targets\)", r"loss\.backward\(\)",
            r"common\.average_gradients\(model\)", r"optimizer[._]step\(\)", r"optimizer\.zero_grad\(\)")

    def test_each_on_a_line_of_its_own_in_this_order(self):
        for module in (ddp_spawn, ddp_launch, dp_example):
            steps = [step for step in self.STEP if module is not dp_example or "average" not in step]
            lines = inspect.getsource(getattr(module, "train_one_epoch", module.train)).split("\n")
            places = [[i for i, line in enumerate(lines) if re.search(step, line.split("#")[0])] for step in steps]
            self.assertEqual([len(found) for found in places], [1] * len(steps), module.__name__)
            self.assertEqual(places, sorted(places))
            self.assertEqual(len({found[0] for found in places}), len(steps))
        self.assertNotIn("average_gradients", inspect.getsource(dp_example))

    def test_the_recipe_has_the_step(self):
        """What `grep -n 'DDP [0-9]' ddp_spawn.py` prints."""
        for module in (ddp_spawn, ddp_launch):
            recipe = re.findall("^.*# DDP [0-9]: .*$", inspect.getsource(module), re.M)
            step = re.findall("^.*# DDP [0-9]: .*$", inspect.getsource(module.train_one_epoch), re.M)
            self.assertGreaterEqual(len(step), 1)
            self.assertIn("backward", "".join(step))
            for word in ("rank", "device", "seed", "sampler|shard", "order", "gradients", "destroy", "join", "writes"):
                self.assertRegex("\n".join(recipe), word)

    def test_both_scripts_have_it_in_the_same_words(self):
        for name in ("train", "train_one_epoch", "leave"):
            self.assertEqual(*[inspect.getsource(getattr(module, name)) for module in (ddp_spawn, ddp_launch)])

    def test_nothing_that_a_reader_has_to_puzzle_out(self):
        """No starred calls, and no calls of a function that an expression chooses."""
        for name in SCRIPTS:
            for node in nodes(name, ast.Call):
                starred = [part for part in node.args if isinstance(part, ast.Starred)]
                starred += [part for part in node.keywords if part.arg is None]
                self.assertEqual(starred, [], f"{name}:{node.lineno}")
                self.assertNotIsInstance(node.func, (ast.IfExp, ast.BoolOp, ast.Lambda), f"{name}:{node.lineno}")


class EditsTest(FolderTest):
    def test_what_test_gpu_changes_is_there(self):
        """That file is skipped where there is no GPU, and would not tell."""
        for edits in (test_gpu.DETERMINISTIC, test_gpu.TELLS, test_gpu.SILENT):
            project(self.folder, *edits)


class HelpTest(unittest.TestCase):
    def test_options_are_in_groups(self):
        groups = {"data": ["--dataset", "--data_root", "--download", "--num_workers"],
                  "training": ["--epochs", "--batch_size", "--drop_last", "--optimizer", "--learning_rate",
                               "--weight_decay", "--accumulation_steps", "--precision", "--max_grad_norm", "--seed"],
                  "devices and processes": ["--device", "--timeout"],
                  "files": ["--checkpoint", "--checkpoint_steps", "--resume", "--metrics"]}
        for module in (ddp_spawn, ddp_launch, dp_example):
            code, out, err = call(module, "--help", COLUMNS="100")
            self.assertEqual((code, err), (0, ""))
            sections = dict(re.findall(r"^(\S[^\n]*):\n((?:  [^\n]*\n|\n)+)", out, re.M))
            for title, names in groups.items():
                for name in names:
                    self.assertRegex(sections[title], rf"(?m)^ +(?:-\w+ )*{name}\b", f"{module.__name__}, {title}")
