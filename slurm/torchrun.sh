#!/bin/bash
# DDP under Slurm with one torchrun per node, which starts the processes of that node. In the project's folder:
#
#   sbatch slurm/torchrun.sh                            # one node; two: sbatch -N2 slurm/torchrun.sh --epochs 10
#   squeue --me; tail -f slurm-JOBID.out
#   scancel JOBID
#
# Copy it, and change the lines marked EDIT. At most --checkpoint_steps steps are lost. Options before the script's name
# go to sbatch, options after it to ddp_launch.py; both override the lines below.
#SBATCH --nodes=1             # EDIT
#SBATCH --ntasks-per-node=1   # one torchrun
##SBATCH --gpus-per-node=2    # EDIT: take one # away
#SBATCH --cpus-per-task=8     # EDIT: cores of all processes of a node
#SBATCH --time=01:00:00       # EDIT: may be shorter than an epoch; before this limit, the job is requeued
#SBATCH --requeue             # start again after preemption, or after a node has failed
#SBATCH --open-mode=append    # a job that starts again keeps its log
#SBATCH --signal=B:USR1@90    # SIGUSR1 to this shell alone, 90 s or more before the time limit

# source .venv/bin/activate   # EDIT: makes `torchrun` the one of the Python that has torch, if it is not already
processes=${SLURM_GPUS_ON_NODE:-2}  # EDIT: processes on each node; without GPUs, two

# All nodes need the same address and port. The port depends on the job's number, as jobs may share a node.
master_addr=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
master_port=$((15000 + SLURM_JOB_ID % 15000))
threads=$((SLURM_CPUS_PER_TASK / processes))  # torchrun's default is one thread
export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))

trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
trap : TERM  # scancel sends it to torchrun too; this shell outlives it, so that its last lines are logged

# srun does not inherit --cpus-per-task. One failed node ends all. With --wait=0, srun waits until Slurm notices a node
# that has failed, and requeues the job; otherwise the job would have failed by then. srun runs in the background,
# because bash runs a trap only after the command in the foreground has ended. `exec` makes torchrun the process that
# Slurm signals; torchrun passes signals on.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=0 \
  bash -c 'exec torchrun --node_rank="$SLURM_NODEID" "$@"' torchrun \
  --nnodes="$SLURM_NNODES" --nproc_per_node="$processes" --master_addr="$master_addr" --master_port="$master_port" \
  ddp_launch.py --checkpoint "checkpoint-$SLURM_JOB_ID.pt" --checkpoint_steps 500 --resume "$@" &
while kill -0 $! 2> /dev/null; do wait $!; done  # a signal ends `wait` early
wait $!
code=$?
# If Slurm grants a grace time, preemption ends the step first, and the job would count as failed.
if [ $code != 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code  # srun's exit code becomes the job's
