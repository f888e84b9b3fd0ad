"""GRPO for policies that act in chunks of tokens: groups of one initial state, advantages within the group."""
