"""The provider on a real pool: against transformers, inside inspect's evals, and under TransformerLens's own tools."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    Model,
    ModelCall,
    ModelOutput,
    ResponseSchema,
    StreamEvent,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import Solver, generate, user_message
from inspect_ai.tool import ToolCall, ToolInfo, ToolParam, ToolParams
from inspect_ai.util import JSONSchema

from lenspool import CacheError, Client, add
from lenspool.integrations import wire
from lenspool.integrations.inspect import fetch, load, registry
from tests.e2e import test_snippets as pages
from tests.e2e.conftest import counters, relative

os.environ.setdefault("INSPECT_DISPLAY", "none")
HOOK = "blocks.12.hook_out"
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Russia": "Moscow",
    "Poland": "Warsaw",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Ireland": "Dublin",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Kenya": "Nairobi",
    "Turkey": "Ankara",
    "Hungary": "Budapest",
    "Belgium": "Brussels",
    "Finland": "Helsinki",
}


def model_of(client: Client, **arguments: Any) -> Model:
    assert registry.lenspool
    return get_model(f"lenspool/{client.model}", base_url=client.url, memoize=False, **arguments)


class Oracle:
    """transformers in float32, with the model's own tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def chat(self, *messages: tuple[str, str]) -> list[int]:
        told = [{"role": role, "content": content} for role, content in messages]
        ids: list[int] = self.tokenizer.apply_chat_template(told, add_generation_prompt=True, return_dict=False)
        return ids

    @torch.no_grad()
    def run(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits `[tokens, vocabulary]`, and the outputs of the blocks but the last `[layers - 1, tokens, width]`."""
        out = self.model(torch.tensor([ids]), output_hidden_states=True)
        return out.logits[0].numpy(), torch.cat(out.hidden_states[1:-1]).numpy()

    @torch.no_grad()
    def greedy(self, ids: list[int], count: int, layer: int | None = None, vector: np.ndarray | None = None) -> str:
        """Text of greedy tokens; with a vector added to the output of a block, at every position."""

        def steer(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
            return out + torch.from_numpy(vector)

        handle = None if layer is None else self.model.model.layers[layer].register_forward_hook(steer)
        try:
            out = self.model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
        finally:
            if handle is not None:
                handle.remove()
        text: str = self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Oracle:
    return Oracle(smollm2)


@pytest.fixture(scope="module")
def vector() -> np.ndarray:
    return np.random.default_rng(3).normal(0, 4.0, 576).astype(np.float32)


async def test_a_chat_is_what_transformers_makes_of_it(client: Client, oracle: Oracle) -> None:
    question = "What is the capital of France?"
    ids = oracle.chat(("user", question))
    model = model_of(client)
    config = GenerateConfig(
        max_tokens=8, temperature=0, logprobs=True, top_logprobs=3, prompt_logprobs=2, extra_body={"capture": HOOK}
    )
    output = await model.generate(question, config=config)
    assert output.completion == oracle.greedy(ids, 8) and "Paris" in output.completion
    assert output.stop_reason in ("max_tokens", "stop") and output.usage is not None
    assert output.usage.input_tokens == len(ids) and output.usage.total_tokens == len(ids) + output.usage.output_tokens
    assert output.message.source == "generate" and output.message.model == client.model and output.time is not None

    (choice,) = output.choices
    assert choice.logprobs is not None and len(choice.logprobs.content) == output.usage.output_tokens
    generated = oracle.tokenizer(output.completion, add_special_tokens=False).input_ids
    logits = torch.from_numpy(oracle.run([*ids, *generated])[0]).log_softmax(-1)
    for i, token in enumerate(generated):
        told, row = choice.logprobs.content[i], logits[len(ids) - 1 + i]
        assert told.token == oracle.tokenizer.decode([token])
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


async def test_edits_are_there_while_text_is_generated(client: Client, oracle: Oracle, vector: np.ndarray) -> None:
    """By the call in either form, and by a model argument; text and rows are those of the edited model."""
    question = "What is the capital of Italy?"
    ids = oracle.chat(("user", question))
    clean, steered = oracle.greedy(ids, 6), oracle.greedy(ids, 6, 12, vector)
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


# -- TransformerLens's own tools


def adapted(smollm2: Path, tokenizer: Any) -> tuple[Any, Any]:
    """TransformerLens's adapter for the model, and its tokenizer as it wants it."""
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_config_from_hf, configure_tokenizer
    from transformer_lens.model_bridge.sources._hf_format import determine_architecture_from_hf_config

    config = transformers.AutoConfig.from_pretrained(smollm2)
    architecture = determine_architecture_from_hf_config(config)
    bridge_config = build_bridge_config_from_hf(config, architecture, str(smollm2), torch.float32)
    adapter = ArchitectureAdapterFactory.select_architecture_adapter(bridge_config)
    return adapter, configure_tokenizer(tokenizer, adapter.cfg)


async def test_transformer_lens_drives_the_provider(
    client: Client, oracle: Oracle, smollm2: Path, vector: np.ndarray
) -> None:
    """InspectDriver under a RemoteBridge: caches, logits at every position, loss, edits."""
    from transformer_lens.model_bridge import RemoteBridge
    from transformer_lens.model_bridge.sources.inspect.driver import InspectDriver
    from transformer_lens.model_bridge.sources.inspect.profiles import TLBridgeProfile

    adapter, tokenizer = adapted(smollm2, oracle.tokenizer)
    model = model_of(client)
    api: Any = model.api
    profile = TLBridgeProfile(
        api.supported_kinds(), api.provides_sequence_logits, supports_attention_mask=api.supports_attention_mask
    )
    ids = oracle.chat(("user", "What is the capital of Spain?"))
    attention = [f"blocks.3.attn.hook_{part}" for part in ("out", "z", "pattern")]
    names = [HOOK, *attention, "blocks.3.ln2.hook_in"]
    edit = {"op": "add", "value": torch.from_numpy(vector), "pos": [2, 3]}

    def work() -> tuple[Any, Any, Any, Any]:
        driver = InspectDriver(model, adapter, tokenizer, profile)
        bridge = RemoteBridge(adapter=adapter, tokenizer=tokenizer, driver=driver)
        tokens = torch.tensor([ids])
        logits, cache = bridge.run_with_cache(tokens, names_filter=names)
        edited = bridge.forward(tokens, intervene={HOOK: edit})
        loss = bridge.forward(tokens, return_type="loss")
        bridge.close()
        return logits, cache, edited, loss

    logits, cache, edited, loss = await asyncio.to_thread(work)
    expected, streams = oracle.run(ids)
    assert relative(logits[0].numpy(), expected) < 1e-5
    assert float(loss) == pytest.approx(
        float(torch.nn.functional.cross_entropy(torch.from_numpy(expected[:-1]), torch.tensor(ids[1:]))), abs=1e-4
    )
    assert relative(cache[HOOK][0].numpy(), streams[12]) < 1e-5
    assert cache["blocks.3.attn.hook_z"].shape == (1, len(ids), 9, 64)
    assert cache["blocks.3.attn.hook_pattern"].shape == (1, 9, len(ids), len(ids))
    mixed = cache["blocks.3.ln2.hook_in"] - cache["blocks.3.attn.hook_out"]
    assert relative(mixed[0].numpy(), streams[2]) < 1e-5
    same = await client.capture(ids, "logits", interventions=add("resid_post.12", vector, positions=[2, 3]))
    assert relative(edited[0].numpy(), same["logits"]) < 1e-5
    assert relative(edited[0].numpy(), expected) > 1e-2


async def test_the_wire_form_moves_logits_only_when_asked(client: Client) -> None:
    model = model_of(client)

    async def ask(**arguments: Any) -> dict[str, Any]:
        output = await model.generate("", config=GenerateConfig(extra_body={"extra_args": arguments}))
        assert output.metadata is not None and output.usage is not None and output.usage.output_tokens == 1
        return output.metadata

    full = await ask(input_ids=[1, 504, 3575], capture=["0:resid_pre"])
    assert set(full) == {"activations", "tl_logits"} and full["tl_logits"]["shape"] == [3, 49152]
    assert full["activations"]["0:resid_pre"]["dtype"] == "float32"
    rows = wire.decode_array(full["activations"]["0:resid_pre"])
    assert np.array_equal(rows, (await client.capture([1, 504, 3575], "resid_pre.0"))["resid_pre.0"])
    assert set(await ask(input_ids=[1, 504, 3575], capture=[], return_logits=False)) == {"activations"}


# -- evals


def task(name: str, solver: list[Solver] | Solver | None = None, count: int = len(CAPITALS)) -> Task:
    pairs = list(CAPITALS.items())[:count]
    dataset = [Sample(f"What is the capital of {country}?", target=city) for country, city in pairs]
    return Task(dataset, solver=solver or generate(), scorer=includes(), name=name)


async def run(task: Task, model: Model, folder: Path, **config: Any) -> EvalLog:
    options = {"temperature": 0.0, "max_tokens": 10, "max_connections": 64, **config}
    async with asyncio.timeout(300):
        (log,) = await eval_async(task, model=model, log_dir=str(folder), **options)
    assert log.status == "success", log.error
    read = read_eval_log(log.location)  # as anyone who has the file
    assert read.samples is not None and len(read.samples) == len(task.dataset)
    return read


def accuracy(log: EvalLog) -> float:
    assert log.results is not None
    return log.results.scores[0].metrics["accuracy"].value


async def test_an_eval_is_one_batch_and_its_log_holds_references(
    client: Client, tmp_path: Path, vector: np.ndarray
) -> None:
    before = await counters(client)
    plain = await run(task("plain"), model_of(client), tmp_path)
    after = await counters(client)
    written = sum(usage.output_tokens for usage in plain.stats.model_usage.values())
    assert accuracy(plain) > 0.5
    assert after["steps"] - before["steps"] < written / 3, "samples run together"

    hooks = ["blocks.1?.hook_resid_post", "z.3"]
    captured = await run(task("captured"), model_of(client, capture=hooks), tmp_path)
    assert accuracy(captured) == accuracy(plain)
    assert plain.samples is not None and captured.samples is not None
    answers = [[sample.output.completion for sample in log.samples or ()] for log in (plain, captured)]
    assert answers[0] == answers[1]
    size = sum(rows.nbytes for sample in captured.samples for g in load(sample) for rows in g.numpy().values())
    grown = Path(captured.location).stat().st_size - Path(plain.location).stat().st_size
    assert size > 15e6 and grown < 1500 * len(captured.samples), f"{size} bytes of activations, {grown} of log"

    sample = captured.samples[5]
    (turn,) = load(sample)
    straight = await client.capture(turn.prompt_token_ids, ["resid_post.12", "z.3"])
    assert turn.text == sample.output.completion and len(turn.hooks) == 11
    assert relative(turn["resid_post.12"], straight["resid_post.12"]) < 1e-5
    assert turn["z.3"].shape == straight["z.3"].shape
    (fetched,) = await fetch(sample, client)
    assert np.array_equal(fetched["resid_post.12"], turn["resid_post.12"]) and fetched.tokens is not None
    with pytest.raises(CacheError, match="no store"):
        load(sample, store=tmp_path)

    edit = {"12:resid_post": {"op": "add", "value": wire.array_ref(await client.put(vector))}}
    steered = await run(task("steered", count=12), model_of(client, interventions=edit, capture=HOOK), tmp_path)
    assert steered.samples is not None and accuracy(steered) < accuracy(plain)
    (turn,) = load(steered.samples[0])
    same = await client.capture(turn.prompt_token_ids, HOOK, interventions=add(HOOK, vector))
    assert relative(turn[HOOK], same[HOOK]) < 1e-5, "as edited"


async def test_transformer_lens_reads_what_it_captures_in_an_eval(
    client: Client, tmp_path: Path, oracle: Oracle
) -> None:
    from inspect_ai.analysis import SampleSummary, samples_df
    from transformer_lens.model_bridge.sources.inspect.eval import (
        activations_column,
        capture_activations,
        turn_activations,
    )

    names = [HOOK, "blocks.3.attn.hook_q"]
    artifacts = tmp_path / "artifacts"
    capture = capture_activations(names, output_dir=str(artifacts))
    steps: list[Solver] = [capture, generate(), user_message("Sure?"), generate()]
    model = model_of(client, capture=names, inline=True)
    log = await run(task("turns", steps, count=2), model, tmp_path, max_tokens=4)
    assert log.samples is not None
    for i, sample in enumerate(log.samples):
        saved = np.load(artifacts / f"{sample.id}_epoch1.npz")
        country = list(CAPITALS)[i]
        ids = oracle.chat(("user", f"What is the capital of {country}?"))
        assert relative(saved[HOOK], oracle.run(ids)[1][12]) < 1e-5 and saved[names[1]].shape == (len(ids), 9, 64)
        turns = turn_activations(sample)
        assert len(turns) == 3, "the solver's run and two turns"
        assert relative(turns[1][HOOK][0], saved[HOOK]) < 1e-5
        usages = [event.output.usage for event in sample.events if event.event == "model"]
        for turn, usage in zip(turns, usages, strict=True):
            assert usage is not None and turn[HOOK].shape == (1, usage.input_tokens, 576)
            assert turn[names[1]].shape == (1, usage.input_tokens, 9, 64)
    table = samples_df(log.location, columns=[*SampleSummary, activations_column()])
    assert len(table) == 2 and HOOK in str(table["tl_activations"].iloc[0])


async def test_the_page_runs(
    client: Client,
    oracle: Oracle,
    smollm2: Path,
    vector: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/inspect.md, from top to bottom."""
    from transformer_lens.model_bridge import RemoteBridge
    from transformer_lens.model_bridge.sources.inspect.driver import InspectDriver
    from transformer_lens.model_bridge.sources.inspect.profiles import TLBridgeProfile

    monkeypatch.setenv("LENSPOOL_REDIS", client.url)
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path))
    adapter, tokenizer = adapted(smollm2, oracle.tokenizer)
    task = Task(dataset=[Sample(input="Name a city.")], solver=generate(), config=GenerateConfig(max_tokens=4))
    names: dict[str, Any] = {"client": client, "vector": vector, "task": task, "adapter": adapter}
    names |= {"tokenizer": tokenizer, "get_model": get_model, "eval_async": eval_async, "array_ref": wire.array_ref}
    names |= {part.__name__: part for part in (RemoteBridge, InspectDriver, TLBridgeProfile)}
    async with asyncio.timeout(200):
        for snippet in pages.snippets(Path(__file__).parents[2] / "docs" / "inspect.md"):
            await pages.run(snippet, names, "inspect.md")
    assert names["log"].status == "success" and names["turn"]["resid_post.12"].shape[1] == 576
    await asyncio.to_thread(names["bridge"].close)
