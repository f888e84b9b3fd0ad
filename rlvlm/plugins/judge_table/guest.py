"""What this guest adds: `judge-bench table`, `asked-again`, `harvest`, and an entry of each bench of a frozen suite."""

from rlvlm.core.guests import Command, Guest

GUEST = Guest(
    about="entries and the page of judges, and suites of what fooled judges in runs",
    docs="judge_files.md",
    commands={
        "judge-bench table": Command(
            call="rlvlm.plugins.judge_table.commands:table",
            text="ENTRY... --out FILE   a page of entries with a sortable table, as compare --out makes it",
        ),
        "judge-bench asked-again": Command(
            call="rlvlm.plugins.judge_table.commands:asked_again",
            text="ENTRY AGAIN --second FILE   notes that a judge of the table was asked again",
        ),
        "judge-bench harvest": Command(
            call="rlvlm.plugins.judge_table.commands:harvest",
            text="RUN... --out DIR   a suite of the episodes that fooled the judges of runs",
        ),
    },
    bench_files="rlvlm.plugins.judge_table.entries:write_entry",
)
