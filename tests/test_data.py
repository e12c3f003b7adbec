"""Data sets: the same rows, splits and words in every process. Downloads: complete and checked, once per node."""
import hashlib
import http.server
import io
import os
import tarfile
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import common
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import dp_example
from tests.helpers import (DATA_ROOT, FolderTest, Run, call, finish, launcher, needs_data, options, start, write_mnist,
                           write_subj)


def load(folder, dataset, *more):
    return common.load_data(options("--dataset", dataset, "--data_root", folder, *more))


def rows(data):
    return [tuple(tensor.tolist() if tensor.dim() else tensor.item() for tensor in data[i]) for i in range(len(data))]


class SubjTest(FolderTest):
    def test_lines_words_and_parts(self):
        # windows-1252: 0x85 and 0xa0 stand inside a sentence; blank lines, CRLF, and no newline at the end.
        plot = b"".join(b"plot %d\r\n" % i for i in range(12)) + b"\r\n   \nlast\x85 line\xa0here"
        write_subj(self.folder, plot, b"".join(b"quote %d\n\n" % i for i in range(8)))
        parts = load(self.folder, "Subj")
        self.assertEqual([len(part) for part in parts], [17, 2, 2])
        targets = [target for part in parts for _, target in rows(part)]
        self.assertEqual((targets.count(0), targets.count(1)), (13, 8))

    def test_the_vocabulary_is_of_the_training_part_alone(self):
        sentences = [b"common word%d" % i for i in range(20)]
        write_subj(self.folder, b"\n".join(sentences[:10]), b"\n".join(sentences[10:]))
        train, valid, test = load(self.folder, "Subj")
        self.assertEqual(train.tensors[0].max(), 1 + 16)  # padding, "common", and one word of each of 16 sentences
        self.assertEqual(sorted(train.tensors[0].flatten().tolist()), [1] * 16 + list(range(2, 18)))
        self.assertEqual([tokens for tokens, _ in rows(valid) + rows(test)], [[1, 0]] * 4)

    def test_a_batch_is_padded_to_its_longest_sentence(self):
        data = common.Sentences(torch.tensor([[5, 6, 7, 0], [0, 0, 0, 0], [8, 0, 0, 0]]), torch.tensor([0, 1, 0]))
        self.assertEqual(data.batch([1, 2])[0].tolist(), [[0], [8]])
        inputs, targets = data.batch([0, 2, 1])
        self.assertEqual(inputs.tolist(), [[5, 6, 7], [8, 0, 0], [0, 0, 0]])
        self.assertEqual(targets.tolist(), [0, 0, 1])
        torch.manual_seed(0)
        model = common.build_model(options("--dataset", "Subj"), data).eval()
        mean = model[0].weight[torch.tensor([5, 6, 7])].mean(0)
        torch.testing.assert_close(model(inputs)[0], model[1](mean))
        torch.testing.assert_close(model(inputs)[1], model[1](model[0].weight[8]))  # padding changes nothing
        torch.testing.assert_close(model(inputs)[2], model[1].bias)

    def test_string_hashes_and_the_locale_change_nothing(self):
        """Cases 7 and 8: to the last bit, in processes with other hash seeds and without UTF-8."""
        words = [b"w%d \x85 caf\xe9 z%d" % (i % 13, i % 7) for i in range(60)]
        write_subj(self.folder, b"\n".join(words[:30]), b"\n".join(words[30:]))
        command = ["ddp_launch.py", "--dataset", "Subj", "--data_root", self.folder, "--epochs", "1"]
        environments = ({"PYTHONHASHSEED": "1"},
                        {"PYTHONHASHSEED": "2", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
        with ThreadPoolExecutor() as pool:
            first, second = pool.map(lambda environment: Run(*command, **environment), environments)
        self.assertEqual(first.difference(second), 0.0)
        self.assertEqual(first.metrics[-1], second.metrics[-1])

    @needs_data
    def test_real_files(self):
        parts = load(DATA_ROOT, "Subj")
        self.assertEqual([len(part) for part in parts], [8000, 1000, 1000])
        targets = torch.cat([part.tensors[-1] for part in parts])
        self.assertEqual(targets.bincount().tolist(), [5000, 5000])


class MnistTest(FolderTest):
    def test_parts_pixels_and_labels(self):
        for compress in (False, True):
            folder = self.path(str(compress))
            write_mnist(folder, 31, 12, compress)
            train, valid, test = load(folder, "mnist")
            self.assertEqual([len(part) for part in (train, valid, test)], [28, 3, 12])
            for part in (train, valid, test):
                images, labels = part[torch.arange(len(part))]
                self.assertEqual((images.dtype, labels.dtype), (torch.uint8, torch.int64))
                self.assertEqual(images.shape, (len(part), 1, 28, 28))
                self.assertTrue((images == 25 * labels.view(-1, 1, 1, 1)).all())
            both = torch.cat([train.tensors[1], valid.tensors[1]]).tolist()
            self.assertEqual(sorted(both), sorted(i % 10 for i in range(31)))

    @needs_data
    def test_real_files(self):
        train, valid, test = load(DATA_ROOT, "MNIST")
        self.assertEqual([len(part) for part in (train, valid, test)], [7200, 800, 2000])
        self.assertAlmostEqual(train.tensors[0].float().mean().item() / 255, 0.13, delta=0.01)


class PartsTest(unittest.TestCase):
    def test_the_seed_decides_and_nothing_else(self):
        with torch.random.fork_rng():
            first = [rows(part) for part in common.load_data(options())]
            torch.manual_seed(5)
            self.assertEqual(first, [rows(part) for part in common.load_data(options())])
        self.assertNotEqual(first, [rows(part) for part in common.load_data(options("--seed", "1"))])

    def test_a_batch_is_one_look_up_and_the_same_as_its_samples(self):
        data = common.load_data(options())[0]
        original = common.Rows.batch
        with mock.patch.object(common.Rows, "batch", autospec=True, side_effect=original) as look_up:
            batches = list(common.make_loader(data, range(0, 250), options(), torch.device("cpu")))
        self.assertEqual((len(batches), look_up.call_count), (3, 3))
        plain = DataLoader([data[i] for i in range(250)], batch_size=100)
        for (inputs, targets), (plain_inputs, plain_targets) in zip(batches, plain):
            self.assertTrue(torch.equal(inputs, plain_inputs) and torch.equal(targets, plain_targets))


class Told(Dataset):
    """Samples: a random number, and the process and the seed of the worker that reads it. The last may not come."""
    stuck = False

    def __getitem__(self, index):
        time.sleep(30 if self.stuck and index == 3 else 0)
        return torch.rand(()).item(), os.getpid(), get_worker_info().seed

    def __len__(self):
        return 4


class WorkersTest(unittest.TestCase):
    def loader(self, rank=0, *more):
        with mock.patch.object(common, "rank_and_world_size", return_value=(rank, 2)):
            loader = common.make_loader(Told(), range(4), options("--num_workers", "1", "--batch_size", "1", *more),
                                        torch.device("cpu"))
            return loader, [[value.item() for value in sample] for sample in loader]

    def test_two_ranks_draw_different_numbers(self):
        """Also for one sample, which a padded shard can give to both; the worker's own seed is for numpy."""
        (_, first), (_, second) = self.loader(0), self.loader(1)
        self.assertEqual(len({draw for draw, _, _ in first + second}), 8)
        self.assertEqual(len({seed for _, _, seed in first + second}), 2)

    def test_workers_stay_from_epoch_to_epoch(self):
        loader, first = self.loader()
        self.assertEqual({pid for _, pid, _ in first}, {pid.item() for _, pid, _ in loader})

    def test_a_worker_that_is_stuck(self):
        with mock.patch.object(Told, "stuck", True), self.assertRaisesRegex(RuntimeError, "timed out after 2"):
            self.loader(0, "--timeout", "2")


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` on loopback, and counts the requests."""

    def __init__(self, files):
        self.files, self.asked = files, []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked.append(self.path)
                content = server.files.get(self.path)
                self.send_response(200 if content is not None else 404)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *args):
        self.shutdown()
        super().__exit__(*args)


def archive(files):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


class DownloadTest(FolderTest):
    def checksums(self, dataset, files):
        """Patch in the checksums of the test's own files."""
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        patch = mock.patch.dict(common.CHECKSUMS, {dataset: sums})
        patch.start()
        self.addCleanup(patch.stop)

    def test_mnist(self):
        write_mnist(self.path("source"), 20, 10, compress=True)
        files = {name[:-3]: open(self.path("source", "MNIST", "raw", name), "rb").read()
                 for name in os.listdir(self.path("source", "MNIST", "raw"))}
        self.checksums("MNIST", files)
        served = {f"/{name}.gz": content for name, content in files.items()}
        target = self.path("data")
        command = ["--epochs", "1", "--dataset", "MNIST", "--data_root", target, "--download"]
        with Server(dict(served)) as server:
            served_well, name = server.files, "/t10k-labels-idx1-ubyte.gz"
            server.files = {**served_well, name: b"something else"}
            code, _, err = call(dp_example, *command, MNIST_URL=server.url)
            self.assertEqual((code, err.count("\n")), (2, 1), err)
            self.assertIn("checksum", err)
            self.assertIn(name[1:-3], err)
            left = sorted(os.listdir(os.path.join(target, "MNIST", "raw")))
            self.assertTrue(all(name.endswith("-ubyte.gz") and "t10k-labels" not in name for name in left), left)
            server.files, server.asked[:] = served_well, []
            code, _, err = call(dp_example, *command, MNIST_URL=server.url + "/")
            self.assertEqual((code, err), (0, ""))
            self.assertIn(name, [asked.replace("//", "/") for asked in server.asked])
            server.asked.clear()
            self.assertEqual(call(dp_example, *command, MNIST_URL=server.url)[0], 0)
            self.assertEqual(server.asked, [])  # nothing is missing any more

    def test_a_source_that_does_not_answer_or_has_nothing(self):
        for dataset, variable in (("MNIST", "MNIST_URL"), ("Subj", "SUBJ_URL")):
            with Server({"/archive": b"no archive", "/other": archive({"readme": b"x"})}) as server:
                urls = [server.url + "/none", "http://127.0.0.1:1/closed", "nonsense"]
                for url in urls + [server.url + "/archive", server.url + "/other"] * (dataset == "Subj"):
                    command = ["--epochs", "1", "--dataset", dataset, "--data_root", self.path("d"), "--download"]
                    code, _, err = call(dp_example, *command, **{variable: url})
                    self.assertEqual((code, err.count("\n")), (2, 1), err)
                    self.assertIn(variable, err)

    @needs_data
    def test_subj_is_fetched_once_for_the_processes_of_a_node(self):
        """The real archive's content with other line ends, and with a member whose path must not be followed."""
        files = {"../../escaped": b"x"}
        for name in common.CHECKSUMS["Subj"]:
            with open(os.path.join(DATA_ROOT, "Subj", name), "rb") as file:
                files[name] = file.read().replace(b"\n", b"\r\n")[:-2]
        with Server({"/subj.tar.gz": archive(files)}) as server:
            # The lock is held for a while: the processes wait for it in turn.
            command = [*launcher(2), "ddp_launch.py", "--dataset", "Subj", "--data_root", self.path("a", "b"),
                       "--download", "--epochs", "0"]
            code, out, err = finish(start(command, SUBJ_URL=server.url + "/subj.tar.gz"))
        self.assertEqual(code, 0, err)
        self.assertEqual(len(server.asked), len(common.CHECKSUMS["Subj"]))
        self.assertEqual(sorted(os.listdir(self.path("a", "b", "Subj"))), sorted(common.CHECKSUMS["Subj"]))
        self.assertEqual(os.listdir(self.folder), ["a"])
