"""Numbers for transitions: the RewardSource protocol and its members. Used by preferences and algorithms."""
