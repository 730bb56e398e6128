"""What hooks of one run must be to one another, with the checkpoint's own weights, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tests.families.reference import first_of

Rows = Mapping[str, np.ndarray]
Linear = tuple[np.ndarray, np.ndarray | float]
"""Matrix `[in, out]` and bias."""


class Weights:
    """Weights of transformers' modules that lead from one hook to another; copied, as vLLM changes their classes."""

    def __init__(self, model: Any) -> None:
        core = first_of(model, "model", "transformer", "gpt_neox")
        self._output: list[Linear] = []
        self._down: list[Linear | None] = []
        for layer in first_of(core, "layers", "h"):
            attention = first_of(layer, "self_attn", "attn", "self_attention", "attention")
            self._output.append(_linear(first_of(attention, "o_proj", "c_proj", "dense")))
            down = first_of(layer.mlp, "down_proj", "c_proj", "dense_4h_to_h", missing=True)
            self._down.append(_linear(down) if down is not None else None)
        norm = first_of(core, "norm", "ln_f", "final_layer_norm")
        self._centred = "RMS" not in type(norm).__name__
        self._epsilon = first_of(norm, "variance_epsilon", "eps")
        self._scale = _numbers(norm.weight) + ("Gemma" in type(norm).__name__)
        self._shift = _numbers(getattr(norm, "bias", None))
        self._head = _linear(model.get_output_embeddings())
        self._soft_cap = getattr(model.config, "final_logit_softcapping", None)

    def errors(self, rows: Rows, *, whole: bool) -> dict[str, float]:
        """Identity -> the largest relative L2 error over layers, for those whose hooks are there.

        Parameters
        ----------
        whole
            Rows are those of all positions of the run, as a pattern needs them.
        """
        found: dict[str, float] = {}
        for name, got, want in self._pairs({name: array.astype(np.float64) for name, array in rows.items()}, whole):
            error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
            old = found.get(name, 0.0)
            found[name] = error if not error <= old else old
        return found

    def _pairs(self, rows: Rows, whole: bool) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        for i, (output, down) in enumerate(zip(self._output, self._down, strict=True)):
            here = {
                name.removeprefix(f"blocks.{i}.").replace("hook_", ""): array
                for name, array in rows.items()
                if name.startswith(f"blocks.{i}.")
            }
            if i:
                yield "resid_pre[i+1] = resid_post[i]", here["resid_pre"], rows[f"blocks.{i - 1}.hook_resid_post"]
            if "attn_out" not in here:  # refused, of a family that is not known
                continue
            if "resid_mid" in here:
                yield "resid_pre + attn_out = resid_mid", here["resid_pre"] + here["attn_out"], here["resid_mid"]
                yield "resid_mid + mlp_out = resid_post", here["resid_mid"] + here["mlp_out"], here["resid_post"]
            else:
                total = here["resid_pre"] + here["attn_out"] + here["mlp_out"]
                yield "resid_pre + attn_out + mlp_out = resid_post", total, here["resid_post"]
            if whole:
                yield "pattern @ v = z", _mixed(here["attn.pattern"], here["attn.v"], here["attn.z"]), here["attn.z"]
            result = here.get("attn.out", here["attn_out"])
            yield "z @ W_O = attn_out", here["attn.z"] @ output[0] + output[1], result
            if down is not None and "mlp.post" in here:
                yield (
                    "mlp.post @ W_down = mlp_out",
                    here["mlp.post"] @ down[0] + down[1],
                    here.get("mlp.out", here["mlp_out"]),
                )
        logits = self._unembed(rows[f"blocks.{len(self._output) - 1}.hook_resid_post"])
        yield "unembed(ln_final(resid_post)) = logits", logits, rows["unembed.hook_out"]

    def _unembed(self, stream: np.ndarray) -> np.ndarray:
        if self._centred:
            stream = stream - stream.mean(-1, keepdims=True)
        normalized = stream / np.sqrt(np.square(stream).mean(-1, keepdims=True) + self._epsilon)
        logits = (normalized * self._scale + self._shift) @ self._head[0] + self._head[1]
        return self._soft_cap * np.tanh(logits / self._soft_cap) if self._soft_cap else logits


def _mixed(pattern: np.ndarray, values: np.ndarray, z: np.ndarray) -> np.ndarray:
    """`[n, head * d_head]`, as z."""
    length = len(z)
    heads = pattern.shape[1] // length
    split = values.reshape(length, -1, z.shape[1] // heads)
    split = split.repeat(heads // split.shape[1], axis=1)
    return np.einsum("qhk,khd->qhd", pattern.reshape(length, heads, length), split).reshape(z.shape)


def _linear(module: Any) -> Linear:
    matrix = _numbers(module.weight)
    return matrix if type(module).__name__ == "Conv1D" else matrix.T, _numbers(getattr(module, "bias", None))


def _numbers(parameter: Any) -> Any:
    return 0.0 if parameter is None else parameter.detach().double().numpy().copy()
