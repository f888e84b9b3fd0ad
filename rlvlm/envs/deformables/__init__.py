"""Tasks with rope, water and cloth, simulated as MuJoCo's deformables: one file per task, and the env they share."""
