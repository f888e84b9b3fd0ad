"""The four games of gym-cards, redrawn, as envs in turns; `pictured` makes them known to Gymnasium too."""
