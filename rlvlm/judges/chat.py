"""A chat VLM as a judge: takes questions, returns verdicts and scores, with `dialogues` put by an asker of `asking`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from rlvlm.core.errors import UnsupportedQuestion
from rlvlm.core.judging import Clip, Query, Score, Stamp, Verdict
from rlvlm.judges import prompts
from rlvlm.judges.asking import Asker, AsyncAsker, ask_what_can_be
from rlvlm.judges.config import SHOW_NO_GOAL, Abilities, JudgeConfig
from rlvlm.judges.dialogues import Dialogue, DialogueResult, label_dialogue, score_dialogue
from rlvlm.vlms.chats import Chat, checked_chat

Item = TypeVar("Item", Query, Clip)


class ChatJudge:
    """A chat VLM behind the `Judge` and `Generator` protocols.

    Args:
        config: form of the questions.
        asker: puts dialogues to the model.
        abilities: forms of question that the model was trained on.

    Raises:
        UnsupportedQuestion: the model cannot be asked as `config` says.
    """

    def __init__(self, config: JudgeConfig, asker: Asker, abilities: Abilities | None = None) -> None:
        self._config = config
        self._asker = asker
        self._abilities = abilities or Abilities()
        # now and not at the first question: an unreadable file of sentences must end a run before it starts
        self._label = label_dialogue(config.prompt)
        self._score = score_dialogue(config.score, prompts.sentences_of(config))
        self._abilities.check(config)
        shows_goal = self._abilities.goal_pictures and config.score not in SHOW_NO_GOAL
        self._when_scoring = replace(self._abilities, goal_pictures=shows_goal)

    @property
    def stamp(self) -> Stamp:
        """Stamp of the answers."""
        return self._asker.stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """Returns one verdict per query, in order; a query that cannot be asked has failed.

        Raises:
            UnsupportedQuestion: the model was only trained to score.
            JudgeUnavailable: every query that could be asked failed.
        """
        self._check_compares()
        outcomes = ask_what_can_be(queries, self._abilities, lambda good: self._asker.run(good, self._label))
        return [outcome.verdict(self.stamp) for outcome in outcomes]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """Returns one score per clip, in order. Raises as `compare` does."""
        outcomes = ask_what_can_be(clips, self._when_scoring, lambda good: self._asker.run(good, self._score))
        return [self._scored(clip, outcome) for clip, outcome in zip(clips, outcomes, strict=True)]

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """Returns the model's reply to each chat, in order.

        Raises:
            UnsupportedQuestion: a chat is not in the format of `vlms.chats`, or the model cannot reply to it.
            JudgeUnavailable: the model does not reply.
        """
        return self._asker.write(list(map(_checked, chats)), max_new_tokens, temperature)

    async def compare_one(self, query: Query) -> Verdict:
        """Returns the verdict on one query, for callers that ask one at a time; see `judge.ContinuousJudge`."""
        self._check_compares()
        return (await self._ask_one(query, self._label, self._abilities)).verdict(self.stamp)

    async def score_one(self, clip: Clip) -> Score:
        """Returns the score of one clip, for callers that ask one question at a time."""
        return self._scored(clip, await self._ask_one(clip, self._score, self._when_scoring))

    async def generate_one(self, chat: Chat, *, max_new_tokens: int, temperature: float) -> str:
        """Returns the model's reply to one chat, for callers that ask one question at a time."""
        return await self._async_asker.write_one(_checked(chat), max_new_tokens, temperature)

    def shrink(self, query: Query) -> Query:
        """Returns the query with its images at the size that the model will see; the answer is the same.

        For callers with time to spare before the model is asked: resizing takes a quarter of a small model's answer
        time. A query that cannot be asked is returned unchanged.
        """
        if prompts.problem_of(query, self._abilities) is not None:  # `compare` answers it: failed, with the reason
            return query
        try:
            left, right = self._asker.shrink(query.left), self._asker.shrink(query.right)
        except ValueError:  # a shape that the processor rejects; asking will report it
            return query
        return query if left is query.left and right is query.right else replace(query, left=left, right=right)

    @property
    def _async_asker(self) -> AsyncAsker:
        assert isinstance(self._asker, AsyncAsker), "only those whose config `batches_itself` are asked one by one"
        return self._asker

    def _check_compares(self) -> None:
        if not self._abilities.compare:
            raise UnsupportedQuestion(
                "this judge scores turns and clips, it was never trained to compare",
                "use a judge that compares, e.g. the pocket judge: leave out --judge.model",
            )

    def _scored(self, clip: Clip, outcome: DialogueResult) -> Score:
        # a clip that failed was not shown, so it counts no frames
        return outcome.score(self.stamp, 0 if outcome.has_failed else prompts.num_shown(self._config.score, clip))

    async def _ask_one(self, item: Item, dialogue: Callable[[Item], Dialogue], abilities: Abilities) -> DialogueResult:
        problem = prompts.problem_of(item, abilities)
        return DialogueResult(text=problem, has_failed=True) if problem else await self._async_asker.ask(dialogue(item))


def _checked(chat: Chat) -> Chat:
    """Returns the chat; raises UnsupportedQuestion unless it is in the format of `vlms.chats`."""
    try:
        return checked_chat(chat)
    except ValueError as error:
        raise UnsupportedQuestion(f"the judge cannot read a chat: {error}", "see docs/judges.md") from error
