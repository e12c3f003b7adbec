"""The user's mistakes: exit code 2, one line that says what is wrong and what to do, nothing started."""
import gzip
import os
from unittest import mock

import common
import runtime

import ddp_launch
import ddp_spawn
import dp_example
from tests.helpers import FolderTest, call, idx, launcher, run, socket, write_mnist, write_subj


class ErrorTest(FolderTest):
    def check(self, module, options, *expected, **environment):
        """The one line contains the `expected` words."""
        started = AssertionError("a process or a process group was started")
        with mock.patch("torch.multiprocessing.spawn", side_effect=started), \
                mock.patch("torch.distributed.init_process_group", side_effect=started), self.subTest(options=options):
            code, out, err = call(module, *options, **environment)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
            self.assertTrue(err.startswith(os.path.basename(module.__file__) + ": error: "), err)
            for word in expected:
                self.assertIn(word, err)

    def check_all(self, options, *expected):
        for module, more in ((dp_example, ["--epochs", "1"]), (ddp_spawn, []), (ddp_launch, [])):
            self.check(module, more + options, *expected)


class OptionsTest(ErrorTest):
    def test_counts_below_one_and_other_numbers_that_cannot_be(self):
        for option in ("--batch_size", "--accumulation-steps"):
            for value in ("0", "-3", "1.5", "many", "99999999999"):
                self.check_all([option, value], option, value, "whole number from 1")
        self.check_all(["--epochs", "-1"], "--epochs", "'-1'", "from 0")
        self.check_all(["--seed", "-1"], "--seed")
        self.check_all(["--num_workers", "-1"], "--num_workers")
        for option in ("--learning_rate", "--max_grad_norm", "--timeout"):
            for value in ("0", "-1", "nan", "inf", "-inf", "fast"):
                self.check(ddp_launch, [f"{option}={value}"], option, value)
        for option in ("-n", "-g"):
            self.check(ddp_spawn, [option, "0"], option, "'0'", "from 1")
        self.check(dp_example, ["--data_size", "0"], "--data_size")

    def test_unknown_names(self):
        self.check_all(["--dataset", "CIFAR"], "CIFAR", "synthetic", "MNIST", "Subj")
        self.check_all(["--device", "tpu"], "tpu", "cpu")
        self.check_all(["--batchsize", "3"], "--batchsize", "--help")
        self.check(ddp_spawn, ["--backend", "mpi"], "mpi", "gloo")

    def test_gpus_that_are_not_there(self):
        with mock.patch("torch.cuda.is_available", return_value=False):
            self.check_all(["--device", "cuda"], "--device cuda", "0 GPU", "--device cpu")
            self.check_all(["--precision", "fp16"], "fp16", "bf16")
            self.check(ddp_spawn, ["--backend", "nccl"], "nccl", "gloo")
        with mock.patch("torch.cuda.is_available", return_value=True), \
                mock.patch("torch.cuda.device_count", return_value=1), \
                mock.patch("torch.cuda.get_device_properties", return_value=mock.Mock(uuid="GPU-1")) as properties:
            properties.return_value.name = "a GPU"
            self.check(ddp_spawn, ["-g", "2", "--device", "cuda"], "1 GPU", "2 process")
            args = runtime.make_parser(None).parse_args([])
            own = runtime.describe(0, 0, 1, args, ())
            two = runtime.assign_devices([own, {**own, "rank": 1, "local_rank": 1}])
            self.assertEqual((two["devices"], two["backend"]), (None, "gloo"))
            one = runtime.assign_devices([own])
            self.assertEqual((one["devices"], one["backend"]), ([0], "nccl"))

    def test_nodes(self):
        self.check(ddp_spawn, ["-n", "2", "-nr", "2", "--master_addr", "a", "--master_port", "1"], "-nr 2", "0 to 1")
        self.check(ddp_spawn, ["-nr", "-1"], "-nr", "from 0")
        self.check(ddp_spawn, ["-n", "2"], "--master_addr", "MASTER_ADDR")
        self.check(ddp_spawn, ["-n", "2", "--master_addr", "localhost"], "--master_port", "MASTER_PORT")
        self.check(ddp_spawn, ["--master_port", "65536"], "--master_port", "65535")

    def test_a_port_that_is_taken(self):
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            self.check(ddp_spawn, ["--master_port", port], port, "taken", "--master_port")
            self.check(ddp_spawn, ["-n", "2", "--master_addr", "127.0.0.1", "--master_port", port], port, "taken")
            self.check(ddp_launch, [], port, "taken", "MASTER_PORT", RANK="0", LOCAL_RANK="0", WORLD_SIZE="2",
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

    def test_launchers(self):
        """Cases 2 and 13."""
        self.check(ddp_launch, ["--multi_gpu"], "torchrun --nproc_per_node=2 ddp_launch.py --multi_gpu")
        self.check(ddp_launch, ["--multi_gpu", "False"], "False")
        self.check(ddp_launch, ["--local_rank", "-1"], "--local_rank")
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        for change in ({"RANK": "2"}, {"LOCAL_RANK": "x"}, {"MASTER_PORT": "none"}, {"WORLD_SIZE": "0"}):
            self.check(ddp_launch, [], "RANK", "torchrun", **{**world, **change})
        del world["MASTER_ADDR"]
        self.check(ddp_launch, [], "MASTER_ADDR", **world)

    def test_options_of_training_without_training(self):
        for option in (["--checkpoint", self.path("c.pt")], ["--resume"], ["--dataset", "MNIST"]):
            self.check(dp_example, option, "--epochs")


class ReallyTest(FolderTest):
    def test_in_processes_of_their_own(self):
        code, out, err = run("ddp_spawn.py", "-g", "2", "--dataset", "Subj", "--data_root", self.folder)
        self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
        code, out, err = run(*launcher(2), "ddp_launch.py", "--dataset", "MNIST", "--data_root", self.folder)
        self.assertNotEqual(code, 0)  # torchrun's own exit code is 1
        self.assertEqual((out, err.count("ddp_launch.py: error: ")), ("", 1), err)
        self.assertNotIn('File "', err.split("ddp_launch.py: error: ")[0])

    def test_help_names_the_defaults(self):
        for module in (dp_example, ddp_spawn, ddp_launch):
            code, out, err = call(module, "--help")
            self.assertEqual((code, err), (0, ""))
            for option in ("--batch_size", "--batch-size", "--learning_rate", "--timeout"):
                self.assertIn(option, out)
            self.assertRegex(" ".join(out.split()), r"--timeout SECONDS how many seconds [^()]*\(default: 600\)")


class FilesTest(ErrorTest):
    def test_paths_that_cannot_be_written(self):
        for option in ("--checkpoint", "--metrics"):
            self.check_all([option, self.path("no", "such", "file")], option, self.path("no", "such", "file"), "folder")
            self.check_all([option, self.folder], option, self.folder)
            self.check(ddp_launch, [option, "/proc/file"], "/proc/file")
        self.check_all(["--resume"], "--resume", "--checkpoint")
        self.assertEqual(os.listdir(self.folder), [])

    def test_an_empty_part_of_the_users_own_data(self):
        train, _, test = common.load_data(runtime.make_parser(None).parse_args([]))
        with mock.patch.object(common, "load_data", return_value=(train, common.Rows(*train[:0]), test)):
            self.check_all([], "a sample each", "[4000, 0, 1000]")

    def test_missing_data(self):
        self.check_all(["--dataset", "MNIST", "--data_root", self.folder], self.path("MNIST", "raw", "train-images"),
                       "--data_root", "--download", "28x28 images")
        self.check_all(["--dataset", "Subj", "--data_root", self.folder], self.path("Subj", "plot.tok.gt9.5000"),
                       "one sentence per line", "--download")

    def test_mnist_that_is_empty_truncated_or_malformed(self):
        raw, options = self.path("MNIST", "raw"), ["--dataset", "MNIST", "--data_root", self.folder]
        images, labels = os.path.join(raw, "train-images-idx3-ubyte"), os.path.join(raw, "train-labels-idx1-ubyte")
        good = idx((4, 28, 28), bytes(4 * 784))
        bad = {images: [b"", good[:10], good[:-1], good + b"x", b"\x1f\x8b" + good, idx((4,), bytes(4)),
                        idx((0, 28, 28), b""), idx((4, 28, 29), bytes(4 * 28 * 29))],
               labels: [b"", idx((3,), bytes(3)), idx((4,), [1, 2, 3, 10]), idx((1, 4), bytes(4)), good]}
        for path, contents in bad.items():
            for content in contents:
                write_mnist(self.folder, 4, 2)
                with open(path, "wb") as file:
                    file.write(content)
                self.check(ddp_spawn, options, raw, "expected")
        write_mnist(self.folder, 1, 2)
        self.check(ddp_spawn, options, raw, "two images")

    def test_compressed_mnist_that_is_truncated_or_not_compressed(self):
        raw, options = self.path("MNIST", "raw"), ["--dataset", "MNIST", "--data_root", self.folder]
        packed = gzip.compress(idx((4, 28, 28), os.urandom(4 * 784)))
        for content in (packed[:-9], packed[:200], packed[:100] + b"xxxx" + packed[104:], b"plain", b""):
            write_mnist(self.folder, 4, 2, compress=True)
            path = os.path.join(raw, "train-images-idx3-ubyte.gz")
            with open(path, "wb") as file:
                file.write(content)
            self.check(ddp_launch, options, path, "expected")

    def test_subj_that_is_empty_or_no_text(self):
        for content in (b"", b"\n \n\t\n", b"a\0b\n" * 9, None):
            write_subj(self.folder, b"some words\n" * 5, b"" if content is None else content)
            if content is None:
                os.remove(self.path("Subj", "quote.tok.gt9.5000"))
                os.mkdir(self.path("Subj", "quote.tok.gt9.5000"))
            self.check(ddp_launch, ["--dataset", "Subj", "--data_root", self.folder], "quote.tok.gt9.5000", "expected")
        write_subj(self.path("two"), b"one\n", b"two\n")
        self.check(ddp_launch, ["--dataset", "Subj", "--data_root", self.path("two")], "2 sentences", "at least 3")
