"""The four games of gym-cards, redrawn, as envs in turns; `card_images` also registers them with Gymnasium."""
