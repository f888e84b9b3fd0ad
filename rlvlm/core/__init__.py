"""Shared by every package: frozen records of numpy arrays, errors, metric names, files on disk and the console.

Shape letters, used in every docstring of the project:
B batch, T steps of an episode, L steps of a segment, K ensemble members, G group, N any count, D obs, A action,
S snapshot, H and W pixels. Left and right name the two sides of a comparison; `p_right` is always the probability
that the right side is the better one.
"""
