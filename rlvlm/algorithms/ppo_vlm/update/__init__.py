"""What an update of PPO descends: credit for every turn, and the losses. Used by the learner."""
