"""The commands of `rlvlm`, a file each: its arguments, and `command`, which calls the packages below."""
