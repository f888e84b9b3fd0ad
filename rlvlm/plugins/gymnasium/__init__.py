"""A judge's score as the reward of Gymnasium's envs and of Stable-Baselines3's."""
