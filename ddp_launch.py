"""DistributedDataParallel with processes that a launcher starts: torchrun, torch.distributed.launch, mpirun or srun.

    python ddp_launch.py                                         # one process, without a launcher or a process group
    torchrun --nproc_per_node=2 ddp_launch.py                    # two processes on this node
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=2 --master_addr=HOST --master_port=PORT ddp_launch.py
    python -m torch.distributed.launch --nproc_per_node=2 ddp_launch.py                      # torchrun's predecessor
    mpirun -np 2 python ddp_launch.py
    srun --nodes=2 --ntasks-per-node=2 python ddp_launch.py

`grep -n 'DDP [0-9]' ddp_launch.py` prints the recipe; `diff ddp_spawn.py ddp_launch.py` shows what a launcher changes.
"""
import contextlib
import os
from argparse import Namespace

import common
import runtime
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler


def worker(args: Namespace) -> None:
    """The main function of this process: one of several that a launcher has started, or the only one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        common.end_with(runtime.PARENT)  # end when torchrun ends
    # DDP 1: each process has a rank among all world_size processes, and a local_rank among those of its node.
    launched = runtime.launched_ranks(args)
    rank, local_rank, world_size, _ = launched or (0, args.local_rank or 0, 1, 1)
    if args.multi_gpu and not launched:
        raise common.UsageError("--multi_gpu needs a launcher: torchrun --nproc_per_node=2 ddp_launch.py --multi_gpu")
    data = common.load_data(args)
    # DDP 2: join the other processes in a store at the address and port that the launcher has set.
    if launched:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with runtime.Joining(rank, world_size, address, port, args.timeout) as joining:
            store = runtime.launched_store(launched, address, port, args.timeout)
            # DDP 3: local_rank, not rank, chooses the device: on the second node of two, rank 2 must use cuda:0.
            device, backend, problems = runtime.roll_call(joining, store, local_rank, args, data)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=joining.limit)
            dist.all_reduce(torch.zeros(1, device=device))  # connects nccl now, within the time limit
    else:
        device, _, problems = runtime.roll_call(None, None, local_rank, args, data)
    try:
        if args.check:
            runtime.check(rank, world_size, device, problems)
        else:
            train(rank, world_size, device, data, args)
    finally:
        leave()


def train(rank: int, world_size: int, device: torch.device, data: tuple, args: Namespace) -> None:
    """Train on this rank's shard, evaluate after each epoch, and test the weights of the best one."""
    is_main = rank == 0  # DDP 4: only rank 0 prints and writes files; every node has a local_rank 0
    train_data, valid_data, test_data = data
    # DDP 5: build the model from the same seed on all ranks, so that they begin with equal weights; wrap it in DDP.
    common.seed(args.seed)
    model = common.build_model(args, train_data).to(device)
    if args.precision != "fp32":
        model = common.Autocast(model, args.precision)
    if args.compile:  # compile first, then wrap: DDP stays outermost
        model = torch.compile(model)
    if dist.is_initialized() and args.grad_sync == "ddp":
        # BatchNorm's statistics need no broadcast in each step, because they are averaged once per epoch. Gradients
        # that are views of the buckets which DDP sends save a copy.
        model = DDP(model, device_ids=[device] if device.type == "cuda" else None, broadcast_buffers=False,
                    gradient_as_bucket_view=True)
    # DDP 6: the sampler gives each rank its own shard, padded to equal length: all ranks need equally many steps.
    sampler = DistributedSampler(train_data, num_replicas=world_size, rank=rank, seed=args.seed)
    train_loader = common.make_loader(train_data, sampler, args, device, drop_last=args.drop_last)
    # In evaluation, ranks may take different numbers of steps. Its shards have no padding: no sample counts twice.
    valid_loader = common.make_loader(valid_data, range(rank, len(valid_data), world_size), args, device)
    test_loader = common.make_loader(test_data, range(rank, len(test_data), world_size), args, device)
    state = runtime.TrainState(model, args, data)
    runtime.start_or_resume(args, state, train_loader)
    for epoch in range(state.epoch, args.epochs):
        sampler.set_epoch(epoch)  # DDP 7: shuffle anew; without this, every epoch has the same order
        figures = train_one_epoch(model, train_loader, state, args)
        valid_loss, valid_score = common.evaluate(model, valid_loader)
        state.end_epoch(figures, valid_loss, valid_score)
        if is_main:
            state.save(args.checkpoint)
            runtime.log(args, state)
    common.load_weights(model, state.best_model)
    test_loss, test_score = common.evaluate(model, test_loader)
    if is_main:
        runtime.log(args, state, test_loss, test_score)


def train_one_epoch(model: torch.nn.Module, loader: object, state: runtime.TrainState, args: Namespace) -> dict:
    """Train for one epoch on this rank's shard; return the figures (loss, speed) over all ranks."""
    no_sync = model.no_sync if isinstance(model, DDP) else contextlib.nullcontext
    model.train()
    for batch in runtime.batches(loader, state, args):
        # DDP 8: backward averages the gradients over all ranks, but only in the last micro-batch of a step.
        with contextlib.nullcontext() if batch.ends_step else no_sync():
            outputs = model(batch.inputs)
            losses = common.losses(outputs, batch.targets)  # [batch], one for each sample
            batch.record(losses)
            loss = (losses * batch.weights).sum()  # its mean over the ranks is the mean over the step's samples
            loss.backward()
        if batch.ends_step:
            if args.grad_sync == "manual":
                common.average_gradients(model)  # after backward; before it, it would average the previous step's
            state.optimizer_step()
            state.optimizer.zero_grad()  # otherwise the next step adds its gradients to these
    return state.end_training()  # one all-reduce sums the losses, and averages BatchNorm's statistics


def leave() -> None:
    """End the process group, after `train` has returned or failed."""
    # DDP 9: drop all references to the process group, then destroy it; otherwise its threads may abort at exit.
    runtime.drop_references()
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = runtime.make_parser(__doc__)
    group = parser.add_argument_group("launcher")
    runtime.add_option(group, "--local_rank", type=runtime.COUNT_OR_NONE, help="local rank if LOCAL_RANK is not set")
    runtime.add_option(group, "--multi_gpu", action="store_true", help="refuse to start without a launcher")
    worker(parser.parse_args())


if __name__ == "__main__":
    runtime.end_on_signals()
    record(runtime.run)(main)  # hands the traceback to torchrun, which prints it last
