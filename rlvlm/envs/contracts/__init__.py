"""What every world promises, checked: for `rlvlm check-task` and, through `rlvlm.testing`, for each world's tests."""
