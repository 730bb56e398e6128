"""What a result can be turned into, and how it shows itself."""

from __future__ import annotations

import html.parser
import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.sdk.made import PATTERN, POST, WORDS, Z, made, pattern, rows

from lenspool import InvalidJob, ModelCard, stack
from lenspool.readouts import lens
from lenspool.readouts import loss as loss_of

LOSS = "unembed.hook_out|loss()"
MEAN = f"{POST}|mean([[0,6]])"
LENS = [f"blocks.{i}.hook_resid_post|lens.top_k(2)" for i in range(4)]


def lens_arrays() -> dict[str, np.ndarray]:
    stored: dict[str, np.ndarray] = {}
    for i, name in enumerate(LENS):
        stored |= {f"{name}.indices": np.arange(12, dtype=np.int32).reshape(6, 2) + i}
        stored |= {f"{name}.values": rows(6, 2, i)}
    return stored


def test_arrays_are_numpys_own(card: ModelCard) -> None:
    exact = rows(6, 16, dtype="float32")
    half = exact.astype(ml_dtypes.bfloat16)
    result = made(card, {POST: half, Z: exact})
    assert result.numpy(POST).dtype == np.float32 and np.array_equal(result.numpy(POST), half.astype(np.float32))
    assert result.numpy("z.0") is result[Z] and not result.numpy(Z).flags.writeable
    assert list(result.numpy()) == [POST, Z]
    torch = pytest.importorskip("torch", reason="an extra")
    assert result.torch()[POST].dtype == torch.bfloat16 and result.torch(Z).shape == (6, 2, 8)
    several = made(card, lens_arrays())
    assert several.numpy()[f"{LENS[1]}.indices"].dtype == np.int32
    with pytest.raises(InvalidJob, match=r"indices, \.values"):
        several.numpy(LENS[0])


def test_labelled_arrays_are_selected_by_name_and_position(card: ModelCard) -> None:
    pytest.importorskip("xarray", reason="an extra")
    stored = {POST: rows(3, 16), Z: rows(3, 16, 1)}
    result = made(card, stored, positions=[1, 3, 5])
    array = result.to_xarray(Z)
    assert array.dims == ("token", "head", "d_head") and array.text.values.tolist() == [WORDS[p] for p in (1, 3, 5)]
    assert np.array_equal(array.sel(position=3).isel(head=1), result[Z][1, 1])
    assert array.token_id.values.tolist() == [11, 13, 15] and array.attrs["hook"] == Z
    data = result.to_xarray()
    assert data[POST].dims == ("token", "d_model") and set(data.data_vars) == {POST, Z}
    other = made(card, {POST: rows(2, 16)}, positions=[3, 4]).to_xarray(POST)
    assert (data[POST] - other).position.values.tolist() == [3]  # aligned by position, not by place
    assert "text" not in made(card, stored, positions=[1, 3, 5], tokens=None).to_xarray(POST).coords


def test_a_dataset_holds_patterns_losses_readouts_and_reductions(card: ModelCard) -> None:
    pytest.importorskip("xarray", reason="an extra")
    stored = {PATTERN: pattern(6), LOSS: rows(5, 1), MEAN: rows(1, 16), **lens_arrays()}
    result = made(card, stored)
    data = result.to_xarray()
    assert data[PATTERN].dims == ("head", "token", "key")
    assert np.allclose(data[PATTERN].sel(position=4).sum("key"), 1)
    assert np.array_equal(data[LOSS].values[:5], result[loss_of()]) and np.isnan(data[LOSS].values[5])
    assert data[MEAN].dims == ("d_model",) and data[f"{LENS[0]}.indices"].dims == ("token", "k")
    assert result.to_xarray(LOSS).position.values.tolist() == [0, 1, 2, 3, 4]
    mixed = {**lens_arrays(), "unembed.hook_out|top_k(3).indices": np.ones((6, 3), np.int32)}
    mixed["unembed.hook_out|top_k(3).values"] = rows(6, 3)
    sizes = made(card, mixed).to_xarray().sizes
    assert sizes["k_2"] == 2 and sizes["k_3"] == 3


