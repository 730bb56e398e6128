"""The check at boot: every tap fires, the residual stream adds up, and hooks fit one another.

A worker of a known family that fails it does not serve; of a guessed family, hooks that fail it are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lenspool_worker.capture import JobRows

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, and the hooks that may be the cause."""

    text: str
    hooks: tuple[str, ...]


def problems(rows: JobRows, hooks: Sequence[str], length: int, tolerance: float) -> list[str]:
    """What `examine` finds, as text."""
    return [problem.text for problem in examine(rows, hooks, length, tolerance)]


def examine(
    rows: JobRows, hooks: Sequence[str], length: int, tolerance: float, computed: Arrays | None = None
) -> list[Problem]:
    """What is wrong with the rows of a plain run of `length` tokens over all hooks; empty when all is right.

    Parameters
    ----------
    tolerance
        Largest relative L2 error, at any position, of an identity of the residual stream (Elhage et al. 2021, "A
        Mathematical Framework for Transformer Circuits"): the stream is the sum of what the blocks write.
    computed
        Rows of hooks that have no tap.
    """
    found: list[Problem] = []
    arrays: dict[str, np.ndarray] = {}
    fired = rows.fired()
    for name in hooks:
        if computed is not None and name in computed:
            arrays[name] = computed[name].astype(np.float32)
        elif fired.get(name) != length:
            found.append(Problem(f"{name} fired for {fired.get(name, 0)} of {length} tokens", (name,)))
            continue
        else:
            arrays[name] = rows.assemble(name, [(0, length)])[0][1].astype(np.float32)
        if not np.isfinite(arrays[name]).all():
            found.append(Problem(f"{name} is not finite", (name,)))
    layers = [name.rsplit(".", 1)[0] for name in hooks if name.endswith(".hook_resid_pre")]
    for here, after in zip(layers, [*layers[1:], None], strict=True):
        for whole, parts in _sums(here, after, hooks):
            if whole in arrays and all(part in arrays for part in parts):
                error = _relative([arrays[part] for part in parts], arrays[whole])
                if not error <= tolerance:
                    inner = tuple(n for n in (whole, *parts) if not n.endswith(("_pre", "_post")))
                    text = f"{whole} differs from {' + '.join(parts)} by {error:.1e}"
                    found.append(Problem(text, inner or (whole, *parts)))
        found.extend(_attention(here, arrays, tolerance))
    for norm in [f"{layer}.ln{i}" for layer in layers for i in (1, 2)] + ["ln_final"]:
        found.extend(_norm(norm, arrays, tolerance))
    return found


def _sums(here: str, after: str | None, hooks: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Tensors of a layer that are sums of others."""
    if here == "blocks.0" and "hook_embed" in hooks:
        yield f"{here}.hook_resid_pre", ["hook_embed", *(["hook_pos_embed"] if "hook_pos_embed" in hooks else [])]
    if f"{here}.hook_resid_mid" in hooks:
        yield f"{here}.hook_resid_mid", [f"{here}.hook_resid_pre", f"{here}.hook_attn_out"]
        yield f"{here}.hook_resid_post", [f"{here}.hook_resid_mid", f"{here}.hook_mlp_out"]
    else:
        parts = [f"{here}.hook_{part}" for part in ("resid_pre", "attn_out", "mlp_out")]
        yield f"{here}.hook_resid_post", parts
    if after is not None:
        yield f"{after}.hook_resid_pre", [f"{here}.hook_resid_post"]


def _attention(here: str, arrays: Arrays, tolerance: float) -> Iterator[Problem]:
    """The pattern mixes values into z, and the heads' results add up to the attention output but for its bias."""
    attn = f"{here}.attn.hook"
    pattern, v, z, result = (arrays.get(f"{attn}_{part}") for part in ("pattern", "v", "z", "result"))
    if pattern is not None and v is not None and z is not None:
        length, heads = len(z), pattern.shape[1] // len(z)
        values = v.reshape(length, -1, z.shape[1] // heads)
        values = np.repeat(values, heads // values.shape[1], axis=1)
        mixed = np.einsum("qhk,khd->qhd", pattern.reshape(length, heads, length), values)
        error = _relative([mixed.reshape(z.shape)], z)
        if not error <= tolerance:
            names = tuple(f"{attn}_{part}" for part in ("pattern", "attn_scores", "v", "z"))
            yield Problem(f"{attn}_z differs from pattern @ v by {error:.1e}", names)
    out = arrays.get(f"{attn}_out", arrays.get(f"{here}.hook_attn_out"))
    if result is not None and out is not None:
        bias = out - result.reshape(len(out), -1, out.shape[1]).sum(1)
        error = _relative([out - bias.mean(0)], out - bias)
        if not error <= tolerance:
            yield Problem(f"{attn}_result does not add up to the attention output, by {error:.1e}", (f"{attn}_result",))


def _norm(norm: str, arrays: Arrays, tolerance: float) -> Iterator[Problem]:
    """A norm's output is its normalized input times a weight, plus a bias, of each channel."""
    x, y = (arrays.get(f"{norm}.hook_{part}") for part in ("normalized", "out"))
    if x is None or y is None or len(x) < 4:
        return
    centred = x - x.mean(0)
    weight = (centred * (y - y.mean(0))).sum(0) / np.maximum(np.square(centred).sum(0), 1e-12)
    fitted = weight * centred + y.mean(0)
    error = float(np.linalg.norm(fitted - y) / max(float(np.linalg.norm(y)), 1e-30))
    if not error <= tolerance:
        names = tuple(f"{norm}.hook_{part}" for part in ("normalized", "scale"))
        yield Problem(f"{norm}.hook_out is not {norm}.hook_normalized times a weight, by {error:.1e}", names)


def _relative(parts: Sequence[np.ndarray], whole: np.ndarray) -> float:
    """Relative error at the worst position: one token's massive activations must not hide the others' errors.

    Relative to the largest of the tensors, as these are what has been rounded when two of them cancel.
    """
    scale = np.max([np.linalg.norm(array, axis=1) for array in (*parts, whole)], axis=0)
    error = np.linalg.norm(np.sum(parts, axis=0) - whole, axis=1)
    return float(np.max(error / np.maximum(scale, 1e-30)))
