"""The collectives and evaluate() against values worked out by hand, on 1 to 4 ranks."""
import functools
import os
import tempfile
import unittest

import common
import torch
from torch import nn

from tests.helpers import launcher, once, run

INF = float("inf")


def run_ranks(world_size):
    with tempfile.TemporaryDirectory() as folder:
        code, out, err = run(*(launcher(world_size) if world_size > 1 else []), "tests/ranks.py", folder)
        if code:
            raise AssertionError(f"ranks.py ended with {code}\n{out}\n{err}")
        return [torch.load(os.path.join(folder, f"{rank}.pt"), weights_only=True) for rank in range(world_size)]


@functools.lru_cache(maxsize=None)
def results(world_size):
    """What each rank saved: tests/ranks.py under torchrun, once per world size. One process needs no launcher."""
    return once(("ranks.py", world_size), lambda: run_ranks(world_size))


class CollectivesTest(unittest.TestCase):
    def each(self, function):
        """(world size, rank, results of `function`) on two and on three ranks."""
        for world_size in (2, 3):
            for rank, result in enumerate(results(world_size)):
                with self.subTest(world_size=world_size, rank=rank):
                    yield world_size, rank, result[function]

    def equal(self, found, dtype, *values):
        self.assertEqual(found.dtype, dtype)
        self.assertEqual(found.flatten().tolist(), list(values))


class ReduceMeanTest(CollectivesTest):
    def test_it_is_the_mean_over_the_world_in_a_type_that_can_hold_it(self):
        for world_size, _, found in self.each("reduce_mean_cases"):
            middle = (world_size - 1) / 2  # the mean of the ranks
            self.equal(found["count"], torch.float64, 3 + middle)
            self.equal(found["python int"], torch.float64, 3 + middle)
            self.equal(found["python float"], torch.float64, 0.5 + middle)
            self.equal(found["bool"], torch.float64, 1 / world_size, 1.0)
            self.equal(found["float16"], torch.float16, 60000.0, 1.0)  # the sum would be infinite
            self.equal(found["bfloat16"], torch.bfloat16, 256.0, 1 + middle)
            self.equal(found["non-contiguous"], torch.float32, *(x + middle for x in (0, 3, 1, 4, 2, 5)))
            self.assertEqual(found["non-contiguous"].shape, (3, 2))
            self.assertEqual(found["count"].shape, ())
            self.assertEqual(found["empty"].shape, (0, 2))
            expected = torch.tensor((2 ** 24 + world_size - 1) / world_size, dtype=torch.float64).float()
            self.equal(found["large and small"], torch.float32, expected.item())

    def test_ranks_may_differ_in_type(self):
        for world_size, rank, found in self.each("reduce_mean_cases"):
            mean = 1.5 * (world_size - 1) / world_size
            self.equal(found["int here, float there"], torch.float32 if rank else torch.float64, mean)

    def test_the_input_stays_and_the_result_is_detached(self):
        for world_size, rank, found in self.each("reduce_mean_cases"):
            self.equal(found["input"], torch.float32, *(x + rank for x in range(3)))
            mean, loss, grad = found["loss"]
            w = 2 + 4 * rank
            self.assertFalse(mean.requires_grad)
            self.assertEqual((loss.item(), grad.item()), (w * w, 2 * w))
            squares = [(2 + 4 * r) ** 2 for r in range(world_size)]
            self.assertAlmostEqual(mean.item(), sum(squares) / world_size, places=5)

    def test_nprocs_must_be_the_world_size(self):
        for world_size, _, found in self.each("reduce_mean_cases"):
            self.assertIn(str(world_size), found["wrong nprocs"])
            self.assertIn(str(world_size + 1), found["wrong nprocs"])
        with self.assertRaises(ValueError):
            common.reduce_mean(1.0, nprocs=2)

    def test_complex_numbers_are_refused(self):
        for value in (torch.ones(2, dtype=torch.complex64), torch.tensor(1j), 2j):
            with self.assertRaises(TypeError) as caught:
                common.reduce_mean(value)
            self.assertIn("view_as_real", str(caught.exception))

    def test_without_a_process_group_it_is_the_value(self):
        self.equal(common.reduce_mean(3), torch.float64, 3.0)
        value = torch.ones(2, requires_grad=True)
        found = common.reduce_mean(value)
        found += 1
        self.equal(value.detach(), torch.float32, 1.0, 1.0)
        self.equal(common.reduce_mean(torch.tensor([True])), torch.float64, 1.0)


