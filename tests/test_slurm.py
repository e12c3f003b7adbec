"""Under a real Slurm: the job scripts, commands in a job without srun, and jobs that fail, end or start again."""
import json
import os
import re
import shutil
import sys
import time
import unittest

from tests.helpers import ROOT, FolderTest, Run, launcher, project, run, trained, wait_until
from tests.test_failures import STEP
from tests.test_patterns import PROCESS

import torch

SCRIPTS = ("srun.sh", "torchrun.sh")
PER_NODE = "SLURM_GPUS_ON_NODE:-2"  # the line of torchrun.sh that is to be edited
SLOW = ["--batch_size", "4", "--epochs", "4"]  # seconds for each epoch
LONG = ["--epochs", "120"]  # longer than until the signal in a job with a limit of three minutes
LOAD = "data = common.load_data(args)\n"
FAILS = ("ddp_launch.py", LOAD, f"{LOAD}    if rank == 1:\n        raise OSError('no disk')\n")
long_test = unittest.skipUnless(os.environ.get("LONG_TESTS"), "takes minutes: LONG_TESTS=1")


@unittest.skipUnless(shutil.which("sbatch"), "needs Slurm: there is no sbatch on PATH")
@unittest.skipIf(shutil.which("sbatch") and run("sinfo", timeout=30)[0], "needs Slurm: sinfo reaches no cluster")
class SlurmTest(FolderTest):
    """All nodes must see the test's folder: set TMPDIR to one that they share."""

    def setUp(self):
        super().setUp()
        os.mkdir(self.path("bin"))  # jobs must find the Python that runs the tests
        for name, more in (("python", ""), ("torchrun", " -m torch.distributed.run")):
            with open(self.path("bin", name), "w") as file:
                file.write(f'#!/bin/sh\nexec "{sys.executable}" -W ignore{more} "$@"\n')
            os.chmod(file.name, 0o755)
        self.environment = {"PATH": f"{self.path('bin')}:{os.environ['PATH']}"}

    def slurm(self, *command):
        code, out, err = run(*command, timeout=60, **self.environment)
        self.assertEqual(code, 0, f"{command}: {out}{err}")
        return out

    def sbatch(self, *command):
        """The number of a job that writes NUMBER.out."""
        job = self.slurm("sbatch", "--parsable", f"--output={self.path('%j.out')}", *command).strip().split(";")[0]
        self.addCleanup(self.end, job)
        return job

    def submit(self, script, nodes, *options, per_node=1, threads=1, settings=()):
        """A job of one of the two scripts, which writes SCRIPT.pt, with so many processes on each node."""
        with open(os.path.join(ROOT, "slurm", script)) as file:
            content = file.read()
        self.assertEqual(content.count(PER_NODE), script == "torchrun.sh")
        with open(self.path(script), "w") as file:
            file.write(content.replace(PER_NODE, f"{PER_NODE[:-1]}{per_node}"))
        tasks, cores = (1, per_node * threads) if script == "torchrun.sh" else (per_node, threads)
        return self.sbatch(f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cores}", *settings,
                           self.path(script), "--checkpoint", self.path(f"{script}.pt"), *options)

    def end(self, job):
        run("scancel", job)
        wait_until(lambda: time.sleep(0.3) or not run("squeue", "-h", "-j", job)[1], "the end of a job")

    def show(self, job):
        return dict(re.findall(r"(\w+)=(\S*)", self.slurm("scontrol", "show", "job", job)))

    def wait(self, job, *states, timeout=150):
        """What Slurm says of the job when it is in one of these states."""
        deadline = time.monotonic() + timeout
        while (show := self.show(job))["JobState"] not in states:
            self.assertLess(time.monotonic(), deadline, f"{show}\n{self.log(job)}")
            time.sleep(0.3)
        return show

    def log(self, job):
        with open(self.path(f"{job}.out"), "a+") as file:  # it may not be there yet
            file.seek(0)
            return file.read()

    def check_completed(self, job):
        show = self.wait(job, "COMPLETED", "FAILED", "TIMEOUT")
        self.assertEqual((show["JobState"], show["ExitCode"]), ("COMPLETED", "0:0"), self.log(job))

    def check_ranks(self, job, nodes, per_node):
        ranks = [found[:3] for found in PROCESS.findall(self.log(job))]
        size = nodes * per_node
        self.assertEqual(ranks, [(str(rank), str(size), str(rank % per_node)) for rank in range(size)])

    def check_weights(self, script, other):
        weights = torch.load(self.path(f"{script}.pt"), weights_only=True)["model"]
        self.assertEqual(list(weights), list(other.weights))
        for key in weights:
            self.assertTrue(torch.equal(weights[key], other.weights[key]), key)


