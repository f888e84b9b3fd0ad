"""Terminal output of running commands, and the signals that users send."""
