"""nn.DataParallel: one process splits each batch over the GPUs of a machine. Easy, and slow: the first one sums up.

    python dp_example.py                # who gets which part of a batch, as in the notes
    python dp_example.py --epochs 2     # trains what the two DDP scripts train
"""
import os
from argparse import Namespace

import common
import runtime
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class RandomDataset(Dataset):
    """`length` random vectors of `size` numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)


class Model(nn.Module):
    """One linear layer that tells what it gets: with several GPUs, each has a copy, and a part of the batch."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, input: Tensor) -> Tensor:
        output = self.fc(input)
        print("\tIn Model: input size", input.size(), "output size", output.size())
        return output


def demonstrate(args: Namespace) -> None:
    """Print what goes into the model, and what into its copies."""
    device = torch.device("cuda:0" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and args.device == "cuda":
        raise common.UsageError("--device cuda: 0 GPU(s) here; use --device cpu")
    loader = DataLoader(RandomDataset(args.input_size, args.data_size), batch_size=args.batch_size, shuffle=True)
    model = Model(args.input_size, args.output_size)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        print("Let's use", torch.cuda.device_count(), "GPUs!")
        model = nn.DataParallel(model)  # splits a batch of 30 along dimension 0: 10 each for three GPUs
    model.to(device)
    for data in loader:
        inputs = data.to(device)
        output = model(inputs)
        print("Outside: input size", inputs.size(), "output_size", output.size())


def train(args: Namespace) -> None:
    """What ddp_spawn.py and ddp_launch.py do, without what several processes need."""
    train_data, valid_data, test_data = data = common.load_data(args)
    device, _, _ = runtime.roll_call(None, None, 0, args, data)
    common.seed(args.seed)
    model = common.build_model(args, train_data).to(device)
    if args.precision != "fp32":
        model = common.Autocast(model, args.precision)
    model = nn.DataParallel(model)  # called like the module; the first GPU has the weights, copies last for one forward
    # One process has the whole data. This sampler gives it in the order that all ranks of a DDP run have together.
    sampler = DistributedSampler(train_data, num_replicas=1, rank=0, seed=args.seed)
    train_loader = common.make_loader(train_data, sampler, args, device, drop_last=args.drop_last)
    valid_loader = common.make_loader(valid_data, range(len(valid_data)), args, device)
    test_loader = common.make_loader(test_data, range(len(test_data)), args, device)
    state = runtime.TrainState(model, args, data)
    runtime.start_or_resume(args, state, train_loader)
    for epoch in range(state.epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch in runtime.batches(train_loader, state, args):
            outputs = model(batch.inputs)  # split over the GPUs, computed there, and gathered on the first
            losses = common.losses(outputs, batch.targets)  # [batch], one for each sample
            batch.record(losses)
            loss = (losses * batch.weights).sum()  # the mean over all samples of the step
            loss.backward()  # back through the copies: the first GPU gets the sum of their gradients
            if batch.ends_step:
                state.optimizer_step()
                state.optimizer.zero_grad()  # or the next step's gradients are added to these
        figures = state.end_training()
        valid_loss, valid_score = common.evaluate(model, valid_loader)
        state.end_epoch(figures, valid_loss, valid_score)
        state.save(args.checkpoint)
        runtime.log(args, state)
    common.load_weights(model, state.best_model)
    test_loss, test_score = common.evaluate(model, test_loader)
    runtime.log(args, state, test_loss, test_score)


def main() -> None:
    parser = runtime.make_parser(__doc__, ddp=False)
    parser.set_defaults(batch_size=30, epochs=None)
    group = parser.add_argument_group("without --epochs: who gets which part of a batch")
    runtime.add_option(group, "--input_size", type=runtime.COUNT, default=5, help="numbers per random vector")
    runtime.add_option(group, "--output_size", type=runtime.COUNT, default=2, help="outputs of the model")
    runtime.add_option(group, "--data_size", type=runtime.COUNT, default=100, help="random vectors")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DataParallel takes every GPU that it sees
    if runtime.find_launcher():
        raise common.UsageError("dp_example.py is one process: start it with python; ddp_launch.py is for launchers")
    if args.epochs is not None:
        train(args)
    elif args.checkpoint or args.resume or args.metrics or args.download or args.dataset != "synthetic":
        raise common.UsageError("training starts with --epochs N; without it, only random vectors are passed through")
    else:
        demonstrate(args)


if __name__ == "__main__":
    runtime.end_on_signals()
    runtime.run(main)
