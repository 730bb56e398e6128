"""What the provider asks of a pool, and what it refuses: against a pretended pool."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelOutput,
    ResponseSchema,
    get_model,
)
from inspect_ai.tool import ToolCall, ToolCallError, ToolInfo, ToolParam, ToolParams
from inspect_ai.util import JSONSchema

from lenspool import (
    ArrayRef,
    Client,
    DeadlineExceeded,
    EngineFailed,
    InvalidJob,
    PoolUnavailable,
    QueueFull,
    UnknownHook,
    WorkerLost,
)
from lenspool.integrations import wire
from lenspool.integrations.inspect import settings
from lenspool.integrations.inspect.messages import in_words, prompt_ids
from lenspool.integrations.inspect.provider import LenspoolAPI
from lenspool.integrations.inspect.tool_calls import find_calls
from lenspool.testing import FakePool, fake_card
from lenspool.testing.fake_model import byte_tokenizer
from lenspool.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
ADD = ToolInfo(
    name="add",
    description="Adds.",
    parameters=ToolParams(
        properties={"a": ToolParam(type="integer"), "b": ToolParam(type="integer")}, required=["a", "b"]
    ),
)
CALLED = ToolCall(id="call_1", function="add", arguments={"a": 1, "b": 2})
DIALOGUE: list[ChatMessage] = [
    ChatMessageUser(content="1+2?"),
    ChatMessageAssistant(content="Let me see.", tool_calls=[CALLED]),
    ChatMessageTool(content="3", tool_call_id="call_1", function="add"),
]


class FakeAPI(LenspoolAPI):
    """The provider, on a pretended pool."""

    def __init__(self, pool: FakePool, **arguments: Any) -> None:
        self.pool = pool
        super().__init__("fake", **arguments)

    def _make(self) -> Client:
        return self.pool.client()


async def ask(
    api: LenspoolAPI, config: GenerateConfig | None = None, tools: list[ToolInfo] | None = None, prompt: str = "Hi"
) -> ModelOutput:
    answer = await api.generate([ChatMessageUser(content=prompt)], tools or [], "auto", config or GenerateConfig())
    return answer[0] if isinstance(answer, tuple) else answer  # type: ignore[return-value]


def test_the_entry_point_is_light_and_names_the_provider() -> None:
    (entry,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["inspect_ai"].items()
    assert entry[0] == "lenspool"
    heavy = {"torch", "transformers", "vllm", "lenspool.integrations.inspect.provider"}
    code = f"import sys, {entry[1]}; print({heavy} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"
    EntryPoint(*entry, group="inspect_ai").load()
    model = get_model("lenspool/some/model", base_url="redis://nowhere:1", memoize=False)
    assert isinstance(model.api, LenspoolAPI), "nothing is asked of the pool yet"
    assert model.api.connection_key() == "redis://nowhere:1 some/model" and model.api.max_tokens() == 2048


def test_no_field_of_the_config_is_dropped_silently(caplog: pytest.LogCaptureFixture) -> None:
    fields = set(GenerateConfig.model_fields)
    groups = [set(settings.SERVED), set(settings.REFUSED), settings.INSPECTS_OWN, settings._MORE]
    assert sum(map(len, groups)) == len(set.union(*groups)), "each in one group"
    assert set.union(*groups) <= fields
    hints = {"reasoning_effort": "low", "parallel_tool_calls": False, "cache_prompt": True, "extra_headers": {"a": "b"}}
    settings._warned.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            settings.sampling_of(GenerateConfig(**hints), {}, 10)  # type: ignore[arg-type]
    assert sorted(record.args[0] for record in caplog.records) == sorted(hints)  # type: ignore[index]
    for name, value in {"best_of": 3, "modalities": ["image"]}.items():
        with pytest.raises(InvalidJob, match=name):
            settings.sampling_of(GenerateConfig(**{name: value}), {}, 10)  # type: ignore[arg-type]


async def test_everything_that_vllm_samples_by_reaches_the_job() -> None:
    pool = FakePool()
    config = GenerateConfig(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        seed=3,
        stop_seqs=["x"],
        frequency_penalty=0.1,
        presence_penalty=0.2,
        logit_bias={5: 1.5},
        num_choices=2,
        response_schema=ResponseSchema(name="n", json_schema=JSONSchema(type="integer")),
        extra_body={
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "stop_token_ids": [9],
            "min_tokens": 2,
            "ignore_eos": True,
        },
    )
    output = await ask(FakeAPI(pool), config)
    first, second = (request.sampling for request in pool.requests)
    assert first == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 3,
        "stop": ["x"],
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "logit_bias": [[5, 1.5]],
        "json_schema": {"type": "integer"},
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [9],
        "min_tokens": 2,
        "ignore_eos": True,
    }
    assert second is not None and second["seed"] == 4 and len(output.choices) == 2
    assert output.usage is not None and output.usage.output_tokens == 14


async def test_what_is_not_said_has_inspects_defaults_and_can_be_had_again() -> None:
    pool = FakePool(fake_card(max_model_len=4096))
    output = await ask(FakeAPI(pool))
    sampling = pool.requests[0].sampling
    assert sampling is not None and sampling["max_tokens"] == 2048 and sampling["temperature"] == 1.0
    assert output.metadata is not None and output.metadata["lenspool"]["seed"] == sampling["seed"] is not None
    assert output.message.model == "fake" and output.message.source == "generate"
    await ask(FakeAPI(pool))
    assert pool.requests[1].sampling != sampling, "another draw"


async def test_a_full_context_is_a_stop_reason() -> None:
    pool = FakePool(fake_card(max_model_len=64))
    api = FakeAPI(pool)
    cut = await ask(api, GenerateConfig(max_tokens=500))
    assert cut.stop_reason == "model_length" and cut.usage is not None and cut.usage.total_tokens == 64
    assert (await ask(api, GenerateConfig(max_tokens=8))).stop_reason == "max_tokens"
    long = await ask(api, prompt="x" * 100)
    assert long.stop_reason == "model_length" and long.error is not None and "63" in long.error
    assert len(pool.requests) == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"guided_regex": "a*"}, "guided_regex"),
        ({"extra_args": {"capture": ["0:resid_post"], "caption": 1}}, "caption"),
        ({"extra_args": {"return_logits": True}}, "return_logits"),
        ({"extra_args": {"capture": ["0:nope"]}}, "unrecognised wire key '0:nope'"),
        ({"extra_args": {"capture": ["x:resid_post"]}}, "<layer>:<kind>"),
        ({"extra_args": {"capture": ["99:resid_post"]}}, "99:resid_post"),
        ({"extra_args": {"input_ids": [1, 2], "attention_mask": [0, 1]}}, "attention_mask"),
        ({"capture": ["blocks.0.hook_nope"]}, "hook_nope"),
        ({"capture": ["ln_final.hook_out"], "inline": True}, "ln_final.hook_out"),
        ({"interventions": {"0:resid_post": {"op": "explode"}}}, "explode"),
        ({"interventions": {"0:pattern": {"op": "suppress"}}}, "hook_pattern"),
        ({"interventions": {"0:resid_post": {"op": "add", "value": [1.0, 2.0]}}}, r"\(2,\).*\(16,\).*hook_resid_post"),
    ],
)
async def test_a_wrong_call_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    pool = FakePool()
    with pytest.raises(InvalidJob, match=words):
        await ask(FakeAPI(pool), GenerateConfig(max_tokens=2, extra_body=body))
    assert not pool.requests, "nothing was asked"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"capture": "blocks.0.hook_nope"}, UnknownHook, "hook_nope"),
        ({"capture": ["ln_final.hook_out"], "inline": True}, InvalidJob, "ln_final.hook_out"),
        ({"gpu_memory_utilization": 0.5}, InvalidJob, "gpu_memory_utilization"),
        ({"priority": "fast"}, InvalidJob, "interactive"),
        ({"interventions": {"99:resid_post": {"op": "suppress"}}}, InvalidJob, "2 layers"),
        ({"interventions": {"0:resid_post": {"op": "add", "value": np.ones(16)}}}, InvalidJob, "JSON"),
    ],
)
def test_model_arguments_are_checked_when_the_model_is_made(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        FakeAPI(FakePool(), **arguments)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("suppress", "a dict with 'op'"),
        ({"value": 1}, "a dict with 'op'"),
        ({"op": "double"}, "unsupported intervention op 'double'"),
        ({"op": "scale"}, "factor"),
        ({"op": "add", "value": None}, "value"),
        ({"op": "suppress", "factor": 2}, "unknown spec key"),
        ({"op": "set", "value": {"data": "AAAA", "dtype": "object", "shape": [1]}}, "object"),
    ],
)
def test_a_wrong_spec_names_its_key_and_is_a_value_error(spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        wire.interventions({"1:resid_post": spec})
    assert isinstance(caught.value, InvalidJob) and "1:resid_post" in str(caught.value)


@pytest.mark.parametrize("spec", [{"op": "add", "value": True}, {"op": "scale", "factor": "2"}])
@pytest.mark.parametrize("where", [{}, {"pos": []}, {"pos": True}, {"pos": 99}])
async def test_values_and_positions_that_mean_nothing_are_refused(spec: dict[str, Any], where: dict[str, Any]) -> None:
    good = {"op": "scale", "factor": 2.0} if where else spec
    with pytest.raises(InvalidJob, match=r"interventions\[0\]"):
        await ask(
            FakeAPI(FakePool()), GenerateConfig(extra_body={"interventions": {"0:resid_post": {**good, **where}}})
        )


def test_values_come_as_numbers_arrays_or_references() -> None:
    vector = np.arange(4, dtype=np.float32)
    ref = ArrayRef("ab" * 32, (4,))
    specs = [
        {"op": "add", "value": np.float32(2.5)},
        {"op": "add", "value": np.array(2.5)},
        {"op": "set", "value": wire.encode_array(vector), "pos": [1, -1]},
        {"op": "steer", "value": json.loads(json.dumps(wire.array_ref(ref))), "coefficient": 3.0, "phase": "generated"},
    ]
    first, second, third, fourth = wire.interventions({"1:attn_out": specs})
    assert first.value == second.value == 2.5 and first.hook == "blocks.1.attn.hook_out"
    assert np.array_equal(third.value, vector) and third.where == {"positions": [1, -1]}
    assert fourth.value == ref and fourth.options["coefficient"] == 3.0 and fourth.where == {"phase": "generated"}
    (other,) = wire.interventions({"mlp_post.0": {"op": "zero", "units": [3]}})
    assert other.hook == "mlp_post.0" and other.op == "zero"


def test_every_kind_has_a_key_and_a_hook() -> None:
    card = fake_card()
    keys = wire.wire_keys(card)
    assert len(keys) == card.n_layers * len(wire.KINDS) and len(set(keys.values())) == len(keys)
    assert keys["1:resid_mid"] == "blocks.1.hook_resid_mid" and keys["0:attn_out"] == "blocks.0.hook_attn_out"
    api = FakeAPI(FakePool(card))
    assert api.supported_kinds() == set(wire.KINDS) and api.capability_note() == ""
    reason = "no queries of their own here"
    hooks = {name: info for name, info in card.hooks.items() if not name.endswith("attn.hook_q")}
    document = {**card.to_dict(), "refusals": {"blocks.{layer}.attn.hook_q": reason}}
    gated = FakeAPI(FakePool(type(card).from_dict(document)))
    gated.pool.card.hooks.clear()
    gated.pool.card.hooks.update(hooks)
    assert "q" not in gated.supported_kinds() and gated.capability_note() == reason


def test_only_what_may_pass_is_tried_again() -> None:
    api = FakeAPI(FakePool())
    full = api.should_retry(QueueFull(10))
    assert full and full.kind == "rate_limit"
    for error in (PoolUnavailable("gone"), WorkerLost(3), DeadlineExceeded("queue", 1.0)):
        assert api.should_retry(error) and api.should_retry(error).kind == "transient"
    for final in (InvalidJob("a", "b"), UnknownHook("x"), EngineFailed("broken"), ValueError("x")):
        assert not api.should_retry(final)


def block(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (f"I add.\n{block({'name': 'add', 'arguments': {'a': 1, 'b': 2}})}", "I add.", [{"a": 1, "b": 2}]),
        (f"{block({'name': 'add', 'parameters': {'a': 1}})} {block({'name': 'now'})}", "", [{"a": 1}, {}]),
        ('{"name": "add", "arguments": {"a": {"x": 1}}}', "", [{"a": {"x": 1}}]),
        ('<tool_call>{"name": "add", "arguments": "4"}</tool_call>', "", [{"a": 4}]),
        ('The set {1, 2} and {"name": "add"', 'The set {1, 2} and {"name": "add"', []),
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ],
)
def test_tool_calls_are_found(text: str, rest: str, calls: list[dict[str, Any]]) -> None:
    found = find_calls(text, [ADD])
    assert found[0] == rest and [call.arguments for call in found[1]] == calls
    assert all(call.parse_error is None for call in found[1]) and len({call.id for call in found[1]}) == len(calls)


@pytest.mark.parametrize(
    "text",
    ["<tool_call>{add 1 2}</tool_call>", '<tool_call>{"name": "add", "argume', "<tool_call>[1]</tool_call>"],
)
def test_a_broken_tool_call_is_told_to_the_model(text: str) -> None:
    ((call,), rest) = reversed(find_calls(text, [ADD]))
    assert rest == "" and call.parse_error is not None and "Error parsing" in call.parse_error


def tool_tokenizer() -> Tokenizer:
    """The byte tokenizer with a template that takes tools."""
    template = (
        "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}"
        "{% if m.tool_call_id %} {{ m.tool_call_id }} {{ m.name }}{% endif %}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %} CALL {{ c.id }} {{ c.function | tojson }}{% endfor %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return Tokenizer({"tokenizer": byte_tokenizer()._fast.to_str(), "chat_template": template})


def test_tools_and_their_history_reach_a_template_that_takes_them() -> None:
    tokenizer = tool_tokenizer()
    assert tokenizer.takes_tools and not byte_tokenizer().takes_tools
    text = tokenizer.text(prompt_ids(tokenizer, DIALOGUE, [ADD]))
    assert text.startswith('TOOLS [{"type": "function", "function": {"name": "add", "description": "Adds.",')
    assert 'assistant: Let me see. CALL call_1 {"name": "add", "arguments": {"a": 1, "b": 2}}' in text
    assert text.endswith("tool call_1 add: 3assistant:")


def test_tools_and_their_history_are_written_out_where_the_template_has_none() -> None:
    failed = ChatMessageTool(content="", function="add", error=ToolCallError("timeout", "too slow"))
    dialogue = [ChatMessageSystem(content="Be brief."), *DIALOGUE, failed, ChatMessageUser(content="And?")]
    system, user, assistant, results = in_words(dialogue, [ADD])
    assert system["content"].startswith("Be brief.") and '"required": ["a", "b"]' in system["content"]
    assert user == {"role": "user", "content": "1+2?"}
    assert find_calls(assistant["content"], [ADD])[1][0].arguments == CALLED.arguments
    assert results["role"] == "user" and results["content"].count("<tool_response>") == 2
    assert '{"name": "add", "content": "3"}' in results["content"] and "Error: too slow" in results["content"]
    assert results["content"].endswith("And?")


def test_messages_that_are_not_text_are_refused_and_reasoning_is_kept() -> None:
    image = ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AAAA")])
    with pytest.raises(InvalidJob, match="image"):
        prompt_ids(byte_tokenizer(), [image], [])
    thought = ChatMessageAssistant(content=[ContentReasoning(reasoning="Hm."), ContentText(text="Yes.")])
    tokenizer = byte_tokenizer()
    assert "<think>\nHm.\n</think>\nYes." in tokenizer.text(prompt_ids(tokenizer, [thought], []))


def test_a_model_without_a_template_takes_text_but_no_tools() -> None:
    tokenizer = Tokenizer({"tokenizer": byte_tokenizer()._fast.to_str()})
    messages = [ChatMessageSystem(content="One."), ChatMessageUser(content="Two.")]
    assert tokenizer.text(prompt_ids(tokenizer, messages, [])) == "One.\nTwo."
    with pytest.raises(InvalidJob, match="chat template"):
        prompt_ids(tokenizer, messages, [ADD])
