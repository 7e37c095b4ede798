"""What is known of one sequence between two steps, and what is handed out in the end.

The last token of a sequence is its root: chosen already, not yet in the target's cache. So a
sequence of n tokens has n - 1 committed rows, and the root's position is n - 1.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.sampling import GREEDY, Sampling, check_integer, check_seed

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Generation:
    """The new tokens of one prompt, prompt excluded."""

    token_ids: tuple[int, ...]
    commit_lengths: tuple[int, ...]  # tokens appended by each step, before any cut at the end
    logprobs: tuple[float, ...]  # the target's own, one for each token
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Cut:
    """How many of a step's tokens are kept, and why the sequence ends there; None if it goes on."""

    num_tokens: int
    finish_reason: FinishReason | None


def cut_at_stop(token_ids: Sequence[int], stop_token_ids: Collection[int], *, room: int) -> Cut:
    """Cut a step's tokens after the first stop token, or where `room` tokens are full.

    The stop token itself is kept. A stop token that is also the last one there is room for counts
    as a stop.
    """
    for kept, token in enumerate(token_ids[:room], start=1):
        if token in stop_token_ids:
            return Cut(kept, "stop")
    if len(token_ids) >= room:
        return Cut(max(0, room), "length")
    return Cut(len(token_ids), None)


@dataclass(frozen=True, slots=True)
class SequenceMark:
    """A point in the life of a sequence to go back to."""

    num_tokens: int
    num_logprobs: int
    num_steps: int


@dataclass(slots=True)
class SequenceState:
    """One sequence of a batch: its tokens so far and how the next ones are chosen."""

    seq: int  # the cache's name for it
    token_ids: list[int]  # prompt and everything appended; the last one is the root
    prompt_length: int
    seed: int = 0
    sampling: Sampling = GREEDY
    logprobs: list[float] = field(default_factory=list)
    commit_lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_integer(
            "prompt_length",
            self.prompt_length,
            least=1,
            most=len(self.token_ids),
            reason="a sequence begins with at least one token",
        )

    @property
    def root_token(self) -> int:
        """The last token, whose KV row does not exist yet."""
        return self.token_ids[-1]

    @property
    def committed_length(self) -> int:
        """Rows in the target's cache, P; also the root's absolute position."""
        return len(self.token_ids) - 1

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """The tokens after the prompt."""
        return tuple(self.token_ids[self.prompt_length :])

    @property
    def num_new_tokens(self) -> int:
        """How many tokens there are after the prompt."""
        return len(self.token_ids) - self.prompt_length

    def append_step(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append what one step committed: accepted tokens, then the bonus token."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.commit_lengths.append(len(token_ids))

    def finished(self, stop_token_ids: Collection[int], max_new_tokens: int) -> Generation | None:
        """Return what is handed out if the last step ended the sequence, cut where it ended."""
        before = self.num_new_tokens - self.commit_lengths[-1]
        last = self.token_ids[self.prompt_length + before :]
        cut = cut_at_stop(last, stop_token_ids, room=max_new_tokens - before)
        if cut.finish_reason is None:
            return None
        kept = before + cut.num_tokens
        return Generation(
            token_ids=self.new_token_ids[:kept],
            commit_lengths=tuple(self.commit_lengths),
            logprobs=tuple(self.logprobs[:kept]),
            finish_reason=cut.finish_reason,
        )

    def mark(self) -> SequenceMark:
        """Return the present point, to come back to with `rewind`."""
        return SequenceMark(len(self.token_ids), len(self.logprobs), len(self.commit_lengths))

    def has_passed(self, mark: SequenceMark) -> bool:
        """Return whether `mark` is a point on the way here, none that a rewind took back."""
        steps = self.commit_lengths[: mark.num_steps]
        num_tokens = self.prompt_length + sum(steps)
        return (len(steps), num_tokens) == (mark.num_steps, mark.num_tokens)

    def rewind(self, mark: SequenceMark) -> None:
        """Forget all that was appended after `mark`."""
        del self.token_ids[mark.num_tokens :]
        del self.logprobs[mark.num_logprobs :]
        del self.commit_lengths[mark.num_steps :]
