"""What this guest adds: the judge `human`, `rlvlm labels ask`, and people's lines in `labels show`."""

from rlvlm.core.guests import Command, Guest, JudgeBackend

GUEST = Guest(
    about="people as judges and teachers, on a page in a browser",
    docs="people.md",
    commands={
        "labels ask": Command(
            call="rlvlm.plugins.people.command:command",
            text="Let people answer questions in a browser, on a page of this machine behind a token.",
        )
    },
    judges={
        "human": JudgeBackend(
            build="rlvlm.plugins.people.judge:build",
            is_human=True,
            session="rlvlm.plugins.people.page:person_judge",
        )
    },
    settings={"judge.human": "rlvlm.plugins.people.config:HumanConfig"},
    store_lines="rlvlm.plugins.people.queue:people_lines",
)
