"""Failures during a run: a rank fails, a signal arrives, a peer is missing or silent, the disk is full.

Unless a test sets it, the time limit is the default of 600 s: a run that ends sooner ends for the right reason.
"""
import os
import re
import signal
import socket

import torch

from tests.helpers import FolderTest, finish, free_port, launcher, project, run, start, wait_until

STARTED_BY = {"spawn": ["ddp_spawn.py", "-g", "2"], "torchrun": [*launcher(2), "ddp_launch.py"]}
LONG, SHORT = "LONG_TESTS" in os.environ, (("raise", "torchrun"), ("kill", "spawn"))
STEP = "    for i, batch in enumerate(loader):\n"  # in runtime.batches


def gone(pid):
    """Whether a process has ended, even if nobody has waited for it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


class RunningTest(FolderTest):
    def start(self, name, *command):
        """Start a long run; return it, and the file with its output."""
        out = self.path(name + ".out")
        with open(out, "w") as file:
            process = start([*command, "--epochs", "100000", "--checkpoint", self.path(name + ".pt")], stdout=file)
        self.addCleanup(process.stderr.close)
        return process, out

    def pids(self, process, out):
        """The ranks' processes, once the second epoch is done."""
        def ranks():
            with open(out) as file:
                text = file.read()
            return "epoch 2/" in text and [int(pid) for pid in re.findall(r", pid (\d+)$", text, re.M)]
        return wait_until(ranks, f"{process.args} has trained two epochs")


class FailingRankTest(FolderTest):
    def test_the_failing_rank_is_named_at_the_end_and_all_others_end_too(self):
        """The others fail too, in the next collective. Their errors are not the cause, and must not come last."""
        faults = {"raise": 'raise KeyError("in rank", rank)', "exit": "os._exit(3)", "kill": "os.kill(os.getpid(), 9)"}
        for fault, line in faults.items():
            os.mkdir(self.path(fault))
            line = f"        if rank == 1 and state.epoch == 1: {line}\n"
            project(self.path(fault), ("runtime.py", STEP, STEP + line))
        for fault, name in [(fault, name) for fault in faults for name in STARTED_BY if LONG or (fault, name) in SHORT]:
            with self.subTest(fault=fault, started_by=name):
                code, out, err = run(*STARTED_BY[name], "--epochs", "9", cwd=self.path(fault))
                self.assertEqual((code, "epoch 1/9" in out, "epoch 2/9" in out), (1, True, False), err)
                if name == "spawn":
                    last = err[err.index(f"ddp_spawn.py: error: rank 1 of 2 on host {socket.gethostname()} failed: "):]
                else:
                    last = err[err.index("Root Cause (first observed failure):"):]
                    self.assertRegex(last, r"host +: \S+\n +rank +: 1 \(local_rank: 1\)")
                expected = {"raise": "train_one_epoch\n.*KeyError: ('in rank', 1)", "exit": "exit ?code.*3",
                            "kill": "SIGKILL"}[fault]
                self.assertRegex(last, "(?s)" + expected.replace("('in rank', 1)", re.escape("('in rank', 1)")))
                self.assertNotIn("gloo", err)

    def test_a_rank_that_fails_alone_does_not_wait_in_the_end_of_nccl(self):
        """There, destroy_process_group waits for the other ranks, which wait for this one. Here, gloo is made to."""
        left, time_out = "        dist.destroy_process_group()\n", "        __import__('time').sleep(600)\n"
        project(self.folder, ("runtime.py", STEP, f"{STEP}        if rank == 1: raise KeyError('in rank', rank)\n"),
                ("runtime.py", 'common.comm_device().type == "cuda"', "rank_and_world_size()[0] == 1"),
                ("ddp_spawn.py", left, time_out), ("ddp_launch.py", left, time_out))
        for name, command in STARTED_BY.items():
            with self.subTest(started_by=name):
                code, _, err = run(*command, cwd=self.folder, timeout=60)
                self.assertEqual((code, "rank 1 of 2 on host" in err or "Root Cause" in err), (1, True), err)
                self.assertIn("KeyError: ('in rank', 1)", err)


