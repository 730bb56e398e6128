"""The provider on a real pool, against transformers."""

from __future__ import annotations

import asyncio
import json
import os

import numpy as np
import pytest
import torch
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    ModelCall,
    ModelOutput,
    ResponseSchema,
    StreamEvent,
)
from inspect_ai.tool import ToolCall, ToolInfo, ToolParam, ToolParams
from inspect_ai.util import JSONSchema

from lenspool import Client, add
from lenspool.integrations import wire
from tests.e2e.conftest import counters
from tests.integrations.inspect_models import HOOK, Reference, model_of

os.environ.setdefault("INSPECT_DISPLAY", "none")


async def test_a_chat_is_what_transformers_makes_of_it(client: Client, reference: Reference) -> None:
    question = "What is the capital of France?"
    ids = reference.chat(("user", question))
    model = model_of(client)
    config = GenerateConfig(
        max_tokens=8, temperature=0, logprobs=True, top_logprobs=3, prompt_logprobs=2, extra_body={"capture": HOOK}
    )
    output = await model.generate(question, config=config)
    assert output.completion == reference.greedy(ids, 8) and "Paris" in output.completion
    assert output.stop_reason in ("max_tokens", "stop") and output.usage is not None
    assert output.usage.input_tokens == len(ids) and output.usage.total_tokens == len(ids) + output.usage.output_tokens
    assert output.message.source == "generate" and output.message.model == client.model and output.time is not None

    (choice,) = output.choices
    assert choice.logprobs is not None and len(choice.logprobs.content) == output.usage.output_tokens
    generated = reference.tokenizer(output.completion, add_special_tokens=False).input_ids
    logits = torch.from_numpy(reference.run([*ids, *generated])[0]).log_softmax(-1)
    for i, token in enumerate(generated):
        told, row = choice.logprobs.content[i], logits[len(ids) - 1 + i]
        assert told.token == reference.tokenizer.decode([token])
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert told.top_logprobs is not None and len(told.top_logprobs) == 3
        assert [t.logprob for t in told.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert told.top_logprobs[0].token == told.token, "greedy"
    assert choice.prompt_logprobs is not None and len(choice.prompt_logprobs.content) == len(ids) - 1
    for i, entry in enumerate(choice.prompt_logprobs.content):
        assert entry.logprob == pytest.approx(float(logits[i, ids[i + 1]]), abs=1e-3)
        assert entry.top_logprobs is not None and len(entry.top_logprobs) == 2


async def test_stop_sequences_stop_and_are_not_in_the_text(client: Client) -> None:
    model = model_of(client)
    full = await model.generate("What is the capital of France?", config=GenerateConfig(max_tokens=8, temperature=0))
    config = GenerateConfig(max_tokens=8, temperature=0, stop_seqs=["France"])
    cut = await model.generate("What is the capital of France?", config=config)
    assert "France" in full.completion and full.completion.startswith(cut.completion) and "France" not in cut.completion
    assert cut.stop_reason == "stop" and cut.usage is not None and full.usage is not None
    assert cut.usage.output_tokens < full.usage.output_tokens


async def test_an_answer_keeps_to_its_schema(client: Client) -> None:
    schema = ResponseSchema(name="n", json_schema=JSONSchema(type="object", properties={"n": JSONSchema(enum=[3, 7])}))
    config = GenerateConfig(max_tokens=30, temperature=0, response_schema=schema)
    output = await model_of(client).generate("Tell me a number.", config=config)
    assert json.loads(output.completion) in ({"n": 3}, {"n": 7}, {})


async def test_samples_choices_and_seeds(client: Client) -> None:
    model = model_of(client)
    config = GenerateConfig(max_tokens=6, temperature=1.2, seed=5, num_choices=3, top_p=0.95)
    prompt = "Name any animal."
    output = await model.generate(prompt, config=config)
    assert len({choice.message.text for choice in output.choices}) > 1
    again = await model.generate(prompt, config=config)
    assert [c.message.text for c in again.choices] == [c.message.text for c in output.choices]
    assert again.metadata is not None and again.metadata["lenspool"]["cached"]
    drawn = await model.generate(prompt, config=GenerateConfig(max_tokens=6, temperature=1.2))
    assert drawn.metadata is not None
    seed = drawn.metadata["lenspool"]["seed"]
    repeated = await model.generate(prompt, config=GenerateConfig(max_tokens=6, temperature=1.2, seed=seed))
    assert repeated.completion == drawn.completion, "the seed that was drawn is told"


async def test_a_stream_is_the_answer_piece_by_piece(client: Client) -> None:
    pieces: list[str] = []

    async def hear(event: StreamEvent) -> None:
        assert event.type == "text"
        pieces.append(event.text)

    config = GenerateConfig(max_tokens=24, temperature=0)
    model = model_of(client, capture=HOOK)
    output = await model.generate("Tell me about streams of water.", config=config, on_stream=hear)
    assert "".join(pieces) == output.completion and len(pieces) > 4
    silent = await model.generate("Tell me about streams of water.", config=config)
    assert silent.completion == output.completion


async def test_edits_are_there_while_text_is_generated(
    client: Client, reference: Reference, vector: np.ndarray
) -> None:
    """By the call in either form, and by a model argument; text and rows are those of the edited model."""
    question = "What is the capital of Italy?"
    ids = reference.chat(("user", question))
    clean, steered = reference.greedy(ids, 6), reference.greedy(ids, 6, 12, vector)
    assert clean != steered
    specs = {"12:resid_post": {"op": "add", "value": vector.tolist()}}
    config = GenerateConfig(max_tokens=6, temperature=0)
    model = model_of(client)
    for body in ({"extra_args": {"interventions": specs}}, {"interventions": specs}):
        output = await model.generate(question, config=config.merge(GenerateConfig(extra_body=body)))
        assert output.completion == steered
    by_digest = {"12:resid_post": {"op": "add", "value": wire.array_ref(await client.put(vector))}}
    edited = model_of(client, interventions=by_digest)
    assert (await edited.generate(question, config=config)).completion == steered
    assert (await model.generate(question, config=config)).completion == clean, "nothing stays"
    late = {"12:resid_post": {"op": "add", "value": 3.0, "phase": "generated"}}
    both = GenerateConfig(extra_body={"interventions": late})
    expected = await client.generate(
        ids,
        max_tokens=6,
        interventions=[add("resid_post.12", vector), add("resid_post.12", 3.0, phase="generated")],
    )
    assert (await edited.generate(question, config=config.merge(both))).completion == expected.text


async def test_a_second_asking_runs_nothing(client: Client) -> None:
    model = model_of(client, capture=["resid_post.3", "z.4"])
    config = GenerateConfig(max_tokens=5, temperature=0)
    first = await model.generate("What is asked twice?", config=config)
    before = await counters(client)
    second = await model.generate("What is asked twice?", config=config)
    assert (await counters(client))["steps"] == before["steps"]
    assert first.metadata is not None and second.metadata is not None and second.completion == first.completion
    assert second.metadata["lenspool"]["cached"] and not first.metadata["lenspool"]["cached"]
    assert second.metadata["lenspool"]["captures"] == first.metadata["lenspool"]["captures"]
    assert first.usage == second.usage


async def test_calls_of_a_model_that_cannot_call(client: Client) -> None:
    """The template of this model knows no tools: history and schemas are in the words of the prompt."""
    tool = ToolInfo(
        name="add",
        description="Add two numbers.",
        parameters=ToolParams(
            properties={"a": ToolParam(type="integer"), "b": ToolParam(type="integer")}, required=["a", "b"]
        ),
    )
    messages: list[ChatMessage] = []
    for i, (a, b) in enumerate([(1, 2), (4, 5), (7, 1)]):
        call = ToolCall(id=f"c{i}", function="add", arguments={"a": a, "b": b})
        messages += [
            ChatMessageUser(content=f"What is {a} plus {b}?"),
            ChatMessageAssistant(content="", tool_calls=[call]),
            ChatMessageTool(content=str(a + b), tool_call_id=f"c{i}", function="add"),
            ChatMessageAssistant(content=f"It is {a + b}."),
        ]
    messages.append(ChatMessageUser(content="What is 6 plus 3?"))
    api = model_of(client).api
    answer = await api.generate(messages, [tool], "auto", GenerateConfig(max_tokens=60, temperature=0))
    assert isinstance(answer, tuple)
    output, call = answer
    assert isinstance(output, ModelOutput) and isinstance(call, ModelCall)
    prompt = str(call.request["prompt"])
    assert prompt.count('"name": "add", "arguments"') == 3 and prompt.count("<tool_response>") == 3
    assert output.stop_reason == "tool_calls" and output.message.tool_calls is not None
    assert output.message.tool_calls[0].function == "add"
    assert output.message.tool_calls[0].arguments == {"a": 6, "b": 3}


async def test_one_model_serves_several_loops_and_closes(client: Client) -> None:
    """inspect runs each eval in a loop of its own, and keeps the model."""
    model = model_of(client)
    config = GenerateConfig(max_tokens=2, temperature=0)

    async def call(text: str) -> str:
        return (await model.generate(text, config=config)).completion

    first = await asyncio.to_thread(asyncio.run, call("Loops?"))
    assert await asyncio.to_thread(asyncio.run, call("Loops?")) == first == await call("Loops?")
    assert await model.api.tokenize("Loops?") == (await client.tokens("Loops?")).ids
    assert await model.api.count_tokens("Loops?") == len((await client.tokens("Loops?")).ids)
    await model.api.aclose()
    await model.api.aclose()
    assert await call("Loops?") == first
    await model.api.aclose()
