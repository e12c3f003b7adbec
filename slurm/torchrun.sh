#!/bin/bash
# DDP under Slurm with one torchrun per node, which starts the processes of that node. From the project's folder:
#
#   sbatch slurm/torchrun.sh                            # one node; two: sbatch -N2 slurm/torchrun.sh --epochs 10
#   squeue --me; tail -f slurm-JOBID.out
#   scancel JOBID
#
# To make it yours, copy it and change the lines marked EDIT; --checkpoint_steps is how many steps may be lost. Options
# before its name are sbatch's and win over the lines below; those after it are ddp_launch.py's, and win as well.
#SBATCH --nodes=1             # EDIT
#SBATCH --ntasks-per-node=1   # one torchrun
##SBATCH --gpus-per-node=2    # EDIT: take one # away
#SBATCH --cpus-per-task=8     # EDIT: cores of all processes of a node
#SBATCH --time=01:00:00       # EDIT: may be shorter than an epoch; before it is over, the job starts again
#SBATCH --requeue             # start again after preemption, or when a node has died
#SBATCH --open-mode=append    # a job that starts again keeps its log
#SBATCH --signal=B:USR1@90    # SIGUSR1 to this shell alone, 90 s or more before the time limit

# source .venv/bin/activate   # EDIT: makes `torchrun` the one of the Python that has torch, if it is not already
processes=${SLURM_GPUS_ON_NODE:-2}  # EDIT: on each node; without GPUs two

# All nodes must agree on where they meet. Jobs that share a node have different ports, by their numbers.
master_addr=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
master_port=$((15000 + SLURM_JOB_ID % 15000))
threads=$((SLURM_CPUS_PER_TASK / processes))  # torchrun's own choice would be one
export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))

trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
trap : TERM  # scancel sends it to torchrun as well: this shell outlives it, for its last lines

# srun hands down --cpus-per-task only if told so. One failed node ends all. --wait=0: srun waits for a node that has
# died until Slurm has noticed, and puts the job back into the queue; else the job would have failed by then. In the
# background, as bash runs traps only after a command in the foreground. `exec`, as Slurm signals only the process
# that it has started: torchrun, which passes it on.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=0 \
  bash -c 'exec torchrun --node_rank="$SLURM_NODEID" "$@"' torchrun \
  --nnodes="$SLURM_NNODES" --nproc_per_node="$processes" --master_addr="$master_addr" --master_port="$master_port" \
  ddp_launch.py --checkpoint "checkpoint-$SLURM_JOB_ID.pt" --checkpoint_steps 500 --resume "$@" &
while kill -0 $! 2> /dev/null; do wait $!; done  # a signal ends `wait` early
wait $!
code=$?
# Where Slurm gives a time of grace, preemption ends the step first, and the job would count as failed.
if [ $code != 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code  # srun's, which becomes the job's
