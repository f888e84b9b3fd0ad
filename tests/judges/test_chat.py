import asyncio
from dataclasses import replace

import numpy as np
import pytest
from scripted import ScriptedModel

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.core.judging import Clip, Label, Query, Status
from rlvlm.judges import prompts
from rlvlm.judges.asking import AsyncAsker, BatchAsker
from rlvlm.judges.chat import ChatJudge
from rlvlm.judges.config import Abilities, JudgeConfig
from rlvlm.judges.dialogues import label_dialogue, score_dialogue
from rlvlm.judges.judge import ChatTask
from rlvlm.judges.reading import parse_change
from rlvlm.judges.votes import BothOrders
from rlvlm.vlms.chats import Chat, ChatReply, images_of, rendered

GOAL = "open the drawer"
IMAGE = np.zeros((1, 8, 8, 3), np.uint8)
CONFIG = JudgeConfig(batch_size=4)
QUERY = Query(goal=GOAL, left=IMAGE, right=IMAGE + 9)
CLIP = Clip(goal=GOAL, frames=np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), np.uint8))


def make_judge(model: ScriptedModel, abilities: Abilities | None = None, **changes) -> ChatJudge:
    config = replace(CONFIG, **changes)
    return ChatJudge(config, BatchAsker(model, config), abilities)


@pytest.mark.parametrize(
    ("form", "p", "value", "text"),
    [
        # by hand: yes 0.3 + 0.06, no 0.04: the rest of the probability went elsewhere; 0.36 / 0.40 = 0.9
        ("success", [0.3, 0.06, 1e-30, 0.04, 1e-30, 1e-30], 0.9, "yes"),
        # 0.1 x 1/4 + 0.3 x 3/4 + 0.6 x 1 = 0.85, the likeliest rating is 5
        ("utility", [1e-30, 0.1, 1e-30, 0.3, 0.6], 0.85, "5"),
        ("statement", [0.3, 0.1], 0.3, "True"),  # among all words: not 0.3 / 0.4
    ],
)
def test_a_score_from_probabilities(form, p, value, text):
    judge = make_judge(ScriptedModel(log_p=lambda count: [[-20.0] * len(p), np.log(p)]), score=form)
    faint, score = judge.score([CLIP] * 2)
    assert (score.status, score.text) == (Status.OK, text) and score.value == pytest.approx(value)
    assert faint.status is Status.INVALID, "all choices together are unlikely"


def test_a_step_is_shown_as_before_action_after():
    model = ScriptedModel(log_p=lambda count: [[-1.0] * 5] * count)
    make_judge(model, score="utility").score([replace(CLIP, action="pull the handle"), CLIP])
    for chat, action in zip(model.chats, ("pull the handle", prompts.NO_ACTION), strict=True):
        parts = chat[0]["content"]
        assert [int(image[0, 0, 0]) for image in images_of(chat)] == [0, 2]
        assert [part["type"] for part in parts] == ["text", "image", "text", "image", "text"]
        assert action in parts[2]["text"]


def test_an_action_that_could_end_a_turn_is_not_asked_about():
    model = ScriptedModel(log_p=lambda count: [[-1.0] * 5] * count)
    scores = make_judge(model, score="utility").score([replace(CLIP, action="<|im_end|>"), CLIP])
    assert [score.status for score in scores] == [Status.FAILED, Status.OK] and "action" in scores[0].text


def test_a_model_that_does_not_answer_with_a_label_is_invalid():
    given = [[-20.0, -21.0, -22.0], [-np.inf] * 3, [-1.0, -2.0, -3.0]]
    verdicts = make_judge(ScriptedModel(log_p=lambda count: given)).compare([QUERY] * 3)
    assert [verdict.status for verdict in verdicts] == [Status.INVALID, Status.INVALID, Status.OK]
    assert sum(verdicts[1].probabilities) == pytest.approx(1), "numbers even where there was no probability at all"


