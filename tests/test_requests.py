"""What no engine is built from and what no engine serves, with what is said of it."""

import pytest
import torch

from engine.config import EngineConfig
from engine.decoder import Engine
from engine.errors import BackendError, ConfigError, RequestError, ShapeError
from engine.presets import preset
from engine.sampling import Sampling
from tests.nano import MODELS, TARGET, VOCAB, make_engine
from tests.steered import Steered


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention_backend": "nope"}, BackendError, "expected one of reference, .*got 'nope'"),
        (
            {"page_size": 7},
            ConfigError,
            r"page_size: expected one of \(1, 16, 32, 64, 128\), got 7",
        ),
        ({"max_context": 8192}, ConfigError, "max_context: expected at most 4096"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_with_the_choices(changes, error, message):
    with pytest.raises(error, match=message):
        make_engine(**changes)


def test_a_drafter_of_another_target_is_refused():
    with pytest.raises(ConfigError, match="hidden_size"):
        Engine(TARGET, preset("tiny").drafter, EngineConfig())


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([], {}, "prompts: expected at least one"),
        ([[1], []], {}, "prompt: expected at least one token"),
        ([[1, VOCAB]], {}, f"expected token ids in 0..{VOCAB - 1}, got {VOCAB}"),
        ([[-1]], {}, "got -1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: expected an integer >= 1"),
        ([[1]], {"max_new_tokens": 256}, r"expected at most 256, got 1 \+ 256"),
        ([[1]], {"temperature": -0.5}, "temperature"),
        ([[1]], {"seed": [1, 2]}, "seed: expected one"),
        ([[1]], {"seed": 2**63}, "seed"),
        ([1, 2], {}, "prompt: expected token ids, got 1"),
        (None, {}, "prompts: expected a list of prompts, got None"),
        ((prompt for prompt in [[1]]), {}, "prompts: expected a list of prompts, got <generator"),
        ({0: [1]}, {}, "prompts: expected a list of prompts, got {0"),
        (torch.tensor(1), {}, "prompts: expected a list of prompts, got tensor"),
        ([torch.tensor(1)], {}, "prompt: expected token ids, got tensor"),
        ([{1, 2}], {}, "prompt: expected token ids, got {1, 2}"),
        ([(token for token in [1])], {}, "prompt: expected token ids, got <generator"),
        ([[1.0]], {}, r"expected integer token ids, got 1\.0"),
        ([[True]], {}, "expected integer token ids, got True"),
        ([[1]], {"max_new_tokens": True}, "max_new_tokens: expected an integer >= 1, got True"),
        ([[1]], {"max_new_tokens": 2.0}, "max_new_tokens: expected an integer >= 1, got 2.0"),
        ([[1]], {"seed": 1.0}, "seed: expected an integer"),
        ([[1]], {"seed": True}, "seed: expected an integer"),
        ([[1]], {"seed": [1.0]}, "seed: expected an integer"),
        ([[1]], {"temperature": False}, "temperature: expected a finite number >= 0, got False"),
        ([[1]], {"temperature": 0.0, "sampling": Sampling()}, "expected none beside a Sampling"),
        ([[1]], {"sampling": 0.5}, "sampling: expected a Sampling, got 0.5"),
        ([[1]], {"stop_token_ids": 5}, "stop_token_ids: expected a collection, got 5"),
        ([[1]], {"stop_token_ids": ""}, "stop_token_ids: expected a collection, got ''"),
        ([[1]], {"stop_token_ids": torch.tensor(1)}, "stop_token_ids: expected a collection"),
        ([[1]], {"temperature": 10**400}, "temperature: expected a finite number >= 0, got 1000"),
        (
            [[1]],
            {"stop_token_ids": {VOCAB}},
            f"stop_token_ids: expected an integer in 0..{VOCAB - 1}",
        ),
        ([[1]], {"stop_token_ids": [1.0]}, "stop_token_ids: expected an integer"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(prompts, changes, message):
    with pytest.raises(RequestError, match=message):
        make_engine().generate(prompts, **({"max_new_tokens": 4} | changes))


@pytest.mark.parametrize("prompt", [None, 5, (token for token in [1]), {1: 2}])
def test_the_plain_pass_refuses_what_is_no_list_of_tokens(prompt):
    with pytest.raises(RequestError, match="prompt: expected token ids, got"):
        TARGET.logits(prompt)


@pytest.mark.parametrize(
    "steer",
    [
        lambda logits, _request: logits[:1],
        lambda logits, _request: logits.repeat(1, 1, 2),
        lambda logits, _request: logits[0],
    ],
    ids=["fewer sequences", "more tokens", "no sequences"],
)
def test_drafts_of_other_sequences_or_tokens_are_refused(steer):
    engine = Engine(TARGET, Steered(MODELS.drafter, steer), EngineConfig(max_context=64))

    with pytest.raises(ShapeError, match=r"draft_logits: expected \[2, horizon, 23\], got"):
        engine.generate([[1, 2], [3]], max_new_tokens=4)
    assert engine.cache.sequences == ()
