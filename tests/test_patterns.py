"""Each way to start each script: the commands of the README and of the notes, and what they print."""
import contextlib
import inspect
import os
import re
import subprocess
import sys
import unittest
from argparse import Namespace
from unittest import mock

import ddp_launch
import ddp_spawn
import runtime
import torch
from tests.helpers import (AT_ONCE, ROOT, FolderTest, Run, call, finish, free_port, launcher, project, run, start,
                           trained, write_subj)

PROCESS = re.compile(r"^rank (\d+) of (\d+): host \S+, local rank (\d+), device cpu, pid (\d+)$", re.M)


class DataParallelTest(unittest.TestCase):
    def test_it_prints_what_the_notes_print(self):
        code, out, err = run("dp_example.py", CUDA_VISIBLE_DEVICES="")
        expected = "".join(f"\tIn Model: input size torch.Size([{n}, 5]) output size torch.Size([{n}, 2])\n"
                           f"Outside: input size torch.Size([{n}, 5]) output_size torch.Size([{n}, 2])\n"
                           for n in (30, 30, 30, 10))
        self.assertEqual((code, out, err), (0, expected, ""))

    def test_it_trains(self):
        result = trained("dp_example.py", "--epochs", "2", "--batch_size", "200")
        self.assertGreater(result.metrics[-1]["test_accuracy"], 0.9)


class LearnsTest(unittest.TestCase):
    def check(self, result, world_size, launched=0):
        self.assertEqual(result.metrics[-1]["world_size"], world_size)
        self.assertGreater(result.metrics[-1]["test_accuracy"], 0.9)
        ranks = [tuple(map(int, found)) for found in PROCESS.findall(result.out)]
        self.assertEqual([(rank, size) for rank, size, *_ in ranks], [(r, world_size) for r in range(world_size)])
        self.assertEqual(len({pid for *_, pid in ranks}), world_size)
        # One process prints: each line of results once (18 in the notes), and nothing on standard error.
        self.assertEqual([len(re.findall(f"^epoch {e}/2: ", result.out, re.M)) for e in (1, 2)], [1, 1])
        self.assertEqual(result.out.count("test accuracy"), 1)
        # torchrun, and not the script, may say once that numpy is missing.
        err = result.err.replace("UserWarning: Failed to initialize NumPy", "", launched)
        self.assertNotIn("Warning", result.out + err)
        self.assertNotIn("\r", result.out)  # the progress line is for terminals

    def test_spawn(self):
        result = trained("ddp_spawn.py", "-n", "1", "-g", "2")
        self.check(result, 2)
        self.assertEqual(result.err, "")
        self.assertIn("backend gloo, torch ", result.out)

    def test_spawn_with_one_process_and_no_visible_gpu(self):
        """Case 11."""
        self.check(Run("ddp_spawn.py", "-n", "1", "-g", "1", "--num_workers", "1", CUDA_VISIBLE_DEVICES=""), 1)

    def test_torchrun(self):
        self.check(trained(*launcher(2), "ddp_launch.py"), 2, launched=1)

    def test_no_launcher(self):
        result = trained("ddp_launch.py")
        self.check(result, 1)
        self.assertIn("backend none", result.out)
        self.assertEqual(result.err, "")


class OldLauncherTest(unittest.TestCase):
    def test_local_rank_as_an_option_or_as_a_variable(self):
        """Case 1: the notes' own command, with the default data; and torchrun."""
        notes = Run(sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2",
                    f"--master_port={free_port()}", "ddp_launch.py", "--multi_gpu", CUDA_VISIBLE_DEVICES="0,1")
        for result in (notes, trained(*launcher(2), "ddp_launch.py")):
            self.assertEqual(result.metrics[-1]["world_size"], 2)
            self.assertEqual([found[2] for found in PROCESS.findall(result.out)], ["0", "1"])

    def test_both_spellings_by_hand(self):
        for option in ("--local_rank", "--local-rank"):
            code, out, _ = call(ddp_launch, "--epochs", "0", option, "0")
            self.assertEqual((code, len(PROCESS.findall(out))), (0, 1))


