"""DistributedDataParallel, processes started by a launcher: torchrun, torch.distributed.launch, or Slurm's srun.

    python ddp_launch.py                                         # one process, without a launcher or a process group
    torchrun --nproc_per_node=2 ddp_launch.py                    # two processes on this machine
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=2 --master_addr=HOST --master_port=PORT ddp_launch.py
                                                                 # first of two machines; on the other --node_rank=1
    python -m torch.distributed.launch --nproc_per_node=2 ddp_launch.py                      # torchrun's predecessor
    srun --nodes=2 --ntasks-per-node=2 python ddp_launch.py      # Slurm starts every process

`grep -n 'DDP [0-9]' ddp_launch.py` prints the recipe; `diff ddp_spawn.py ddp_launch.py`, what the launch changes.
"""
import os
import re
import signal
import sys
from argparse import Namespace
from datetime import timedelta

if __name__ in ("__main__", "__mp_main__"):  # Ctrl-C ends every process at once, without tracebacks; files stay whole
    signal.signal(signal.SIGINT, signal.SIG_DFL)
import common  # before torch: see there
import tools
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler


def launched_ranks(args: Namespace) -> tuple:
    """(rank, local_rank, world_size, local_world_size) from a launcher's variables; () without one."""
    env = os.environ
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            local = int(env.get("LOCAL_RANK", args.local_rank))
            ranks = int(env["RANK"]), local, int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", local + 1))
        # The variables of a step. A job has SLURM_NTASKS too, but what is started in it without srun is alone.
        elif int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            # "2(x3),1" is 2, 2, 2, 1; the list "rack[1-2]n[07-09,12],x" begins with rack1n07.
            per_node = re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"])
            per_node = [int(tasks) for tasks, times in per_node for _ in range(int(times or 1))]
            ranks = (int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), int(env["SLURM_STEP_NUM_TASKS"]),
                     per_node[int(env["SLURM_NODEID"])])
            env.setdefault("MASTER_ADDR", re.sub(r"\[(\d+)[^]]*\]|,.*", r"\1", env["SLURM_STEP_NODELIST"]))
            env.setdefault("MASTER_PORT", str(15000 + int(env["SLURM_JOB_ID"]) % 15000))
        else:
            return ()
        port_fits = env["MASTER_ADDR"] and 0 < int(env["MASTER_PORT"]) < 65536
        if not port_fits or not 0 <= ranks[0] < ranks[2] or not 0 <= ranks[1] < ranks[3]:
            raise ValueError(f"rank {ranks[0]} of {ranks[2]}, local rank {ranks[1]} of {ranks[3]}")
        return ranks
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise common.UsageError("the launcher's variables RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
                                f"do not fit together ({error!r}): unset them, or start with torchrun") from None


def worker(ranks: tuple, args: Namespace) -> None:
    """The process that this is: one of several, or without `ranks` the only one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        tools.end_with(common.PARENT)
    # DDP 1: which of all processes this is, which of its node's, and how many there are.
    rank, local_rank, world_size, local_world_size = ranks or (0, args.local_rank or 0, 1, 1)
    # DDP 2: the device by local rank; the rank would name a GPU that a second node does not have.
    device, backend = common.pick_device(args, local_rank, local_world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    data = common.load_data(args)
    if rank == 0:
        common.check_files(args, data)
    # DDP 3: join the others, through the address and port that the launcher has put into the environment.
    timeout = timedelta(seconds=args.timeout)
    if ranks:
        with tools.joining(rank, world_size, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], args.timeout):
            store = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))[0]
            if world_size == local_world_size:  # one that torchrun restarts must not find what the last one left there
                store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), store)
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
    parser.add_argument("--local_rank", type=common.COUNT_OR_NONE, metavar="N", help="without LOCAL_RANK (default: 0)")
    parser.add_argument("--multi_gpu", action="store_true", help="refuse to start without a launcher (default: off)")
    args = parser.parse_args()
    ranks = launched_ranks(args)
    if args.multi_gpu and not ranks:
        raise common.UsageError("--multi_gpu needs torchrun --nproc_per_node=2 ddp_launch.py --multi_gpu, for instance")
    worker(ranks, args)


if __name__ == "__main__":
    record(common.run)(main)  # leaves the traceback for torchrun, to print it last
