"""Positions by the text that stands there, and the table of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from lenspool import InvalidJob, ModelCard, Tokens, add, at, swap_rows
from lenspool.job import prepare, tokenize
from lenspool.places import decoded, located
from lenspool.tokenizer import Tokenizer

TEXT = 'The cat in Paris saw a cat: Paris, 🙂 café & "Paris"'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE with a BOS; it knows a few words, so that some characters are several tokens."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    fast.train_from_iterator(["the cat sat in Par and Par", "Paris is cat"] * 5, trainer)
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return Tokenizer({"tokenizer": fast.to_str(), "chat_template": template})


@pytest.fixture
def wide(card: ModelCard) -> ModelCard:
    return dataclasses.replace(card, vocab_size=300, max_model_len=512)


@pytest.mark.parametrize("text", [TEXT, "日本語 naïve\u0301 👩‍👩‍👧", " leading and trailing ", "<s>twice"])
def test_characters_of_each_token_are_found(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    whole, spans = decoded(ids, tokenizer)
    assert whole == tokenizer.text(ids) == f"<s>{text}"
    for token, (start, stop) in zip(tokenizer.tokens(ids), spans, strict=True):
        assert whole[start:stop] == token or "\ufffd" in token
        assert start < stop
    assert {c for start, stop in spans for c in range(start, stop)} == set(range(len(whole)))


@pytest.mark.parametrize(
    ("text", "occurrence", "place"),
    [
        ("Paris", 0, 0), ("Paris", 2, 2), ("Paris", -2, 1), ("cat", 1, 1), ("🙂", 0, 0), (" in P", 0, 0), ("<s>", 0, 0),
    ],
)  # fmt: skip
def test_all_tokens_that_overlap_the_text(tokenizer: Tokenizer, text: str, occurrence: int, place: int) -> None:
    ids = tokenizer.encode(TEXT)
    found = at(text, occurrence).find(ids, tokenizer)
    assert found == list(range(found[0], found[-1] + 1))
    assert text in tokenizer.text([ids[p] for p in found])
    for shorter in (found[1:], found[:-1]):
        assert text not in tokenizer.text([ids[p] for p in shorter])
    assert tokenizer.text(ids[: found[-1] + 1]).count(text) == place + 1


def test_positions_of_calls_and_interventions(tokenizer: Tokenizer, wide: ModelCard) -> None:
    ids = tokenize(wide, tokenizer, TEXT)
    paris, cat = at("Paris").find(ids, tokenizer), at("cat", -1).find(ids, tokenizer)
    items = [add("resid_post.1", 1.0, positions=at("cat", -1)), swap_rows("resid_post.1", at("🙂"), 0)]
    positions, found = located([at("Paris"), -1], items, ids, tokenizer)
    assert positions == [*paris, -1] and found[0].where["positions"] == cat
    assert found[1].options["i"] == at("🙂").find(ids, tokenizer)
    request = prepare(wide, tokenizer, ids, "resid_post.0", positions, found[:1])
    assert request.ranges == [(paris[0], paris[-1] + 1), (len(ids) - 1, len(ids))]
    assert request.interventions[0]["ranges"] == [[cat[0], cat[-1] + 1]]
    unchanged = slice(1, 3)
    assert located(unchanged, (), ids, None) == (unchanged, [])


def test_a_chat_is_searched_with_its_template(tokenizer: Tokenizer, wide: ModelCard) -> None:
    ids = tokenize(wide, tokenizer, [{"role": "user", "content": "Paris"}])
    assert tokenizer.text([ids[p] for p in at("user: P").find(ids, tokenizer)]).startswith("user: P")


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (at("London"), "not in the prompt"),
        (at("Paris", 3), r"occurrence 3 \(allowed: -3..2\)"),
        (at(""), "not empty"),
        (at("Paris", True), "an int"),
    ],
)
def test_refusals_name_the_argument(tokenizer: Tokenizer, wide: ModelCard, place: Any, match: str) -> None:
    ids = tokenizer.encode(TEXT)
    with pytest.raises(InvalidJob, match=match) as error:
        located("all", [add("resid_post.1", 1.0, positions=[0, place])], ids, tokenizer)
    assert error.value.field == "interventions[0].positions"
    with pytest.raises(InvalidJob, match="tokenizer"):
        located(place, (), ids, None)


def test_several_prompts_in_place_of_one_are_refused(tokenizer: Tokenizer, wide: ModelCard) -> None:
    for prompts in (["one", "two"], [[1, 2], [3]], ([1],)):
        with pytest.raises(InvalidJob, match=r"Client\.map"):
            tokenize(wide, tokenizer, prompts)


def test_tokens_show_themselves(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a <b>\n")
    tokens = Tokens(ids, tokenizer.tokens(ids), tokenizer)
    assert tokens.positions == list(range(len(ids))) and next(iter(tokens)) == (0, ids[0], "<s>")
    lines = repr(tokens).splitlines()
    assert len(lines) == len(ids) + 1 and lines[1].split() == ["0", "0", "'<s>'"] and r"'\n'" in lines[-1]
    page = tokens._repr_html_()
    assert "<code>&#x27;&lt;s&gt;&#x27;</code>" in page and "<b>" not in page
    assert tokens.at("b") == at("b").find(ids, tokenizer)
    bare = Tokens([5, 6], None, None)
    assert repr(bare).splitlines()[1].split() == ["0", "5"]
    with pytest.raises(InvalidJob, match="tokenizer"):
        bare.at("b")
