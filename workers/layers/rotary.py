"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scalings for longer contexts.

linear   positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)
dynamic  base grown with the length beyond the trained one ("dynamic NTK"); here fixed for the longest length served
llama3   low frequencies divided, high ones kept, a ramp between (Llama 3.1's published rope parameters)
yarn     interpolation by frequency band, and a temperature (Peng et al. 2023, arXiv:2309.00071)

Shapes: T tokens, H heads, D head size, F = D / 2 frequencies.
"""

from __future__ import annotations

import math

import torch

from atom_async.wire.model import ModelSpec, RopeScaling


def frequencies(spec: ModelSpec, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Angular frequency of each pair of dimensions [F] (float32), and the factor on cos and sin."""
    scaling = spec.rope_scaling
    base_F = _plain(spec.rope_theta, spec.head_dim)
    if scaling is None:
        return base_F, 1.0
    if scaling.kind == "linear":
        return base_F / scaling.factor, 1.0
    if scaling.kind == "dynamic":
        return _plain(_dynamic_theta(spec, scaling, max_model_len), spec.head_dim), 1.0
    if scaling.kind == "llama3":
        return _llama3(base_F, scaling), 1.0
    return _yarn(spec, base_F, scaling)


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / theta**exponents_F


def _dynamic_theta(spec: ModelSpec, scaling: RopeScaling, max_model_len: int) -> float:
    trained = scaling.original_max_positions or spec.max_positions
    length = max(max_model_len, trained)
    growth = scaling.factor * length / trained - (scaling.factor - 1)
    return float(spec.rope_theta * growth ** (spec.head_dim / (spec.head_dim - 2)))


def _llama3(base_F: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelength_F = 2 * math.pi / base_F
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    ramp_F = (scaling.original_max_positions / wavelength_F - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended_F = (1 - ramp_F) * base_F / scaling.factor + ramp_F * base_F
    scaled_F = torch.where(wavelength_F > longest, base_F / scaling.factor, blended_F)
    return torch.where(wavelength_F < shortest, base_F, scaled_F)


def _yarn(spec: ModelSpec, base_F: torch.Tensor, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    dim, trained = spec.head_dim, scaling.original_max_positions or spec.max_positions

    def dimension_at(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    low, high = dimension_at(scaling.beta_fast), dimension_at(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp_F = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep_F = 1 - ramp_F
    return base_F / scaling.factor * (1 - keep_F) + base_F * keep_F, _yarn_temperature(scaling)


def _yarn_temperature(scaling: RopeScaling) -> float:
    def scale(factor: float, weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.factor, scaling.mscale) / scale(scaling.factor, scaling.mscale_all_dim)
    return scale(scaling.factor)


class Rotary:
    """Tables of cos and sin for every position, computed once."""

    def __init__(self, spec: ModelSpec, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        frequency_F, factor = frequencies(spec, max_model_len)
        angle_PF = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequency_F
        self._cos_PF = (angle_PF.cos() * factor).to(device=device, dtype=dtype)
        self._sin_PF = (angle_PF.sin() * factor).to(device=device, dtype=dtype)

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, F] for a step's tokens; shared by all layers."""
        return self._cos_PF[positions_T].unsqueeze(1), self._sin_PF[positions_T].unsqueeze(1)


def rotate(x_THD: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor) -> torch.Tensor:
    """Turns each pair (i, i + F) of dimensions by its angle. Returns a new tensor."""
    first_THF, second_THF = x_THD.chunk(2, dim=-1)
    return torch.cat((first_THF * cos_T1F - second_THF * sin_T1F, second_THF * cos_T1F + first_THF * sin_T1F), dim=-1)