class AverageGradientsTest(CollectivesTest):
    def test_a_missing_gradient_counts_as_zero_and_one_that_all_miss_stays_none(self):
        for world_size, _, found in self.each("average_gradients_cases"):
            a, b, c, d, e = found["missing"]
            inputs = range(1, world_size + 1)
            self.assertAlmostEqual(a.item(), 1 / world_size, places=6)
            self.assertAlmostEqual(b.item(), sum(inputs[1:]) / world_size, places=6)
            self.assertAlmostEqual(c.item(), sum(inputs) / world_size, places=6)
            self.assertIsNone(d)
            self.assertAlmostEqual(e.item(), world_size / world_size, places=6)

    def test_shared_parameters_once_and_frozen_ones_never(self):
        for world_size, rank, found in self.each("average_gradients_cases"):
            shared, frozen = found["shared and frozen"]
            mean = sum(1 + r for r in range(world_size)) / world_size
            self.equal(shared, torch.float32, *[mean] * 4)
            self.equal(frozen, torch.float32, *[float(rank)] * 4)
            self.assertTrue(found["in place"])

    def test_every_dtype_keeps_its_own_and_half_precision_does_not_overflow(self):
        for world_size, _, found in self.each("average_gradients_cases"):
            for grad in found["dtypes"]:
                exact = 40000 + 64 * (world_size - 1) / 2
                self.assertEqual(grad.tolist(), torch.full((3,), exact, dtype=grad.dtype).tolist(), grad.dtype)

    def test_non_contiguous_gradients(self):
        for world_size, _, found in self.each("average_gradients_cases"):
            factor = sum(range(1, world_size + 1)) / world_size
            self.equal(found["non-contiguous"], torch.float32, *(x * factor for x in (0, 2, 4, 1, 3, 5)))
            self.assertTrue(found["non-contiguous in place"])

    def test_sparse_gradients_stay_sparse_also_where_a_rank_has_none(self):
        for world_size, _, found in self.each("average_gradients_cases"):
            first, second = found["sparse"]
            expected = [1 / world_size if row < world_size else 0 for row in range(4)]
            expected[3] += 2
            for row in range(4):
                self.assertAlmostEqual(first[row, 0].item(), expected[row], places=6)
            self.assertAlmostEqual(second[1, 0].item(), 1 / world_size, places=6)
            self.assertEqual(found["stays sparse"], [True, True])

    def test_collectives_follow_the_bytes_and_not_the_number_of_parameters(self):
        for world_size, _, found in self.each("bucket_cases"):
            for i, (low, high) in enumerate(found["large"]):
                self.assertAlmostEqual(low, 10 * i + (world_size - 1) / 2, places=5)
                self.assertEqual(low, high)
            # Whole parameters, up to 25 MiB together. A few bytes more are sent, for flags.
            buckets = [size // 100 * 100 for size in found["large, collectives"]]
            self.assertEqual(buckets, [20_000_000, 28_000_000, 80_000_000])
            self.assertEqual(found["200 of 100, collectives"], 1)
            self.assertEqual(found["10 of 1250000, collectives"], 2)  # 25 MB each, which is less than 25 MiB

    def test_a_gradient_that_was_missing_lies_in_memory_as_its_parameter(self):
        """One rank has gradients, of a channels_last and of a transposed weight. The optimizer's step then leaves all
        ranks with the same weights. Adam's first step moves each weight by the learning rate, whatever its gradient."""
        torch.manual_seed(0)
        weights = [nn.Conv2d(3, 4, 3, bias=False).weight.detach(), torch.randn(3, 2).t()]
        for world_size, rank, found in self.each("layout_cases"):
            self.assertEqual([strides for strides, _ in found["strides"]], [(27, 1, 9, 3), (1, 2)])
            for parameter_strides, strides in found["strides"]:
                self.assertEqual(strides, parameter_strides)
            for i, grad in enumerate(results(world_size)[0]["layout_cases"]["first"]):
                torch.testing.assert_close(found["missing elsewhere"][i], grad / world_size)
                expected = weights[i] - 0.5 * grad.sign()
                torch.testing.assert_close(found["stepped"][i], expected, atol=1e-3, rtol=0)
                self.assertTrue(torch.equal(found["stepped"][i], results(world_size)[0]["layout_cases"]["stepped"][i]))

    def test_expanded_conjugate_and_negated_gradients(self):
        for world_size, _, found in self.each("layout_cases"):
            middle = (world_size - 1) / 2
            expanded, sometimes, conjugate, negated = found["views"]
            self.assertEqual(expanded.tolist(), [1 + middle] * 3)
            self.assertEqual(sometimes.tolist(), [1 + middle] * 3)
            self.assertEqual(conjugate.tolist(), [1 - 2j, 3, -middle * 1j])
            self.assertEqual(negated.tolist(), [-1, -2, -middle])

    def test_gradients_that_several_buckets_share(self):
        """Missing, transposed, strided, expanded and sparse ones, in buckets from one number up."""
        torch.manual_seed(7)
        values = [torch.randn(shape) for shape in ((3,), (2, 5), (7,), (), (4, 2), (6,), (3, 4), (5,))]
        for world_size, _, found in self.each("layout_cases"):
            everywhere = sum(1 + rank for rank in range(world_size)) / world_size
            elsewhere = everywhere - 1 / world_size  # all but rank 0
            for size in (4, 8, 12, 16, 52, 10**6):
                grads = found[f"buckets of {size}"]
                self.assertIsNone(grads[5])
                for i in (0, 1, 6):
                    torch.testing.assert_close(grads[i], everywhere * values[i])
                for i in (2, 3, 4):
                    torch.testing.assert_close(grads[i], elsewhere * values[i])
                torch.testing.assert_close(grads[7], everywhere * values[7][:1].expand(5))

    def test_a_call_in_inference_mode_does_not_break_later_ones(self):
        for world_size, _, found in self.each("inference_cases"):
            for when in ("inside", "outside"):
                first, second, sparse = found[when]
                self.assertEqual(first.tolist(), [2 * (1 + (world_size - 1) / 2)] * 3)
                for grad in (second, sparse):
                    torch.testing.assert_close(grad, torch.full_like(grad, 2 * 3 / world_size))

    def test_it_changes_nothing_after_ddp(self):
        for world_size, _, found in self.each("average_gradients_cases"):
            self.assertAlmostEqual(found["ddp"][0].item(), sum(range(1, world_size + 1)) / world_size, places=6)

    def test_without_a_process_group_there_is_nothing_to_do(self):
        model = nn.Linear(1, 1)
        model.weight.grad = torch.ones(1, 1)
        common.average_gradients(model)
        self.assertEqual(model.weight.grad.item(), 1.0)
        self.assertIsNone(model.bias.grad)


class EvaluateTest(CollectivesTest):
    def test_every_sample_counts_once_for_any_world_size(self):
        """Also with fewer samples than ranks. Ranks with different numbers of batches do not hang."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
        inputs, targets = torch.randn(10, 4), torch.randint(3, (10,))
        with torch.no_grad():
            scores = model(inputs).double()
        losses = scores.logsumexp(1) - scores.gather(1, targets[:, None])[:, 0]
        hits = (scores.argmax(1) == targets).tolist()
        self.assertTrue(0 < sum(hits) < 10)
        for world_size in (1, 2, 3, 4):
            for result in results(world_size):
                for samples in range(1, 11):
                    with self.subTest(world_size=world_size, samples=samples):
                        loss, accuracy, collectives = result["evaluate_cases"][f"{samples} samples"]
                        self.assertEqual(accuracy, sum(hits[:samples]) / samples)
                        self.assertAlmostEqual(loss, losses[:samples].mean().item(), places=6)
                        self.assertEqual(collectives, int(world_size > 1))

    def test_batch_norm_statistics_are_the_mean_of_the_ranks(self):
        for world_size, _, found in self.each("buffers"):
            self.equal(found["running mean"], torch.float32, *[(world_size - 1) / 2] * 2)


class TrainingTest(CollectivesTest):
    def test_ranks_stay_equal_and_do_what_one_process_does(self):
        """Case 16: also where the rows do not divide, and where a rank has none of its own."""
        alone = results(1)[0]["training_cases"]
        for world_size, _, found in self.each("training_cases"):
            first = results(world_size)[0]["training_cases"]
            self.assertEqual(len(found), 20)
            for name, (weight, losses) in found.items():
                self.assertTrue(torch.equal(weight, first[name][0]), name)
                expected, expected_losses = alone[f"{name.rsplit(' ', 1)[0]} {world_size}"]
                self.assertLess((weight - expected).abs().max().item(), 1e-6, name)
                for loss, expected_loss in zip(losses, expected_losses):
                    self.assertAlmostEqual(loss, expected_loss, places=6, msg=name)


class BroadcastTest(CollectivesTest):
    def test_every_rank_gets_what_rank_0_has(self):
        """As a checkpoint has it, in pieces: also sparse momenta, empty tensors, views and other types."""
        for _, _, found in self.each("broadcast_cases"):
            self.assertEqual(found["text"], {"name": "a", "numbers": [1, 2.5, None], "flag": True})
            self.assertEqual(found["tensors"][0].tolist(), [[0, 3], [1, 4], [2, 5]])
            self.assertEqual((found["tensors"][1].shape, found["tensors"][1].dtype), ((0, 3), torch.bfloat16))
            self.assertEqual(found["tensors"][2].item(), 7)
            self.assertEqual(found["tensors"][3].tolist(), [1j, 2])
            self.assertTrue(found["sparse"].is_sparse)
            self.assertEqual(found["sparse"].to_dense().tolist(), [[0, 0], [1.5, 2], [0, 0]])


class UnwrapTest(unittest.TestCase):
    def test_it_finds_the_users_module_through_any_nesting(self):
        model = nn.Linear(1, 1)
        model.module = nn.Linear(1, 1)  # an attribute of the user's own
        self.assertIs(common.unwrap(model), model)
        self.assertIs(common.unwrap(nn.DataParallel(nn.DataParallel(model))), model)
        self.assertIs(common.unwrap(torch.compile(nn.DataParallel(model))), model)
        self.assertIs(common.unwrap(nn.DataParallel(torch.compile(model))), model)