@pytest.mark.parametrize(
    ("form", "texts", "values"),
    [
        ("progress", ["40", "quite a lot"], [0.4, None]),
        ("rating", ["Rating: 4", "4.5"], [0.75, None]),
        ("video", ["<think>30 or 50</think><answer>45</answer>", "<think>I see 45"], [0.45, None]),
        ("rubric", ["ANSWER: 4", "ANSWER: 1", "5", "ANSWER: 7", "nearly"], [0.75, 0.0, 1.0, None, None]),
    ],
)
def test_a_written_score_has_its_own_scale(form, texts, values):
    scores = make_judge(ScriptedModel(texts), score=form, batch_size=8).score([CLIP] * len(texts))
    assert [score.value for score in scores] == values
    assert [score.status for score in scores] == [Status.INVALID if value is None else Status.OK for value in values]
    assert [score.text for score in scores] == texts


def test_two_stage_keeps_both_texts_and_reads_the_second():
    model = ScriptedModel(["1", "0", "0", "-1"])
    verdicts = make_judge(model, prompt="two_stage").compare([QUERY] * 2)
    assert [verdict.label for verdict in verdicts] == [Label.LEFT, Label.TIE]
    assert [verdict.text for verdict in verdicts] == ["1\n\n0", "0\n\n-1"]
    assert [len(images_of(chat)) for chat in model.chats] == [2, 2, 0, 0]
    assert "Report:\n1\n" in model.chats[2][0]["content"][0]["text"]
    assert model.choices == [(), prompts.LABEL_TEXTS]


def test_questions_that_a_model_was_not_trained_on_are_refused():
    only = Abilities(compare=frozenset({"direct"}), score=frozenset({"progress"}), goal_pictures=False)
    with pytest.raises(UnsupportedQuestion, match="judge.score rating, it knows progress"):
        make_judge(ScriptedModel(), only, score="rating")
    with pytest.raises(UnsupportedQuestion, match="judge.prompt two_stage, it knows direct"):
        make_judge(ScriptedModel(), only, prompt="two_stage")
    model = ScriptedModel(log_p=lambda count: [[-1.0, -2.0, -3.0]] * count)
    verdicts = make_judge(model, only).compare([QUERY, replace(QUERY, goal_picture=IMAGE)])
    assert [verdict.status for verdict in verdicts] == [Status.OK, Status.FAILED] and len(model.chats) == 1
    assert "goal_picture" in verdicts[1].text
    scores_alone = Abilities(compare=frozenset(), score=frozenset({"utility"}))
    judge = make_judge(ScriptedModel(log_p=lambda count: [[-1.0] * 5] * count), scores_alone, score="utility")
    with pytest.raises(UnsupportedQuestion, match="never trained to compare"):
        judge.compare([QUERY])
    assert judge.score([CLIP])[0].status is Status.OK


def test_a_goal_image_is_shown_first_and_checked_like_the_others():
    model = ScriptedModel(["50"] * 2, log_p=lambda count: [[-1.0, -2.0, -3.0]] * count)
    judge = make_judge(model)
    goal_picture = IMAGE + 200
    assert judge.compare([replace(QUERY, goal_picture=goal_picture)])[0].status is Status.OK
    assert judge.score([replace(CLIP, goal_picture=goal_picture)])[0].value == 0.5
    assert [images_of(chat)[0].max() for chat in model.chats] == [200, 200]
    bad = judge.compare([QUERY, replace(QUERY, goal_picture=goal_picture[0])])
    assert [verdict.status for verdict in bad] == [Status.OK, Status.FAILED]


def test_out_of_memory_halves_the_batch_and_loses_nothing():
    model = ScriptedModel()

    def small_memory(count: int):
        if count > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return [[-1.0, -2.0, -3.0]] * count

    model._log_p = small_memory
    verdicts = make_judge(model, batch_size=8).compare([QUERY] * 16)
    assert [verdict.label for verdict in verdicts] == [Label.LEFT] * 16
    assert model.sizes[:3] == [8, 4, 2] and model.sizes.count(8) == 1  # later batches start small


def test_a_model_that_breaks_on_everything_is_unavailable():
    def broken(count: int):
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(JudgeUnavailable, match="device-side assert"):
        make_judge(ScriptedModel(log_p=broken)).compare([QUERY] * 3)


