"""Names resolve to the hook that is meant, and a wrong name is refused with help."""

from __future__ import annotations

import pytest

from lenspool import InvalidJob, ModelCard, UnknownHook, UnsupportedHook
from lenspool.hooks import ALIASES, VOCABULARY, resolve, template


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("blocks.2.hook_resid_post", "blocks.2.hook_resid_post"),
        ("blocks.2.hook_out", "blocks.2.hook_resid_post"),
        ("blocks.2.hook_in", "blocks.2.hook_resid_pre"),
        ("blocks.2.ln2.hook_in", "blocks.2.hook_resid_mid"),
        ("blocks.0.attn.hook_out", "blocks.0.hook_attn_out"),
        ("blocks.3.mlp.hook_out", "blocks.3.hook_mlp_out"),
        ("resid_post.2", "blocks.2.hook_resid_post"),
        ("resid_post.-1", "blocks.3.hook_resid_post"),
        ("blocks.-4.hook_resid_pre", "blocks.0.hook_resid_pre"),
        ("embed.hook_out", "hook_embed"),
        ("logits", "unembed.hook_out"),
    ],
)
def test_every_spelling_means_one_hook(card: ModelCard, spelling: str, canonical: str) -> None:
    assert resolve(spelling, card) == [canonical]


def test_glob_expands_in_network_order(card: ModelCard) -> None:
    assert resolve("blocks.*.hook_resid_post", card) == [f"blocks.{i}.hook_resid_post" for i in range(4)]
    assert resolve("resid_mid.[12]", card) == ["blocks.1.hook_resid_mid", "blocks.2.hook_resid_mid"]
    everything = resolve("*", card)
    assert len(everything) == len(card.hooks) == len(set(everything))
    assert everything[0] == "hook_embed" and everything[-1] == "unembed.hook_out"
    block = [n.split(".")[-1] for n in everything if n.startswith("blocks.1.")]
    assert block == ["hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post"]


def test_order_and_repeats_do_not_matter(card: ModelCard) -> None:
    assert resolve(["logits", "resid_post.1", "resid_post.1", "embed"], card) == resolve(
        ["embed", "blocks.1.hook_out", "unembed.hook_out"], card
    )


def test_unknown_name_names_the_nearest(card: ModelCard) -> None:
    with pytest.raises(UnknownHook) as error:
        resolve("blocks.2.hook_resid_pots", card)
    assert "blocks.2.hook_resid_post" in error.value.nearest
    with pytest.raises(UnknownHook):
        resolve("nothing.*.like_it", card)


def test_known_but_unserved_is_not_called_unknown(card: ModelCard) -> None:
    for name in ("blocks.1.attn.hook_pattern", "blocks.*.attn.hook_z", "hook_pos_embed"):
        with pytest.raises(UnsupportedHook):
            resolve(name, card)


def test_layer_out_of_range_says_how_many_there_are(card: ModelCard) -> None:
    with pytest.raises(UnsupportedHook, match=r"4 layers \(0\.\.3\)"):
        resolve("resid_post.4", card)


@pytest.mark.parametrize("bad", [5, [5], [None], None])
def test_other_types_are_refused(card: ModelCard, bad: object) -> None:
    with pytest.raises(InvalidJob, match="hook"):
        resolve(bad, card)  # type: ignore[arg-type]


def test_aliases_point_into_the_vocabulary() -> None:
    assert set(ALIASES.values()) <= set(VOCABULARY)
    assert template("blocks.17.attn.hook_q") == "blocks.{layer}.attn.hook_q"


def test_card_survives_its_json_form(card: ModelCard) -> None:
    again = ModelCard.from_dict(card.to_dict())
    assert again == card
    assert len(card.to_dict()["hooks"]) == 8
