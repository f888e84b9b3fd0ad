"""Supervised fine-tuning of policies on demonstrations."""
