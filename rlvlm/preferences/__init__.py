"""A reward learned from answers, used by `algorithms.sac_pebble`.

In the order of a session of `loop`: `queries` are drawn, `teachers` answer, `records` keep what was said beside the
truth, `dataset` what trains, and the `reward_model`, an `ensemble` of `networks`, is fitted to it by `losses`.
"""
