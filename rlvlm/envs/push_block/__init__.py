"""The task `push_block`: a hand pushes the block of the named colour onto a pad, in chunks of eight actions."""
