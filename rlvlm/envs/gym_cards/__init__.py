"""The four games of gym-cards, redrawn, as worlds in turns; `pictured` makes them known to Gymnasium too."""
