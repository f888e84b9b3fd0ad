"""SAC with a reward source that may change while it learns (PEBBLE), as an RLlib algorithm.

Best read in the order of a round, which is `SACPebble.training_step` in `algorithm`: `runner` steps the envs,
`reward_switch` decides the present source and asks its teacher, `label` stores new transitions in the `replay` with
their rewards, and `learner` makes updates (`update`, `losses`, on the fast networks of `dense`).
"""
