"""nn.DataParallel: one process splits each batch over the GPUs of one node. Easy but slow: GPU 0 sums all gradients.

    python dp_example.py                # shows how a batch is split, as in the notes
    python dp_example.py --epochs 2     # trains the task of the two DDP scripts
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
    """One linear layer that prints its sizes. With several GPUs, each has a copy of it, and gets part of the batch."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, input: Tensor) -> Tensor:
        output = self.fc(input)
        print("\tIn Model: input size", input.size(), "output size", output.size())
        return output


def demonstrate(args: Namespace) -> None:
    """Print the sizes of each batch outside the model, and inside each of its copies."""
    device = torch.device("cuda:0" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and args.device == "cuda":
        raise common.UsageError("--device cuda: 0 GPU(s) here; use --device cpu")
    loader = DataLoader(RandomDataset(args.input_size, args.data_size), batch_size=args.batch_size, shuffle=True)
    model = Model(args.input_size, args.output_size)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        print("Let's use", torch.cuda.device_count(), "GPUs!")
        model = nn.DataParallel(model)  # splits a batch of 30 along dimension 0: three GPUs get 10 rows each
    model.to(device)
    for data in loader:
        inputs = data.to(device)
        output = model(inputs)
        print("Outside: input size", inputs.size(), "output_size", output.size())


def train(args: Namespace) -> None:
    """Train as ddp_spawn.py and ddp_launch.py do, in one process."""
    train_data, valid_data, test_data = data = common.load_data(args)
    device, _, _ = runtime.roll_call(None, None, 0, args, data)
    common.seed(args.seed)
    model = common.build_model(args, train_data).to(device)
    if args.precision != "fp32":
        model = common.Autocast(model, args.precision)
    model = nn.DataParallel(model)  # GPU 0 keeps the weights; each forward copies them to the other GPUs
    # One process reads the whole data set, in the same order as all ranks of a DDP run together.
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
            outputs = model(batch.inputs)  # splits the batch over the GPUs, and gathers the outputs on GPU 0
            losses = common.losses(outputs, batch.targets)  # [batch], one for each sample
            batch.record(losses)
            loss = (losses * batch.weights).sum()  # the mean over all samples of the step
            loss.backward()  # goes back through the copies, and sums their gradients on GPU 0
            if batch.ends_step:
                state.optimizer_step()
                state.optimizer.zero_grad()  # otherwise the next step adds its gradients to these
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
    group = parser.add_argument_group("without --epochs: show how a batch is split")
    runtime.add_option(group, "--input_size", type=runtime.COUNT, default=5, help="numbers per random vector")
    runtime.add_option(group, "--output_size", type=runtime.COUNT, default=2, help="outputs of the model")
    runtime.add_option(group, "--data_size", type=runtime.COUNT, default=100, help="number of random vectors")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DataParallel uses every visible GPU
    if runtime.find_launcher():
        raise common.UsageError("dp_example.py is one process: start it with python; for a launcher, use ddp_launch.py")
    if args.epochs is not None:
        train(args)
    elif args.checkpoint or args.resume or args.metrics or args.download or args.dataset != "synthetic":
        raise common.UsageError("options of data and files need training: add --epochs N, or leave them out")
    else:
        demonstrate(args)


if __name__ == "__main__":
    runtime.end_on_signals()
    runtime.run(main)
