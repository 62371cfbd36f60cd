"""Codecs: values as fewer bytes for the wire, and back; numbers of 8 or 4 bits with a scale for each block.

    encoded | scales, 2 bytes for each block | numbers, 1 or 1/2 byte for each element |

A block is `block` consecutive elements, the last one may be shorter. Its scale is a bfloat16: the largest finite
magnitude of the block, over the largest number of the format. A number (at most 7 bits) times a scale (8 bits) is exact
in float32, so all ranks and devices decode the same values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sherd.errors import PolicyError, PolicyTypeError, reason_of
from sherd.policy import Codec
from sherd.requirements import require_int, require_type

SCALE_BYTES = 2
TINY = 2.0**-126
"""The least scale: denormal scales would be 0 where a device flushes them. It stands for 0, and a zero decodes as 0."""
AT_ONCE = 1 << 22
"""The elements of small parts that one call takes, with temporaries of 16 MiB each. It starts about ten operations."""
SLACK = 1 + 2.0**-10
"""For the rounding of a quotient in float32 before it is rounded to a number of the format."""


def codec(name: str, block: int | None = None) -> Codec:
    """Returns the codec of a format whose blocks have a scale each (Dettmers, "8-Bit Approximations", ICLR 2016).

    | name | bytes for an element | error of an element, `largest` being the largest finite magnitude in its block |
    |---|---|---|
    | `"int8"` | 1 + 2 / block | at most `largest` / 250 |
    | `"fp8_e4m3"` | 1 + 2 / block | at most 1/16 of the element, or `largest` / 423,000 if that is more |
    | `"fp8_e5m2"` | 1 + 2 / block | at most 1/8 of the element, or `largest` / 7,400,000,000 if that is more |
    | `"int4"` | 1/2 + 2 / block | at most `largest` / 13.9 |

    NaN and infinities arrive as such, and the finite elements of their block as if the others were zero; with `"int4"`
    infinities arrive as NaN. Zeros arrive as zeros. Values beyond the range of float32 are infinities, and magnitudes
    below about 1e-38 may arrive as zeros.

    `values` and `out` may be of any floating-point dtype. They and the encoded bytes may have equal leading dims:
    [ranks, n] and [ranks, num_bytes(n)], each row encoded by itself. Encoding reads `values` three times and takes one
    temporary of 4 bytes an element (two if `values` are not float32); decoding takes two.

    Args:
        name: the format, one of the table.
        block: elements that share a scale, a multiple of 8. 128 by default, 32 for `"int4"`.

    Raises:
        PolicyError: an unknown name, or a block that is not a positive multiple of 8.
    """
    if name not in FORMATS:
        raise PolicyError(f"codec({name!r}): unknown format; known are {', '.join(map(repr, FORMATS))}")
    block = FORMATS[name].block if block is None else block
    require_int(f"codec({name!r}, block={{}})", block, 8)
    if block % 8:
        raise PolicyError(f"codec({name!r}, block={block}): expected a multiple of 8, as {block // 8 * 8}")
    return BlockCodec(name, block)


@dataclass(frozen=True)
class NumberFormat:
    """How one number is stored.

    Args:
        bits: bits of a number.
        block: elements that share a scale unless the user says how many.
        largest: the largest finite number.
        specials: the numbers that stand for NaN, infinity and minus infinity.
        relative: the most that a number is rounded by, as a part of it.
        absolute: the same, near 0, where the steps between numbers are equal.
        dtype: the dtype of a floating-point number; None for integers, stored as their distance to the least one.
    """

    bits: int
    block: int
    largest: float
    specials: tuple[float, float, float]
    relative: float
    absolute: float
    dtype: torch.dtype | None = None

    @property
    def least(self) -> int:
        return -(1 << self.bits - 1)

    def numbers(self, codes: Tensor) -> Tensor:
        """Returns what `codes`, uint8, stand for, as float32: a number, NaN or an infinity."""
        if self.dtype is not None:
            numbers = codes.view(self.dtype).to(torch.float32)
        else:
            numbers = functional.threshold(codes.to(torch.float32).add_(self.least), self.least + 0.5, math.nan)
        if self.largest < self.specials[1] < math.inf:
            # hardshrink is 0 up to `largest`, and what is left overflows. Masks would take four times as long on a CPU.
            numbers.add_(functional.hardshrink(numbers, self.largest + 0.5), alpha=torch.finfo(torch.float32).max)
        return numbers


# A scale that is rounded down to bfloat16 makes quotients larger than `largest` by up to 1/256 of it, which still are
# rounded to `largest`, not to the next number, which stands for infinity: 126 to 126.49, 416 to 417.6 (of 432).
FORMATS = {
    "int8": NumberFormat(8, 128, 126, (-128, 127, -127), 0, 0.5),
    "fp8_e4m3": NumberFormat(8, 128, 416, (math.nan, 448, -448), 2**-4, 2**-10, torch.float8_e4m3fn),
    "fp8_e5m2": NumberFormat(8, 128, 57344, (math.nan, math.inf, -math.inf), 2**-3, 2**-17, torch.float8_e5m2),
    "int4": NumberFormat(4, 32, 7, (-8, -8, -8), 0, 0.5),
}


@dataclass(frozen=True)
class BlockCodec(Codec):
    """A format of `FORMATS` with a scale for each `block` elements; see `codec`."""

    name: str
    block: int

    @property
    def _format(self) -> NumberFormat:
        return FORMATS[self.name]

    def num_bytes(self, numel: int) -> int:
        return SCALE_BYTES * -(-numel // self.block) + self._num_codes(numel)

    def _num_codes(self, numel: int) -> int:
        return -(-numel * self._format.bits // 8)

    def encode(self, values: Tensor, out: Tensor) -> None:
        require_buffers(self, "encode", values, out)
        form = self._format
        for part, scales, codes in self._parts(values.to(torch.float32), out):
            numbers = torch.nan_to_num(part, 0.0, 0.0, 0.0)
            scale = self._scales(numbers)
            scales.copy_(scale.squeeze(-1).view(torch.uint8))
            torch.div(part, widened(scale), out=numbers)
            numbers.nan_to_num_(*form.specials)
            if form.dtype is not None:
                codes.view(form.dtype).copy_(numbers)
                continue
            numbers.round_().sub_(form.least)
            if form.bits == 4:  # the block's first half in the low bits, its second half in the high bits
                numbers, high = numbers[..., : codes.shape[-1]], numbers[..., codes.shape[-1] :]
                numbers[..., : high.shape[-1]].add_(high, alpha=16)
            codes.copy_(numbers)

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        require_buffers(self, "decode", out, encoded)
        for part, scales, codes in self._parts(out, encoded):
            if self._format.bits == 4:
                codes = torch.cat((codes & 15, codes >> 4), -1)[..., : part.shape[-1]]
            # A clone, as these bytes may begin at an odd address.
            scale = scales.clone(memory_format=torch.contiguous_format).view(torch.int16)
            part.copy_(self._format.numbers(codes).mul_(widened(scale).unsqueeze(-1)))

    def bound(self, values: Tensor) -> Tensor:
        exact = values.to(torch.promote_types(values.dtype, torch.float32))
        num_blocks = -(-exact.shape[-1] // self.block)
        padded = functional.pad(exact, (0, num_blocks * self.block - exact.shape[-1]))
        blocks = padded.unflatten(-1, (num_blocks, self.block))
        scale = widened(self._scales(torch.nan_to_num(blocks.to(torch.float32), 0.0, 0.0, 0.0)))
        rounded = torch.maximum(blocks.abs() * self._format.relative, scale * self._format.absolute)
        return (rounded * SLACK + TINY).flatten(-2)[..., : exact.shape[-1]]

    def _scales(self, blocks: Tensor) -> Tensor:
        """Returns the scale of each of `blocks`, finite float32 [..., block]: a bfloat16 as int16 [..., 1]."""
        largest = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True))
        # At most what bfloat16 has below this: the largest number times the scale is finite in float32.
        mantissa, exponent = math.frexp(torch.finfo(torch.float32).max / self._format.largest)
        most = math.ldexp(math.floor(mantissa * 256), exponent - 8)
        scales = (largest / self._format.largest).clamp(TINY, most)
        # Rounded to nearest as integers: a compiler that fuses may leave out a cast to bfloat16 and back.
        return (scales.view(torch.int32) + 0x8000 >> 16).to(torch.int16)

    def _parts(self, values: Tensor, encoded: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns views of the full blocks, and of the shorter last one: values, bytes of scales, bytes of numbers.

        They are [..., blocks, elements], [..., 2 * blocks] and [..., blocks, bytes].
        """
        numel = values.shape[-1]
        full, rest = numel // self.block, numel % self.block  # Dynamo has no divmod
        end, begin = full * self.block, SCALE_BYTES * -(-numel // self.block)
        middle = begin + self._num_codes(end)
        parts = []
        if full:
            codes = encoded[..., begin:middle].unflatten(-1, (full, -1))
            parts.append((values[..., :end].unflatten(-1, (full, -1)), encoded[..., : SCALE_BYTES * full], codes))
        if rest:
            codes = encoded[..., middle:].unsqueeze(-2)
            parts.append((values[..., end:].unsqueeze(-2), encoded[..., SCALE_BYTES * full : begin], codes))
        return parts


def widened(scales: Tensor) -> Tensor:
    """Returns `scales`, bfloat16 as int16, as float32."""
    return (scales.to(torch.int32) << 16).view(torch.float32)


def require_buffers(codec: Codec, call: str, values: Tensor, encoded: Tensor) -> None:
    """Raise `PolicyTypeError` unless `values` are floating-point and `encoded` is uint8, `PolicyError` for lengths."""
    where = f"codec {codec.name!r}: {call}"
    if not values.is_floating_point():
        raise PolicyTypeError(f"{where} of {values.dtype} values: expected a floating-point dtype")
    if encoded.dtype != torch.uint8:
        raise PolicyTypeError(f"{where} with {encoded.dtype} bytes: expected torch.uint8")
    expected = (*values.shape[:-1], codec.num_bytes(values.shape[-1]))
    if encoded.shape != expected:
        raise PolicyError(f"{where} of values {[*values.shape]} with bytes {[*encoded.shape]}: expected {[*expected]}")


def checked(codec: Codec) -> Codec:
    """Returns `codec` after it has encoded and decoded small buffers on the CPU.

    Raises:
        PolicyTypeError: no `Codec`, one without a name, or a length or bound of the wrong type.
        PolicyError: a call that raises, encoded bytes that are not the same twice, values changed by `encode`, or
            values decoded beyond the bound.
    """
    require_type("a codec: expected a sherd.Codec", codec, Codec)
    if isinstance(codec, BlockCodec):
        return codec
    if not isinstance(getattr(codec, "name", None), str):
        raise PolicyTypeError(f"a codec of class {type(codec).__name__}: expected a `name`, a str")
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (0, 1, 7, 300):
            values = torch.linspace(-3, 2, numel).to(dtype)
            what = f"codec {codec.name!r}, with {numel} {dtype} values"
            try:
                _check_round_trip(codec, what, values)
            except PolicyError:
                raise
            except Exception as error:
                raise PolicyError(f"{what}: {reason_of(error)}") from error
    return codec


def codec_of(given: Any) -> Codec | None:
    """Returns the codec that a policy is `given`, or that it names; None for what is no codec. Raises as `checked`."""
    if isinstance(given, str):
        return codec(given)
    return checked(given) if isinstance(given, Codec) else None


def encode_parts(codec: Codec, values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Returns the parts of `values`, of `sizes` elements, each encoded, one after the other; and their lengths."""
    lengths = [codec.num_bytes(size) for size in sizes]
    encoded = values.new_empty(sum(lengths), dtype=torch.uint8)
    for several, of_several in _in_calls(codec, values, encoded, sizes):
        codec.encode(several, of_several)
    return encoded, lengths


def decode_parts(codec: Codec, encoded: Tensor, sizes: Sequence[int], out: Tensor) -> None:
    """Fill `out` with what `encode_parts` has encoded."""
    for several, of_several in _in_calls(codec, out, encoded, sizes):
        codec.decode(of_several, several)


def parts_at_once(codec: Codec, sizes: Sequence[int]) -> int:
    """Returns how many parts of equal `sizes` one call encodes or decodes, as rows; of a user's codec it is one."""
    return max(1, AT_ONCE // max(1, sizes[0])) if isinstance(codec, BlockCodec) and len(set(sizes)) == 1 else 1


def decoding_bytes(codec: Codec, sizes: Sequence[int], itemsize: int) -> int:
    """Returns the bytes of temporaries while parts of `sizes` elements are decoded, as many as one call takes.

    `itemsize` is that of a copy of what is decoded, 0 for none. A user's codec is taken to need two tensors of float32.
    """
    form = FORMATS[codec.name] if isinstance(codec, BlockCodec) else FORMATS["int8"]
    of_element = (4 if form.specials[1] == math.inf else 8) + (form.bits == 4)
    scales = SCALE_BYTES * -(-max(sizes) // codec.block) if isinstance(codec, BlockCodec) else 0
    return ((of_element + itemsize) * max(sizes) + scales) * min(len(sizes), parts_at_once(codec, sizes))


def _in_calls(codec: Codec, values: Tensor, encoded: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the values and the bytes for each call: of one part, or of several equal ones."""
    at_once = parts_at_once(codec, sizes)
    if at_once > 1 and sizes[0]:
        rows = values.view(len(sizes), -1), encoded.view(len(sizes), -1)
        yield from zip(*(each.split(at_once) for each in rows), strict=True)
    else:
        yield from zip(values.split(list(sizes)), encoded.split([*map(codec.num_bytes, sizes)]), strict=True)


def _check_round_trip(codec: Codec, what: str, values: Tensor) -> None:
    numel, before = values.shape[0], values.clone()
    num_bytes = codec.num_bytes(numel)
    if not isinstance(num_bytes, int) or num_bytes < 0:
        raise PolicyTypeError(f"{what}: num_bytes returned {num_bytes!r}, expected an int from 0 on")
    first, second = torch.zeros(2, num_bytes, dtype=torch.uint8)
    codec.encode(values, first)
    codec.encode(values, second.fill_(255))
    if not torch.equal(values, before):
        raise PolicyError(f"{what}: encode changed the values; it may read them only")
    if not torch.equal(first, second):
        raise PolicyError(f"{what}: encode wrote other bytes the second time; it must fill all bytes, always the same")
    decoded, bound = torch.full((numel,), math.nan), codec.bound(values)
    codec.decode(first, decoded)
    if bound.shape != values.shape or bound.dtype not in (torch.float32, torch.float64):
        raise PolicyTypeError(
            f"{what}: bound returned {bound.dtype} {[*bound.shape]}, expected float32 or float64 {[numel]}"
        )
    error = (decoded - values).abs()
    if not bool((error <= bound).all()):
        raise PolicyError(f"{what}: decode is off by {error.max():.3g}, which is more than bound allows")


def round_to_bf16(values: Tensor, key: Sequence[int]) -> Tensor:
    """Returns `values` as bfloat16, each rounded up or down at random, so that its mean is the value.

    The generator has no state: what is drawn for an element depends on `key` and the element's index only, on every
    device (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). Values that bfloat16 has stay as
    they are, and so do NaN and infinities. Takes temporaries of 8 bytes an element, three at a time.

    Args:
        values: floating-point, of any shape, with fewer than 2^32 elements; float64 is rounded to float32 first.
        key: integers modulo 2^64, as (seed, step, rank): other keys draw other numbers.
    """
    return rounded_by(values, random_bits(values.numel(), key, values.device).view(values.shape))


def rounded_by(values: Tensor, random: Tensor) -> Tensor:
    """Returns `values` as bfloat16, rounded by 16 random bits each, int32."""
    exact = values.to(torch.float32)
    # 2^16 values of float32 are between two neighbours in bfloat16, and their low 16 bits say where: these and 16
    # random bits carry into the upper half with the probability that the value is as near to the upper neighbour.
    bits = exact.contiguous().view(torch.int32)
    rounded = (bits + random & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(exact), rounded, exact).to(torch.bfloat16)


def random_bits(numel: int, key: Sequence[int], device: torch.device) -> Tensor:
    """Returns `numel` random numbers of 16 bits, int32: a hash of `key` and the index.

    The hash is Wellons' of two rounds with 32 bits ("hash-prospector", 2018). Its products are below 2^63: no overflow.
    """
    folded, mask = 0, 0xFFFFFFFF
    for part in key:
        folded = (folded + part + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        folded ^= folded >> 31
    state = torch.arange(numel, dtype=torch.int64, device=device).add_(folded & mask).bitwise_and_(mask)
    state.bitwise_xor_(state >> 16).mul_(0x21F0AAAD).bitwise_and_(mask)
    # Half of the key after a round: keys whose other half differs by 1 would draw one sequence, shifted by 1.
    state.bitwise_xor_(folded >> 32)
    state.bitwise_xor_(state >> 15).mul_(0x735A2D97).bitwise_and_(mask)
    return state.bitwise_xor_(state >> 15).bitwise_and_(0xFFFF).to(torch.int32)
