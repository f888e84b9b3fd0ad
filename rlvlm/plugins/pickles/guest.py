"""What this guest adds: `rlvlm labels import`."""

from rlvlm.core.guests import Command, Guest

GUEST = Guest(
    about="imports label files of the reference implementation",
    docs="labels.md",
    commands={
        "labels import": Command(
            call="rlvlm.plugins.pickles.command:command",
            text="Import the reference implementation's pickled label files into a store, without executing them.",
        )
    },
)