class SignalTest(RunningTest):
    def test_one_signal_ends_all_processes(self):
        """Ctrl-C in a terminal reaches all processes of a group. SIGTERM and SIGKILL reach only the one started."""
        numbers = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
        all_of_them = [(name, number) for number in numbers for name in STARTED_BY]
        short = [("spawn", signal.SIGINT), ("spawn", signal.SIGTERM), ("torchrun", signal.SIGKILL)]
        runs = [(name, *self.start(f"{name}-{number}", *STARTED_BY[name]), number)
                for name, number in (all_of_them if LONG else short)]
        for started in runs:
            with self.subTest(started_by=started[0], signal=started[-1]):
                self.check(*started)

    def check(self, name, process, out, number):
        pids = self.pids(process, out)
        self.assertEqual(len(pids), 2)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        wait_until(lambda: process.poll() is not None and all(map(gone, pids)), f"{name} has ended", 15)
        self.assertNotEqual(process.returncode, 0)
        err = process.stderr.read()
        # torchrun's agent has a traceback of its own.
        self.assertLessEqual(err.count("Traceback"), 1 if name == "torchrun" else 0, err)
        self.assertGreaterEqual(torch.load(out[:-4] + ".pt", weights_only=True)["epoch"], 1)


class TimeLimitTest(RunningTest):
    waiting = []

    def by_hand(self, rank, port, *options, **more):
        """One rank of two, without a launcher that would end it."""
        return start(["ddp_launch.py", *options], RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1",
                     MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **more)

    def setUp(self):
        super().setUp()
        if not self.waiting:  # long before they are looked at
            for number in (0, 1):
                port = free_port()
                command = ["ddp_spawn.py", "-n", "2", "-g", str(2 - number), "-nr", str(number), "--timeout", "7",
                           "--master_addr", "127.0.0.1", "--master_port", port]
                self.waiting.append((number, port, 4 - 2 * number, start(command)))
                port = free_port()
                self.waiting.append((number, port, 2, self.by_hand(number, port, "--timeout", "7")))

    def test_a_peer_that_never_comes(self):
        """Node 0 and node 1 of two under spawn, rank 0 and rank 1 of two by hand: each alone, waiting for the other."""
        for number, port, world_size, process in self.waiting:
            with self.subTest(command=process.args, number=number):
                code, out, err = finish(process, 60)
                self.assertEqual((code, out), (1, ""), err)
                ranks = range(2 * number, 2 * number + 2) if world_size == 4 else [number]
                missing = f"rank 0 of {world_size}" if number else {4: "ranks 2, 3 of 4", 2: "rank 1 of 2"}[world_size]
                for rank in ranks:
                    where = f"rank {rank} of {world_size} at 127.0.0.1:{port} "
                    self.assertEqual(err.count(f"{where}waits for {missing}, 7 s at most (--timeout)"), 1, err)
                self.assertRegex(err, f"rank [{ranks[0]}-{ranks[-1]}] of {world_size} at 127.0.0.1:{port} waited in "
                                 f"vain for {missing}" r", 7 s at most \(--timeout\): start all ranks")

    def test_a_peer_that_falls_silent(self):
        """It is stopped, as if its machine were unplugged. The other rank ends, and so does everything on that node."""
        port, pairs = free_port(), []
        nodes = [self.start(f"node{nr}", "ddp_spawn.py", "-n", "2", "-nr", str(nr), "--master_addr", "127.0.0.1",
                            "--master_port", port, "--timeout", "4") for nr in (0, 1)]
        pairs.append((nodes[0][1], [process for process, _ in nodes]))
        out, port = self.path("by-hand.out"), free_port()
        with open(out, "w") as file:
            pairs.append((out, [self.by_hand(rank, port, "--timeout", "4", "--epochs", "100000", stdout=file)
                                for rank in (0, 1)]))
        stopped = [self.pids(process, out) for out, (process, _) in pairs]
        for pids in stopped:
            os.kill(pids[1], signal.SIGSTOP)
        for (_, (process, silent)), pids in zip(pairs, stopped):
            with self.subTest(command=process.args):
                wait_until(lambda: process.poll() is not None and gone(pids[0]), "rank 0 has ended", 15)
                self.assertEqual(process.returncode, 1)
                self.assertRegex(process.stderr.read(), "(?s)Traceback.*Timed out waiting 4000ms")
                for pid in (pids[1], silent.pid):
                    os.kill(pid, signal.SIGKILL)
                silent.wait(10)
                silent.stderr.close()
                process.stderr.close()
