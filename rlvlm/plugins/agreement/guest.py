"""What this guest adds: `rlvlm labels agree`, and two forms of `rlvlm labels import`."""

from rlvlm.core.guests import Command, Guest

_IMPORT = "rlvlm.plugins.agreement.command:import_command"

GUEST = Guest(
    about="compares the per-frame outputs of several judges on the same episodes",
    docs="labels.md",
    commands={
        "labels agree": Command(
            call="rlvlm.plugins.agreement.command:command",
            text="Compare judges that others asked about the same episodes: a CSV, or roboreason's outputs.",
        )
    },
    imports={
        "csv": Command(call=_IMPORT, text="Values of judges about frames: a CSV of episode, frame, judge, value."),
        "roboreason": Command(call=_IMPORT, text="Values of judges about frames: roboreason's folder model_outputs."),
    },
)
