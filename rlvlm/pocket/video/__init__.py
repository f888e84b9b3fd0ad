"""The pocket video judge: tells successes of LIBERO's basket tasks from failures. Its clips, training, evaluation."""
