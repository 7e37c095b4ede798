import numpy as np
import pytest
import torch

from engine.errors import RequestError
from engine.layers import joined
from engine.presets import preset
from engine.target import Target, check_tokens

TARGET = preset("nano").target


@pytest.mark.parametrize(
    "token", [True, False, 1.0, 1.5, "1", None, [1], np.bool_(1), np.float32(1)]
)
def test_a_token_that_is_no_integer_is_refused_by_its_type(token):
    with pytest.raises(
        RequestError, match=f"integer token ids, got .* of type {type(token).__name__}"
    ):
        check_tokens([3, token], 23)


@pytest.mark.parametrize("token", [-1, 23, 2**40])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(RequestError, match=f"expected token ids in 0..22, got {token}"):
        check_tokens([3, token], 23)


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(RequestError, match="at least one token"):
        check_tokens([], 23)


def test_integers_of_any_kind_are_tokens():
    check_tokens([0, 22, np.int64(3), np.uint8(7)], 23)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        (torch.tensor([1.0, 2.0]), "integer token ids, got 1.0 of type float"),
        (torch.tensor([True]), "integer token ids, got True of type bool"),
        (torch.tensor([[1, 2]]), r"expected token ids \[S\], got shape \[1, 2\]"),
        (torch.tensor(1), r"expected token ids \[S\], got shape \[\]"),
    ],
)
def test_logits_are_of_one_sequence_of_tokens(token_ids, message):
    with pytest.raises(RequestError, match=message):
        TARGET.logits(token_ids)


def test_a_sequence_and_a_tensor_of_the_same_tokens_give_the_same_logits():
    assert torch.equal(TARGET.logits([1, 2, 3]), TARGET.logits(torch.tensor([1, 2, 3])))


def test_matrices_that_multiply_the_same_rows_are_copied_behind_each_other_once():
    layers = [layer.self_attn for layer in TARGET.layers]
    dense_mlp, moe = TARGET.layers[0].mlp, TARGET.layers[1].mlp
    again = Target(TARGET.config, TARGET.tensors)

    for attention in layers:
        assert joined(attention.q_a_proj, attention.kv_a_proj_with_mqa) is not None
    assert joined(dense_mlp.gate_proj, dense_mlp.up_proj) is not None
    assert joined(moe.router.weight, moe.shared.gate_proj, moe.shared.up_proj) is not None
    for name, tensor in TARGET.tensors.items():
        assert again.tensors[name].data_ptr() == tensor.data_ptr(), name
