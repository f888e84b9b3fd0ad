"""What this guest adds: the tasks `softgym/NAME`."""

from rlvlm.core.guests import Guest

GUEST = Guest(about="SoftGym's own tasks", docs="tasks.md", tasks="rlvlm.plugins.softgym.tasks:softgym_tasks")
