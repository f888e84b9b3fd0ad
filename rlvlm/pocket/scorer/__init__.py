"""The small model that ships for scoring turns and clips: its lessons, training, evaluation, weights and card."""
