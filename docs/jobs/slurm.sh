#!/bin/bash
# Two nodes with four GPUs each, one rank for each GPU: sbatch slurm.sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
set -eu

source "$HOME/venv/bin/activate"
# One task fails, and all end.
srun --kill-on-bad-exit=1 python train.py
