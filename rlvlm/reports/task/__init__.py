"""`rlvlm check-task`: does a task keep the promises of a world, and do its pictures show what they should?"""