def test_a_chat_model_also_just_writes():
    model = ScriptedModel(["hello", "there", "again", "and", "on"])
    image = {"type": "image", "image": IMAGE[0]}
    chat = [{"role": "system", "content": "be brief<|im_end|>"}, {"role": "user", "content": [image]}]
    texts = make_judge(model).generate([chat] * 5, max_new_tokens=8, temperature=0.0)
    assert texts == ["hello", "there", "again", "and", "on"] and model.sizes == [4, 1]
    assert model.chats[0][0]["content"] == [{"type": "text", "text": "be brief< im_end >"}]
    with pytest.raises(UnsupportedQuestion, match="pop from empty list"):  # what the model broke on
        make_judge(ScriptedModel()).generate([[{"role": "user", "content": "a"}]], max_new_tokens=8, temperature=0.0)


@pytest.mark.parametrize(
    "chat",
    [[], {}, "hello", [1], [{"role": "user"}], [{"role": "root", "content": "a"}], [{"role": "user", "content": []}]]
    + [[{"role": "user", "content": "a", "tools": 1}], [{"role": "user", "content": [{"type": "video"}]}]]
    + [[{"role": "user", "content": [{"type": "image", "image": odd}]}] for odd in ("http://x", IMAGE)],
)
def test_a_chat_in_another_format_is_refused(chat):
    with pytest.raises(UnsupportedQuestion, match="cannot read a chat"):
        make_judge(ScriptedModel(["a"])).generate([chat], max_new_tokens=8, temperature=0.0)


# --- the forms that published reward models have: statement, delta


def test_a_statement_without_the_chat_template_goes_on_as_a_text_does():
    """TOPReward's main setting: no turn is opened, and the word behind the colon begins with a space."""
    model = ScriptedModel(log_p=lambda count: [np.log([0.2, 0.1, 0.3, 0.1])] * count)
    [score] = make_judge(model, score="statement_raw").score([CLIP])
    assert score.value == pytest.approx(0.2 + 0.1) and model.choices == [(" True", "True", " False", "False")]
    [chat] = model.chats

    def qwen(turns: Chat) -> str:
        parts = ("<|image_pad|>" if part["type"] == "image" else part["text"] for part in turns[0]["content"])
        return f"<|im_start|>{turns[0]['role']}\n{''.join(parts)}<|im_end|>\n<|im_start|>assistant\n"

    statement = prompts.SENTENCES["statement_raw"].replace("{goal}", GOAL)
    assert rendered(chat, qwen) == "<|image_pad|>" * 3 + statement
    assert rendered([{**chat[0], "role": "user"}], qwen) == qwen([{**chat[0], "role": "user"}])
    with pytest.raises(ValueError, match="cannot be asked without the template"):  # LLaVA's shows images first
        rendered(chat, lambda turns: "USER: <image> between between ASSISTANT:")
    with pytest.raises(ValueError, match="a server puts it around every question"):
        JudgeConfig(backend="openai", model="m", score="statement_raw")


ODDS = [
    # the form of the question; odds of the first token; the value, by hand: of all words, of the two, mean of ratings
    ("statement", {"True": 0.30, "The": 0.35, "False": 0.10, "Yes": 0.25}, 0.30),
    ("statement", {"The": 0.5, "It": 0.45, "True": 0.02, "False": 0.03}, 0.02),
    ("statement", {"The": 0.9, "Sure": 0.0995, "True": 0.0003, "False": 0.0002}, None),  # no answer, so no failure
    ("success", {"Yes": 0.3, "The": 0.55, "No": 0.15}, 2 / 3),
    ("success", {"The": 0.97, "No": 0.02, "Yes": 0.01}, 1 / 3),
    ("utility", {"4": 0.2, "The": 0.6, "3": 0.1, "1": 0.1}, (0.2 * 0.75 + 0.1 * 0.5) / 0.4),
    ("direct", {"1": 0.3, "The": 0.54, "0": 0.15, "-": 0.01}, (0.15 / 0.46, 0.3 / 0.46, 0.01 / 0.46)),
]


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize(("form", "odds", "value"), ODDS)
def test_the_same_odds_mean_the_same_on_our_engines_and_over_http(form, odds, value, over_http):
    dialogue = label_dialogue("direct")(QUERY) if form == "direct" else score_dialogue(form)(CLIP)
    request = next(dialogue)
    known = odds | ({"-1": odds["-"]} if "-" in odds else {})
    own = ChatReply(choice_log_p=np.log([known.get(choice, 1e-300) for choice in request.choices]))
    remote = ChatReply(text=max(odds, key=lambda token: odds[token]), first_tokens=tuple(odds.items()))
    with pytest.raises(StopIteration) as end:
        dialogue.send(remote if over_http else own)
    result = end.value.value
    assert (result.probabilities or result.value) == (None if value is None else pytest.approx(value, abs=1e-6))


