"""Models and texts that ship: found by name, trained where they say so."""

import math

import pytest
import torch

from engine.errors import ConfigError
from engine.presets import END_TOKEN, NUM_BYTES, TEXTS, preset, sample_text


@pytest.mark.parametrize("name", ["tiny", "nano"])
def test_a_preset_is_the_same_each_time(name):
    first, second = preset(name), preset(name)

    for one, other in ((first.target, second.target), (first.drafter, second.drafter)):
        assert one.config == other.config
        assert all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)


def test_a_seed_makes_other_random_weights_and_none_where_they_are_trained():
    tensors = [preset("nano", seed=seed).target.tensors["lm_head.weight"] for seed in (0, 1)]

    assert not torch.equal(*tensors)
    with pytest.raises(ConfigError, match="seed: expected None for 'tiny', got 3"):
        preset("tiny", seed=3)


def test_an_unknown_name_is_refused():
    with pytest.raises(
        ConfigError, match=r"preset: expected one of tiny, nano, kimi.*, got 'huge'"
    ):
        preset("huge")
    with pytest.raises(ConfigError, match="text: expected one of predictable, code, prose"):
        sample_text("../target/config.json")


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_longer_than_the_longest_context_and_ends_with_a_line(name):
    text = sample_text(name)

    assert len(text) > 8192 + 1024
    assert text.endswith(b"\n")
    assert text.decode()  # UTF-8


@pytest.mark.parametrize(
    ("name", "most_bits"), [("predictable", 0.6), ("code", 2.0), ("prose", 2.2)]
)
def test_the_trained_target_has_learnt_what_it_never_saw(name, most_bits):
    tokens = list(sample_text(name)[4096 : 4096 + 1024])

    logits = preset("tiny").target.logits(tokens)

    bits = torch.nn.functional.cross_entropy(logits[255:-1], torch.tensor(tokens[256:])).item()
    assert bits / math.log(2) < most_bits  # a random model has 8


def test_the_trained_pair_speaks_bytes_and_a_token_that_ends_them():
    config = preset("tiny").target.config

    assert NUM_BYTES == END_TOKEN == 256
    assert config.vocab_size > END_TOKEN
