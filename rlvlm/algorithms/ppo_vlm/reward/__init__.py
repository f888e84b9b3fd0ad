"""Where reward enters PPO: each turn's sources are added up, asked for while the next turns are played, and watched."""
