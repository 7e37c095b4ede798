"""A drafter's own mask embedding in a file beside its tensors."""

import pickle

import pytest
import torch

from engine.errors import WeightsError
from engine.presets import preset
from engine.weights import load_drafter, load_target, save_drafter, save_target

MASK = torch.arange(32, dtype=torch.float32)
NANO_MASK_ID = 22


@pytest.fixture
def saved(tmp_path):
    models = preset("nano", seed=4)
    save_target(models.target, tmp_path / "target")
    save_drafter(models.drafter, tmp_path / "drafter")
    return tmp_path


@pytest.mark.parametrize(
    "stored",
    [
        MASK,
        MASK.bfloat16().unsqueeze(0),
        {"mask_token_id": NANO_MASK_ID, "embedding": MASK},
        {"mask_embedding": MASK},
        torch.nn.Parameter(MASK),
    ],
    ids=["a tensor", "a row", "a record", "a named tensor", "a parameter"],
)
def test_a_mask_embedding_beside_the_tensors_is_read_and_saved(saved, stored):
    target = load_target(saved / "target", dtype=torch.float32)
    torch.save(stored, saved / "drafter" / "mask_embedding.pt")

    drafter = load_drafter(saved / "drafter", target)
    save_drafter(drafter, saved / "again")

    for read in (drafter, load_drafter(saved / "again", target)):
        assert torch.equal(read.tensors["mask_embedding.weight"], MASK)
        assert not read.mask_row.requires_grad


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (torch.ones(31), r"expected 32 plain numbers, got \[31\]"),
        (torch.ones(32).int(), r"expected 32 plain numbers, got \[32\]"),
        ({"mask_token_id": 3, "embedding": MASK}, "of mask token 22, got one of 3"),
        ({"weight": MASK}, "expected 32 plain numbers, got NoneType"),
        ([1.0] * 32, "expected 32 plain numbers, got list"),
        (MASK.to_sparse(), r"expected 32 plain numbers, got \[32\]"),
        (torch.empty(32, device="meta"), r"expected 32 plain numbers, got \[32\]"),
        (
            {"mask_token_id": torch.tensor([1, 2]), "embedding": MASK},
            "of mask token 22, got one of",
        ),
    ],
)
def test_a_mask_embedding_that_does_not_fit_is_refused(saved, stored, message):
    torch.save(stored, saved / "drafter" / "mask_embedding.pt")

    with pytest.raises(WeightsError, match=message):
        load_drafter(saved / "drafter", load_target(saved / "target"))


class Intruder:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps(Intruder(), protocol=2),
        b"\x80\x02s",
        b"\x80\x02X",
        b"\x80\x02h&",
        b"\x80\x02X\x01\0\0\0\xff.",
    ],
)
def test_a_mask_embedding_that_is_no_saved_tensor_is_refused_and_never_run(saved, content, capsys):
    (saved / "drafter" / "mask_embedding.pt").write_bytes(content)

    with pytest.raises(WeightsError, match=r"mask_embedding\.pt: expected a saved tensor"):
        load_drafter(saved / "drafter", load_target(saved / "target"))
    assert capsys.readouterr().out == ""
