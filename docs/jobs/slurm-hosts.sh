#!/bin/bash
# The same for Horovod and MPI (TensorFlow, MXNet, Theano, CNTK): sbatch slurm-hosts.sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
set -eu

source "$HOME/venv/bin/activate"
# node1:4,node2:4; the nodes reach each other by ssh.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/:4/' | paste -sd,)
python -m compat run --hosts "$hosts" train.py
