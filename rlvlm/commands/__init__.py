"""The words of `rlvlm`, a file each: its arguments, and `command`, which hands over to the packages below."""
