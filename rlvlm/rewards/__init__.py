"""Numbers for what happened: of steps by a `RewardSource`, of turns and episodes by a `Scorer`.

`source` says what a source of steps' rewards is, `build` makes one by its name; `scorers` score turns and episodes, and
`monitor` watches a judge among them. Used by preferences and algorithms.
"""
