"""What an episode, or a chunk of it, was worth: within its group, or against what a critic expected."""
