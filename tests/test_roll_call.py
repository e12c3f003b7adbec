"""The roll call: no rank trains unless all are there and agree; missing ranks are named; devices are chosen for all."""
import contextlib
import io
import os
import re
import tempfile
import threading
import unittest
from array import array
from unittest import mock

import common
import runtime
import torch

from tests.helpers import FolderTest, finish, free_port, options, project, run, start, write_subj


class Counted:
    """A store client that counts its operations."""

    def __init__(self, store):
        self.store, self.operations = store, 0

    def __getattr__(self, name):
        def operation(*args):
            self.operations += 1
            return getattr(self.store, name)(*args)
        return operation


def roll_call(given, data=None, changes=None, local_ranks=None):
    """Return each rank's result of a roll call: the triple or the error. Ranks are threads, each with a store client.

    `given` has the options of each rank, `data` its data sets, `changes` what differs in its report."""
    world_size, results, data, changes = len(given), {}, data or {}, changes or {}
    server = runtime.make_store("127.0.0.1", 0, 30, is_master=True)
    original = runtime.describe

    def describe(rank, *rest):
        own = original(rank, *rest)
        change = dict(changes.get(rank, {}))
        own["alike"] = {**own["alike"], **change.pop("alike", {})}
        return {**own, **change}

    def work(rank):
        args = options(*given[rank])
        store = Counted(runtime.make_store("127.0.0.1", server.port, 30, is_master=False))
        try:
            with runtime.Joining(rank, world_size, "127.0.0.1", server.port, 30) as joining:
                local_rank = (local_ranks or range(world_size))[rank]
                results[rank] = runtime.roll_call(joining, store, local_rank, args, data.get(rank, DATA))
        except common.UsageError as error:
            results[rank] = error
        results[rank, "operations"] = store.operations

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    out = io.StringIO()
    # Before it ends with an error, rank 0 waits for others to read the store. Here, the store stays.
    with mock.patch.object(runtime, "describe", describe), mock.patch("time.sleep"), contextlib.redirect_stdout(out):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    return [results[rank] for rank in range(world_size)], out.getvalue(), sum(
        results[rank, "operations"] for rank in range(world_size))


DATA = None  # made when tests run: processes that run tests are forked, and torch must not have threads by then


def setUpModule():
    global DATA
    DATA = common.load_data(options())


