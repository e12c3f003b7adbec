"""Whether everything works on the GPUs of this machine: python -m tests test_gpu says so, in under five minutes.

It takes all GPUs that torch finds; CUDA_VISIBLE_DEVICES=0,1 leaves others alone. What needs two is skipped with one,
and all is skipped without any. TEST_GPU_ON=cpu runs the same tests with two ranks on the CPU: that shows that they are
well formed, and no more. This process itself takes no GPU, as one in exclusive mode serves only one process.
"""
import concurrent.futures
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings
from unittest import mock

from tests.helpers import ROOT, FolderTest, Run, finish, free_port, launcher, options, project, run, start, wait_until
from tests.test_failures import STEP, gone

import common
import ddp_launch
import runtime
import torch
from torch import nn
from torch.distributed.run import get_args_parser

ON = os.environ.get("TEST_GPU_ON", "cuda")
ON_GPU = ON == "cuda"
RANKS = 2 if not ON_GPU else torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = ("--device", ON)
# Every training run takes steps of the same samples, 200 or somewhat less, shared out among the ranks. SGD, as Adam
# turns the rounding of a gradient near 0 into a whole step.
MICRO = max(1, 100 // max(1, RANKS))
STEPS_OF = 2 * MICRO * RANKS
TRAIN = ("--optimizer", "sgd", "--epochs", "3", "--max_grad_norm", "1", "--timeout", "90")
SPAWN = ["ddp_spawn.py", "-g", str(RANKS), *DEVICE]
TORCHRUN = [*launcher(RANKS), "ddp_launch.py", *DEVICE]
VIRTUAL = "--virtual-local-rank" if "--virtual-local-rank" in get_args_parser().format_help() else ""

# The scripts have no options for these: copies of them do it.
DETERMINISTIC = [("common.py", "import torch.distributed as dist\n",
                  "import torch.distributed as dist\ntorch.use_deterministic_algorithms(True)\n"),
                 # The last rank, in the second epoch, once all ranks have taken a step in it, and rank 0 has saved.
                 ("runtime.py", STEP, f"{STEP}        if (state.epoch, i, rank) == (1, 1, world_size - 1):\n"
                                      "            state.loss_sum.item()\n"
                                      "            exec(os.environ.get('FAULT', ''))\n")]
TELLS = [("common.py", "            outputs = self.module(*inputs)\n", "            outputs = self.module(*inputs)\n"
          "            sys.stdout.write(f'[computed in {outputs.dtype} on {outputs.device}]\\n')\n")]
SILENT = [("ddp_launch.py", "            dist.init_process_group(", "            __import__('time').sleep(99 * rank)\n"
           "            dist.init_process_group(")]
SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1",
             "NCCL_ALGO": "Ring"}  # NVLink switches sum in another order each time; newer torch sees to that itself


def facts():
    """What a process sees before it takes a GPU."""
    gpus = runtime.visible_gpus()
    taken = [i for i in range(len(gpus)) if torch._C._cuda_hasPrimaryContext(i)]
    properties = [torch.cuda.get_device_properties(i) for i in range(len(gpus))]
    print(json.dumps({"gpus": gpus, "taken": taken, "bf16": not gpus or torch.cuda.is_bf16_supported(),
                      "uuids": [str(gpu.uuid) for gpu in properties if hasattr(gpu, "uuid")],  # torch 2.4 or newer
                      "capability": min([gpu.major for gpu in properties], default=9)}))


def waits():
    """How often a second epoch waits for the GPU, in fp32 and with the scaled losses of fp16."""
    found = {}
    for precision in ("fp32", "fp16") if ON_GPU else ("fp32",):
        args = options("--max_grad_norm", "5", "--precision", precision)
        data, device = common.load_data(args)[0], torch.device(ON)
        model = common.build_model(args, data).to(device)
        if precision == "fp16":
            model = common.Autocast(model, precision)
        loader = common.make_loader(data, range(len(data)), args, device)
        state = runtime.TrainState(model, args)
        ddp_launch.train_one_epoch(model, loader, state, args)
        with warnings.catch_warnings(record=True) as caught:
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("warn")  # which warns that this is a prototype
            caught.clear()
            warnings.simplefilter("always")
            ddp_launch.train_one_epoch(model, loader, state, args)
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")
        found[precision] = [str(warning.message) for warning in caught if "called a synchroniz" in str(warning.message)]
    print(json.dumps(found))


