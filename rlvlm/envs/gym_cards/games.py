"""The games of gym-cards as the registry knows them; imports nothing, so that the command line starts at once."""

GAMES = {
    "number_line": (
        "bring the current number to the target number",
        "the current number equals the target number",
        "number_line:NumberLine",
        10,
    ),
    "blackjack": ("win the hand of blackjack", "the hand of blackjack is won", "blackjack:Blackjack", 20),
    "ez_points": (
        "write a formula of both cards that makes 12",
        "the formula uses both cards and makes 12",
        "points:EZPoints",
        7,
    ),
    "points24": (
        "write a formula of all four cards that makes 24",
        "the formula uses all four cards and makes 24",
        "points:Points24",
        22,
    ),
}
"""Goal phrase, goal as a sentence, `module:CLASS` of the env, and the turns of the longest episode."""
IDS = {
    "gym_cards/NumberLine-v0": "number_line",
    "gym_cards/Blackjack-v0": "blackjack",
    "gym_cards/EZPoints-v0": "ez_points",
    "gym_cards/Points24-v0": "points24",
}
"""The reference's names in Gymnasium."""
OWN_IDS = {_id.replace("gym_cards/", "rlvlm/"): _game for _id, _game in IDS.items()}
"""Ids of our own: if the reference's package was imported first, it keeps the ids above."""
