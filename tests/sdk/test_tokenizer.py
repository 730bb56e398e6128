"""The client tokenizes as transformers does with the model's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lenspool import InvalidJob
from lenspool.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers", reason="the oracle")

TEXTS = ["Hello world", " leading space", "naïve café 🙂 日本", "a\n\n b\tc", "<s>not special?", "x" * 300]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Say "hi" & <b>'},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "again"},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|{{ m['role'] }}|>\n{% generation %}{{ m['content'] | trim }}{% endgeneration %}{{ eos_token }}\n"
    "{%- if loop.index > 9 %}{% break %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}{{ {'a': 'é'} | tojson }}"
)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level BPE tokenizer that adds a BOS, as Llama's do."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    fast.train_from_iterator(TEXTS * 3, trainer)
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder), folder


@pytest.fixture(scope="module")
def ours(oracle: Any) -> Tokenizer:
    pytest.importorskip("vllm", reason="the worker's package makes the blob")
    from lenspool_worker.model_card import tokenizer_blob

    blob = tokenizer_blob(Path(oracle[1]))
    assert blob is not None
    return Tokenizer(json.loads(blob))


@pytest.mark.parametrize("text", TEXTS)
def test_text_as_transformers(oracle: Any, ours: Tokenizer, text: str) -> None:
    expected = oracle[0](text)["input_ids"]
    assert ours.encode(text) == expected
    assert ours.decode(expected) == oracle[0].decode(expected, skip_special_tokens=True)
    assert ours.tokens(expected) == [oracle[0].decode([t]) for t in expected]
    assert ours.encode(text, special=False) == oracle[0](text, add_special_tokens=False)["input_ids"]
    assert ours.spans(text) == oracle[0](text, return_offsets_mapping=True)["offset_mapping"]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_chat_as_transformers_and_one_bos(oracle: Any, ours: Tokenizer, length: int) -> None:
    messages = CHAT[:length]
    ask = messages[-1]["role"] != "assistant"
    text = oracle[0].apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    assert ours.render(messages) == text
    ids = oracle[0].apply_chat_template(messages, tokenize=True, add_generation_prompt=ask, return_dict=False)
    assert ours.chat(messages) == ids
    assert ids.count(0) == 1, "one BOS"


def test_bad_chats_are_refused(ours: Tokenizer) -> None:
    with pytest.raises(InvalidJob, match="no tools"):
        ours.chat([{"role": "tool", "content": "x"}])
    with pytest.raises(InvalidJob) as error:
        ours.chat([{"role": "user", "content": "x"}, {"content": "y"}])
    assert error.value.field == "prompt[1]"


def test_model_without_template_says_so(oracle: Any) -> None:
    plain = Tokenizer({"tokenizer": oracle[0].backend_tokenizer.to_str(), "chat_template": None})
    with pytest.raises(InvalidJob, match="no chat template"):
        plain.chat(CHAT)