@pytest.mark.parametrize(("module", "extra"), [("xarray", "xarray"), ("matplotlib.pyplot", "plot")])
def test_what_is_not_installed_is_named(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> Any:
        if name == module:
            raise ModuleNotFoundError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    result = made(card, {POST: rows(6, 16)})
    with pytest.raises(ImportError, match=rf"lenspool\[{extra}\]"):
        result.to_xarray() if extra == "xarray" else result.plot.norms()


class _Spans(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "span":
            self.spans.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.spans and self.tags[-1] == "span":
            attrs, text = self.spans[-1]
            self.spans[-1] = attrs, text + data


def spans(markup: str) -> list[tuple[dict[str, str | None], str]]:
    parser = _Spans()
    parser.feed(markup)
    assert set(parser.tags) <= {"div", "span", "b", "details", "summary", "table", "tr", "td", "code"}
    return parser.spans


def opacity(style: str | None) -> float:
    return float((style or "").partition("rgba(")[2].partition(")")[0].split(",")[3])


def test_html_is_escaped_and_coloured_by_norm(card: ModelCard) -> None:
    stored = np.ones((5, 16), np.float32) * np.array([[1000], [1], [3], [2], [5]], np.float32)
    result = made(card, {POST: stored}, positions=[0, 1, 2, 3, 5])
    found = spans(result._repr_html_())
    assert [text for _, text in found] == ["<s>", " The", " <b>", " $x$", "⏎\n", " end"]
    strong = [opacity(attrs["style"]) for attrs, _ in found if "style" in attrs]
    assert strong[4] == max(strong[1:]) == strong[0] and strong[1] == 0 < strong[3] < strong[2]  # the sink is cut off
    assert "style" not in found[4][0]  # no row was captured there


def test_tokens_are_coloured_by_any_number(card: ModelCard) -> None:
    result = made(card, {POST: rows(6, 16), LOSS: np.abs(rows(5, 1)), MEAN: rows(1, 16), **lens_arrays()})
    shown = result.highlight(loss_of())
    assert np.array_equal(shown.values[:5], result[LOSS]) and np.isnan(shown.values[5]) and shown.title == LOSS
    found = spans(result.highlight([0, -2, 1, 2, 0, 0])._repr_html_())
    styles = [attrs["style"] or "" for attrs, _ in found]
    assert "rgba(214" in styles[1] and "rgba(31" in styles[3] and opacity(styles[1]) == opacity(styles[3]) == 0.7
    for wrong, match in ((MEAN, "no row"), (lens("resid_post.1", k=2), "several arrays"), ([1, 2], "shape")):
        with pytest.raises(InvalidJob, match=match):
            result.highlight(wrong)
    assert "no hook has rows" in made(card, {MEAN: rows(1, 16)})._repr_html_()


def test_repr_opens_no_array(card: ModelCard) -> None:
    result = made(card, {POST: rows(6, 16), PATTERN: pattern(6), MEAN: rows(1, 16), **lens_arrays()})
    text = repr(result)
    assert not result._values
    assert repr(made(card, {LOSS: rows(5, 1)})).endswith(f"{LOSS}  token 5>")
    assert f"{POST}  token 6 x d_model 16" in text and "head 2 x token 6 x key 6" in text and "' <b>'" in text
    assert "blocks.*.hook_resid_post|lens.top_k(2) (4)  token 6 x k 2" in text
    assert len(repr(made(card, {POST: rows(5000, 16)}, tokens=None, count=5000))) < 400


def test_ragged_prompts_are_stacked_with_a_mask(card: ModelCard) -> None:
    sizes = (6, 3, 5)
    items = [
        made(card, {POST: rows(n, 16, n), PATTERN: pattern(n), LOSS: rows(n - 1, 1), MEAN: rows(1, 16)}, count=n)
        for n in sizes
    ]
    stacked = stack(items)
    array = stacked[POST]
    assert array.shape == (3, 6, 16) and stacked.mask.sum(1).tolist() == list(sizes)
    assert np.isnan(array[~stacked.mask]).all() and stacked.positions[1].tolist() == [0, 1, 2, -1, -1, -1]
    for i, item in enumerate(items):
        assert np.array_equal(array[i][stacked.mask[i]], item[POST])
        assert np.array_equal(stacked[PATTERN][i, :, : sizes[i], : sizes[i]], item[PATTERN])
    assert np.isnan(stacked["pattern.0"][1, :, 3:]).all() and np.isnan(stacked[PATTERN][1, :, :, 3:]).all()
    assert stacked.mask_of(loss_of()).sum(1).tolist() == [5, 2, 4]
    assert stacked[MEAN].shape == (3, 16) and "masked" in repr(stacked)
    with pytest.raises(InvalidJob, match="no rows"):
        stacked.mask_of(MEAN)
    even = stack(made(card, lens_arrays()) for _ in range(2))
    assert even[lens("resid_post.1", k=2)].indices.shape == (2, 6, 2) and even.mask.all()
    ints = stack([made(card, lens_arrays()), made(card, lens_arrays(), positions=range(6))])[LENS[0]].indices
    assert ints.dtype == np.int32
    with pytest.raises(InvalidJob, match="other hooks"):
        stack([items[0], made(card, {POST: rows(6, 16)})])
    with pytest.raises(InvalidJob, match="empty"):
        stack([])


def test_comparison_finds_the_hook_and_position_that_differ(card: ModelCard) -> None:
    base, z = rows(6, 16), rows(6, 16, 1)
    moved = z.copy()
    moved[4] *= 1.5
    first = made(card, {POST: base, Z: z, LOSS: rows(5, 1)})
    second = made(card, {Z: moved[[1, 4, 5]], POST: base[[1, 4, 5]], "hook_embed": base[:3]}, positions=[1, 4, 5])
    found = first.compare(second)
    assert found.hooks == [POST, Z] and found.positions.tolist() == [1, 4, 5]
    assert np.allclose(found.relative, [[0, 0, 0], [0, 0.5, 0]], atol=1e-7)
    assert found.max_abs[1, 1] == pytest.approx(np.abs(z[4]).max() / 2)
    assert repr(found).splitlines()[1].split() == [Z, "0.5", "(max", "abs", f"{found.max_abs[1, 1]:.3g})", "at", "4",
                                                   r"'\n'"]  # fmt: skip
    assert first.compare(second, ["*.attn.hook_z", "resid_post.1"]).hooks == [Z, POST]
    zero = made(card, {POST: base * 0})
    assert np.isinf(zero.compare(first, POST).relative).all() and not zero.compare(zero).relative.any()
    with pytest.raises(InvalidJob, match="no hook"):
        made(card, {PATTERN: pattern(6)}).compare(second)
    with pytest.raises(InvalidJob, match="no position"):
        first.compare(made(card, {POST: base[:1]}, positions=[7], count=9, tokens=None))
    with pytest.raises(KeyError):
        first.compare(second, "hook_embed")


def test_patterns_of_prompts_with_the_same_beginning_compare(card: ModelCard) -> None:
    whole = pattern(6).reshape(6, 2, 6)
    beginning = whole[:4, :, :4].reshape(4, -1)
    found = made(card, {PATTERN: whole.reshape(6, -1)}).compare(made(card, {PATTERN: beginning}, count=4))
    assert found.positions.tolist() == [0, 1, 2, 3] and not found.relative.any()


def test_pictures(card: ModelCard) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="an extra")
    matplotlib.use("Agg")
    stored = {POST: rows(6, 16), Z: rows(6, 16, 1), PATTERN: pattern(6), **lens_arrays()}
    result = made(card, stored)
    ax = result.plot.norms([POST, Z])
    assert np.allclose(ax.images[0].get_array()[1], np.linalg.norm(stored[Z], axis=1))
    assert [t.get_text() for t in ax.get_yticklabels()] == [POST, Z]
    assert len(result.plot.norms().get_yticklabels()) == 2  # a pattern's norm is another thing
    ax = result.plot.logit_lens()
    assert ax.get_yticklabels()[0].get_text() == "blocks.3.hook_resid_post" and len(ax.texts) == 24
    assert ax.texts[0].get_text() == "word3"
    ax = result.plot.attention(0, -1)
    assert np.array_equal(ax.images[0].get_array(), result[PATTERN][1])
    for figure in map(matplotlib.pyplot.figure, matplotlib.pyplot.get_fignums()):
        figure.canvas.draw()  # labels like $x$ would be refused here
    matplotlib.pyplot.close("all")
    with pytest.raises(InvalidJob, match="head"):
        result.plot.attention(0, 2)
    with pytest.raises(KeyError, match="captured"):
        made(card, {POST: rows(6, 16)}).plot.attention(0, 0)
    with pytest.raises(InvalidJob, match="lens"):
        made(card, {POST: rows(6, 16)}).plot.logit_lens()


def test_a_result_is_a_mapping_in_what_one_would_not_think_of(card: ModelCard) -> None:
    result = made(card, {POST: rows(6, 16), "blocks.0.hook_resid_post": rows(6, 16, 1)})
    assert result.get("nope") is None and result.get("blocks.99.hook_resid_post", 3) == 3 and 3 not in result
    with pytest.raises(KeyError, match="unknown hook 'nope'; this result has"):
        result["nope"]
    assert np.array_equal(result["*.1.hook_resid_post"], result[POST])
    with pytest.raises(KeyError, match="several of this result's"):
        result["resid_post.*"]
    assert result == result and result != made(card, {POST: rows(6, 16)}) and len({result}) == 1


def test_rows_are_not_copied_where_their_layout_is_the_stored_one(card: ModelCard) -> None:
    pytest.importorskip("xarray", reason="an extra")
    stored = {POST: rows(6, 16), Z: rows(6, 16, 1)}
    result = made(card, stored)
    read: dict[str, np.ndarray] = {}
    result._reader = lambda name: read.setdefault(name, stored[name].copy())
    for name in stored:
        assert np.shares_memory(result[name], read[name]) and result.numpy(name) is result[name], name
        assert np.shares_memory(result.to_xarray(name).values, read[name]), name
    assert result[Z].shape == (6, 2, 8)
    result.torch(POST)[0] = 0  # a copy, as torch has no tensors that cannot be written to
    assert np.array_equal(result[POST], stored[POST])
