"""What the README says: its lines for one's own data and model work, and what it links to is there."""
import ast
import json
import os
import re
import unittest

from tests.helpers import ROOT, FolderTest, finish, launcher, project, run, start

import torch
from torch import nn

with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as readme:
    README = readme.read()


def replace_functions(path, lines):
    """Put `lines` into a file: functions in place of those of the same name, all else before the first of them."""
    with open(path) as file:
        content = original = file.read()
    new = {node.name: ast.get_source_segment(lines, node) for node in ast.parse(lines).body}
    for node in ast.parse(original).body:
        if isinstance(node, ast.FunctionDef) and node.name in new:
            wanted = [new.pop(name) for name in list(new) if name[0].isupper() or name == node.name]
            content = content.replace(ast.get_source_segment(original, node), "\n\n\n".join(wanted))
    assert not new, new
    with open(path, "w") as file:
        file.write(content)


class OwnDataAndModelTest(FolderTest):
    def test_the_lines_of_the_readme(self):
        """Launching, exact figures, and a resume by another launcher: the run was killed after its first epoch."""
        save = "            state.save(args.checkpoint)\n"
        project(self.folder, ("ddp_spawn.py", save, f"{save}            if 'killed' in args.checkpoint:\n"
                              "                os.kill(os.getpid(), signal.SIGKILL)\n"))
        replace_functions(self.path("common.py"), re.search("```python\n(.*?)```", README, re.S).group(1))
        parts = {}
        for part, rows in (("train", 101), ("valid", 13), ("test", 7)):
            targets = torch.arange(rows) % 3
            inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)) + targets[:, None]
            with open(self.path(f"{part}.csv"), "w") as file:
                file.writelines(f"{','.join(map(str, row))},{target}\n" for row, target in
                                zip(inputs.tolist(), targets.tolist()))
            parts[part] = inputs, targets
        given = ["--data_root", self.folder, "--epochs", "3", "--batch_size", "10", "--metrics"]
        whole, killed = [start(["ddp_spawn.py", "-g", "2", *given, f"{name}.jsonl", "--checkpoint", f"{name}.pt"],
                               cwd=self.folder) for name in ("whole", "killed")]
        self.assertEqual([finish(whole)[0], finish(killed)[0]], [0, 1])
        code, out, err = run(*launcher(2), "ddp_launch.py", *given, "killed.jsonl", "--checkpoint", "killed.pt",
                             "--resume", cwd=self.folder)
        self.assertEqual((code, "after epoch 1" in out), (0, True), err)
        whole, resumed = [torch.load(self.path(f"{name}.pt"), weights_only=True) for name in ("whole", "killed")]
        for key, value in whole["model"].items():
            self.assertTrue(torch.equal(value, resumed["model"][key]), key)
        model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
        model.load_state_dict(whole["best_model"])
        with open(self.path("killed.jsonl")) as file:
            metrics = [json.loads(line) for line in file]
        hits = {part: (model(inputs).argmax(1) == targets).sum().item() for part, (inputs, targets) in parts.items()}
        self.assertEqual(metrics[-1]["test_accuracy"], hits["test"] / 7)
        self.assertEqual(max(line["valid_accuracy"] for line in metrics[:-1]), hits["valid"] / 13)
        self.assertGreater(hits["valid"], 6)


class LinksTest(unittest.TestCase):
    def test_they_lead_to_files_headings_and_tests_that_are_there(self):
        headings = {re.sub("[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
                    for heading in re.findall("^#+ (.*)$", README, re.M)}
        links = re.findall(r"\[([^\]]*)\]\(([^)]*)\)", README)
        self.assertGreater(len(links), 20)
        for text, target in links:
            with self.subTest(link=f"{text} -> {target}"):
                if target.startswith("#"):
                    self.assertIn(target[1:], headings)
                    continue
                with open(os.path.join(ROOT, target), encoding="utf-8") as file:
                    content = file.read()
                if re.fullmatch("`test_[a-z0-9_]+`", text):
                    self.assertIn(f"def {text[1:-1]}(self", content)
