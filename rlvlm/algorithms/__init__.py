"""When to play, label, learn and sync weights: all RLlib code. Built and run by `runs`.

`base` is RLlib's life cycle as both algorithms have it, `learners` and `sharding` are those who train, `runner_group`
where envs are stepped, `evaluation` what an evaluation is, `checkpoint` a state on disk. `sft` and its kin are the
supervised start, which a run may begin with and `rlvlm sft` does as a job of its own.
"""
