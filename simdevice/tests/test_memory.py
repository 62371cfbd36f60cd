"""The allocator follows CUDA's rules: which block is reused, by whom and when, and every byte of the peaks."""

import random
from collections.abc import Iterator

import pytest
import torch

import simdevice

MIB = 1 << 20


@pytest.fixture
def device(device: torch.device) -> Iterator[torch.device]:
    """The second device: on the first one other files of this process may have left models."""
    torch.accelerator.set_device_index(1)
    torch.accelerator.reset_peak_memory_stats()
    yield torch.device(device.type, 1)
    torch.accelerator.set_device_index(0)


def stat(name):
    return torch.accelerator.memory_stats()[name]


def bytes_of(size):
    return torch.empty(size, dtype=torch.uint8, device="sim")


def test_sizes_are_rounded_and_segments_reserved(device):
    for size, allocated, reserved in (
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of a mebibyte is not worth a split
    ):
        torch.accelerator.empty_cache()
        x = bytes_of(size)
        assert torch.accelerator.memory_allocated() == allocated
        assert torch.accelerator.memory_reserved() == reserved
        assert stat("requested_bytes.all.current") == size
        del x
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == 0


def test_a_stream_gets_its_own_memory_back_at_once_and_no_other_stream_does(device):
    first = bytes_of(5000).data_ptr()
    assert bytes_of(5000).data_ptr() == first
    with torch.Stream(device=device):
        assert bytes_of(5000).data_ptr() != first
    assert bytes_of(4000).data_ptr() == first


def test_the_smallest_block_that_fits_is_split_and_neighbours_are_merged(device):
    a, b, c, d = (bytes_of(size) for size in (4096, 512, 1024, 512))
    begin_a, begin_c = a.data_ptr(), c.data_ptr()
    assert begin_c == begin_a + 4096 + 512
    del a, c
    small = bytes_of(1000)
    assert small.data_ptr() == begin_c, "best fit: not the larger block, though it comes first"
    part = bytes_of(512)
    assert part.data_ptr() == begin_a
    del part, b
    assert bytes_of(4096 + 512).data_ptr() == begin_a, "merged on both sides"
    assert stat("inactive_split.all.current") == 2
    del small, d
    assert stat("inactive_split.all.current") == 0


def test_recorded_streams_hold_a_block_until_they_have_passed(device):
    side = torch.Stream(device=device)
    x = torch.ones(1000, device=device)
    begin = x.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        gate = simdevice.closed_gate()
        y = x * 2
    x.record_stream(side)
    del x
    assert bytes_of(4000).data_ptr() != begin
    assert stat("active_bytes.all.current") > stat("allocated_bytes.all.current")
    gate.open()
    side.synchronize()
    again = bytes_of(4000)
    assert again.data_ptr() == begin
    again.fill_(1)
    with side:
        assert y.sum().item() == 2000


