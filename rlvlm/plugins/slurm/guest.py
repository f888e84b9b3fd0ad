"""What this guest adds: the command `rlvlm slurm`."""

from rlvlm.core.guests import Command, Guest

GUEST = Guest(
    about="runs and sweeps as SLURM jobs that save, requeue themselves and resume",
    docs="cluster.md",
    commands={
        "slurm": Command(
            call="rlvlm.plugins.slurm.command:command",
            text="TASK [options] [-- run options]   the same run as a SLURM job",
            needs_train=True,
        )
    },
)
