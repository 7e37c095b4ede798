"""Where a step's tokens end, and a sequence that can go back."""

import pytest

from engine.errors import RequestError
from engine.sequence import Cut, SequenceState, cut_at_stop


@pytest.mark.parametrize(
    ("tokens", "stops", "room", "cut"),
    [
        ([12, 21, 31, 77], {21}, 100, Cut(2, "stop")),
        ([12, 21, 31, 77], {77}, 100, Cut(4, "stop")),
        ([12, 21, 31, 21], {21, 31}, 100, Cut(2, "stop")),
        ([12, 21, 31, 77], (), 100, Cut(4, None)),
        ([12, 21, 31, 77], (), 3, Cut(3, "length")),
        ([12, 21, 31, 77], (), 4, Cut(4, "length")),
        ([12, 21, 31, 77], {31}, 3, Cut(3, "stop")),
        ([12, 21, 31, 77], {31}, 2, Cut(2, "length")),
        ([12], {12}, 0, Cut(0, "length")),
        ([0, 0], {5}, 9, Cut(2, None)),
    ],
)
def test_tokens_end_at_the_first_stop_or_where_room_ends(tokens, stops, room, cut):
    assert cut_at_stop(tokens, stops, room=room) == cut


def test_the_last_token_is_the_root_and_has_no_row():
    state = SequenceState(seq=3, token_ids=[5, 6, 7], prompt_length=3)

    state.append_step([8, 9], [-0.5, -0.25])

    assert state.root_token == 9
    assert state.committed_length == 4
    assert state.new_token_ids == (8, 9)
    assert state.commit_lengths == [2]


def test_a_rewound_sequence_is_as_it_was():
    state = SequenceState(seq=3, token_ids=[5, 6, 7], prompt_length=3)
    state.append_step([8, 9], [-0.5, -0.25])
    mark = state.mark()
    before = (list(state.token_ids), list(state.logprobs), list(state.commit_lengths))

    state.append_step([1], [-2.0])
    state.append_step([2, 3, 4], [-3.0, -4.0, -5.0])
    state.rewind(mark)

    assert (state.token_ids, state.logprobs, state.commit_lengths) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_ids": [], "prompt_length": 0}, "prompt_length: expected"),
        ({"token_ids": [1], "prompt_length": 2}, "prompt_length: expected"),
        ({"token_ids": [1], "prompt_length": True}, "prompt_length: expected"),
        ({"token_ids": [1], "prompt_length": 1, "seed": 2**63}, "seed: expected"),
        ({"token_ids": [1], "prompt_length": 1, "seed": 0.5}, "seed: expected an integer"),
        ({"token_ids": [1], "prompt_length": 1, "seed": True}, "seed: expected an integer"),
    ],
)
def test_a_sequence_that_cannot_be_served_is_refused(options, message):
    with pytest.raises(RequestError, match=message):
        SequenceState(seq=0, **options)