class AgreementTest(unittest.TestCase):
    def check_refused(self, *expected, given=((), ()), **more):
        results, out, _ = roll_call(given, **more)
        for result in results:
            self.assertIsInstance(result, common.UsageError)
            self.assertTrue(result.on_all_ranks)
            for text in ("rank 1 on ", *expected):
                self.assertIn(text, str(result))
        self.assertEqual(out, "")

    def test_each_option_that_must_be_alike(self):
        for option, other, default in (("--learning_rate", "0.1", "0.005"), ("--seed", "1", "0"),
                                       ("--optimizer", "sgd", "adam"), ("--precision", "bf16", "fp32"),
                                       ("--max_grad_norm", "1.5", "None"), ("--epochs", "3", "2"),
                                       ("--batch_size", "50", "100"), ("--accumulation_steps", "2", "1"),
                                       ("--grad_sync", "manual", "ddp"), ("--weight_decay", "0.5", "None"),
                                       ("--checkpoint_steps", "7", "None"), ("--backend", "gloo", "auto")):
            with self.subTest(option):
                more = ["--checkpoint", "/nowhere"] if option == "--checkpoint_steps" else []
                self.check_refused(f"{option} {other}, rank 0 has {default}", given=((), (option, other, *more)))
        self.check_refused("--resume True, rank 0 has False", given=((), ("--resume",)))

    def test_options_of_one_machine_may_differ_and_a_default_may_be_given(self):
        results, out, _ = roll_call(((), ("--num_workers", "2", "--data_root", "elsewhere", "--timeout", "60",
                                          "--learning_rate", "0.005")))
        self.assertEqual(results, 2 * [(torch.device("cpu"), "gloo", [])])
        self.assertEqual(out.count("local rank"), 2)

    def test_data(self):
        train, valid, test = DATA
        labels = valid.tensors[1].clone()
        labels[17] = (labels[17] + 1) % 10
        changed = train, common.Rows(valid.tensors[0], labels), test
        self.check_refused("validation data of 500 samples", data={1: changed})
        self.check_refused("test data of 999 samples", "rank 0 has 1000 samples",
                           data={1: (train, valid, common.Rows(*test[:999]))})

        class Table(torch.utils.data.Dataset):
            def __init__(self, rows):
                self.rows = rows

            def __len__(self):
                return len(self.rows)

        # An array and a view of every other number stand for NumPy's, which have the same buffer protocol.
        for kind, rows in (("lists", lambda target: [[1.0, 2.0, target]] * 5),
                           ("bytes", lambda target: b"1234%d" % target),
                           ("array", lambda target: array("d", [1, 2, 3, 4, target])),
                           ("view", lambda target: memoryview(array("d", [1, 0, 2, 0, 3, 0, 4, 0, target]))[::2])):
            with self.subTest(kind):
                tables = [3 * (Table(rows(target)),) for target in (0, 1, 1)]
                self.check_refused("training data of 5 samples", data=dict(enumerate(tables)))
                self.assertEqual(roll_call(((), ()), data=dict(enumerate(tables[1:])))[0][1][1], "gloo")

    def test_files_that_are_exchanged_on_the_second_node(self):
        """Case 30: Subj's two files."""
        with tempfile.TemporaryDirectory() as folder:
            given, data = [], {}
            for rank, (plot, quote) in enumerate([(b"a b\n" * 9, b"c\n" * 9), (b"c\n" * 9, b"a b\n" * 9)]):
                root = os.path.join(folder, str(rank))
                write_subj(root, plot, quote)
                given.append(("--dataset", "Subj", "--data_root", root))
                data[rank] = common.load_data(options(*given[rank]))
            self.check_refused("training data of ", given=given, data=data)

    def test_code_and_torch(self):
        self.check_refused("common.py 0123", changes={1: {"alike": {"common.py": "0123"}}})
        self.check_refused(f"torch 2.0.9, rank 0 has {torch.__version__}", changes={1: {"alike": {"torch": "2.0.9"}}})

    def test_a_rank_that_is_there_twice_and_a_world_of_another_size(self):
        results, _, _ = roll_call(((), (), ()), changes={1: {"host": "a"}, 2: {"rank": 1, "host": "a"}})
        self.assertTrue(all("rank 1 on a is also on a: give each node its own rank" in str(result)
                            for result in results))
        self.check_refused("a world size of 4, rank 0 has 2", changes={1: {"alike": {"a world size of": 4}}})

    def test_a_rank_that_cannot_start_says_so_on_all(self):
        results, _, _ = roll_call(((), ()), data={1: (DATA[0], DATA[1], common.Rows(*DATA[2][:0]))})
        self.assertEqual([str(result) for result in results],
                         2 * ["training, validation and test data need a sample each, and __getitem__; they have "
                              "[4000, 500, 0]"])

    def test_other_threads_are_reported(self):
        results, out, _ = roll_call(((), ()), changes={1: {"threads": 77}})
        self.assertEqual(len(results[1][2]), 1)
        self.assertRegex(out, r"(?m)^rank 1 has torch \S+, 77 threads, a CPU, but rank 0 has torch")

    def test_store_operations_grow_with_the_number_of_ranks(self):
        """8 for each rank, and 2 more for each that waits long."""
        for size in (8, 64):
            self.assertTrue(7 * size < roll_call(((),) * size)[2] < 12 * size)


