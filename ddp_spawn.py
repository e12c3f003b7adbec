"""DistributedDataParallel with processes that torch.multiprocessing.spawn starts. It needs no launcher.

    python ddp_spawn.py -n 1 -g 2                                # two processes on this node
    python ddp_spawn.py -n 2 -g 2 -nr 0 --master_addr HOST --master_port PORT     # node 0 of two; on the other, -nr 1

`grep -n 'DDP [0-9]' ddp_spawn.py` prints the recipe; `diff ddp_spawn.py ddp_launch.py` shows what a launcher changes.
"""
import contextlib
import logging
import os
import sys
from argparse import Namespace

import common
import runtime
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler


def worker(local_rank: int, args: Namespace, address: str, port: int) -> None:
    """The main function of process `local_rank` of this node."""
    runtime.end_on_signals()
    common.end_with(mp.parent_process().pid)  # end when the parent process ends
    # DDP 1: each process has a rank among all world_size processes, and a local_rank among those of its node.
    rank, world_size = args.nr * args.gpus + local_rank, args.nodes * args.gpus
    with runtime.errors_in_one_line(local_rank):
        data = common.load_data(args)
        # DDP 2: join the other processes in a store at this address and port, which node 0's parent process hosts.
        with runtime.Joining(rank, world_size, address, port, args.timeout) as joining:
            store = runtime.make_store(address, port, args.timeout, is_master=False)
            # DDP 3: local_rank, not rank, chooses the device: on the second node of two, rank 2 must use cuda:0.
            device, backend, problems = runtime.roll_call(joining, store, local_rank, args, data)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=joining.limit)
            dist.all_reduce(torch.zeros(1, device=device))  # connects nccl now, within the time limit
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
    group = parser.add_argument_group("nodes")
    runtime.add_option(group, "-n", "--nodes", type=runtime.COUNT, default=1, help="number of nodes")
    runtime.add_option(group, "-g", "--gpus", type=runtime.COUNT, default=1, help="processes per node, one per GPU")
    runtime.add_option(group, "-nr", "--nr", type=runtime.COUNT_OR_NONE, default=0, help="rank of this node")
    runtime.add_option(group, "--master_addr", metavar="HOST", help="address of node 0 (default: MASTER_ADDR)")
    runtime.add_option(group, "--master_port", type=runtime.number(int, 1, 65535), help="port (default: MASTER_PORT)")
    args = parser.parse_args()
    if args.nodes == 1 and runtime.find_launcher():
        raise common.UsageError("ddp_spawn.py starts its own processes: start it with python, or use ddp_launch.py")
    address, port = runtime.address_of_node_0(args)
    # Find mistakes before any process starts. (Each process loads the data itself.)
    own = runtime.describe(args.nr * args.gpus, 0, args.nodes * args.gpus, args, common.load_data(args))
    runtime.assign_devices([{**own, "rank": own["rank"] + i, "local_rank": i} for i in range(args.gpus)])
    if args.nr == 0:
        store = runtime.make_store(address, port, args.timeout, is_master=True)  # this process hosts it for all ranks
        port = store.port
    # Divide the cores among the processes; otherwise each uses all. (torchrun gives each process one thread.)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.gpus)))
    logging.getLogger("torch.multiprocessing.spawn").setLevel("ERROR")  # a failed rank reports its own error
    try:
        mp.spawn(worker, args=(args, address, port), nprocs=args.gpus)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:  # its text has the rank's traceback
        if getattr(error, "exit_code", None) in (1, 2):  # the rank has printed its one-line error
            sys.exit(error.exit_code)
        rank, host = own["rank"] + error.error_index, own["host"]
        sys.exit(f"ddp_spawn.py: error: rank {rank} of {args.nodes * args.gpus} on host {host} failed: {error}")


if __name__ == "__main__":
    runtime.end_on_signals()
    runtime.run(main)