def replicas():
    """Two copies of a model on one GPU: the threads of DataParallel compute in bf16, and return what the model does."""
    torch.manual_seed(0)
    dtypes = []
    model = nn.Linear(3, 2).to(ON)
    model.register_forward_hook(lambda module, inputs, output: dtypes.append(str(output.dtype)))
    inputs = torch.randn(6, 3, device=ON)
    module = common.Autocast(model, "bf16")
    outputs = nn.DataParallel(module, device_ids=[0, 0])(inputs)
    print(json.dumps({"dtypes": dtypes, "difference": (outputs - module(inputs)).abs().max().item()}))


def in_a_process(function):
    """What a function of this file prints, in a process of its own."""
    code, out, err = run(sys.executable, "-c", f"from tests import test_gpu; test_gpu.{function}()")
    if code:
        raise AssertionError(f"{function} ended with {code}\n{out}\n{err}")
    return json.loads(out.splitlines()[-1])


def visible(rank):
    """The GPU of a rank, as CUDA_VISIBLE_DEVICES names it."""
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(RANKS)))).split(",")[rank].strip()


def may_be_shared():
    """Whether two runs may be on a GPU at the same time."""
    try:
        modes = subprocess.run(["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ON_GPU and set(modes.split()) == {"Default"}


def cannot_compile(capability):
    """Why torch.compile does not work here, with GPUs of this compute capability."""
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
        return "torch.compile needs a C compiler here"
    if ON_GPU and (capability < 7 or not importlib.util.find_spec("triton")):
        return "torch.compile needs triton, and GPUs of compute capability 7.0"
    return "" if ON_GPU or shutil.which("g++") else "torch.compile needs a C++ compiler here"


def commands(folder, bf16, capability, **_):
    """The training runs that are compared: name, command, and what else they are started with."""
    copy = {"cwd": project(os.path.join(folder, "tells"), *TELLS)}
    cache = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1",
             "TRITON_CACHE_DIR": os.path.join(folder, "triton"), "timeout": 200}
    step = ["--batch_size", str(2 * MICRO)]
    by_hand = ["--grad_sync", "manual", "--batch_size", str(MICRO), "--accumulation_steps", "2"]
    dp = ["dp_example.py", *DEVICE, "--batch_size", str(STEPS_OF), "--precision", "bf16"]
    yield "cpu", ["ddp_launch.py", "--device", "cpu", "--batch_size", str(STEPS_OF)], {}
    yield "fp32", [*TORCHRUN, *step], {}
    yield "same bits", [*SPAWN, *step], {"cwd": project(os.path.join(folder, "same"), *DETERMINISTIC), **SAME_BITS}
    yield "by hand", [*launcher(RANKS, *filter(None, [VIRTUAL])), "ddp_launch.py", *DEVICE, *by_hand], {}
    if bf16:
        yield "bf16", [*SPAWN, *step, "--precision", "bf16"], {}
        yield "dp", dp, copy
        yield "dp on one", dp, {**copy, "CUDA_VISIBLE_DEVICES": visible(0)}
    if ON_GPU:
        yield "fp16", [*TORCHRUN, *step, "--precision", "fp16"], {}
    if not cannot_compile(capability):
        yield "compile", [*SPAWN, *step, "--compile"], cache


@unittest.skipUnless(RANKS, "needs a GPU, and torch finds none here")
class GpuTest(FolderTest):
    @classmethod
    def setUpClass(cls):
        """Without all-reduces there is no use in the rest. With them, training runs take turns, while tests run."""
        environment = mock.patch.dict(os.environ, NCCL_DEBUG=os.environ.get("NCCL_DEBUG", "WARN"))  # says why it fails
        environment.start()
        cls.addClassCleanup(environment.stop)
        cls.facts = in_a_process("facts")
        code, out, err = run(*SPAWN, "--check", "--timeout", "90", timeout=120)
        if out.count("all-reduce of ") < 3 or "wrong sums" in out:  # code 1 if the GPUs are of several kinds, too
            raise AssertionError(f"{SPAWN} --check ended with {code}\n{out}\n{err}")
        print("\n".join([f"{RANKS} ranks on {ON}", *map(" ".join, cls.facts["gpus"]), out]), flush=True)
        cls.scratch = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.scratch, ignore_errors=True)
        for name in ("tells", "same"):
            os.mkdir(os.path.join(cls.scratch, name))
        todo = {name: (command, more, concurrent.futures.Future())
                for name, command, more in commands(cls.scratch, **cls.facts)}
        cls.runs, over = {name: future for name, (_, _, future) in todo.items()}, threading.Event()

        def take_turns():
            for command, more, future in todo.values():
                try:
                    future.set_result(None if over.is_set() else Run(*command, *TRAIN, **more))
                except BaseException as error:
                    future.set_exception(error)

        thread = threading.Thread(target=take_turns, daemon=True)  # Ctrl-C does not wait for it
        thread.start()
        cls.addClassCleanup(lambda: (over.set(), thread.join()))
        if not may_be_shared():
            concurrent.futures.wait(cls.runs.values())

    def trained(self, name):
        if name not in self.runs:
            self.skipTest({"compile": cannot_compile(self.facts["capability"]), "fp16": "fp16 needs a GPU"}.get(
                name, "bf16 needs a newer GPU"))
        return self.runs[name].result()

    def devices(self, indices):
        """How the report names these GPUs."""
        return [f"cuda:{i} ({self.facts['gpus'][gpu][1]})" if ON_GPU else "cpu" for gpu, i in enumerate(indices)]

    def check(self, name, least=0.0, most=1e-3):
        """Losses and weights are those of one process on the CPU; the weights are not further apart than they may be,
        nor nearer than another precision lets them be. A gradient that is not averaged would make 0.04 of a difference,
        and a batch of 198 in place of 200 samples 0.009."""
        found, cpu = self.trained(name), self.trained("cpu")
        difference = found.difference(cpu)
        self.assertTrue(least <= difference < most, f"{name}: weights that differ by {difference} from the CPU's")
        for line, expected in list(zip(found.metrics, cpu.metrics))[-2:]:
            for key in ("train_loss", "valid_loss", "valid_accuracy", "test_loss", "test_accuracy"):
                if key in expected:
                    delta = most / 5 if "loss" in key else 0.01
                    self.assertAlmostEqual(line[key], expected[key], delta=delta, msg=f"{name}: {key}")

    def test_the_roll_call_names_each_gpu(self):
        uuids = [uuid for uuid, _ in self.facts["gpus"]]
        self.assertEqual(len(set(uuids)), RANKS if ON_GPU else 0, uuids)
        self.assertIn(self.facts["uuids"], ([], uuids))
        self.assertEqual(self.facts["taken"], [], "GPUs are taken that are only looked at: busy, in exclusive mode")
        for name in ("fp32", "same bits"):
            host = re.escape(socket.gethostname())
            found = re.findall(rf"(?m)^rank (\d+) of {RANKS}: host {host}, local rank (\d+), device (.*), pid \d+$",
                               self.trained(name).out)
            expected = enumerate(self.devices(range(RANKS)))
            self.assertEqual(found, [(str(rank), str(rank), device) for rank, device in expected])
        backend = "none" if RANKS == 1 else "nccl" if ON_GPU else "gloo"
        self.assertIn(f"backend {backend}, ", self.trained("fp32").out)

    def test_training_gives_the_figures_of_a_cpu(self):
        """Under torchrun, and under spawn with deterministic algorithms. fp16 leaves out steps until it has a scale."""
        for name, least, most in (("fp32", 0, 1e-3), ("same bits", 0, 1e-3), ("bf16", 1e-4, 1e-2),
                                  ("fp16", 1e-5, 0.15)):
            with self.subTest(name):
                self.check(name, least, most)

    def test_training_with_gradients_averaged_by_hand(self):
        self.check("by hand")

    def test_training_with_torch_compile(self):
        self.check("compile")

    def test_training_where_each_process_sees_one_gpu_as_the_first(self):
        if not VIRTUAL:
            self.skipTest("torchrun of this torch has no --virtual-local-rank")
        out = self.trained("by hand").out
        found = re.findall(rf"(?m)^rank \d+ of {RANKS}: .*, local rank 0, device (.*), pid", out)
        self.assertEqual(found, self.devices([0] * RANKS))

    def test_training_with_data_parallel(self):
        self.check("dp", 1e-4, 1e-2)
        for name, gpus in (("dp", RANKS), ("dp on one", 1)):
            found = set(re.findall(r"\[computed in (\S+) on (\S+)\]", self.trained(name).out))
            self.assertEqual(found, {("torch.bfloat16", f"cuda:{i}" if ON_GPU else "cpu") for i in range(gpus)})
        self.assertLess(self.trained("dp").difference(self.trained("dp on one")), 1e-2)
        found = in_a_process("replicas")
        self.assertEqual(found["dtypes"], ["torch.bfloat16"] * (3 if ON_GPU else 2))
        self.assertLess(found["difference"], 0.02)

    def test_a_step_does_not_wait_for_the_gpu(self):
        for precision, found in in_a_process("waits").items():
            self.assertLessEqual(len(found), 2, f"{precision}: {found}")  # for the epoch's loss; it has 40 batches

    def test_a_rank_that_fails_or_is_killed_and_a_resumed_run_that_has_the_same_bits(self):
        """Twice in the second epoch: first the last rank raises an error, then, resumed, it is killed."""
        self.trained("same bits")
        where, last = os.path.join(self.scratch, "same"), RANKS - 1
        files = ["--checkpoint", self.path("c.pt"), "--metrics", self.path("m.jsonl"), "--resume"]
        more = ["--batch_size", str(2 * MICRO), *TRAIN, "--timeout", "600", *files]  # not ended by the time limit
        for command, fault, told in (
                (SPAWN, "raise KeyError('in rank', rank)",
                 rf"error: rank {last} of {RANKS} on host .* failed: (?s:.*)KeyError: \('in rank', {last}\)"),
                (TORCHRUN, "os.kill(os.getpid(), 9)",
                 rf"(?s)Root Cause .*rank +: {last} \(local_rank: {last}\).*Signal 9")):
            with self.subTest(fault):
                code, out, err = run(*command, *more, cwd=where, FAULT=fault, **SAME_BITS)
                self.assertEqual((code, "epoch 2/3" in out), (1, False), out + err)
                self.assertRegex(err, told)
                pids = [int(pid) for pid in re.findall(r", pid (\d+)$", out, re.M)]
                self.assertEqual(len(pids), RANKS)
                wait_until(lambda: all(map(gone, pids)), "all ranks have ended", 30)
                self.assertEqual(torch.load(files[1], map_location="cpu", weights_only=True)["epoch"], 1)
        resumed = run(*TORCHRUN, *more, cwd=where, **SAME_BITS)
        self.assertEqual((resumed[0], "going on from" in resumed[1]), (0, True), resumed)
        found = torch.load(files[1], map_location="cpu", weights_only=True)
        for part in ("model", "best_model"):
            for key, value in self.trained("same bits").checkpoint[part].items():
                self.assertTrue(torch.equal(found[part][key], value), f"{part}, {key}")
        with open(files[3]) as file:
            lines = [json.loads(line) for line in file]
        for line, expected in zip(lines, self.trained("same bits").metrics):
            for changes in ("seconds", "samples_per_second"):
                line.pop(changes, None), expected.pop(changes, None)
            self.assertEqual(line, expected)

    def by_hand(self, rank, *given, cwd=ROOT, **more):
        """One rank of two, without a launcher that would end it. What it leaves if it aborts stays in the folder."""
        return start([os.path.join(cwd, "ddp_launch.py"), *DEVICE, *given], cwd=self.folder, RANK=str(rank),
                     LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", **more)

    def test_a_rank_that_never_comes(self):
        code, out, err = finish(self.by_hand(0, "--timeout", "8", MASTER_PORT=free_port()), 8 + 60)
        self.assertEqual((code, out), (1, ""), err)
        self.assertRegex(err, " waits for rank 1 of 2, 8 s at most (?s:.*) waited in vain for rank 1 of 2, 8 s at most")

    def two_gpus(self):
        if RANKS < 2:
            self.skipTest("needs two GPUs")

    def test_a_rank_that_is_silent_when_nccl_connects(self):
        self.two_gpus()
        copy, port = os.path.join(self.folder, "silent"), free_port()
        os.mkdir(copy)
        project(copy, *SILENT)
        ranks = [self.by_hand(rank, "--timeout", "12", cwd=copy, MASTER_PORT=port) for rank in range(2)]
        for code, out, err in [finish(process, 12 + 60) for process in ranks]:
            self.assertEqual((code, "epoch" in out), (1, False), err)
            self.assertIn("waited in vain for the connections to the other ranks, which have all reported, 12 s", err)

    def test_a_rank_that_is_killed_where_no_launcher_ends_the_other(self):
        """Each sees one GPU. A launcher would end the other at once; here it ends by itself, for nccl's watchdog some
        15 s after the time limit."""
        self.two_gpus()
        port, path = free_port(), self.path("out")
        with open(path, "w") as file:
            ranks = [self.by_hand(rank, "--timeout", "20", "--epochs", "100000", stdout=file, MASTER_PORT=port,
                                  CUDA_VISIBLE_DEVICES=visible(rank)) for rank in range(2)]
        try:
            def trains():
                with open(path) as file:
                    text = file.read()
                return any(process.poll() is not None for process in ranks) or "epoch 2/" in text and text
            text = wait_until(trains, "they train", 90)
        finally:
            ranks[1].kill()
            (code, _, err), _ = [finish(process, 20 + 75) for process in ranks]
        self.assertNotIn(code, (0, 2), err)
        self.assertIsInstance(text, str, err)
        self.assertEqual(re.findall(r"(?m)^rank [01] of 2: .*, device (.*), pid", text), self.devices([0, 0]))

    def test_ranks_do_not_share_a_gpu(self):
        """Two that see the same single one, as one node and as two: refused, or, if they may, on the CPU."""
        if not ON_GPU:
            self.skipTest("CPUs have no UUIDs, and are shared")
        where = ["--master_addr", "127.0.0.1", "--master_port", free_port(), "--backend", "gloo"]
        started = [start([*command, "--device", device, "--epochs", "1"], CUDA_VISIBLE_DEVICES=visible(0))
                   for device, *command in (("cuda", "ddp_spawn.py", "-g", "2"), ("auto", "ddp_spawn.py", "-g", "2"),
                                            ("cuda", "ddp_spawn.py", "-n", "2", "-nr", "0", *where),
                                            ("cuda", "ddp_spawn.py", "-n", "2", "-nr", "1", *where))]
        (code, out, err), auto, *nodes = [finish(process, 90) for process in started]
        for code, out, err in ((code, out, err), *nodes):
            self.assertEqual((code, out), (2, ""), err)
            self.assertIn("--device cuda: ranks 0 and 1 have 1 GPU for 2 process(es)", err)
        self.assertEqual((auto[0], "on the CPU: ranks 0 and 1 have 1 GPU" in auto[1]), (0, True), auto)

    def test_what_it_costs(self):
        """The rows of the benchmark, printed: not a test, as times differ from machine to machine."""
        concurrent.futures.wait(self.runs.values())
        table = "gpu" if ON_GPU else "gpu-trial"
        code, out, err = run(sys.executable, os.path.join("benchmarks", "bench.py"), table, timeout=200)
        self.assertEqual((code, "Training loop, " in out), (0, True), out + err)
        self.assertEqual("share of that which backward hides" in out and "average_gradients: " in out, RANKS > 1, out)
        print(out, flush=True)