class DevicesTest(unittest.TestCase):
    """GPUs are simulated; the tests check which rank gets which GPU."""

    def devices(self, gpus, given=(), local_ranks=None):
        """Return the indices, the error, or None for the CPU; and the output. `gpus`: the UUIDs that a rank sees."""
        changes = {rank: {"gpus": [[uuid, "GPU"] for uuid in uuids]} for rank, uuids in enumerate(gpus)}
        results, out, _ = roll_call((given,) * len(gpus), changes=changes, local_ranks=local_ranks)
        if isinstance(results[0], common.UsageError):
            return str(results[0]), out
        devices = [device.index for device, _, _ in results]
        self.assertEqual({backend for _, backend, _ in results}, {"gloo" if devices[0] is None else "nccl"})
        return devices, out

    def test_by_local_rank(self):
        self.assertEqual(self.devices(["ab", "ab", "cd", "cd"], local_ranks=[0, 1, 0, 1])[0], [0, 1, 0, 1])

    def test_the_only_one_that_each_process_sees(self):
        self.assertEqual(self.devices(["a", "b"], local_ranks=[0, 1])[0], [0, 0])
        self.assertEqual(self.devices(["a", "b"], local_ranks=[0, 0])[0], [0, 0])  # torchrun --virtual-local-rank

    def test_all_on_the_cpu_if_one_rank_can_have_none(self):
        for gpus, local_ranks, reason in ((["ab", "ab", "", ""], [0, 1, 0, 1], "rank 2 on "),
                                          (["a", "a"], [0, 1], "1 GPU"),
                                          (["ab", "ab", "ab"], [0, 1, 2], "rank 2 on ")):
            devices, out = self.devices(gpus, local_ranks=local_ranks)
            self.assertEqual(devices, [None] * len(gpus))
            self.assertIn(reason, re.findall("on the CPU: .*", out)[0])
            error, _ = self.devices(gpus, ["--device", "cuda"], local_ranks)
            self.assertIn("--device cuda: ", error)
            self.assertIn(reason, error)

    def test_the_cpu_for_all_if_one_rank_asks_for_it(self):
        changes = {rank: {"gpus": [["ab"[rank], "GPU"]]} for rank in range(2)}
        results, _, _ = roll_call(((), ("--device", "cpu")), changes=changes)
        self.assertEqual([device.type for device, _, _ in results], ["cpu", "cpu"])

    def test_uuids_and_their_substitute(self):
        properties = mock.Mock(uuid="GPU-7")
        properties.name = "a GPU"
        with mock.patch("torch.cuda.is_available", return_value=True), \
                mock.patch("torch.cuda.device_count", return_value=2), \
                mock.patch("torch.cuda.get_device_properties", return_value=properties), \
                mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="3,5"):
            self.assertEqual(runtime.visible_gpus(), [["GPU-7", "a GPU"]] * 2)
            del properties.uuid  # torch before 2.4
            self.assertRegex(" ".join(uuid for uuid, _ in runtime.visible_gpus()), r"\S+ 3 \S+ 5$")


def errors(err):
    """Standard error without the lines that name missing ranks: on a busy machine, a rank may come after 4 s."""
    return "".join(line for line in err.splitlines(keepends=True) if " waits for " not in line)


class ProcessesTest(FolderTest):
    def by_hand(self, ranks, world_size, given=lambda rank: ()):
        """Ranks without a launcher, started at once; (code, out, err) of each."""
        port = free_port()
        started = [start(["ddp_launch.py", *given(rank)], RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port,
                         WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1") for rank in ranks]
        return [finish(process, 60) for process in started]

    def test_options_that_differ_end_every_rank_and_are_told_once(self):
        files = ["--checkpoint", self.path("c.pt"), "--metrics", self.path("m")]
        results = self.by_hand((0, 1), 2, lambda rank: [*files, *["--learning_rate", "0.1"] * rank])
        self.assertEqual([(code, out) for code, out, _ in results], [(2, ""), (2, "")], results)
        self.assertRegex(errors("".join(err for _, _, err in results)), r"^ddp_launch.py: error: rank 1 on \S+ has "
                         r"--learning_rate 0.1, rank 0 has 0.005: [^\n]*\n$")
        self.assertEqual(os.listdir(self.folder), [])

    def test_nodes_with_other_code(self):
        """One line of common.py differs on the second node. Each node says so once."""
        port, nodes = free_port(), []
        for nr, momentum in enumerate(("0.9", "0.8")):
            os.mkdir(self.path(str(nr)))
            project(self.path(str(nr)), ("common.py", '"momentum": 0.9', f'"momentum": {momentum}'))
            nodes.append(start(["ddp_spawn.py", "-n", "2", "-g", "2", "-nr", str(nr), "--master_addr", "127.0.0.1",
                                "--master_port", port], cwd=self.path(str(nr))))
        for code, out, err in map(finish, nodes):
            self.assertEqual((code, out, errors(err).count("\n")), (2, "", 1), err)
            self.assertRegex(errors(err), "^ddp_spawn.py: error: rank [123] on .* has common.py ")

    def test_three_of_four_are_there(self):
        for code, out, err in self.by_hand((0, 1, 3), 4, lambda rank: ["--timeout", "8"]):
            self.assertEqual((code, out), (1, ""), err)
            self.assertEqual(err.count(" waits for rank 2 of 4, 8 s at most (--timeout)"), 1, err)
            self.assertIn(" waited in vain for rank 2 of 4, 8 s at most (--timeout): start all ranks", err)

    def test_two_processes_that_see_one_gpu(self):
        """A simulated GPU in a real run, which uses the CPU. DevicesTest has --device cuda, which is refused."""
        line = "    count = torch.cuda.device_count() if"
        project(self.folder, ("runtime.py", line, f"    return [['GPU-1', 'pretended']]\n{line}"))
        code, out, err = run("ddp_spawn.py", "-g", "2", "--epochs", "1", cwd=self.folder)
        self.assertEqual((code, "on the CPU: " in out, "test accuracy" in out), (0, True, True), err)
