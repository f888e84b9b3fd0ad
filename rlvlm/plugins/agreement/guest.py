"""What this guest adds: `rlvlm labels agree`."""

from rlvlm.core.guests import Command, Guest

GUEST = Guest(
    about="compares the per-frame outputs of several judges on the same episodes",
    docs="labels.md",
    commands={
        "labels agree": Command(
            call="rlvlm.plugins.agreement.command:command",
            text="Compare judges that others asked about the same episodes: a CSV, or roboreason's outputs.",
        )
    },
)
