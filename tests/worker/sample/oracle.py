"""One row at a time, in plain Python and 64-bit floats: what the sampler must do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from vllm.sampling_params import SamplingParams

EPS = 1e-6
NEVER = -math.inf
F = np.float32


def changed_logits(
    logits: Sequence[float], params: SamplingParams, prompt: list[int], output: list[int], stop: Sequence[int] = ()
) -> list[np.float32]:
    """Logits after everything that comes before temperature, with the roundings of 32-bit floats."""
    x = [F(v) for v in logits]
    if params.allowed_token_ids is not None:
        x = [v if i in params.allowed_token_ids else F(NEVER) for i, v in enumerate(x)]
    for i, bias in (params.logit_bias or {}).items():
        x[int(i)] += F(bias)
    for word in params.bad_words_token_ids or []:
        head = word[:-1]
        if len(output) >= len(head) and output[len(output) - len(head) :] == head:
            x[word[-1]] = F(NEVER)
    if len(output) < params.min_tokens:
        for i in stop:
            x[i] = F(NEVER)
    penalty = F(params.repetition_penalty)
    for i in set(prompt) | set(output):
        x[i] = x[i] / penalty if x[i] > 0 else x[i] * penalty
    for i, count in Counter(output).items():
        x[i] = x[i] - F(params.frequency_penalty) * F(count)
        x[i] = x[i] - F(params.presence_penalty)
    return x


def distribution(x: Sequence[np.float32], temperature: float, min_p: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities (not normalised) after the filters. min_p and top_p may be moved a little to probe a boundary."""
    scaled = [float(F(v) / F(temperature)) for v in x]
    peak = max(scaled)
    weight = [math.exp(v - peak) for v in scaled]
    weight = [w if w >= min_p else 0.0 for w in weight]
    order = sorted(range(len(x)), key=lambda i: (-scaled[i], i))
    order = order[:top_k] if top_k > 0 else order
    total = math.fsum(weight[i] for i in order)
    kept, mass = set(), 0.0
    for i in order:
        kept.add(i)
        mass += weight[i]
        if mass >= top_p * total:
            break
    return [w if i in kept else 0.0 for i, w in enumerate(weight)]


def choices(x: Sequence[np.float32], params: SamplingParams, uniform: float) -> set[int]:
    """The tokens that are right: one, or several if a decision is within rounding of a boundary."""
    if params.temperature < 1e-5:
        return {max(range(len(x)), key=lambda i: (x[i], -i))}
    found = set()
    for nudge in (-EPS, 0.0, EPS):
        for shift in (-EPS, 0.0, EPS):
            min_p = float(F(params.min_p)) * (1 + nudge) if params.min_p else 0.0
            top_p = min(1.0, float(F(params.top_p)) + shift) if params.top_p < 1 else 1.0
            weight = distribution(x, params.temperature, min_p, params.top_k, top_p)
            total = math.fsum(weight)
            for moved in (uniform - EPS, uniform, uniform + EPS):
                target, mass = max(0.0, moved) * total, 0.0
                for i, w in enumerate(weight):
                    mass += w
                    if w > 0 and mass > target:
                        found.add(i)
                        break
    return found
