"""`rlvlm check-task`: does a task keep the promises of an env, and do its images show what they should?"""
