"""Policies that denoise a chunk of actions by flow matching."""
