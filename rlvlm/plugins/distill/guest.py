"""What this guest adds: the command `rlvlm distill`."""

from rlvlm.core.guests import Command, Guest

GUEST = Guest(
    about="trains a pocket judge on another judge's labels",
    docs="labels.md",
    commands={
        "distill": Command(
            call="rlvlm.plugins.distill.command:command",
            text="--from STORE --out DIR   train a pocket judge on another judge's labels",
            needs_train=True,
        )
    },
)
