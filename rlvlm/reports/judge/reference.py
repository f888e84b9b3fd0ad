"""Label quality of the reference, to be drawn beside ours and always labelled as theirs.

Source: RL-VLM-F, Wang et al. 2024, arXiv:2402.03681, and its website: per task, shares of correct, incorrect and
undecided labels in ten bins of the gap in true progress, in percent, read off the figure by eye (so sums may miss 100
by one or two). The VLM was Gemini-Pro-Vision, for the cloth GPT-4V, asked in two stages.
"""

import numpy as np

from rlvlm.types.steps import FloatArray

NAME = "RL-VLM-F (Wang et al. 2024), read off their figure"

_SHARES = {
    "CartPole": "24/13/62 29/5/66 35/1/64 37/1/62 52/1/47 69/1/30 86/0/14 93/2/6 100/0/0 100/0/0",
    "Drawer": "42/28/30 47/42/11 53/46/1 51/49/1 57/43/0 54/43/3 61/39/0 65/33/3 68/32/0 80/19/1",
    "Soccer": "45/45/9 42/39/18 48/41/11 51/44/5 56/42/2 64/30/6 76/21/3 84/16/0 100/0/0 100/0/0",
    "Sweep": "24/16/60 38/20/42 42/16/43 42/38/20 14/35/51 46/10/44 54/26/19 60/25/15 58/9/33 79/8/13",
    "Cloth": "27/25/49 33/20/47 31/19/49 46/12/43 37/10/52 42/20/38 40/13/47 58/4/38 50/0/50 55/9/36",
    "Rope": "27/25/47 32/10/59 44/16/40 51/17/31 65/15/20 67/14/19 71/11/18 80/15/4 87/2/10 69/19/11",
    "Water": "51/43/6 56/43/1 65/35/0 65/34/1 60/38/2 62/31/7 59/34/7 63/29/8 57/22/22 72/14/14",
}
SHARES: dict[str, FloatArray] = {
    task: np.array([[float(share) for share in one.split("/")] for one in bins.split()], np.float32)
    for task, bins in _SHARES.items()
}
"""[10, 3] correct, incorrect, undecided per task, in percent; the first bin has the smallest gaps."""
_THEIRS = {
    "drawer_open": "Drawer",
    "soccer": "Soccer",
    "sweep_into": "Sweep",
    "cartpole": "CartPole",
    "fold_cloth": "Cloth",
    "straighten_rope": "Rope",
    "pass_water": "Water",
}


def their_task(task: str) -> str | None:
    """What the reference calls our task; None for a task that it has not."""
    return _THEIRS.get(task)


def decided_accuracy(task: str) -> FloatArray:
    """[10] percent of the reference's decided labels that were right, by bin."""
    correct, incorrect, _ = SHARES[task].T
    return 100 * correct / np.maximum(correct + incorrect, 1)
