"""What starts the processes: from whose variables a rank is read, and what is refused; mpirun, pods, containers."""
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import unittest
from argparse import Namespace
from unittest import mock

import common
import ddp_spawn
import dp_example
import runtime
import torch

from tests.helpers import FolderTest, call, finish, free_port, launcher, run, start, trained, wait_until
from tests.test_failures import gone
from tests.test_patterns import PROCESS

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "3", "MPI_LOCALRANKID": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "2", "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3(x2)", "SLURM_STEP_NODELIST": "n[1-2]"}
WHERE = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
MPIRUN = {"Open MPI": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"], "MPICH": ["mpirun.mpich"]}


def launched(*variables, local_rank=None):
    """(ranks, environment) of a process with these variables."""
    environment = {key: value for more in variables for key, value in more.items()}
    with mock.patch.dict(os.environ, environment, clear=True):
        return runtime.launched_ranks(Namespace(local_rank=local_rank)), dict(os.environ)


class VariablesTest(unittest.TestCase):
    def test_the_ranks_of_each_launcher(self):
        for variables in TORCHRUN, OPEN_MPI, MPICH:
            self.assertEqual(launched(variables, WHERE)[0], (3, 1, 4, 2))
        ranks, environment = launched(SRUN)
        self.assertEqual((ranks, environment["MASTER_ADDR"]), ((5, 2, 6, 3), "n1"))
        self.assertEqual(launched()[0], ())

    def test_their_order(self):
        """torchrun in an mpirun or a step; mpirun in a Slurm job; srun --mpi=pmi2, which sets PMI_RANK and PMI_SIZE."""
        self.assertEqual(launched(TORCHRUN, OPEN_MPI, SRUN, {"PMI_RANK": "9"}, WHERE)[0], (3, 1, 4, 2))
        wrong_step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
        for variables in OPEN_MPI, MPICH:
            self.assertEqual(launched(variables, {**SRUN, **wrong_step}, WHERE)[0], (3, 1, 4, 2))
        self.assertEqual(launched(SRUN, {"PMI_RANK": "5", "PMI_SIZE": "6"})[0], (5, 2, 6, 3))

    def test_one_process_per_pod_and_local_ranks_without_their_number(self):
        """Cases 32 and 22."""
        self.assertEqual(launched({"RANK": "2", "WORLD_SIZE": "4"}, WHERE)[0][:3], (2, 0, 4))
        self.assertEqual(launched({"RANK": "2", "WORLD_SIZE": "4"}, WHERE, local_rank=1)[0][:3], (2, 1, 4))
        self.assertEqual(launched({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, WHERE)[0][:3], (2, 1, 4))

    def test_the_names_in_the_store_are_of_one_step_or_mpirun_or_attempt(self):
        """Torchrun keeps its store when it restarts the processes; two steps, or two mpiruns, can share a port."""
        one_node = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "2"}
        torchrun = {**TORCHRUN, "WORLD_SIZE": "2"}
        for variables, parent, other, other_parent in (
                (SRUN, 1, {"SLURM_STEP_ID": "1"}, 1), (one_node, 1, {}, 2),
                ({**torchrun, "TORCHELASTIC_RESTART_COUNT": "0"}, 1, {"TORCHELASTIC_RESTART_COUNT": "1"}, 1)):
            server, found = torch.distributed.HashStore(), []
            for more, pid in (({}, parent), ({}, parent), (other, other_parent)):
                with mock.patch.object(runtime, "make_store", return_value=server), \
                        mock.patch.object(runtime, "PARENT", pid), \
                        mock.patch.dict(os.environ, {**variables, **more}, clear=True):
                    store = runtime.launched_store((1, 1, 2, 2), "host", 1, 5)
                found.append(store.check(["name"]))
                store.set("name", "value")
            self.assertEqual(found, [False, True, False], variables)

    def test_two_steps_of_a_job_and_two_mpiruns_have_ports_and_names_of_their_own(self):
        ports = {launched({**SRUN, "SLURM_STEP_ID": step})[1]["MASTER_PORT"] for step in "012"}
        self.assertEqual(len(ports), 3)
        one_node = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_RANK": "1"}
        with mock.patch.object(runtime, "PARENT", 1234):
            ranks, environment = launched(OPEN_MPI, one_node)
        self.assertEqual((ranks, environment["MASTER_ADDR"]), ((1, 1, 2, 2), "127.0.0.1"))
        self.assertEqual(environment["MASTER_PORT"], str(10000 + 1234))

    def check_refused(self, variables, *expected, local_rank=None):
        with self.assertRaises(common.UsageError) as caught:
            launched(variables, local_rank=local_rank)
        for text in expected:
            self.assertIn(text, str(caught.exception))

    def test_one_of_several_that_cannot_tell_which_never_trains_alone(self):
        self.check_refused({"RANK": "0", **WHERE}, "WORLD_SIZE")
        self.check_refused({"WORLD_SIZE": "2", **WHERE}, "RANK")
        self.check_refused({"OMPI_COMM_WORLD_SIZE": "2", **WHERE}, "OMPI_COMM_WORLD_RANK")
        self.check_refused({"PMI_SIZE": "2", "PMI_RANK": "0", **WHERE}, "MPI_LOCALRANKID")
        self.check_refused({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID")
        self.check_refused({**TORCHRUN, "MASTER_ADDR": "host", "MASTER_PORT": "99999"}, "99999")
        self.check_refused(TORCHRUN, "MASTER_PORT")
        self.check_refused(OPEN_MPI, "several nodes", "-x MASTER_ADDR=HOST")
        self.check_refused(MPICH, "several nodes", "export them")

    def test_scripts_that_start_no_or_their_own_processes_are_started_once(self):
        for module, more in ((ddp_spawn, []), (dp_example, []), (dp_example, ["--epochs", "1"])):
            for variables in TORCHRUN, OPEN_MPI, MPICH, SRUN:
                with mock.patch("time.sleep"):  # local ranks above 0 wait for local rank 0 to be the first
                    code, out, err = call(module, *more, **variables, **WHERE)
                self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
                self.assertIn("ddp_launch.py", err)


class RealTest(FolderTest):
    @unittest.skipUnless(all(shutil.which(command[0]) for command in MPIRUN.values()),
                         "needs mpirun.openmpi and mpirun.mpich: there are none on PATH")
    def test_mpirun_gives_the_bits_of_torchrun(self):
        """Case 31. Two at once, on one node, without a variable."""
        expected = trained(*launcher(2), "ddp_launch.py").weights
        files = {name: self.path(name) for name in MPIRUN}
        started = [start([*command, "-np", "2", sys.executable, "ddp_launch.py", "--checkpoint", files[name]],
                         OMP_NUM_THREADS="1") for name, command in MPIRUN.items()]
        for name, process in zip(MPIRUN, started):
            code, out, err = finish(process)
            self.assertEqual((code, out.count("test accuracy")), (0, 1), err)
            weights = torch.load(files[name], weights_only=True)["model"]
            self.assertEqual([key for key in expected if not torch.equal(weights[key], expected[key])], [])

    def test_pods_with_an_address_in_brackets(self):
        """Two processes with RANK, WORLD_SIZE and an IPv6 address, and no local rank."""
        if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
            self.skipTest("needs IPv6")
        where = {"WORLD_SIZE": "2", "MASTER_ADDR": "[::1]", "MASTER_PORT": free_port()}
        results = [finish(pod) for pod in [start(["ddp_launch.py", "--epochs", "1"], RANK=rank, **where)
                                           for rank in "01"]]
        self.assertEqual([code for code, _, _ in results], [0, 0], results)
        self.assertEqual([found[1:3] for found in PROCESS.findall(results[0][1])], [("2", "0"), ("2", "0")])

    def test_a_store_of_one_node_listens_on_loopback_only(self):
        store = runtime.make_store("127.0.0.1", 0, 10, is_master=True)
        listening = []
        for name in ("/proc/net/tcp", "/proc/net/tcp6"):
            with open(name) as file:
                listening += [line.split()[1] for line in file if line.split()[3] == "0A"]
        self.assertEqual([address for address in listening if address.endswith(f":{store.port:04X}")],
                         [f"0100007F:{store.port:04X}"])

    def test_output_that_has_no_umlauts(self):
        folder = self.path("größer")
        os.mkdir(folder)
        torch.save(trained("ddp_launch.py").checkpoint, os.path.join(folder, "c.pt"))
        code, out, err = run("ddp_launch.py", "--checkpoint", os.path.join(folder, "c.pt"), "--resume", "--metrics",
                             os.path.join(folder, "m"), PYTHONIOENCODING="ascii")
        self.assertEqual((code, "gr\\xf6\\xdfer" in out), (0, True), err)


class SignalTest(FolderTest):
    def start(self, *command, **environment):
        with open(self.path("out"), "w") as file:
            process = start([*command, "--epochs", "100000"], stdout=file, **environment)
        self.addCleanup(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
        return process

    def pids(self, processes=2):
        def found():
            with open(self.path("out")) as file:
                text = file.read()
            return "epoch 2/" in text and [int(pid) for pid in re.findall(r", pid (\d+)$", text, re.M)]
        return wait_until(found, "two epochs")

    @unittest.skipUnless(shutil.which("unshare") and not subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode,
        "needs unshare, and root: neither is here")
    def test_process_1_of_a_container(self):
        """Case 27: the kernel ignores a signal to process 1 that has no handler."""
        for command, number in ((["ddp_spawn.py", "-g", "2"], signal.SIGINT), (["ddp_launch.py"], signal.SIGTERM)):
            with self.subTest(command=command):
                container = self.start("unshare", "--pid", "--fork", "--mount-proc", sys.executable, *command)
                self.pids()
                with open(f"/proc/{container.pid}/task/{container.pid}/children") as file:
                    first = int(file.read().split()[0])
                os.kill(first, number)
                wait_until(lambda: gone(first) and container.poll() is not None, "the end of the container", 10)
                self.assertNotEqual(container.returncode, 0)
                self.assertNotIn("Traceback", container.stderr.read())
                container.stderr.close()

    def test_a_signal_that_was_ignored_stays_ignored(self):
        process = self.start("sh", "-c", f"trap '' INT; exec '{sys.executable}' ddp_launch.py \"$@\"", "sh")
        pid, = self.pids()
        os.kill(pid, signal.SIGINT)
        time.sleep(1)
        self.assertFalse(gone(pid))
        process.kill()
        self.assertNotIn("Traceback", finish(process)[2])

    def test_ctrl_c_ends_dp_example_without_a_traceback(self):
        process = self.start("dp_example.py")
        self.pids()
        process.send_signal(signal.SIGINT)
        self.assertEqual(finish(process, 10)[::2], (-signal.SIGINT, ""))

    def test_data_loading_processes_end_with_their_parent(self):
        process = self.start("ddp_launch.py", "--num_workers", "2")
        pid, = self.pids()
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            workers = [int(child) for child in file.read().split()]
        self.assertEqual(len(workers), 4)  # two for each of the data sets that were read
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all(map(gone, workers)), "the end of the workers", 2)
        finish(process)
