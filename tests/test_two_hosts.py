"""Two network hosts with one or two processes each: their results, who writes, and how runs end when a host fails.

TWO_HOSTS names a script that makes the hosts on this machine (up, down), starts a command there (exec), and takes one
away: kill, poweroff; cut and mute for the link between them, and mend. Without it nothing here is tested.
"""
import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import torch

from tests.helpers import ROOT, FolderTest, Run, finish, free_port, project, start, wait_until
from tests.test_failures import STEP, gone

RIG = os.environ.get("TWO_HOSTS", "")
HOSTS, ADDRESS = ("hosta", "hostb"), "10.99.0.1"  # of hosta
SPAWN, STATIC, C10D = "spawn", "torchrun, static", "torchrun, c10d"
LONG = ["--epochs", "100000", "--timeout", "5"]


def command(started_by, node_rank, processes, address, port):
    """What a user types on one of the hosts."""
    if started_by == SPAWN:
        return ["ddp_spawn.py", "-n", "2", "-g", f"{processes}", "-nr", f"{node_rank}", "--master_addr", address,
                "--master_port", port]
    meeting = {STATIC: [f"--node_rank={node_rank}", f"--master_addr={address}", f"--master_port={port}"],
               C10D: ["--rdzv_backend=c10d", f"--rdzv_endpoint={address}:{port}", "--rdzv_id=test"]}[started_by]
    return ["-m", "torch.distributed.run", "--nnodes=2", f"--nproc_per_node={processes}", *meeting, "ddp_launch.py"]


@functools.lru_cache(maxsize=None)
def on_one_host(processes):
    """The weights of a run with the default options; a thread for each process, as torchrun has it."""
    return Run("ddp_spawn.py", "-g", str(processes), OMP_NUM_THREADS="1").weights


