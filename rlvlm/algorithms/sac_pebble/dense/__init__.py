"""Fully connected networks trained without autograd: their passes written out, their parameters in one vector."""
