"""The small model that ships for scoring turns and clips: its dataset, training, evaluation, weights and card."""