class JobTest(SlurmTest):
    def test_both_scripts_end_with_the_bits_of_torchrun(self):
        expected = trained(*launcher(2), "ddp_launch.py")
        jobs = {script: self.submit(script, 1, per_node=2) for script in SCRIPTS}
        for script, job in jobs.items():
            with self.subTest(script):
                self.check_completed(job)
                self.check_ranks(job, 1, 2)
                self.check_weights(script, expected)

    def test_two_processes_on_each_of_two_nodes_share_the_cores(self):
        for job in [self.submit(script, 2, "--epochs", "0", per_node=2, threads=2) for script in SCRIPTS]:
            self.check_completed(job)
            self.check_ranks(job, 2, 2)
            self.assertIn(f", {min(2, os.cpu_count())} threads per process", self.log(job))  # no more than it has


class AloneTest(SlurmTest):
    """A process in a job that is not one task of several trains alone, whatever the job has reserved."""

    def world_size(self, name):
        with open(self.path(name)) as file:
            return json.loads(file.read().splitlines()[-1])["world_size"]

    def test_typed_in_an_allocation(self):
        out = self.slurm("salloc", "--nodes=2", "--ntasks-per-node=2", "python", "ddp_launch.py", "--epochs", "1",
                         "--metrics", self.path("metrics"))
        self.assertEqual((self.world_size("metrics"), len(PROCESS.findall(out))), (1, 1))
        self.assertIn("backend none", out)

    def test_in_a_batch_script(self):
        """Without srun; as a step of one task; and the notes' command, whose launcher starts two on its node."""
        commands = ("python ddp_launch.py", "srun --ntasks=1 python ddp_launch.py",
                    "env CUDA_VISIBLE_DEVICES=0,1 python -m torch.distributed.launch --nproc_per_node=2 ddp_launch.py "
                    "--batch_size 128 --multi_gpu")
        with open(self.path("job.sh"), "w") as file:
            file.write("#!/bin/bash\nset -e\n")
            file.writelines(f"{command} --epochs 1 --metrics {self.path(str(i))}\n"
                            for i, command in enumerate(commands))
        self.check_completed(self.sbatch("--nodes=2", "--ntasks-per-node=2", self.path("job.sh")))
        self.assertEqual([self.world_size(str(i)) for i in range(3)], [1, 1, 2])


class FailureTest(SlurmTest):
    def test_a_wrong_option_is_a_failed_job_and_one_line(self):
        for job in [self.submit(script, 1, "--epochs", "many", per_node=2) for script in SCRIPTS]:
            self.wait(job, "FAILED")
            # The second process would say so after five seconds, and is ended before.
            self.assertEqual(self.log(job).count("ddp_launch.py: error: argument --epochs: 'many'"), 1, self.log(job))

    def test_a_failed_rank_ends_the_others_which_wait_for_it(self):
        """For ten minutes, as --timeout says."""
        project(self.folder, FAILS)
        for job in [self.submit(script, 2, settings=[f"--chdir={self.folder}"]) for script in SCRIPTS]:
            self.wait(job, "FAILED")
            self.assertIn("OSError: no disk", self.log(job))


