"""What a call asks of a pool beyond text: activations, edits, sampling that inspect has no field for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lenspool.errors import InvalidJob
from lenspool.integrations.inspect.settings import EXTRAS

_BODY = ("extra_args", "capture", "positions", "interventions", "inline", *EXTRAS)
_ARGS = ("input_ids", "capture", "interventions", "return_logits", "attention_mask")


@dataclass(frozen=True)
class Asked:
    """A call's `extra_body`.

    Attributes
    ----------
    forward
        TransformerLens's request for one forward run, its keys as they came; None when text is generated.
    capture, positions, inline
        What to capture during a generation; None where the call does not say, and the model's arguments count.
    interventions
        Edits in wire form, in the order in which they apply.
    extras
        Sampling arguments.
    """

    forward: Mapping[str, Any] | None = None
    capture: tuple[str, ...] = ()
    positions: Any = None
    inline: bool | None = None
    interventions: tuple[Any, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)


def asked(body: Mapping[str, Any] | None) -> Asked:
    """Read an `extra_body`.

    Raises
    ------
    InvalidJob
        It has a key that means nothing here.
    """
    body = body or {}
    _known("extra_body", body, _BODY)
    arguments = body.get("extra_args") or {}
    if not isinstance(arguments, Mapping):
        raise InvalidJob("extra_body.extra_args", f"got {type(arguments).__name__}", ", ".join(_ARGS))
    _known("extra_body.extra_args", arguments, _ARGS)
    forward = arguments if arguments.get("input_ids") is not None or arguments.get("capture") else None
    if forward is None and (arguments.get("return_logits") or arguments.get("attention_mask") is not None):
        raise InvalidJob("extra_body.extra_args", "return_logits and attention_mask are of a forward run", "input_ids")
    if forward is not None and body.get("capture"):
        raise InvalidJob(
            "extra_body.capture", "together with a forward run", "extra_args.capture, or a call of its own"
        )
    return Asked(
        forward,
        names(body.get("capture"), "extra_body.capture"),
        body.get("positions"),
        body.get("inline"),
        tuple(specs for specs in (body.get("interventions"), arguments.get("interventions")) if specs),
        {name: body[name] for name in EXTRAS if name in body},
    )


def names(given: Any, where: str) -> tuple[str, ...]:
    """One hook name or several, as a tuple."""
    if given is None:
        return ()
    found = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(name, str) for name in found):
        raise InvalidJob(where, f"got {given!r}", "hook names")
    return found


def _known(where: str, given: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    if unknown := sorted(map(str, given.keys() - set(allowed))):
        raise InvalidJob(f"{where}.{unknown[0]}", "has no meaning here", ", ".join(allowed))
