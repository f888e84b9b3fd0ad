"""A judge's score as a reward function of TRL."""
