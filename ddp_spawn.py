"""DistributedDataParallel, processes started by torch.multiprocessing.spawn: nothing but Python is needed.

    python ddp_spawn.py -n 1 -g 2                                # two processes on this machine
    python ddp_spawn.py -n 2 -g 2 -nr 0 --master_addr HOST --master_port PORT
                                                                 # first of two machines; on the other -nr 1

`grep -n 'DDP [0-9]' ddp_spawn.py` prints the recipe; `diff ddp_spawn.py ddp_launch.py`, what the launch changes.
"""
import os
import signal
import socket
import sys
from argparse import Namespace
from datetime import timedelta

if __name__ in ("__main__", "__mp_main__"):  # Ctrl-C ends every process at once, without tracebacks; files stay whole
    signal.signal(signal.SIGINT, signal.SIG_DFL)
import common  # before torch: see there
import tools
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler


def worker(local_rank: int, args: Namespace, address: str, port: int) -> None:
    """Process number `local_rank` of this node."""
    tools.end_with(mp.parent_process().pid)
    # DDP 1: which of all processes this is, which of its node's, and how many there are.
    rank, world_size, local_world_size = args.nr * args.gpus + local_rank, args.nodes * args.gpus, args.gpus
    # DDP 2: the device by local rank; the rank would name a GPU that a second node does not have.
    device, backend = common.pick_device(args, local_rank, local_world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    data = common.load_data(args)
    # DDP 3: join the others, through the store that node 0's parent process keeps at this address and port.
    timeout = timedelta(seconds=args.timeout)
    with tools.joining(rank, world_size, address, port, args.timeout):
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        (tools.check if args.check else train)(rank, local_rank, world_size, device, data, args)
    finally:
        leave(args.timeout)


def train(rank: int, local_rank: int, world_size: int, device: torch.device, data: tuple, args: Namespace) -> None:
    """What every process does, each with its own part of the data."""
    is_main = rank == 0  # of the whole world: on several nodes, each has a local rank 0
    tools.report_processes(local_rank, device, args)
    train_data, valid_data, test_data = data

    # DDP 4: the same seed, so all ranks begin with the same weights; the wrapper averages gradients in backward.
    torch.manual_seed(args.seed)
    model = common.build_model(args, train_data).to(device)
    if args.compile:  # inside the wrapper, which then still is what no_sync and unwrap look for
        model = torch.compile(model)
    if dist.is_initialized() and args.grad_sync == "ddp":
        model = DDP(model, device_ids=[device] if device.type == "cuda" else None, **common.NO_BUFFER_SYNC)

    # DDP 5: each rank trains on its own shard. Padded to equal length, as ranks must take equally many steps.
    sampler = DistributedSampler(train_data, num_replicas=world_size, rank=rank, seed=args.seed)
    train_loader = common.make_loader(train_data, sampler, args, device)
    # Evaluation needs no equal steps: shards without padding, so that no sample counts twice.
    valid_loader = common.make_loader(valid_data, range(rank, len(valid_data), world_size), args, device)
    test_loader = common.make_loader(test_data, range(rank, len(test_data), world_size), args, device)

    state = common.TrainState(model, args, len(train_loader))
    if args.resume:
        common.resume(args, state, train_loader)
    for epoch in range(state.epoch, args.epochs):
        sampler.set_epoch(epoch)  # DDP 6: without it, every epoch has the same order
        # Other random numbers (dropout) on each rank, and such as a resumed run will have again.
        torch.manual_seed(args.seed + 1 + epoch * world_size + rank)
        figures = common.train_one_epoch(model, train_loader, state, args)
        # DDP 7: BatchNorm's statistics, which each rank has from its own shard, are averaged; losses and hits, summed.
        common.average_buffers(model)
        state.end_epoch(figures, *common.evaluate(model, valid_loader))
        if is_main:  # DDP 8: one process prints and writes
            common.log(args, state)
            state.save(args.checkpoint)

    if state.best_model:
        common.unwrap(model).load_state_dict(state.best_model)
    test_loss, test_accuracy = common.evaluate(model, test_loader)
    if is_main:
        common.log(args, state, test_loss, test_accuracy)


def leave(timeout: float) -> None:
    """End the process group; to be called when `train` has returned or failed."""
    # DDP 9: leave, when nothing else holds the group, or its threads go on, and may abort the interpreter at its end.
    # The DDP wrapper holds it, and is itself held: by cycles, until the collector comes, and by a traceback's frames.
    tools.drop_references()
    if dist.is_initialized():
        dist.destroy_process_group()
    tools.let_the_first_speak(sys.exc_info()[1], timeout)


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("-n", "--nodes", type=common.COUNT, default=1, metavar="N",
                        help="machines")
    parser.add_argument("-g", "--gpus", type=common.COUNT, default=1, metavar="N",
                        help="processes on each machine, one per GPU where there are GPUs")
    parser.add_argument("-nr", "--nr", type=common.COUNT_OR_NONE, default=0, metavar="N",
                        help="node rank: the number of this machine, from 0")
    parser.add_argument("--master_addr", metavar="HOST",
                        help="address of machine 0 (default: MASTER_ADDR; not needed for one machine)")
    parser.add_argument("--master_port", metavar="PORT", type=common.number(int, 1, 65535),
                        help="a port that is free there (default: MASTER_PORT; for one machine any free port)")
    args = parser.parse_args()
    if args.nr >= args.nodes:
        raise common.UsageError(f"-nr {args.nr}: with -n {args.nodes} the node rank is one of 0 to {args.nodes - 1}")
    address, port = "127.0.0.1", args.master_port or 0
    if args.nodes > 1:
        address, exported = args.master_addr or os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        port = port or int(exported if exported.isdecimal() else 0)
        if not address or not port:
            raise common.UsageError(f"-n {args.nodes} needs --master_addr and --master_port (or MASTER_ADDR and "
                                    "MASTER_PORT): where machine 0 is, and a port that is free there")
    common.pick_device(args, 0, args.gpus)
    data = common.load_data(args)  # here only to find mistakes before anything starts; each process reads its own
    if args.nr == 0:
        common.check_files(args, data)
        # One process binds the port and keeps it. With port 0 the system picks a free one, which nobody can take
        # between the picking and the binding.
        try:
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                                  timeout=timedelta(seconds=args.timeout))
        except RuntimeError as error:
            raise common.UsageError(f"port {port} cannot be had, probably because it is taken: choose another "
                                    f"--master_port ({str(error).splitlines()[0]})") from None
        port = store.port
    del data
    if args.gpus > 1:  # share out the cores, or each process takes all of them; torchrun gives each one thread
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.gpus)))
    try:
        mp.spawn(worker, args=(args, address, port), nprocs=args.gpus)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:  # has the traceback of the rank in its text
        rank, host = args.nr * args.gpus + error.error_index, socket.gethostname()
        sys.exit(f"ddp_spawn.py: error: rank {rank} of {args.nodes * args.gpus} on host {host} failed: {error}")


if __name__ == "__main__":
    common.run(main)
