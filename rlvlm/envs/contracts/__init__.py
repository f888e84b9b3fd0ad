"""What every env promises, checked: for `rlvlm check-task` and, through `rlvlm.testing`, for each env's tests."""
