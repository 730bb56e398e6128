"""The check at boot: every tap fires, and the residual stream adds up. A worker that fails it does not serve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lenspool_worker.capture import JobRows


def problems(rows: JobRows, hooks: Sequence[str], length: int, tolerance: float) -> list[str]:
    """What is wrong with the rows of a plain run of `length` tokens over all hooks; empty when all is right.

    Parameters
    ----------
    tolerance
        Largest relative L2 error, at any position, of an identity of the residual stream (Elhage et al. 2021, "A
        Mathematical Framework for Transformer Circuits"): the stream is the sum of what the blocks write.
    """
    found: list[str] = []
    arrays: dict[str, np.ndarray] = {}
    fired = rows.fired()
    for name in hooks:
        if fired.get(name) != length:
            found.append(f"{name} fired for {fired.get(name, 0)} of {length} tokens")
            continue
        arrays[name] = rows.assemble(name, [(0, length)])[0][1].astype(np.float32)
        if not np.isfinite(arrays[name]).all():
            found.append(f"{name} is not finite")
    layers = [name.rsplit(".", 1)[0] for name in hooks if name.endswith(".hook_resid_pre")]
    for here, after in zip(layers, [*layers[1:], None], strict=True):
        identities = [
            (f"{here}.hook_resid_mid", [f"{here}.hook_resid_pre", f"{here}.hook_attn_out"]),
            (f"{here}.hook_resid_post", [f"{here}.hook_resid_mid", f"{here}.hook_mlp_out"]),
        ]
        if after is not None:
            identities.append((f"{after}.hook_resid_pre", [f"{here}.hook_resid_post"]))
        for whole, parts in identities:
            if whole in arrays and all(part in arrays for part in parts):
                error = _relative([arrays[part] for part in parts], arrays[whole])
                if not error <= tolerance:
                    found.append(f"{whole} differs from {' + '.join(parts)} by {error:.1e}")
    return found


def _relative(parts: Sequence[np.ndarray], whole: np.ndarray) -> float:
    """Relative error at the worst position: one token's massive activations must not hide the others' errors.

    Relative to the largest of the tensors, as these are what has been rounded when two of them cancel.
    """
    scale = np.max([np.linalg.norm(array, axis=1) for array in (*parts, whole)], axis=0)
    error = np.linalg.norm(np.sum(parts, axis=0) - whole, axis=1)
    return float(np.max(error / np.maximum(scale, 1e-30)))
