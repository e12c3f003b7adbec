"""--check: where each rank is, whether ranks agree, and whether all-reduces are right."""
import re

from tests.helpers import FolderTest, finish, free_port, project, run, start


class CheckTest(FolderTest):
    def test_all_is_well(self):
        code, out, err = run("ddp_spawn.py", "-g", "2", "--check")
        self.assertEqual((code, err), (0, ""))
        for rank in range(2):
            self.assertRegex(out, rf"(?m)^rank {rank} of 2: host \S+, local rank {rank}, device cpu, pid \d+, "
                             r"torch \S+, \d+ threads$")
        lines = re.findall(r"^all-reduce of +(\d+) ([KM])B: +(\S+) ms, bus bandwidth +(\S+) GB/s$", out, re.M)
        self.assertEqual([line[:2] for line in lines], [("1", "K"), ("1", "M"), ("64", "M")])
        size, milliseconds, bandwidth = 2**26, float(lines[2][2]), float(lines[2][3])
        self.assertAlmostEqual(bandwidth, size / milliseconds / 1e6 * 2 * 1 / 2, places=1)  # 2 (n - 1) / n
        self.assertEqual(out.splitlines()[-1], "all is well")
        self.assertNotIn("epoch", out)

    def test_ranks_that_differ_and_sums_that_are_wrong(self):
        """The two ranks differ in their threads, and in one element of the sum of the second size."""
        then = "            wrong[rank] +="
        wrong = then, f"            summed[-1] += rank == 1 and size == 2**20\n{then}"
        project(self.folder, ("runtime.py", *wrong))
        port = free_port()
        ranks = [start(["ddp_launch.py", "--check"], cwd=self.folder, RANK=str(rank), LOCAL_RANK=str(rank),
                       WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                       OMP_NUM_THREADS=str(1 + rank)) for rank in range(2)]
        (code, out, err), (other_code, other_out, other_err) = map(finish, ranks)
        self.assertEqual((code, other_code, other_out), (1, 1, ""))
        problems = out.splitlines()[-2:]
        self.assertRegex(problems[0], "rank 1 has .*, 2 threads, a CPU, but rank 0 has torch .*, 1 threads, a CPU$")
        self.assertEqual(problems[1], "all-reduce of 1 MB: wrong sums on rank 1")
        for text in err, other_err:  # on each node
            self.assertTrue(text.endswith(f"RuntimeError: --check: {'; '.join(problems)}\n"), text)
