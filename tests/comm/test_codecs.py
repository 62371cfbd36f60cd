"""Encoded values are few bytes and come back within the bound, whatever they are; random rounding has no bias."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sherd
from sherd.codecs import FORMATS, checked, random_bits, round_to_bf16
from sherd.errors import PolicyError, PolicyTypeError

LARGEST = torch.finfo(torch.float32).max
WIDE = (torch.float32, torch.float64)
DTYPES = (*WIDE, torch.bfloat16, torch.float16)
SCALES = (1.0, 0.0, 1e-3, 1e30, 1e-37, 1e-40, LARGEST / 4, LARGEST)  # of values up to 1
UNUSUAL = (0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, LARGEST, -LARGEST, 1e-45, 3e4)

codecs = st.builds(
    lambda name, blocks: sherd.codec(name, blocks and 8 * blocks),
    st.sampled_from(sorted(FORMATS)),
    st.one_of(st.none(), st.integers(1, 20)),
)


def through(codec, values, dtype=None):
    """What arrives of `values`, in `dtype`, and the bytes that were sent."""
    sent = torch.full((*values.shape[:-1], codec.num_bytes(values.shape[-1])), 255, dtype=torch.uint8)
    codec.encode(values, sent)
    arrived = torch.empty_like(values, dtype=dtype or values.dtype)
    codec.decode(sent, arrived)
    return arrived, sent


@st.composite
def drawn_values(draw):
    """Values of one magnitude or of very different ones, some of them unusual."""
    numel, seed = draw(st.integers(0, 400)), draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(numel, generator=generator, dtype=torch.float64) * 2 - 1
    if draw(st.booleans()):
        values *= torch.exp(30 * torch.randn(numel, generator=generator, dtype=torch.float64))
    values *= draw(st.sampled_from(SCALES))
    for place, value in draw(st.dictionaries(st.integers(0, 399), st.sampled_from(UNUSUAL), max_size=6)).items():
        values[place : min(place, numel) + 1] = value
    return values.to(draw(st.sampled_from(DTYPES)))


@given(codecs, drawn_values(), st.sampled_from(WIDE))
def test_finite_values_come_back_within_the_bound_and_others_as_what_they_are(codec, values, wide):
    before = values.clone()
    arrived, sent = through(codec, values, wide)
    again = torch.zeros_like(sent)
    codec.encode(values, again)
    assert torch.equal(sent, again)
    assert torch.equal(values.nan_to_num(7.0), before.nan_to_num(7.0))
    exact = values.to(torch.float32)
    finite, bound = torch.isfinite(exact), codec.bound(values)
    assert (bound.shape, bound.dtype) == (values.shape, torch.promote_types(values.dtype, torch.float32))
    error = (arrived.double() - values.double()).abs()
    assert (error <= bound.double())[finite].all()
    assert (arrived == 0)[values == 0].all()
    if codec.name == "int4":
        assert arrived.isnan()[~finite].all()
    else:
        assert torch.equal(arrived.isnan(), values.isnan())
        assert torch.equal(arrived.float()[exact.isinf()], exact[exact.isinf()])


@given(codecs, drawn_values())
def test_what_is_not_finite_changes_no_other_element(codec, values):
    finite = torch.isfinite(values.to(torch.float32))
    alone, _ = through(codec, values.where(finite, torch.zeros_like(values)), torch.float32)
    assert torch.equal(through(codec, values, torch.float32)[0][finite], alone[finite])


@given(codecs, drawn_values(), st.sampled_from(DTYPES))
def test_a_narrow_result_is_the_wide_one_rounded_once(codec, values, dtype):
    wide = through(codec, values, torch.float64)[0]
    assert torch.equal(through(codec, values, dtype)[0].nan_to_num(7.0), wide.to(dtype).nan_to_num(7.0))


@given(codecs, st.integers(0, 300), st.integers(1, 3), st.sampled_from(DTYPES))
def test_rows_are_encoded_one_by_one_also_between_other_bytes(codec, numel, num_rows, dtype):
    """A gather's rows are parts of a larger buffer; where they begin may be odd."""
    values = torch.randn(num_rows, numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    num_bytes = codec.num_bytes(numel)
    sent = torch.full((num_rows, num_bytes + 3), 99, dtype=torch.uint8)
    codec.encode(values, sent[:, 1:-2])
    assert (sent[:, [0, -2, -1]] == 99).all()
    arrived = torch.full((num_rows, numel + 3), 99, dtype=dtype)
    codec.decode(sent[:, 1:-2], arrived[:, 1:-2])
    assert (arrived[:, [0, -2, -1]] == 99).all()
    for row, values_of_row in enumerate(values):
        alone, bytes_alone = through(codec, values_of_row)
        assert torch.equal(sent[row, 1:-2], bytes_alone)
        assert torch.equal(arrived[row, 1:-2], alone)


@given(codecs, st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_shards_of_full_blocks_are_encoded_as_their_tensor_is(codec, blocks_of_ranks):
    """Whether a rank encodes its shard, or its part is taken of what was encoded: the numbers are the same."""
    shards = [codec.block * each for each in blocks_of_ranks]
    values = torch.randn(sum(shards), generator=torch.Generator().manual_seed(1))
    together = through(codec, values)[0]
    assert torch.equal(torch.cat([through(codec, shard)[0] for shard in values.split(shards)]), together)


def test_a_quarter_of_float32_is_sent_and_with_int4_a_seventh():
    of_float32 = {name: sherd.codec(name).num_bytes(1 << 20) / (4 << 20) for name in FORMATS}
    assert of_float32 == {"int8": 0.25390625, "fp8_e4m3": 0.25390625, "fp8_e5m2": 0.25390625, "int4": 0.140625}
    for name, block in (("int8", 8), ("int4", 8), ("int4", 32)):
        codec = sherd.codec(name, block)
        for numel in range(70):
            of_numbers = numel if name == "int8" else (numel + 1) // 2
            assert codec.num_bytes(numel) == of_numbers + 2 * math.ceil(numel / block)


def test_errors_are_no_larger_than_the_docstring_says():
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    for name, part in (("int8", 250), ("int4", 13.9)):
        codec = sherd.codec(name)
        largest = values.unflatten(0, (-1, codec.block)).abs().amax(1)
        assert (codec.bound(values).unflatten(0, (-1, codec.block)).amax(1) <= largest / part).all()
    for name, part, small in (("fp8_e4m3", 16, 423e3), ("fp8_e5m2", 8, 7.4e9)):
        codec = sherd.codec(name)
        largest = values.unflatten(0, (-1, codec.block)).abs().amax(1).repeat_interleave(codec.block)
        assert (codec.bound(values) <= torch.maximum(values.abs() / part, largest / small) * 1.001).all()


def test_codecs_of_one_format_and_block_are_equal():
    assert sherd.codec("int8") == sherd.codec("int8", block=128)
    assert len({sherd.codec("int8"), sherd.codec("int8", 128), sherd.codec("int8", 64), sherd.codec("int4", 64)}) == 3


def assert_one_graph_does_the_same(name, backend, cases):
    codec = sherd.codec(name)

    def there_and_back(values):
        sent = torch.empty(codec.num_bytes(values.shape[-1]), dtype=torch.uint8)
        codec.encode(values, sent)
        arrived = torch.empty_like(values)
        codec.decode(sent, arrived)
        return sent, arrived, round_to_bf16(values, (1, 2))

    torch.compiler.reset()
    compiled = torch.compile(there_and_back, fullgraph=True, backend=backend)
    for numel, dtype in cases:
        values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
        for found, expected in zip(compiled(values), there_and_back(values), strict=True):
            assert torch.equal(found, expected), (numel, dtype)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_one_graph_encodes_and_decodes(name):
    assert_one_graph_does_the_same(name, "aot_eager", [(301, torch.float32)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_fused_kernels_give_the_same_bytes_whatever_the_length(name):
    cases = [(301, torch.float32), (1024, torch.float32), (301, torch.bfloat16)]
    assert_one_graph_does_the_same(name, "inductor", cases)


# Refusals


def refused(error, call, *args):
    with pytest.raises(error) as caught:
        call(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_an_unknown_format_or_block_is_refused_with_those_that_are_known():
    assert refused(PolicyError, sherd.codec, "int7") == (
        "codec('int7'): unknown format; known are 'int8', 'fp8_e4m3', 'fp8_e5m2', 'int4'"
    )
    assert refused(PolicyError, sherd.codec, "int8", 0) == "codec('int8', block=0): expected 8 or more"
    assert refused(PolicyError, sherd.codec, "int8", 20) == "codec('int8', block=20): expected a multiple of 8, as 16"
    assert refused(PolicyTypeError, sherd.codec, "int8", 32.0) == "codec('int8', block=32.0): expected an int"


def test_buffers_that_do_not_fit_are_refused_by_name():
    codec, values, sent = sherd.codec("int8"), torch.randn(5), torch.empty(7, dtype=torch.uint8)
    for dtype in (torch.int64, torch.bool, torch.complex64):
        text = refused(PolicyTypeError, codec.encode, values.to(dtype), sent)
        assert text == f"codec 'int8': encode of {dtype} values: expected a floating-point dtype"
    assert "decode with torch.int8 bytes" in refused(PolicyTypeError, codec.decode, sent.to(torch.int8), values)
    assert refused(PolicyError, codec.encode, values, sent[:-1]) == (
        "codec 'int8': encode of values [5] with bytes [6]: expected [7]"
    )
    assert "decode" in refused(PolicyError, codec.decode, sent.expand(2, -1), values)


class Halves(sherd.Codec):
    """A user's codec: float16 as bytes."""

    name = "halves"

    def num_bytes(self, numel):
        return 2 * numel

    def encode(self, values, out):
        out.copy_(values.to(torch.float16).view(torch.uint8))

    def decode(self, encoded, out):
        out.copy_(encoded.view(torch.float16))

    def bound(self, values):
        return values.abs().float() * 2**-11 + 2**-25


def changed(**methods):
    return type("Changed", (Halves,), methods)()


def test_a_users_codec_is_tried_once_and_what_is_wrong_is_said_by_name():
    assert checked(halves := Halves()) is halves
    assert checked(int8 := sherd.codec("int8")) is int8
    assert "expected a sherd.Codec" in refused(PolicyTypeError, checked, "int8")
    assert "codec of class Changed: expected a `name`" in refused(PolicyTypeError, checked, changed(name=None))
    for why, wrong in {
        "num_bytes returned 0.0, expected an int": changed(num_bytes=lambda self, numel: 2.0 * numel),
        "doesn't match": changed(num_bytes=lambda self, numel: 2 * numel + 1),
        "encode wrote other bytes the second time": changed(encode=lambda self, values, out: out[1:].copy_(out[:-1])),
        "encode changed the values": changed(encode=lambda self, values, out: (out.fill_(0), values.fill_(9))),
        "decode is off by 3, which is more": changed(decode=lambda self, encoded, out: out.fill_(0)),
        "decode is off by nan": changed(decode=lambda self, encoded, out: None),
        "bound returned torch.float32 []": changed(bound=lambda self, values: torch.tensor(1.0)),
        "bound returned torch.bfloat16 [0]": changed(bound=lambda self, values: values.abs().bfloat16()),
    }.items():
        text = refused(PolicyError, checked, wrong)
        assert text.startswith("codec 'halves', with "), text
        assert why in text


# Random rounding


def test_random_rounding_gives_a_neighbour_and_leaves_alone_what_bfloat16_has():
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 5000)
    rounded = round_to_bf16(values, (0,))
    assert rounded.dtype is torch.bfloat16
    below = (values.view(torch.int32) & -0x10000).view(torch.float32)
    above = ((values.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert ((rounded == below) | (rounded == above)).all()
    assert 0.4 < (rounded == below).float().mean() < 0.6
    kept = torch.tensor([0.0, -0.0, 1.0, -2.5, 1e-38, math.inf, -math.inf], dtype=torch.bfloat16)
    for key in range(50):
        for dtype in DTYPES[:3]:
            assert torch.equal(round_to_bf16(kept.to(dtype), (key,)).view(torch.int16), kept.view(torch.int16))
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert round_to_bf16(nans, (3,)).isnan().all()


def test_the_mean_of_random_roundings_is_the_value():
    num = 1 << 16
    for value in (1.0 + 2**-9, -1.0 - 2**-10, 3.14159, 1e-20, 1 + 2**-12):
        exact = torch.full((num,), value)
        step = 2.0 ** (math.frexp(value)[1] - 8)
        mean = round_to_bf16(exact, (7, 3)).double().mean().item()
        assert abs(mean - exact[0].item()) < 5 * step / 2 / num**0.5, value  # five standard deviations at most


def test_random_numbers_are_even_and_other_keys_draw_others():
    num = 1 << 18
    keys = [(0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**40,), (5, 6, 7), (5, 7, 6)]
    drawn = {key: random_bits(num, key, torch.device("cpu")) for key in keys}
    for key, numbers in drawn.items():
        assert ((numbers >= 0) & (numbers < 1 << 16)).all()
        for of_bits in (numbers >> 8, numbers & 255):
            counts = torch.bincount(of_bits, minlength=256).double()
            assert ((counts - num / 256).square() / (num / 256)).sum() < 400, key  # chi-square, 255 degrees of freedom
        wave = numbers.double() - 32767.5
        for other in keys[: keys.index(key)]:
            for shift in (0, 1, 2):
                both = (wave.roll(shift) * (drawn[other].double() - 32767.5)).mean() / wave.square().mean()
                assert abs(both) < 6 / num**0.5, (key, other, shift)
        after = (wave * wave.roll(1)).mean() / wave.square().mean()
        assert abs(after) < 6 / num**0.5, key
    assert torch.equal(random_bits(10, (3, 4), torch.device("cpu")), random_bits(20, (3, 4), torch.device("cpu"))[:10])


def test_random_rounding_touches_no_generator_and_is_always_the_same():
    state, values = torch.get_rng_state(), torch.linspace(-1, 1, 11)
    first = round_to_bf16(values, (1, 2, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(round_to_bf16(values, (1, 2, 3)), first)
    # The same with every torch and on every device.
    assert random_bits(4, (1, 2), torch.device("cpu")).tolist() == [13461, 27839, 52085, 61206]
