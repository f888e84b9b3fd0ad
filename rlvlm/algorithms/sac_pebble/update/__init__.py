"""One gradient update of SAC: the losses, and two ways to their gradients. Used by the learner."""
