"""Rope, water and cloth on MuJoCo's own deformables: one file per task, and the env that they share."""