class Model:
    """The rules of CUDA's allocator for one stream, written down a second time: segments as lists of blocks."""

    def __init__(self):
        self.segments = []
        self.allocated = self.requested = 0
        self.peaks = {"allocated": 0, "requested": 0, "reserved": 0}

    def take(self, size, begin):
        """Note an allocation that the device placed at `begin`, where only a new segment may begin anywhere."""
        rounded = max(512, -(-size // 512) * 512)
        small = rounded <= MIB
        fits = [
            (block["size"], block["begin"], blocks)
            for is_small, blocks in self.segments
            for block in blocks
            if is_small == small and block["free"] and block["size"] >= rounded
        ]
        if fits:
            _, best, blocks = min(fits, key=lambda fit: fit[:2])
            assert begin == best
        else:
            segment = 2 * MIB if small else 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
            blocks = [{"size": segment, "begin": begin, "free": True}]
            self.segments.append((small, blocks))
        index = next(index for index, block in enumerate(blocks) if block["begin"] == begin)
        block, rest = blocks[index], blocks[index]["size"] - rounded
        if rest >= 512 if small else rest > MIB:
            blocks.insert(index + 1, {"size": rest, "begin": begin + rounded, "free": True})
            block["size"] = rounded
        block.update(free=False, requested=size)
        self.allocated += block["size"]
        self.requested += size
        for name, now in (("allocated", self.allocated), ("requested", self.requested), ("reserved", self.reserved())):
            self.peaks[name] = max(self.peaks[name], now)
        return block

    def give_back(self, block):
        self.allocated -= block["size"]
        self.requested -= block["requested"]
        block["free"] = True
        blocks = next(blocks for _, blocks in self.segments if any(each is block for each in blocks))
        at = next(index for index, each in enumerate(blocks) if each is block)
        for neighbour in (at + 1, at - 1):
            if 0 <= neighbour < len(blocks) and blocks[neighbour]["free"]:
                left, right = sorted((at, neighbour))
                blocks[left]["size"] += blocks.pop(right)["size"]
                at = left

    def reserved(self):
        return sum(block["size"] for _, blocks in self.segments for block in blocks)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.usefixtures("device")
def test_bytes_agree_with_a_model_of_the_rules_at_every_step(seed):
    chosen = random.Random(seed)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    simdevice.configure(spoil="no")  # nothing touches the pages of so much memory
    model, held = Model(), []
    for _ in range(300):
        if held and chosen.random() < 0.45:
            tensor, block = held.pop(chosen.randrange(len(held)))
            del tensor
            model.give_back(block)
        else:
            size = chosen.choice((chosen.randint(1, 5000), chosen.randint(1, 2 * MIB), chosen.randint(MIB, 30 * MIB)))
            tensor = bytes_of(size)
            held.append((tensor, model.take(size, tensor.data_ptr())))
            del tensor
        assert stat("allocated_bytes.all.current") == model.allocated
        assert stat("requested_bytes.all.current") == model.requested
        assert stat("reserved_bytes.all.current") == model.reserved()
    for name, peak in model.peaks.items():
        assert stat(f"{name}_bytes.all.peak") == peak


def test_holders_at_the_peak_are_named_and_what_a_label_raises_comes_out_at_the_allocation(device):
    label = "weights"
    simdevice.label_allocations(lambda: label)
    weights = bytes_of(3000)
    label = "activations"
    x, y = bytes_of(5000), bytes_of(5000)
    del x
    label = "gradients"
    gradients = bytes_of(512)
    assert simdevice.holders_at_peak(1) == {"weights": 3072, "activations": 2 * 5120}
    assert sum(simdevice.holders_at_peak(1).values()) == torch.accelerator.max_memory_allocated()
    simdevice.label_allocations(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bytes_of(3000)
    del weights, y, gradients


def test_out_of_memory_is_raised_once_the_cache_is_given_back_too(device, monkeypatch):
    monkeypatch.setenv("SIM_MEMORY_MIB", "40")
    x = bytes_of(30 * MIB)
    del x
    y = bytes_of(40 * MIB)  # only if the cached segment is given back
    assert stat("num_alloc_retries") >= 1
    with pytest.raises(torch.OutOfMemoryError, match=r"sim:1 is out of memory: tried to allocate 2097152 bytes"):
        bytes_of(2 * MIB)
    assert stat("num_ooms") >= 1
    assert torch.accelerator.get_memory_info() == (0, 40 * MIB)
    del y
    assert bytes_of(2 * MIB).numel() == 2 * MIB


def test_memory_that_is_handed_out_holds_nan(device):
    assert torch.empty(100, device=device).isnan().all()
    x = torch.ones(100, device=device)
    begin = x.data_ptr()
    alias = torch.empty(0, device=device).set_(x)
    del x, alias
    assert torch.empty(100, device=device).data_ptr() == begin
    assert torch.empty(100, device=device).isnan().all()
    simdevice.configure(spoil="no")
    x = torch.ones(100, device=device)
    begin = x.data_ptr()
    del x
    x = torch.empty(100, device=device)
    assert x.data_ptr() == begin
    assert (x == 1).all()


def test_memory_that_is_freed_holds_nan_when_asked(device):
    side = torch.Stream(device=device)
    for spoil in ("handed out", "freed"):
        simdevice.configure(spoil=spoil, races="off")
        x = torch.ones(100, device=device)
        torch.accelerator.synchronize()
        with side:
            gate = simdevice.closed_gate()
            late = x * 2  # nothing says that the memory is still used
        del x
        torch.sim.default_stream().synchronize()
        gate.open()
        with side:
            assert late.isnan().all().item() == (spoil == "freed")


def test_storage_that_is_resized_keeps_what_fits(device):
    x = torch.arange(8.0, device=device)
    storage = x.untyped_storage()
    storage.resize_(16)
    storage.resize_(32)
    assert x.tolist()[:4] == [0, 1, 2, 3]
    assert x[4:].isnan().all()
    storage.resize_(0)
    assert torch.accelerator.memory_allocated() == 0
