"""SAC with a reward source that may change while it learns (PEBBLE), as an RLlib algorithm.

To be read in the order of a round, which is `SACPebble.training_step` in `algorithm`: `runner` steps the envs,
`reward_switch` says which source is in force and asks its teacher, `label` files what came in the `replay` under its
rewards, and `learner` makes updates (`update`, `losses`, on the fast networks of `dense`).
"""
