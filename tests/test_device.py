"""What goes up to a device: by one copy, whatever it is; to one place, whatever was there."""

import pytest
import torch

from engine.device import ALIGNMENT, Aside, Place, packed, packed_bytes, upload_all, upload_into
from tests.attention_runs import ON_GPU

DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
VALUES = [
    torch.tensor([2**40 + 1, -3, 5]),
    torch.tensor([[7], [-1]], dtype=torch.int32),
    torch.empty(0, dtype=torch.int64),
    torch.tensor(9, dtype=torch.int16),
    torch.arange(5, dtype=torch.float64).view(1, 5),
]


def test_what_lies_behind_each_other_overlaps_nowhere_and_begins_where_a_load_may():
    storage = torch.zeros(packed_bytes(VALUES), dtype=torch.uint8)

    for place, one in zip(packed(storage, VALUES), VALUES, strict=True):
        place.copy_(one)

    for place, one in zip(packed(storage, VALUES), VALUES, strict=True):
        assert torch.equal(place, one)
        assert place.dtype == one.dtype
        assert place.storage_offset() * place.itemsize % ALIGNMENT == 0


@pytest.mark.parametrize("device", DEVICES)
def test_all_go_up_as_they_are(device):
    got = upload_all(VALUES, torch.device(device))

    for one, value in zip(got, VALUES, strict=True):
        assert one.device.type == device
        assert torch.equal(one.cpu(), value)
        assert one.dtype == value.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_a_place_holds_the_last_that_was_brought_and_nothing_on_its_way_is_lost(device):
    place = Place(torch.tensor([0, -1]), torch.device(device))
    address = place.held.data_ptr()
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    size = 2048 if device == "cuda" else 2
    grid = torch.ones(size, size, device=device)

    for number in range(100):  # faster than the device takes them
        grid @ grid  # the device has other work
        sums += place.bring(torch.tensor([number, 1]))

    assert place.held.data_ptr() == address
    assert place.held.tolist() == [99, 1]
    assert sums.tolist() == [4950, 100]


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_of_a_tensor_is_overwritten_by_what_the_host_has(device):
    held = torch.zeros(2, 4, dtype=torch.int32, device=device)

    upload_into(held[1, 1:3], torch.tensor([[5, 6], [7, 8]], dtype=torch.int32)[1])

    assert held.tolist() == [[0] * 4, [0, 7, 8, 0]]


@pytest.mark.parametrize("device", DEVICES)
def test_what_runs_aside_is_behind_what_was_and_before_what_joins(device):
    size = 1024 if device == "cuda" else 32
    x = torch.ones(size, size, device=device)
    for _ in range(20):
        x = (x @ x) / size  # all ones again, some time later

    with Aside(torch.device(device)) as aside:
        y = x + 1
    z = x * 3
    aside.join()

    assert (y + z).unique().tolist() == [5.0]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_what_parts_only_in_a_graph_does_so_nowhere_else(device):
    x, streams = torch.ones(1024, 1024, device=device), []

    def run():
        with Aside(x.device, only_captured=True) as aside:
            streams.append(torch.cuda.current_stream())
            y = x + 1
        z = (x @ x) * 3
        aside.join()
        streams.append(torch.cuda.current_stream())
        return y + z

    plain, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    x.fill_(1)
    graph.replay()

    assert torch.equal(plain, replayed)
    assert streams[0] == streams[1]
    assert streams[2] != streams[3]
