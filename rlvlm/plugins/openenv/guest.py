"""What this guest adds: nothing to commands; `JudgeRubric` for OpenEnv's environments."""

from rlvlm.core.guests import Guest

GUEST = Guest(about="a judge's score as a rubric of OpenEnv", docs="in_your_framework.md")
