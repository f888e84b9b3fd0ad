import json
import random

import pytest

from rlvlm.envs.replies import MAX_CHARS, read_legacy, read_reply, write_reply

NAMES = ("1", "10", "+", "-", "move forward")
ALL = range(len(NAMES))


def test_a_reply_read_by_hand():
    text = '{"cards": [3, 9], "thoughts": "a \\"fine\\" {plan}", "action": "+"}'
    reply = read_reply(text, NAMES, ALL)
    assert reply.action == 2
    assert reply.thought == '"cards": [3, 9], "thoughts": "a \\"fine\\" {plan}"'
    assert reply.action_span is not None and text[slice(*reply.action_span)] == "+"
    assert write_reply("+", reply.thought) == text


def test_plain_words_become_thoughts_and_nothing_stays_nothing():
    assert json.loads(write_reply("-", 'so "be" it')) == {"thoughts": 'so "be" it', "action": "-"}
    assert write_reply("-") == '{"action": "-"}'
    assert json.loads(write_reply("-", '"action": "+"'))["action"] == "-"


@pytest.mark.parametrize(
    ("text", "action", "value"),
    [
        ('Sure! ```json\n{"action" : " Move Forward "}\n```', 4, " Move Forward "),
        ('{"action": 10}', 1, "10"),
        ('{"action": "+"} or rather {"action": "-"}', 3, "-"),
        ('{"plan": {"action": "+"}, "action": "-"}', 3, "-"),
        ('{"action": "-", "because": "{"}', 3, "-"),
    ],
)
def test_harmless_variations_are_read(text, action, value):
    reply = read_reply(text, NAMES, ALL)
    assert reply.action == action and reply.action_span is not None and text[slice(*reply.action_span)] == value


@pytest.mark.parametrize(
    "text",
    ["", "+", '{"action": "+"', '{"action": "+" "-"}', '{"action": "+", "action": "-"}', '{"action": ["+"]}']
    + ['{"action": true}', '{"action": "++"}', '{"action": "11"}', '{"action": 1.0}', "{" * MAX_CHARS, "[" * 100_000]
    + ['{"action":' * 1_000, '{"a": ' + "[" * 3_000 + "}", '{"action": "\ud800"}', "{'action': '+'}"],
)
def test_an_ambiguous_reply_is_no_action(text):
    assert read_reply(text, NAMES, ALL).action is None


def test_an_action_that_is_not_legal_now_is_none_but_has_its_place():
    reply = read_reply('{"action": "+"}', NAMES, (0, 1))
    assert reply.action is None and reply.action_span == (12, 13)


@pytest.mark.timeout(120)
def test_ten_thousand_garbage_replies_raise_nothing_and_take_little_time():
    rng = random.Random(0)
    parts = ['{"action": "', '"}', *'{}":+[], ', "action", "\\", "10", "\x00", "é", "\ud83d"]
    for _ in range(10_000):
        text = "".join(rng.choices(parts, k=rng.randrange(60)))
        for reply in (read_reply(text, NAMES, ALL), read_legacy(text, NAMES, ALL)):
            assert reply.action is None or reply.action in ALL
            assert reply.action_span is None or 0 <= reply.action_span[0] <= reply.action_span[1] <= len(text)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('"action": "10"}', 1),
        ('{"thoughts": "-", "action": "+"}', 2),
        ('"action": "+" - as I said', None),
        ("+", 2),
        ("I add +.", None),
        ('"action": "110"', None),
    ],
)
def test_legacy_reading_takes_the_one_word_behind_the_mark(text, action):
    assert read_legacy(text, NAMES, ALL).action == action


def test_places_in_a_legacy_reply_are_of_the_text_whose_lower_case_is_longer():
    # By hand: each capital I with a dot is two characters in lower case.
    for text in ('{"thoughts": "İİİİ", "action": "-"}', '{"thoughts": "İİİİ", "ACTION": "-"} İ', 'İİ "action": -'):
        reply = read_legacy(text, NAMES, ALL)
        assert reply.action == NAMES.index("-") and reply.action_span is not None
        assert text[slice(*reply.action_span)] == "-" and reply.thought.endswith(("İİ", 'İİ"'))
    assert read_legacy("-İ", NAMES, ALL).action is None
