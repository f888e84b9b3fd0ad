"""The pocket video judge: tells successes of LIBERO's tasks that put one thing somewhere from failures. Its clips,
training, evaluation.
"""

TASKS = (
    *(f"libero_spatial/{number}" for number in range(10)),
    *(f"libero_object/{number}" for number in range(10)),
    *(f"libero_goal/{number}" for number in (1, 2, 4, 5, 6, 8, 9)),
)
"""What it was taught: about anything else its answers mean nothing."""
KNOWS = (*TASKS, "libero_spatial", "libero_object")
"""Those tasks, and the suites all of whose tasks it was taught."""
NUM_FRAMES, FRAME_PX = 2, 144
"""What it is best shown: the first and the last frame, mirrored as LIBERO draws them, this many pixels wide."""
