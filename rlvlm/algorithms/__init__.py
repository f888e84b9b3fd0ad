"""RLlib code: when to roll out, label, learn and sync weights. Built and run by `runs`.

`base` has the RLlib life cycle shared by both algorithms, `learners` and `sharding` the training, `runner_group` the
stepping of envs, `evaluation` the evaluations, `checkpoint` the state on disk. `sft`, `sft_replies` and `sft_chunks`
are the supervised start of a run, `sft_job` the same as a job of its own, `sft_folders` its files.
"""
