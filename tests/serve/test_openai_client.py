"""The official client against a running server with the shipped pair: plain, async, streaming."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from server import TARGET, Served, served
from waiting import wait_for

from moedraft.config import load_settings
from moedraft.core import SamplingParams
from moedraft.system.build import build

PROMPT = "Translate the question into SQL.\nSchema:\nshop(item, price)\nQuestion: How many items are there?"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """The server, and what the target alone says to PROMPT."""
    settings = load_settings(home=tmp_path_factory.mktemp("mini") / "home")
    system = build(settings)
    (plain,) = system.engine.generate(PROMPT, SamplingParams(max_tokens=16), draft=False)
    with served(settings.home, system=system) as found:
        yield found, plain.text


@pytest.fixture
def client(mini: tuple[Served, str]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{mini[0].url}/v1", api_key="unused", max_retries=0) as client:
        yield client
    wait_for(mini[0].idle)


@pytest.fixture
def expected(mini: tuple[Served, str]) -> str:
    return mini[1]


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [TARGET]
    assert client.models.retrieve(TARGET).owned_by == "moedraft"


def test_a_completion(client: OpenAI, expected: str) -> None:
    answer = client.completions.create(model=TARGET, prompt=PROMPT, max_tokens=16, temperature=0, logprobs=2)
    assert answer.choices[0].text == expected
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or []) == answer.usage.completion_tokens  # type: ignore[union-attr]
    spec = answer.model_dump()["metrics"]["speculative_decoding"]
    assert set(spec) >= {
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "num_drafts",
        "expert",
        "adapter_version",
    }


def test_chat(client: OpenAI, expected: str) -> None:
    answer = client.chat.completions.create(
        model=TARGET,
        messages=MESSAGES,
        max_completion_tokens=16,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = answer.choices
    assert choice.message.content == expected
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    content = choice.logprobs.content if choice.logprobs else None
    assert content
    assert "".join(token.token for token in content).startswith(expected)
    assert all(len(token.top_logprobs) == 2 for token in content)


def test_a_stream(client: OpenAI, expected: str) -> None:
    stream = client.chat.completions.create(
        model=TARGET,
        messages=MESSAGES,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")


def test_the_stream_helper(client: OpenAI, expected: str) -> None:
    stop = expected.strip()[3:6]  # the helper takes an answer that was cut off for a fault
    with client.chat.completions.stream(model=TARGET, messages=MESSAGES, temperature=0, stop=stop) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == expected[: expected.index(stop)]
        assert stream.get_final_completion().choices[0].message.content == text


def test_several_answers(client: OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model=TARGET, prompt=PROMPT, max_tokens=12, n=3, seed=seed, temperature=1
        )
        return [choice.text for choice in answer.choices]

    first = texts(1)
    assert len(set(first)) > 1
    assert texts(1) == first
    assert texts(100) != first


def test_a_stop_string(client: OpenAI, expected: str) -> None:
    stop = expected.strip()[3:6]
    answer = client.completions.create(model=TARGET, prompt=PROMPT, max_tokens=16, temperature=0, stop=[stop])
    assert answer.choices[0].text == expected[: expected.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_leaving_a_stream_frees_its_slot(client: OpenAI, mini: tuple[Served, str]) -> None:
    stream = client.completions.create(
        model=TARGET, prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).choices
    stream.close()
    wait_for(mini[0].idle)


def test_async_clients_at_once(mini: tuple[Served, str], expected: str) -> None:
    async def one(client: AsyncOpenAI, stream: bool) -> str:
        if not stream:
            answer = await client.chat.completions.create(
                model=TARGET, messages=MESSAGES, max_tokens=16, temperature=0
            )
            return answer.choices[0].message.content or ""
        pieces = await client.completions.create(
            model=TARGET, prompt=PROMPT, max_tokens=16, temperature=0, stream=True
        )
        return "".join([piece.choices[0].text async for piece in pieces])

    async def all_at_once() -> list[str]:
        async with AsyncOpenAI(base_url=f"{mini[0].url}/v1", api_key="unused", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i % 2 == 0) for i in range(12)))

    assert asyncio.run(all_at_once()) == [expected] * 12


def test_errors_are_the_ones_the_client_knows(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="a")
    assert unknown.value.code == "model_not_found"
    assert unknown.value.request_id
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(
            model=TARGET, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert unsupported.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=TARGET, prompt="a", max_tokens=0)


def test_hostile_text_is_only_text(client: OpenAI) -> None:
    """Letters of all sorts, what looks like special tokens, and bytes that are half a letter."""
    for prompt in (
        "\x00\x01\x7f",
        "</s><s>[INST]",
        "\u202e\ufeff\u2028 a",
        "🏳️‍🌈" * 20,
        "{{7*7}} ${x} <script>",
        "a" * 900,
    ):
        answer = client.completions.create(model=TARGET, prompt=prompt, max_tokens=4, temperature=1, seed=1)
        answer.choices[0].text.encode()
        chat = client.chat.completions.create(
            model=TARGET, messages=[{"role": "user", "content": prompt}], max_tokens=4, seed=1
        )
        assert chat.usage is not None


def test_a_prompt_longer_than_the_context(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(model=TARGET, prompt="word " * 20_000, max_tokens=1)


def test_a_key_is_needed_where_there_are_keys(tmp_path_factory: pytest.TempPathFactory) -> None:
    from moedraft.storage.keys import KeyFile

    home = tmp_path_factory.mktemp("keys")
    secret = KeyFile(home).create(["infer"])[1]
    with served(home) as found:
        url = f"{found.url}/v1"
        with (
            OpenAI(base_url=url, api_key="sk-wrong", max_retries=0) as wrong,
            pytest.raises(openai.AuthenticationError),
        ):
            wrong.models.list()
        with OpenAI(base_url=url, api_key=secret, max_retries=0) as right:
            assert right.models.list().data
            assert right.completions.create(model=TARGET, prompt="1 2", max_tokens=2).choices[0].text
