"""Newton-Schulz iterations: the nearest orthogonal matrix of each matrix in a batch, by products alone.

The iteration of Muon (Jordan et al. 2024): X <- a X + (b A + c A^2) X with A = X X^T, which moves all singular values
towards 1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from sherd.errors import PolicyError

Coefficients = tuple[float, float, float]

QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)
"""Of Jordan et al. (2024), the default of `torch.optim.Muon`: the same for each iteration."""

POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""Of Amsel et al. (2025), "The Polar Express": the best polynomial for each iteration, for singular values from 0.001
on. The last one is repeated."""

MARGIN = 1.01
"""All but the last polynomial of the Polar Express are made for singular values up to this one, as rounding makes some
larger than 1."""

CACHED_BYTES = 512 << 10
"""Of matrices that a CPU iterates together: so few that they and their products stay in a core's cache. In one batch,
24 matrices of 512 x 512 take 15 % longer."""


def coefficients_of(given: str | Sequence[float] | Sequence[Sequence[float]], steps: int) -> list[Coefficients]:
    """Returns the coefficients of each of `steps` iterations.

    Args:
        given: "quintic", "polar_express", three numbers, or three numbers for each iteration; the last ones are
            repeated.
        steps: the number of iterations, 1 to 99.

    Raises:
        PolicyError: `given` or `steps` is something else.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
        raise PolicyError(f"ns_steps={steps!r}: expected the number of iterations, from 1 to 99")
    if given == "polar_express":
        scaled = [(a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in POLAR_EXPRESS[:-1]]
        each = [*scaled, POLAR_EXPRESS[-1]]
    elif given == "quintic":
        each = [QUINTIC]
    else:
        each = _numbers(given)
    return [each[min(step, len(each) - 1)] for step in range(steps)]


def _numbers(given: object) -> list[Coefficients]:
    rows = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if rows and all(isinstance(number, (int, float)) for number in rows):
        rows = [rows]
    if not rows or not all(
        isinstance(row, Sequence) and len(row) == 3 and all(isinstance(number, (int, float)) for number in row)
        for row in rows
    ):
        raise PolicyError(
            f"ns_coefficients={given!r}: expected 'quintic', 'polar_express', three numbers, or three numbers for each "
            "iteration"
        )
    return [(float(a), float(b), float(c)) for a, b, c in rows]


def orthogonalized(
    matrices: torch.Tensor, coefficients: Sequence[Coefficients], eps: float, dtype: torch.dtype, in_cache: bool = True
) -> torch.Tensor:
    """Returns nearly orthogonal matrices: of each matrix, the singular vectors with singular values near 1.

    Args:
        matrices: [batch, m, n]. They are not changed.
        coefficients: a, b and c of each iteration.
        eps: the least norm that a matrix is divided by.
        dtype: the dtype that the iteration computes in.
        in_cache: iterate as few matrices together as a CPU's cache holds, for which the sizes are chosen.

    Returns:
        A tensor of the same shape, of `dtype`.
    """
    if not in_cache or not matrices.numel():
        return _iterated(matrices.to(dtype), coefficients, eps)
    together = CACHED_BYTES // (matrices[0].numel() * dtype.itemsize)
    # One by one as torch does, to the bit: baddbmm rounds some tiny matrices otherwise, also in a batch of one.
    if together < 2 or len(matrices) == 1:
        return torch.stack([_iterated(matrix.to(dtype), coefficients, eps) for matrix in matrices])
    return torch.cat([_iterated(few.to(dtype), coefficients, eps) for few in matrices.split(together)])


def _iterated(x: torch.Tensor, coefficients: Sequence[Coefficients], eps: float) -> torch.Tensor:
    """Returns one matrix, or a batch of them, orthogonalised."""
    # The iteration is made for singular values up to 1, and no singular value is larger than this norm.
    x = x / x.flatten(-2).norm(dim=-1).clamp(min=eps)[..., None, None]
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:  # the Gram matrix of the shorter side is the smaller one
        x = x.mT
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


TINY = 1e-10
"""Added to what NorMuon divides by."""


def with_even_rows(matrices: torch.Tensor, squares: torch.Tensor, beta2: float) -> torch.Tensor:
    """Returns matrices whose rows are divided by their usual sizes, each matrix with the norm that it had.

    The normalisation of NorMuon (Li et al. 2025): v <- beta2 v + (1 - beta2) mean(X^2) for each row of X, X' = X /
    sqrt(v), and of that X' |X| / |X'|.

    Args:
        matrices: [batch, m, n], orthogonalised. They are not changed.
        squares: v, [batch, m, 1], is updated in place.
        beta2: of the average.

    Returns:
        A tensor of the same shape, of the dtype of `squares`.
    """
    x = matrices.to(squares.dtype)
    squares.lerp_(x.square().mean(2, keepdim=True), 1 - beta2)
    divided = x / (squares.sqrt() + TINY)
    norm, of_divided = (each.square().sum((1, 2), keepdim=True).sqrt() for each in (x, divided))
    return divided * (norm / (of_divided + TINY))


@functools.cache
def computes_in(device: torch.device) -> torch.dtype:
    """Returns the dtype to iterate in on `device`: bfloat16 on accelerators, and on CPUs with units for it.

    Elsewhere float32: products in bfloat16 take 10 to 50 times as long on a CPU without such units.
    """
    if device.type != "cpu":
        return torch.bfloat16
    units = torch.cpu.get_capabilities()
    return torch.bfloat16 if units.get("amx_bf16") or units.get("avx512_bf16") else torch.float32
