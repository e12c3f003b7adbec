#!/bin/bash
# DDP under Slurm without another launcher: each process is a task, whose ranks Slurm sets. In the project's folder:
#
#   sbatch slurm/srun.sh                                # one node; two: sbatch -N2 slurm/srun.sh --epochs 10
#   squeue --me; tail -f slurm-JOBID.out
#   scancel JOBID
#
# Copy it, and change the lines marked EDIT. At most --checkpoint_steps steps are lost. Options before the script's name
# go to sbatch, options after it to ddp_launch.py; both override the lines below.
#SBATCH --nodes=1             # EDIT
#SBATCH --ntasks-per-node=2   # EDIT: processes on each node, one per GPU
##SBATCH --gpus-per-node=2    # EDIT: take one # away; --gpus-per-task=1 works too
#SBATCH --cpus-per-task=4     # EDIT: cores of each process
#SBATCH --time=01:00:00       # EDIT: may be shorter than an epoch; before this limit, the job is requeued
#SBATCH --requeue             # start again after preemption, or after a node has failed
#SBATCH --open-mode=append    # a job that starts again keeps its log
#SBATCH --signal=B:USR1@90    # SIGUSR1 to this shell alone, 90 s or more before the time limit

# source .venv/bin/activate   # EDIT: makes `python` the one that has torch, if it is not already

# ddp_launch.py takes the ranks, address and port from the step's variables.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK  # Slurm does not set it; without it, each task uses all cores it sees

trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
trap : TERM  # scancel sends it to the tasks too; this shell outlives them, so that their last lines are logged

# srun does not inherit --cpus-per-task. One failed task ends all. With --wait=0, srun waits until Slurm notices a node
# that has failed, and requeues the job; otherwise the job would have failed by then. srun runs in the background,
# because bash runs a trap only after the command in the foreground has ended.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=0 \
  python ddp_launch.py --checkpoint "checkpoint-$SLURM_JOB_ID.pt" --checkpoint_steps 500 --resume "$@" &
while kill -0 $! 2> /dev/null; do wait $!; done  # a signal ends `wait` early
wait $!
code=$?
# If Slurm grants a grace time, preemption ends the step first, and the job would count as failed.
if [ $code != 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code  # srun's exit code becomes the job's
