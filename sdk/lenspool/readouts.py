"""Readouts: a few numbers from a hook's rows, computed by the worker and used wherever a hook name is.

>>> await client.capture(prompt, ["resid_post.5", top_k("logits", 10), lens("resid_post.*", k=5)])  # doctest: +SKIP

Of logits (which are never built for more than a chunk of positions): `top_k`, `logprobs`, `logits_of`, `rank`,
`entropy`, `loss`; the same of a residual stream through the final norm and the unembedding: `lens` (nostalgebraist
2020, "interpreting GPT: the logit lens"). Of any hook: `norm`, `project`, `top_k`, `sae` per position, and `reduce`
over the positions. A hook's dimensions behind `pos` count as one (`[head, d_head]` as `[head * d_head]`).

All arithmetic is float32 on rows of the model's dtype; captures and readouts show the values after interventions. The
lens begins at the stream: an intervention at `ln_final.hook_out` does not change it.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lenspool import entries
from lenspool.entries import LOGITS, Entry
from lenspool.errors import InvalidJob
from lenspool.interventions import ArrayRef, as_float32
from lenspool_cache.keys import array_digest

_KEPT = 128

Array = Any
"""Array-like (numpy, torch, list) of finite numbers, or an `ArrayRef`."""


@dataclass(frozen=True)
class Readout:
    """What to compute from which hooks. Make it with the functions of this module.

    Attributes
    ----------
    hook
        Name, alias, short form or glob.
    op, args, lens
        As in the names (`lenspool.entries`); a reduction's positions are those of the call.
    arrays
        Digest -> array, for those given by value.
    shapes
        Argument -> shape of the array.
    """

    hook: str
    op: str
    args: tuple[Any, ...] = ()
    lens: bool = False
    arrays: dict[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    def matches(self, entry: Entry) -> bool:
        """Whether a readout of the same hook is this one, whatever the positions of a reduction."""
        args = entry.args if self.args or not entry.reduces else ()
        return (entry.op, args, entry.lens) == (self.op, self.args, self.lens)


@dataclass(frozen=True)
class TopK:
    """The largest numbers of each position, in descending order; the order of equal ones is not specified.

    Attributes
    ----------
    indices
        int32 `[rows, k]`: token ids for logits, else places in the hook's row.
    values
        float32 `[rows, k]`: logits, or the hook's numbers.
    """

    indices: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Features:
    """Features of a sparse autoencoder that are active at each position, strongest first.

    Attributes
    ----------
    indices
        int32 `[rows, k]`; -1 where fewer than k are active.
    values
        float32 `[rows, k]`; 0 where fewer than k are active.
    active
        int32 `[rows]`: how many are active. Where it is more than k, the weakest were left out.
    """

    indices: np.ndarray
    values: np.ndarray
    active: np.ndarray


RESULTS: dict[str, type[TopK] | type[Features]] = {"top_k": TopK, "sae": Features}
"""Op -> what its arrays are put together to; one array stays itself."""


def top_k(hook: str = LOGITS, k: int = 10) -> Readout:
    """The k largest numbers of each row, as `TopK`."""
    return Readout(hook, "top_k", (_integer(k, "top_k.k"),))


def logprobs(token_ids: Sequence[int], hook: str = LOGITS) -> Readout:
    """Log-probabilities (natural log) of given tokens as the next one: `[rows, token_ids]`."""
    return Readout(hook, "logprobs", (_integers(token_ids, "logprobs.token_ids"),))


def logits_of(token_ids: Sequence[int], hook: str = LOGITS) -> Readout:
    """Logits of given tokens: `[rows, token_ids]` float32."""
    return Readout(hook, "logits_of", (_integers(token_ids, "logits_of.token_ids"),))


def rank(token_ids: Sequence[int], hook: str = LOGITS) -> Readout:
    """How many tokens have a larger logit than each given one: int32 `[rows, token_ids]`, 0 for the most likely."""
    return Readout(hook, "rank", (_integers(token_ids, "rank.token_ids"),))


def entropy(hook: str = LOGITS) -> Readout:
    """Entropy of the next token's distribution in nats: `[rows]`."""
    return Readout(hook, "entropy")


def loss() -> Readout:
    """Minus the log-probability of the prompt's next token: `[rows]`.

    The row of position p is about token p + 1, so the prompt's last position has none: of a whole prompt of n tokens
    there are n - 1 rows.
    """
    return Readout(LOGITS, "loss")


def lens(hook: str, of: Readout | None = None, *, k: int | None = None) -> Readout:
    """Read a residual stream as if it were the last: through the final norm and the unembedding.

    Parameters
    ----------
    hook
        `hook_embed`, `hook_resid_pre|mid|post`, in any spelling or as a glob.
    of
        What to read from the logits: `top_k(k=5)`, `logprobs(ids)`, `logits_of(ids)`, `rank(ids)` or `entropy()`.
    k
        Short for `of=top_k(k=k)`.
    """
    if (of is None) == (k is None):
        raise InvalidJob("lens", "got both k and a readout, or none", "k, or a readout of logits")
    inner = of if of is not None else Readout(LOGITS, "top_k", (_integer(k, "lens.k"),))
    if not isinstance(inner, Readout):
        raise InvalidJob("lens", f"got {type(inner).__name__}", "a readout of logits")
    return Readout(hook, inner.op, inner.args, True)