class SlurmVariablesTest(unittest.TestCase):
    def test_a_step_of_two_tasks_is_a_world_of_two(self):
        """Case 20, with the variables that a step of Slurm has, and no others."""
        step = {"SLURM_JOB_ID": free_port(), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0",
                "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": free_port()}
        tasks = [start(["ddp_launch.py"], **step, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(2)]
        results = [finish(task) for task in tasks]
        self.assertEqual([code for code, _, _ in results], [0, 0], results)
        self.assertEqual(PROCESS.findall(results[0][1])[1][:3], ("1", "2", "1"))
        self.assertEqual(results[1][1], "")

    def test_the_last_of_seven_tasks_on_four_nodes(self):
        """The address is that of the first node, however the list is compressed."""
        step = {"SLURM_JOB_ID": "40001", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
                "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
        for nodes, first in (("rack[1-2]n[07,09]", "rack1n07"), ("n[3-5,8],x", "n3"), ("a,b[1-3]", "a")):
            with mock.patch.dict(os.environ, {**step, "SLURM_STEP_NODELIST": nodes}, clear=True):
                self.assertEqual(runtime.launched_ranks(Namespace(local_rank=None)), (6, 0, 7, 1))
                self.assertEqual((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]), (first, "25001"))

    def test_inside_a_job_but_without_a_step_it_is_alone(self):
        job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
        code, out, _ = call(ddp_launch, "--epochs", "0", **job)
        self.assertEqual((code, PROCESS.findall(out)[0][:2]), (0, ("0", "1")))


class SeveralNodesTest(FolderTest):
    def test_two_jobs_of_two_nodes(self):
        """Cases 18 and 12: at once on this machine, each with an address and a port of its own in the environment.

        The first job has one rank per node, and goes on from a checkpoint that only its first node has. The second has
        two per node: row 1 of the notes, whose formula gives ranks 2 and 3 in a world of 2."""
        torch.save(trained("ddp_spawn.py", "-n", "1", "-g", "2").checkpoint, self.path("1-0.pt"))
        jobs = []
        for gpus, epochs in ((1, 3), (2, 1)):
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            jobs.append([start(["ddp_spawn.py", "-n", "2", "-g", str(gpus), "-nr", str(nr), "--epochs", str(epochs),
                                "--resume", "--metrics", self.path(f"{gpus}-{nr}.jsonl"), "--checkpoint",
                                self.path(f"{gpus}-{nr}.pt")], **where) for nr in (1, 0)])
        for (last, first), ranks, epochs in zip(jobs, ([("0", "2", "0"), ("1", "2", "0")], [
                ("0", "4", "0"), ("1", "4", "1"), ("2", "4", "0"), ("3", "4", "1")]), ("3/3", "1/1")):
            code, out, err = finish(first)
            self.assertEqual(code, 0, err)
            self.assertEqual([found[:3] for found in PROCESS.findall(out)], ranks)
            self.assertEqual(re.findall("^epoch (./.)", out, re.M), [epochs])
            self.assertEqual(finish(last), (0, "", ""))
        self.assertEqual(sorted(os.listdir(self.folder)), ["1-0.jsonl", "1-0.pt", "2-0.jsonl", "2-0.pt"])


class PortsTest(unittest.TestCase):
    def test_three_runs_at_once(self):
        """Case 3."""
        for command in AT_ONCE:
            result = trained(*command)
            self.assertEqual(result.err, "")
            self.assertEqual([found[:2] for found in PROCESS.findall(result.out)], [("0", "2"), ("1", "2")])


class SmallDataTest(FolderTest):
    def test_short_and_blank_lines(self):
        """Case 14; a test part of one row, so that one rank has none."""
        write_subj(self.folder, b"a\n\n   \nb c\nd\n\na b c d e f\n", b"a\r\n\r\nx y\nq")
        result = Run(*launcher(2), "ddp_launch.py", "--dataset", "Subj", "--data-root", self.folder,
                     "--batch-size", "4")
        self.assertEqual(result.metrics[-1]["world_size"], 2)


class EndTest(FolderTest):
    """Case 17: "terminate called without an active exception" after the last line, in a run out of three, or of 300."""

    def test_nothing_of_the_process_group_is_left(self):
        """What aborts is a thread of gloo that drops a tensor while the interpreter ends. It has three."""
        count = "len(os.listdir('/proc/self/task'))"
        before = "    runtime.drop_references()", f"    before = {count}\n    runtime.drop_references()"
        left = "        dist.destroy_process_group()\n"
        after = left, f"{left}    print(before - {count}, 'threads ended')\n"
        by_chance = "import gc\n", "import gc\ngc.disable()\n"  # the collector could come by itself
        made = "    state = runtime.TrainState("
        cycle = made, f"    model.cycle = [model]\n{made}"  # as a user's model can be
        project(self.folder, ("runtime.py", *by_chance), *[(name, *edit) for name in ("ddp_spawn.py", "ddp_launch.py")
                                                          for edit in (before, after, cycle)])
        for command in (["ddp_spawn.py", "--accumulation_steps", "2"], [*launcher(1), "ddp_launch.py"]):
            with self.subTest(command=command):
                code, out, err = run(*command, "--epochs", "1", cwd=self.folder, OMP_NUM_THREADS="1")
                self.assertEqual((code, re.findall(".*threads ended", out)), (0, ["3 threads ended"]), out + err)

    @unittest.skipUnless("LONG_TESTS" in os.environ, "takes an hour: LONG_TESTS=1 runs it")
    def test_200_runs_of_each_end_with_exit_code_0(self):
        for i in range(200):
            more = ["--accumulation_steps", "2", "--optimizer", "sgd"] if i % 2 else ["--batch_size", "23"]
            for command in (["ddp_spawn.py", "-g", "3"], [*launcher(3), "ddp_launch.py"]):
                code, _, err = run(*command, "--epochs", "1", *more)
                self.assertEqual(code, 0, f"run {i} of {command}: {err}")


class RecipeTest(unittest.TestCase):
    def test_the_recipe_is_numbered_and_the_same(self):
        recipes = []
        for script in ("ddp_spawn.py", "ddp_launch.py"):
            with open(os.path.join(ROOT, script)) as file:
                recipes.append(re.findall(r"# (DDP \d): ", file.read()))
        self.assertEqual(recipes, 2 * [[f"DDP {i}" for i in range(1, 10)]])

    def test_the_two_scripts_train_with_the_same_lines(self):
        train = [inspect.getsource(function) for module in (ddp_spawn, ddp_launch)
                 for function in (module.train, module.train_one_epoch, module.leave)]
        self.assertEqual(train[:3], train[3:])


class ProgressTest(unittest.TestCase):
    def test_a_terminal_shows_a_line_that_is_updated_in_place(self):
        master, terminal = os.openpty()
        process = subprocess.Popen([sys.executable, "dp_example.py", "--epochs", "1", "--batch_size", "1"], cwd=ROOT,
                                   stdout=terminal, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        os.close(terminal)
        out = b""
        with contextlib.suppress(OSError):  # a terminal that nobody has open any more ends like this
            while chunk := os.read(master, 4096):
                out += chunk
        self.assertEqual((process.wait(60), process.stderr.read()), (0, b""))
        process.stderr.close()
        os.close(master)
        self.assertRegex(out, rb"\repoch 1, batch \d+/4000, loss \d+\.\d+ ")
        self.assertIn(b"\r\x1b[Kepoch 1/1: train loss", out)