class EndTest(SlurmTest):
    def start(self, *options, settings=(), commands=None):
        """{script: job}, on two nodes. When it has saved its first epoch, a job gets its {script: command}."""
        jobs = {script: self.submit(script, 2, *SLOW, *options, settings=settings) for script in SCRIPTS}
        waiting = list(SCRIPTS)
        while waiting:
            saved = wait_until(lambda: [name for name in waiting if os.path.exists(self.path(f"{name}.pt"))], "a file")
            script = saved[0]
            waiting.remove(script)
            if commands:  # not when both have, because the first could be done by then
                self.slurm(*commands[script], jobs[script])
        return jobs

    def processes(self):
        """Those on two nodes that have a checkpoint of this test in their command."""
        pattern = f"[{self.folder[0]}]{self.folder[1:]}/.*\\.pt"  # which this is not itself
        return self.slurm("srun", "--nodes=2", "--ntasks-per-node=1", "sh", "-c",
                          f"grep -l '{pattern}' /proc/[0-9]*/cmdline 2> /dev/null; true").split()

    def test_scancel_ends_every_process_and_leaves_a_whole_checkpoint(self):
        jobs = self.start("--epochs", "99")
        self.assertTrue(self.processes())
        kill_wait = int(re.search(r"KillWait\s*= (\d+)", self.slurm("scontrol", "show", "config"))[1])
        started = time.monotonic()
        self.slurm("scancel", *jobs.values())
        wait_until(lambda: not self.processes(), "the end of all processes")
        self.assertLess(time.monotonic() - started, kill_wait)  # when Slurm kills what SIGTERM did not reach
        for script, job in jobs.items():
            self.wait(job, "CANCELLED")
            self.assertGreater(torch.load(self.path(f"{script}.pt"), weights_only=True)["epoch"], 0)
        # SIGTERM has reached the launcher, and the job's shell was there for its last words.
        self.assertIn("got signal: 15", self.log(jobs["torchrun.sh"]))
        self.assertIn("Terminated", self.log(jobs["srun.sh"]))
        left = {name for name in os.listdir(self.folder) if ".pt" in name}
        self.assertLessEqual(left, {f"{script}.pt{tmp}" for script in SCRIPTS for tmp in ("", ".tmp")})

    def check_goes_on(self, jobs, options=()):
        """Requeued jobs end with the bits of an uninterrupted one."""
        for job in jobs.values():
            self.wait(job, "PENDING")
        self.start_soon(*jobs.values())
        expected = Run(*launcher(2), "ddp_launch.py", *SLOW, *options, timeout=600)
        for script, job in jobs.items():
            with self.subTest(script):
                while self.wait(job, "PENDING", "COMPLETED", "FAILED", "TIMEOUT", timeout=600)["JobState"] == "PENDING":
                    self.start_soon(job)
                self.check_completed(job)
                starts, log = 1 + int(self.show(job)["Restarts"]), self.log(job)  # which has all starts
                self.assertGreater(starts, 1)
                self.assertEqual(log.count("rank 0 of 2: host"), starts, log)
                self.assertEqual(log.count("going on from"), starts - 1, log)
                self.check_weights(script, expected)

    def start_soon(self, *jobs):
        """Slurm itself waits for two minutes; without a pause it takes what comes from the last start for the new."""
        time.sleep(5)
        for job in jobs:
            run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def test_a_requeued_job_on_two_nodes_goes_on_and_ends_with_the_bits_of_torchrun(self):
        """By scontrol, and by the script itself, which gets this signal before its time limit."""
        self.check_goes_on(self.start(commands={"srun.sh": ["scancel", "--batch", "--signal=USR1"],
                                                "torchrun.sh": ["scontrol", "requeue"]}))

    @long_test
    def test_a_job_whose_time_limit_nears_goes_on(self):
        """Slurm looks at limits every 30 s, and sends the signal 60 to 120 s before this one."""
        self.check_goes_on(self.start(*LONG, settings=["--time=3", "--signal=B:USR1@60"]), LONG)

    @long_test
    def test_an_epoch_that_is_longer_than_the_time_limit(self):
        """Its 500 steps take over three minutes; the limit is two, and the signal comes up to 90 s earlier."""
        project(self.folder, ("runtime.py", STEP, f"{STEP}        time.sleep(0.4)\n"))
        options = ["--epochs", "1", "--checkpoint_steps", "20"]
        settings = ["--time=2", "--signal=B:USR1@30", f"--chdir={self.folder}"]
        self.check_goes_on(self.start(*options, settings=settings), options)

    @long_test
    def test_a_preempted_job_goes_on(self):
        if not run("sinfo", "--noheader", "--partition=low")[1]:
            self.skipTest("Slurm has no partition `low`, whose jobs those of the default partition preempt")
        jobs = self.start(settings=["--partition=low"])
        self.slurm("srun", "--nodes=2", "--exclusive", "true")
        self.check_goes_on(jobs)

    @long_test
    def test_a_job_whose_node_is_down_goes_on(self):
        jobs = self.start()
        node = self.slurm("scontrol", "show", "hostnames", self.show(jobs["srun.sh"])["NodeList"]).split()[1]
        self.slurm("scontrol", "update", f"NodeName={node}", "State=down", "Reason=test")
        for job in jobs.values():
            self.wait(job, "PENDING")
        run("scontrol", "update", f"NodeName={node}", "State=resume")  # refused if Slurm has done so by itself
        self.check_goes_on(jobs)
