#!/bin/bash
# DDP under Slurm without a launcher: one task per process, ranks from Slurm. From the project's folder:
#
#   sbatch slurm/srun.sh                                # one node; two: sbatch -N2 slurm/srun.sh --epochs 10
#   squeue --me; tail -f slurm-JOBID.out
#   scancel JOBID
#
# To make it yours, copy it and change the lines marked EDIT; --checkpoint_steps is how many steps may be lost. Options
# before its name are sbatch's and win over the lines below; those after it are ddp_launch.py's, and win as well.
#SBATCH --nodes=1             # EDIT
#SBATCH --ntasks-per-node=2   # EDIT: processes on each node, one per GPU
##SBATCH --gpus-per-node=2    # EDIT: take one # away; --gpus-per-task=1 works too
#SBATCH --cpus-per-task=4     # EDIT: cores of each process
#SBATCH --time=01:00:00       # EDIT: may be shorter than an epoch; before it is over, the job starts again
#SBATCH --requeue             # start again after preemption, or when a node has died
#SBATCH --open-mode=append    # a job that starts again keeps its log
#SBATCH --signal=B:USR1@90    # SIGUSR1 to this shell alone, 90 s or more before the time limit

# source .venv/bin/activate   # EDIT: makes `python` the one that has torch, if it is not already

# Where the tasks meet, ddp_launch.py finds out from the variables of the step.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK  # Slurm does not set it, and each task would take all cores it sees

trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
trap : TERM  # scancel sends it to the tasks as well: this shell outlives them, for their last lines

# srun hands down --cpus-per-task only if told so. One failed task ends all. --wait=0: srun waits for a node that has
# died until Slurm has noticed, and puts the job back into the queue; else the job would have failed by then. In the
# background, as bash runs traps only after a command in the foreground.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=0 \
  python ddp_launch.py --checkpoint "checkpoint-$SLURM_JOB_ID.pt" --checkpoint_steps 500 --resume "$@" &
while kill -0 $! 2> /dev/null; do wait $!; done  # a signal ends `wait` early
wait $!
code=$?
# Where Slurm gives a time of grace, preemption ends the step first, and the job would count as failed.
if [ $code != 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code  # srun's, which becomes the job's
