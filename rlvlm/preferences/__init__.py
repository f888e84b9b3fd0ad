"""Reward learning from a teacher's answers, used by `algorithms.sac_pebble`.

In the order of a session of `loop`: `queries` are drawn, `teachers` answer, `records` store the answers beside the
truth, `dataset` holds the training examples, and the `reward_model`, an `ensemble` of `networks`, is fitted to them by
`losses`.
"""