def norm(hook: str) -> Readout:
    """Euclidean norm of each row: `[rows]`."""
    return Readout(hook, "norm")


def project(hook: str, matrix: Array) -> Readout:
    """Each row times a matrix `[width, columns]` (or a vector `[width]`): `[rows, columns]`."""
    if not isinstance(matrix, ArrayRef):
        matrix = as_float32(matrix, "project.matrix")
        matrix = matrix[:, None] if matrix.ndim == 1 else matrix
    if len(matrix.shape) != 2:
        raise InvalidJob("project.matrix", f"has shape {tuple(matrix.shape)}", "[width, columns]")
    digests, arrays, shapes = _arrays("project", matrix=matrix)
    return Readout(hook, "project", (digests["matrix"], matrix.shape[1]), arrays=arrays, shapes=shapes)


def sae(
    hook: str,
    W_enc: Array,  # noqa: N803 - the field's name
    b_enc: Array,
    b_dec: Array | None = None,
    threshold: Array | None = None,
    *,
    activation: str = "relu",
    k: int | None = None,
) -> Readout:
    """Features of a sparse autoencoder, as `Features`.

    The pre-activations are `(x - b_dec) @ W_enc + b_enc`.

    Parameters
    ----------
    W_enc, b_enc
        `[width, features]` and `[features]`.
    b_dec
        `[width]`; None where the encoder does not subtract it (Gemma Scope).
    threshold
        `[features]`, for `"jumprelu"` only.
    activation
        `"relu"`; `"topk"`: the k largest, then ReLU (Gao et al. 2024, "Scaling and evaluating sparse autoencoders");
        `"jumprelu"`: ReLU where above the threshold, else 0 (Rajamanoharan et al. 2024, "Jumping Ahead").
    k
        Of `"topk"`: how many. Of the others: how many are kept of a position at most, strongest first; default 128.
    """
    digests, arrays, shapes = _arrays("sae", W_enc=W_enc, b_enc=b_enc, b_dec=b_dec, threshold=threshold)
    if len(shapes.get("W_enc", ())) != 2:
        raise InvalidJob("sae.W_enc", f"has shape {shapes.get('W_enc')}", "[width, features]")
    features = shapes["W_enc"][1]
    if k is None and activation == "topk":
        raise InvalidJob("sae.k", "is None", "how many features topk keeps")
    kept = min(_KEPT, features) if k is None else _integer(k, "sae.k")
    args = (activation, kept, features, *digests.values())
    return Readout(hook, "sae", args, arrays=arrays, shapes=shapes)


def reduce(hook: str, how: str) -> Readout:
    """`"mean"` or `"max"` over the positions of the call, per number: the hook's shape without `pos`.

    NaN where a generation has no such position.
    """
    if how not in ("mean", "max"):
        raise InvalidJob("reduce", f"got {how!r}", '"mean" or "max"')
    return Readout(hook, how)


def _arrays(op: str, **values: Any) -> tuple[dict[str, str | None], dict[str, np.ndarray], dict[str, tuple[int, ...]]]:
    """Digests of array arguments (None for those that are None), the arrays, and their shapes."""
    digests: dict[str, str | None] = {}
    arrays: dict[str, np.ndarray] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in values.items():
        digests[name] = None
        if isinstance(value, ArrayRef):
            digests[name], shapes[name] = value.digest, tuple(value.shape)
        elif value is not None:
            array = as_float32(value, f"{op}.{name}")
            digest = array_digest(array)
            digests[name], arrays[digest], shapes[name] = digest, array, array.shape
    return digests, arrays, shapes


def _integer(value: Any, field_: str) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidJob(field_, f"got {value!r}", "an int") from None


def _integers(values: Any, field_: str) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) != 1:
        raise InvalidJob(field_, f"got {values!r}", "a list of token ids")
    return tuple(_integer(value, field_) for value in values)


def from_text(name: str) -> Readout:
    """A readout by its name, the hook in any spelling: `"logits|top_k(10)"`, `"resid_post.5|mean()"`.

    Raises
    ------
    InvalidJob
        It is not the name of a readout.
    """
    hook, _, rest = name.partition("|")
    bare = json.dumps(hook)[1:-1] == hook and hook != ""
    entry = entries.parse(f"{hook if bare else 'x'}|{rest}")
    if entry.part or not bare:
        raise InvalidJob("hooks", f"{name!r} is not a readout", f"without {entry.part!r}" if entry.part else "")
    return Readout(hook, entry.op, entry.args, entry.lens)
