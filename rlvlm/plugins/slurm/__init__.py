"""Runs and sweeps as SLURM jobs: the command that submits them, and the Ray of a job's nodes."""
