"""What this guest adds: judges to name as `module:FUNCTION`, and a table of planted faults."""

from rlvlm.core.guests import Guest

GUEST = Guest(about="judges whose faults are known, to try a bench with", docs="benched_judges.md")
