"""A chat VLM as a judge: takes questions, returns verdicts and scores, with `dialogues` put by an asker of `asking`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlvlm.core.errors import UnsupportedQuestion
from rlvlm.core.judging import Clip, Query, Score, Stamp, Verdict
from rlvlm.judges import prompts
from rlvlm.judges.asking import Asker, AsyncAsker, ask_what_can_be
from rlvlm.judges.config import SHOW_NO_GOAL, Abilities, JudgeConfig
from rlvlm.judges.dialogues import Dialogue, DialogueResult, label_dialogue, score_dialogue
from rlvlm.judges.judge import ChatTask, Tell
from rlvlm.vlms.chats import Chat, checked_chat


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
        return self._asker.stamp

    @property
    def at_once(self) -> int:
        """See `judge.questions_at_once`."""
        return self._asker.at_once

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """Returns one verdict per query, in order; a query that cannot be asked has failed.

        Raises:
            UnsupportedQuestion: the model was only trained to score.
            JudgeUnavailable: every query that could be asked failed.
        """
        return self.tell_each(queries, lambda *_: None)

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        return self.tell_each(clips, lambda *_: None)

    def tell_each(self, items: Sequence[Query] | Sequence[Clip], tell: Tell) -> list[Any]:
        """Returns the answers of `compare` or `score`, in order; see `TellingJudge`."""
        if not items:
            return []

        def answer(index: int, outcome: DialogueResult) -> Verdict | Score:
            item = items[index]
            return self._scored(item, outcome) if isinstance(item, Clip) else outcome.verdict(self.stamp)

        asked: Sequence[Any] = items
        is_query = isinstance(items[0], Query)
        if is_query:
            self._check_compares()
        abilities = self._abilities if is_query else self._when_scoring
        dialogue: Callable[[Any], Dialogue] = self._label if is_query else self._score
        outcomes = ask_what_can_be(
            asked,
            abilities,
            lambda good, tell_result: self._asker.run(good, dialogue, tell_result),
            lambda index, outcome: tell(index, answer(index, outcome)),
        )
        return [answer(index, outcome) for index, outcome in enumerate(outcomes)]

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """Returns the model's reply to each chat, in order.

        Raises:
            UnsupportedQuestion: a chat is not in the format of `vlms.chats`, or the model cannot reply to it.
            JudgeUnavailable: the model does not reply.
        """
        return self._asker.write(list(map(_checked, chats)), max_new_tokens, temperature)

    async def answer(self, item: Query | Clip | ChatTask) -> Any:
        """Returns a verdict, a score or a reply, for callers that ask one item at a time; see `ContinuousJudge`."""
        asker = self._asker
        assert isinstance(asker, AsyncAsker), "only those whose config `batches_itself` are asked one by one"
        if isinstance(item, ChatTask):
            return await asker.write_one(_checked(item.chat), item.max_new_tokens, item.temperature)
        if isinstance(item, Clip):
            problem = prompts.problem_of(item, self._when_scoring)
            return self._scored(item, _failed(problem) if problem else await asker.ask(self._score(item)))
        self._check_compares()
        problem = prompts.problem_of(item, self._abilities)
        return (_failed(problem) if problem else await asker.ask(self._label(item))).verdict(self.stamp)

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

    def _check_compares(self) -> None:
        if not self._abilities.compare:
            raise UnsupportedQuestion(
                "this judge scores turns and clips, it was never trained to compare",
                "use a judge that compares, e.g. the pocket judge: leave out --judge.model",
            )

    def _scored(self, clip: Clip, outcome: DialogueResult) -> Score:
        # a clip that failed was not shown, so it counts no frames
        return outcome.score(self.stamp, 0 if outcome.has_failed else prompts.num_shown(self._config.score, clip))


def _failed(problem: str) -> DialogueResult:
    return DialogueResult(text=problem, has_failed=True)


def _checked(chat: Chat) -> Chat:
    """Returns the chat; raises UnsupportedQuestion unless it is in the format of `vlms.chats`."""
    try:
        return checked_chat(chat)
    except ValueError as error:
        raise UnsupportedQuestion(f"the judge cannot read a chat: {error}", "see docs/judges.md") from error
