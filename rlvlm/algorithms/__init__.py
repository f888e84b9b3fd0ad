"""When to play, label, learn and sync weights: all RLlib code. Built and run by `runs`.

`base` is RLlib's life cycle as both algorithms have it, `learners` and `sharding` are what trains, `runner_group` is
where envs are stepped, `evaluation` what an evaluation is, `checkpoint` a state on disk. `sft`, `sft_replies` and
`sft_chunks` are the supervised start of a run, `sft_job` the same as a job of its own, `sft_folders` its files.
"""