def test_a_score_that_a_short_list_of_tokens_leaves_open_is_no_score():
    # By hand: No is not among the three likeliest, so it may have .2, and yes then .6 of the two instead of all.
    for tokens, value in (((("Yes", 0.3), ("The", 0.3), ("It", 0.2)), None), ((("Yes", 0.9), ("The", 0.05)), 1.0)):
        dialogue = score_dialogue("success")(CLIP)
        next(dialogue)
        with pytest.raises(StopIteration) as end:
            dialogue.send(ChatReply(text="Yes", first_tokens=tokens))
        assert end.value.value.value == value, end.value.value.text


def test_a_label_in_a_sentence_goes_before_what_the_sentence_might_have_begun_with():
    odds = (("The", 0.96), ("0", 0.02), ("1", 0.01), ("-", 0.01))
    for text, wanted in (("The answer is 1.", (Label.RIGHT, None)), ("The", (Label.LEFT, (0.5, 0.25, 0.25)))):
        dialogue = label_dialogue("direct")(QUERY)
        next(dialogue)
        with pytest.raises(StopIteration) as end:
            dialogue.send(ChatReply(text=text, first_tokens=odds))
        assert (end.value.value.value, end.value.value.probabilities) == wanted


def test_deltas_apply_to_the_remaining_distance():
    # by hand: 0 + 50 % of 100 = 50; then -20 % of the 50 that are left, so 40; a loss at the start stays at 0
    model = ScriptedModel(["50", "-20"])
    score = make_judge(model, score="delta").score([CLIP])[0]
    assert score.value == pytest.approx(0.4) and score.text == "50 | -20"
    assert [[int(one[0, 0, 0]) for one in images_of(chat)] for chat in model.chats] == [[0, 1], [1, 2]]
    assert make_judge(ScriptedModel(["-30", "0"]), score="delta").score([CLIP])[0].value == 0.0
    lost = make_judge(ScriptedModel(["better"]), score="delta").score([CLIP])[0]
    assert lost.status is Status.INVALID
    alone = ScriptedModel(["0"])
    assert make_judge(alone, score="delta").score([replace(CLIP, frames=CLIP.frames[:1])])[0].value == 0.0
    assert len(images_of(alone.chats[0])) == 2


def test_a_change_is_one_signed_percentage_and_nothing_else():
    read = {"12": 0.12, "+12%": 0.12, "-8.5": -0.085, "\u22127 %": -0.07, "**100**": 1.0, "0": 0.0}
    unread = dict.fromkeys(("101", "12 or 13", "about 12", "", "12\n13", "<think>12"))
    assert {text: parse_change(text) for text in (*read, *unread)} == pytest.approx(read | unread)


def test_every_sentence_has_its_slot():
    names = ("statement", "rubric", "delta", "video")
    assert [prompts.SENTENCES[name].count("{goal}") for name in names] == [1] * len(names)


def test_items_are_answered_one_by_one_as_in_batches():
    class Engine:
        revision, traits = "1", ""

        async def reply(self, request, **_):
            return ChatReply(text="1" if request.choices else "50")

    config = JudgeConfig(backend="vllm", model="m")
    judge = BothOrders(ChatJudge(config, AsyncAsker(Engine(), config)))
    items = [QUERY, replace(QUERY, goal=""), CLIP, ChatTask([{"role": "user", "content": "hi"}], 4, 0.0)]

    async def ask():
        return await asyncio.gather(*map(judge.answer, items))

    verdict, failed, score, reply = asyncio.run(ask())
    assert verdict.votes == ("right", "left") and failed.status is Status.FAILED
    assert score.value == 0.5 and reply == "50" and score.stamp == verdict.stamp == judge.stamp
