"""The main job, on real data: skipped where DATA_ROOT does not name a folder that has it."""
import os
import sys
import unittest

from tests.helpers import DATA_ROOT, Run, free_port, launcher, needs_data


@needs_data
class RealDataTest(unittest.TestCase):
    def test_the_command_of_the_notes_learns_subj(self):
        """Published for Subj (harvardnlp/sent-conv-torch): 89.2 % without pretrained vectors, 93.4 % with them.

        The 50 epochs of the notes take a minute: LONG_TESTS=1 makes them. At eight times their learning rate, 4 do."""
        epochs, learning_rate = ("50", "0.0005") if os.environ.get("LONG_TESTS") else ("4", "0.004")
        result = Run(sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2",
                     f"--master_port={free_port()}", "ddp_launch.py", "--dataset", "Subj", "--epochs", epochs,
                     "--learning_rate", learning_rate, "--batch_size", "128", "--multi_gpu", "--data_root", DATA_ROOT,
                     timeout=300, CUDA_VISIBLE_DEVICES="0,1")  # old torch has no fused Adam: twice as long
        self.assertEqual(len(result.metrics), int(epochs) + 1)
        self.assertEqual(result.metrics[-1]["world_size"], 2)
        self.assertGreater(result.metrics[-1]["test_accuracy"], 0.91)

    def test_mnist(self):
        result = Run(*launcher(2), "ddp_launch.py", "--dataset", "MNIST", "--data_root", DATA_ROOT, "--epochs", "2",
                     "--batch_size", "50")
        self.assertGreater(result.metrics[-1]["test_accuracy"], 0.96)
