"""What this guest adds: `rlvlm labels import --form pkl`."""

from rlvlm.core.guests import Command, Guest

GUEST = Guest(
    about="imports label files of the reference implementation",
    docs="labels.md",
    imports={
        "pkl": Command(
            call="rlvlm.plugins.pickles.command:command",
            text="Import the reference implementation's pickled label files into a store, without executing them.",
        )
    },
)
