"""What a judge wrote, read strictly: the values in it, and whose words they stand among. `dialogues` calls it."""
