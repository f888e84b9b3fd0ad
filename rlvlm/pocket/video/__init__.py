"""The pocket video judge: tells successes of LIBERO's basket tasks from failures. Its clips, training, evaluation."""

TASKS = tuple(f"libero_object/{number}" for number in range(5))
"""What it was taught: about anything else its answers mean nothing."""
