"""The four games of gym-cards, redrawn, as worlds in turns."""