@unittest.skipUnless(RIG, "TWO_HOSTS does not name a script that makes two network hosts")
class TwoHostsTest(FolderTest):
    own_name = "veth"  # what a host's name resolves to on that host: its address

    @classmethod
    def setUpClass(cls):
        cls.variables = {"TWO_HOSTS_DIR": tempfile.mkdtemp(), "TWO_HOSTS_RESOLVE": cls.own_name}
        atexit.register(cls.down)  # after Ctrl-C, nobody calls the other
        cls.addClassCleanup(cls.down)
        cls.rig("up")

    @classmethod
    def rig(cls, *arguments):
        done = subprocess.run(["bash", RIG, *arguments], env={**os.environ, **cls.variables}, text=True, timeout=60,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, f"{arguments}: {done.stdout}"

    @classmethod
    def down(cls):
        cls.rig("down")
        shutil.rmtree(cls.variables["TWO_HOSTS_DIR"], ignore_errors=True)

    def setUp(self):
        super().setUp()
        self.started = []
        self.addCleanup(self.end)
        for host in HOSTS:
            os.mkdir(self.path(host))

    def end(self):
        for host in HOSTS:
            self.rig("kill", host)
        self.rig("mend")
        for process in self.started:
            process.wait(10)
            process.stderr.close()

    def start(self, started_by, *options, processes=1, address=ADDRESS, cwd=ROOT, second=()):
        """Start a run on both hosts, each with files of its own; `second` are options of the second host alone."""
        port, pair = free_port(), []
        for node_rank, host in enumerate(HOSTS):
            files = [self.path(host, started_by + end) for end in (".pt", ".jsonl", ".out")]
            with open(files[2], "a") as out:
                pair.append(start(["bash", RIG, "exec", host, sys.executable,
                                   *command(started_by, node_rank, processes, address, port),
                                   "--checkpoint", files[0], "--metrics", files[1], *options, *second * node_rank],
                                  cwd=cwd, stdout=out, OMP_NUM_THREADS="1", **self.variables))
        self.started += pair
        return pair

    def printed(self, started_by, host="hosta"):
        with open(self.path(host, started_by + ".out")) as file:
            return file.read()

    def pids(self, started_by):
        """A process on each host, once an epoch is done."""
        wait_until(lambda: "epoch 1/" in self.printed(started_by), f"{started_by} has trained an epoch")
        return [int(pid) for pid in re.findall(r", pid (\d+)$", self.printed(started_by), re.M)]

    def check_done(self, started_by, pair, expected):
        """The run is done, has these weights, and has written only on the first host."""
        for process in pair:
            code, _, err = finish(process)
            self.assertEqual(code, 0, err)
        self.assertIn("local rank 0, device cpu", re.findall("host hostb, (.*), pid", self.printed(started_by)))
        weights = torch.load(self.path("hosta", started_by + ".pt"), weights_only=True)["model"]
        self.assertEqual([key for key in expected if not torch.equal(weights[key], expected[key])], [])
        files = {host: [name for name in sorted(os.listdir(self.path(host))) if name.startswith(started_by)
                        and os.path.getsize(self.path(host, name))] for host in HOSTS}
        self.assertEqual(files, {"hosta": [started_by + end for end in (".jsonl", ".out", ".pt")], "hostb": []})


class IPv6Test(TwoHostsTest):
    """Between hosts without an IPv4 address, whose own names resolve to 127.0.1.1."""
    own_name = "loopback"

    def test_the_bits_of_one_host(self):
        for number, host in enumerate(HOSTS, 1):
            self.rig("exec", host, "sh", "-c", f"ip -4 addr flush dev eth0 && "
                     f"ip -6 addr add fd00:99::{number}/64 dev eth0 nodad")
        pairs = [(started_by, self.start(started_by, "--timeout", "60", address=address))
                 for started_by, address in ((SPAWN, "[fd00:99::1]"), (STATIC, "fd00:99::1"))]
        for started_by, pair in pairs:
            with self.subTest(started_by=started_by):
                self.check_done(started_by, pair, on_one_host(2))


class ResultTest(TwoHostsTest):
    """Between hosts whose own names resolve to 127.0.1.1, as Debian's installer sets it. Others cannot reach it."""
    own_name = "loopback"

    def test_the_bits_of_one_host_and_files_on_the_first_host_alone(self):
        expected = on_one_host(4)
        pairs = [(started_by, self.start(started_by, "--timeout", "60", processes=2, address=address))
                 for started_by, address in ((SPAWN, ADDRESS), (STATIC, ADDRESS), (C10D, "hosta"))]
        for started_by, pair in pairs:
            with self.subTest(started_by=started_by):
                self.check_done(started_by, pair, expected)


    def test_hosts_that_do_not_agree_do_not_start(self):
        """The line names the difference, once on each host, and nothing is written."""
        for second, difference in ((("--learning_rate", "0.1"), "--learning_rate 0.1, rank 0 has 0.005"),
                                   (("--resume",), "--resume True, rank 0 has False")):
            for process in self.start(SPAWN, processes=2, second=second):
                code, _, err = finish(process)
                self.assertEqual((code, err.count("error: "), "Traceback" in err), (2, 1, False), err)
                self.assertRegex(err, rf"ddp_spawn.py: error: rank [23] on hostb has {difference}: ")
        written = [name for host in HOSTS for name in os.listdir(self.path(host)) if not name.endswith(".out")]
        self.assertEqual((written, self.printed(SPAWN)), ([], ""))


class LostHostTest(TwoHostsTest):
    def train(self, seconds, when, *started_by, options=()):
        """Start runs that wait in each step, so that they last long and leave the cores to others, if `when` holds."""
        project(self.folder, ("runtime.py", STEP, f"{STEP}        if {when}: time.sleep({seconds})\n"))
        pairs = [(name, self.start(name, *options, cwd=self.folder)) for name in started_by]
        return [(name, pair, self.pids(name)) for name, pair in pairs]

    def check_end(self, runs, limit, hosts, cause):
        """Rank and launcher end within the limit and a few seconds, with an error that names the cause."""
        for name, pair, pids in runs:
            for i in hosts:
                with self.subTest(started_by=name, host=HOSTS[i]):
                    wait_until(lambda: gone(pids[i]) and pair[i].poll() is not None, "it has ended", limit + 10)
                    self.assertEqual(pair[i].returncode, 1)
                    self.assertRegex(finish(pair[i])[2], cause)

    def test_a_killed_host_ends_the_other_and_a_resume_has_the_bits_of_a_run_that_was_not_killed(self):
        runs = self.train(99, "rank == 1 and state.epoch == 1", SPAWN, STATIC)
        self.rig("kill", "hostb")
        self.check_end(runs, 5, [0], "Connection (closed|reset) by peer")
        self.check_done(SPAWN, self.start(SPAWN, "--resume", "--timeout", "30"), on_one_host(2))
        self.assertIn("spawn.pt, after epoch 1\n", self.printed(SPAWN))

    def test_a_host_without_power(self):
        runs = self.train(0.03, "True", STATIC, options=LONG)
        self.rig("poweroff", "hosta")
        self.check_end(runs, 5, [1], "Timed out waiting 5000ms")

    def test_a_cut_link(self):
        runs = self.train(0.03, "True", SPAWN, STATIC, options=LONG)
        self.rig("cut")
        self.check_end(runs, 5, [0, 1], "Timed out waiting 5000ms")

    def test_a_short_outage_is_survived_and_lost_packets_are_not(self):
        runs = self.train(0.03, "True", SPAWN, options=[*LONG, "--timeout", "10"])
        self.rig("cut")
        time.sleep(2)
        self.rig("mend")
        epochs = self.printed(SPAWN).count("epoch")
        wait_until(lambda: self.printed(SPAWN).count("epoch") > epochs + 1, "it goes on", 10)
        self.rig("mute")
        self.check_end(runs, 10, [0, 1], "Timed out waiting 10000ms")
