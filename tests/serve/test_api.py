"""The OpenAI-compatible routes: what they answer and refuse, and that a client that leaves is noticed."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from serve_fakes import tiny_system
from server import TARGET, Served, check_error, events, served, slowed
from waiting import wait_for

from moedraft.core import SamplingParams
from moedraft.routing.selector import UnaskedSelector
from moedraft.serve.dashboard.panels import VIEWS
from moedraft.serve.http import plan
from moedraft.serve.http.admin_routes import Registration
from moedraft.serve.http.body import parse_json
from moedraft.serve.http.errors import ApiError
from moedraft.serve.http.prompts import PromptPreparer, plain_chat
from moedraft.serve.http.replies import Reply
from moedraft.serve.http.schema import ChatMessage, CompletionRequest, StreamOptions, TextPart

PROMPT = "1 2 3"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("tiny"), request_timeout=20) as found:
        yield found


@pytest.fixture
def client(tiny: Served) -> Iterator[httpx.Client]:
    with tiny.client() as client:
        yield client
    assert tiny.idle()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": TARGET, "prompt": PROMPT, "temperature": 0, "max_tokens": 5, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    row = {
        "model": TARGET,
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 5,
    }
    return {**row, **fields}


def complete(client: httpx.Client, **fields: Any) -> Any:
    response = client.post("/v1/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


# -- answers -------------------------------------------------------------------------------------


def test_the_target_and_its_domains_are_models(client: httpx.Client) -> None:
    rows = client.get("/v1/models").json()["data"]
    assert [(row["id"], row["parent"]) for row in rows] == [
        (TARGET, None),
        (f"{TARGET}:code", TARGET),
        (f"{TARGET}:prose", TARGET),
    ]
    assert client.get(f"/v1/models/{TARGET}:code").json()["parent"] == TARGET
    check_error(client.get("/v1/models/gpt"), 404, "model")


def test_models_are_listed_without_reading_examples(
    client: httpx.Client, tiny: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(tiny.system.store.registry), "domains", None)
    assert [row["id"] for row in client.get("/v1/models").json()["data"]][1:] == [
        f"{TARGET}:code",
        f"{TARGET}:prose",
    ]


def test_limits_that_are_kept_one_by_one_are_not_together(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 answers of 4 096 tokens with 20 log-probabilities each would be 1.4 million objects."""
    row = body(n=16, max_tokens=4096, logprobs=20)
    check_error(client.post("/v1/completions", json=row), 400, "max_tokens")
    row = chat(n=16, max_tokens=4096, logprobs=True, top_logprobs=20)
    message = check_error(client.post("/v1/chat/completions", json=row), 400, "max_tokens")
    assert "are at most 100000, not 1376256" in message
    assert plan.MOST_LOGPROBS > 4096 * 21  # the most that one answer can ask for is taken
    monkeypatch.setattr(plan, "MOST_LOGPROBS", 90)
    check_error(client.post("/v1/completions", json=body(n=2, max_tokens=16, logprobs=2)), 400, "max_tokens")
    for fine in ({"n": 2, "max_tokens": 15}, {"n": 2, "max_tokens": 16, "stream": True}):
        assert client.post("/v1/completions", json=body(**fine, logprobs=2)).status_code == 200


def test_an_answer_is_what_the_engine_says(client: httpx.Client, tiny: Served, tmp_path: Path) -> None:
    answer = complete(client)
    plain = complete(client, draft=False)
    (choice,) = answer["choices"]
    assert choice == plain["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["text"].split()) == 5
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    spec = answer["metrics"]["speculative_decoding"]
    assert spec["expert"] == "shared"
    assert spec["num_accepted_tokens"] <= spec["num_draft_tokens"]
    seeded = complete(client, seed=1, temperature=1)  # it is drafted for however long rounds take here
    assert seeded["metrics"]["speculative_decoding"]["mean_acceptance_length"] > 1
    assert plain["metrics"]["speculative_decoding"]["num_drafts"] == 0


def test_the_router_chooses_or_the_model_says(client: httpx.Client) -> None:
    def expert(**fields: Any) -> Any:
        return complete(client, **fields)["metrics"]["speculative_decoding"]["expert"]

    assert expert(prompt="def function number 3") == "code"
    assert expert(prompt="def function number 3", model=f"{TARGET}:prose") == "prose"
    assert expert(prompt="def function number 3", model=f"{TARGET}:shared") == "shared"


def test_several_prompts_and_answers(client: httpx.Client) -> None:
    answer = complete(client, prompt=[[1, 2], [3, 4, 5]], n=2, temperature=1, seed=7)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] != texts[1]
    assert answer["usage"]["prompt_tokens"] == 5
    assert complete(client, prompt="1 2", temperature=1, seed=7)["choices"][0]["text"] == texts[0]
    assert complete(client, prompt="3 4 5", temperature=1, seed=8)["choices"][0]["text"] == texts[3]


def test_a_stop_string_ends_an_answer(client: httpx.Client) -> None:
    whole = complete(client)["choices"][0]["text"]
    stop = whole.split()[2]
    (choice,) = complete(client, stop=[f"{stop} "])["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == whole[: whole.index(f"{stop} ")]


def test_log_probabilities(client: httpx.Client) -> None:
    (choice,) = complete(client, logprobs=2)["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["text_offset"][1] == len(told["tokens"][0])
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())  # greedy: the best is what was said
    (choice,) = client.post("/v1/chat/completions", json=chat(logprobs=True, top_logprobs=1)).json()[
        "choices"
    ]
    content = choice["logprobs"]["content"]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]
    bare = client.post("/v1/chat/completions", json=chat(logprobs=True)).json()["choices"][0]
    assert bare["logprobs"]["content"][0]["top_logprobs"] == []


def test_chat(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=chat(max_completion_tokens=5)).json()
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", complete(client)["choices"][0]["text"])
    parts = [{"role": "user", "content": [{"type": "text", "text": "1 2"}, {"type": "text", "text": " 3"}]}]
    again = client.post("/v1/chat/completions", json=chat(messages=parts)).json()
    assert again["choices"][0]["message"] == message


def test_the_plain_template() -> None:
    said = [ChatMessage(role=role, content=text) for role, text in (("system", "S"), ("user", "U"))]
    assert plain_chat(said) == "System: S\n\nUser: U\n\nAssistant:"
    assert plain_chat(said[1:]) == "U"


async def _templated(template: str, role: Any = "user") -> object:
    class Tokenizer:
        chat_template = template

        def apply_chat_template(self, rows: list[dict[str, str]], **options: Any) -> list[int]:
            if template == "refuses":
                raise ValueError("roles must alternate: " + rows[0]["content"])
            assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
            return [len(rows), len(rows[0]["role"])]

    return await PromptPreparer(Tokenizer(), None).chat([ChatMessage(role=role, content="secret")])


def test_a_template_of_the_model_wins() -> None:
    assert asyncio.run(_templated("some")) == [1, len("user")]
    assert asyncio.run(_templated("some", "developer")) == [1, len("system")]
    assert asyncio.run(_templated("one that knows developer", "developer")) == [1, len("developer")]
    with pytest.raises(Exception, match="refuses these messages") as raised:
        asyncio.run(_templated("refuses"))
    assert "secret" not in str(raised.value)


# -- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_the_same(client: httpx.Client, n: int) -> None:
    fields = {"n": n, "seed": 3, "temperature": 1, "logprobs": 1, "max_tokens": 20}
    whole = complete(client, **fields)
    row = body(**fields, stream=True, stream_options={"include_usage": True})
    with client.stream("POST", "/v1/completions", json=row) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        pieces = events(response)
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"] == whole["usage"]
    assert pieces[-1]["metrics"]["speculative_decoding"]["num_drafts"] > 0
    assert len({piece["id"] for piece in pieces}) == 1
    for choice in whole["choices"]:
        mine = [p["choices"][0] for p in pieces[:-1] if p["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece["finish_reason"] for piece in mine][-1] == choice["finish_reason"]
        assert all(piece["finish_reason"] is None for piece in mine[:-1])
        assert [t for piece in mine for t in piece["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]


def test_a_stream_of_chat(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        first, *pieces = events(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == complete(client)["choices"][0]["text"]
    assert "usage" not in pieces[-1]
    assert pieces[-1]["metrics"]["speculative_decoding"]["expert"] == "shared"


# -- refusals ------------------------------------------------------------------------------------

MANY = {f"field{i}": 1 for i in range(50_000)}
LONE = b'{"model": "mini", "max_tokens": 1, "prompt": "a\\ud800"}'
HOSTILE: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("n of a billion", {"n": 10**9}, 400, "n"),
    ("n of zero", {"n": 0}, 400, "n"),
    ("n as text", {"n": "2"}, 400, "n"),
    ("n as a fraction", {"n": 1.5}, 400, "n"),
    ("n as a truth", {"n": True}, 400, "n"),
    ("many prompts times n", {"prompt": ["1"] * 16, "n": 16}, 400, "n"),
    ("max_tokens -1", {"max_tokens": -1}, 400, "max_tokens"),
    ("max_tokens 2^63", {"max_tokens": 2**63}, 400, "max_tokens"),
    ("max_tokens over the limit", {"max_tokens": 10**6}, 400, "max_tokens"),
    ("temperature below 0", {"temperature": -0.1}, 400, "temperature"),
    ("temperature of a million", {"temperature": 1e6}, 400, "temperature"),
    ("top_p of 0", {"top_p": 0}, 400, "top_p"),
    ("seed 2^63", {"seed": 2**63}, 400, "seed"),
    ("seed below -2^63", {"seed": -(2**63) - 1}, 400, "seed"),
    ("user as a number", {"user": 7}, 400, "user"),
    ("seed with 500 digits", {"seed": 10**500}, 400, "seed"),
    ("empty prompt", {"prompt": ""}, 400, None),
    ("blank prompt", {"prompt": " \n"}, 400, None),
    ("no prompts", {"prompt": []}, 400, "prompt"),
    ("no tokens", {"prompt": [[]]}, 400, "prompt"),
    ("mixed prompts", {"prompt": ["a", 1]}, 400, "prompt"),
    ("token outside the vocabulary", {"prompt": [10**12]}, 400, None),
    ("negative token", {"prompt": [-1]}, 400, None),
    ("tokens that are truths", {"prompt": [True] * 200_000}, 400, "prompt"),
    ("prompt too long", {"prompt": "7 " * 5000}, 400, None),
    ("tokens too many", {"prompt": [7] * 5000}, 400, None),
    ("unknown model", {"model": "gpt-4"}, 404, "model"),
    ("unknown domain", {"model": f"{TARGET}:law"}, 404, "model"),
    ("path as a model", {"model": f"{TARGET}:../../etc/passwd"}, 404, "model"),
    ("model without end", {"model": "m" * 10_000}, 400, "model"),
    ("many stop strings", {"stop": ["a"] * 100}, 400, "stop"),
    ("empty stop string", {"stop": ""}, 400, "stop"),
    ("long stop string", {"stop": "a" * 5000}, 400, "stop"),
    ("logprobs 10^6", {"logprobs": 10**6}, 400, "logprobs"),
    ("unknown field", {"frobnicate": 1}, 400, "frobnicate"),
    ("best_of", {"best_of": 3}, 400, "best_of"),
    ("echo", {"echo": True}, 400, "echo"),
    ("penalty", {"presence_penalty": 0.5}, 400, "presence_penalty"),
    ("bias", {"logit_bias": {"5": 100}}, 400, "logit_bias"),
    ("options without a stream", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("markup as a field", {"<script>alert(1)</script>": 1}, 400, None),
    ("many fields", MANY, 400, None),
    ("many prompts", {"prompt": [[7]] * 5000}, 400, "prompt"),
    ("many fields of an option", {"stream": True, "stream_options": MANY}, 400, "stream_options"),
]


@pytest.mark.parametrize(
    ("fields", "status", "param"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE]
)
def test_a_hostile_field_is_refused(
    client: httpx.Client, fields: dict[str, Any], status: int, param: str | None
) -> None:
    check_error(client.post("/v1/completions", json=body(**fields)), status, param)


@pytest.mark.parametrize("kind", [CompletionRequest, StreamOptions, ChatMessage, TextPart, Registration])
def test_an_object_of_too_many_fields_is_one_error(kind: type[BaseModel]) -> None:
    """An error for each of them would hold up everybody else for seconds."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(MANY)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize("prompt", ["7 " * 5000, [7] * 5000])
def test_a_prompt_too_long_is_named_as_openai_does(client: httpx.Client, prompt: object) -> None:
    answer = client.post("/v1/completions", json=body(prompt=prompt))
    assert answer.json()["error"]["code"] == "context_length_exceeded"


DEEP = b'{"model": "mini", "prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
BODIES: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("no JSON", b"model=mini"),
    ("cut off", b'{"model": "mi'),
    ("a list", b"[]"),
    ("null", b"null"),
    ("a number", b"7"),
    ("invalid UTF-8", b'{"model": "mini", "prompt": "\xff\xfe"}'),
    ("UTF-16", '{"model": "mini", "prompt": "a"}'.encode("utf-16")),
    ("half a surrogate pair", LONE),
    ("half a pair as a field", b'{"model": "mini", "prompt": "a", "\\udfff": 1}'),
    ("half a pair as the model", b'{"model": "\\udfff", "prompt": "a"}'),
    ("half a pair as a stop string", b'{"model": "mini", "prompt": "a", "stop": ["\\udfff"]}'),
    ("NaN temperature", b'{"model": "mini", "prompt": "a", "temperature": NaN}'),
    ("infinite temperature", b'{"model": "mini", "prompt": "a", "temperature": Infinity}'),
    ("temperature 1e400", b'{"model": "mini", "prompt": "a", "temperature": 1e400}'),
    ("a number of 10 000 digits", b'{"model": "mini", "prompt": "a", "seed": ' + b"9" * 10_000 + b"}"),
    ("10 000 deep", DEEP),
    ("10 000 deep, open", b"[" * 10_000),
    ("900 deep", b'{"model": "mini", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}"),
    (
        "900 deep in a neutral field",
        b'{"model": "mini", "prompt": "a", "tools": ' + b"[" * 900 + b"]" * 900 + b"}",
    ),
]


@pytest.mark.parametrize("content", [row[1] for row in BODIES], ids=[row[0] for row in BODIES])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_hostile_body_is_refused(client: httpx.Client, path: str, content: bytes) -> None:
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    check_error(response, 400)


def test_ten_megabytes_are_refused(client: httpx.Client) -> None:
    check_error(client.post("/v1/completions", json=body(prompt="7 " * 5_000_000)), 413)


def test_a_pair_of_surrogates_is_a_letter(client: httpx.Client) -> None:
    content = b'{"model": "mini", "max_tokens": 1, "prompt": "1 \\ud83d\\ude00"}'
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.json()["usage"]["prompt_tokens"] == 2


def test_nul_is_a_letter_like_others(client: httpx.Client) -> None:
    assert complete(client, prompt="1 \x00 2")["usage"]["prompt_tokens"] == 3


MESSAGES: list[tuple[str, Any]] = [
    ("none", []),
    ("a text", "hello"),
    ("unknown role", [{"role": "tool", "content": "a"}]),
    ("no content", [{"role": "user"}]),
    ("null content", [{"role": "user", "content": None}]),
    (
        "picture",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    ),
    ("tool calls", [{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}]),
    ("many", [{"role": "user", "content": "a"}] * 10_000),
    ("many parts", [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}] * 5),
]


@pytest.mark.parametrize("messages", [row[1] for row in MESSAGES], ids=[row[0] for row in MESSAGES])
def test_hostile_messages_are_refused(client: httpx.Client, messages: Any) -> None:
    check_error(client.post("/v1/chat/completions", json=chat(messages=messages)), 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 9}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_chat_field_is_refused_by_name(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    check_error(client.post("/v1/chat/completions", json=chat(**fields)), 400, param)


def test_a_body_of_many_small_objects_is_read_quickly() -> None:
    """All others wait meanwhile. Garbage collections made two megabytes of empty lists take a second."""
    phases: list[str] = []
    gc.callbacks.append(lambda phase, _: phases.append(phase))
    try:
        assert parse_json(b'{"prompt":[' + b",".join([b"[]"] * 190_000) + b"]}")
    finally:
        gc.callbacks.pop()
    assert phases.count("start") <= 2  # none while the lists are made, which would cause hundreds
    assert gc.isenabled()
    with pytest.raises(ApiError, match="more than 200000 opening brackets"):
        parse_json(b"[" * 200_001)


def test_values_that_change_nothing_are_let_pass(client: httpx.Client) -> None:
    fields = {"presence_penalty": 0.0, "best_of": 1, "echo": False, "logit_bias": {}, "user": None}
    assert complete(client, **fields)["choices"] == complete(client)["choices"]
    fields = {"user": "u-1", "safety_identifier": "s", "prompt_cache_key": "k", "reasoning_effort": None}
    assert complete(client, **fields)["choices"] == complete(client)["choices"]
    assert (
        client.post("/v1/chat/completions", json=chat(tools=[], response_format={"type": "text"})).status_code
        == 200
    )


def test_a_seed_may_be_negative(client: httpx.Client) -> None:
    one, again, other = (complete(client, temperature=1, seed=seed)["choices"] for seed in (-7, -7, -(2**63)))
    assert one == again != other


def test_a_server_of_short_answers_gives_short_ones(tmp_path: Path) -> None:
    with served(tmp_path, max_output_tokens=8) as found, found.client() as client:
        row = {"model": TARGET, "prompt": PROMPT, "ignore_eos": True}
        assert client.post("/v1/completions", json=row).json()["usage"]["completion_tokens"] == 8


def test_nothing_but_json_is_taken(client: httpx.Client) -> None:
    content = json.dumps(body()).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None):
        headers = {"content-type": kind} if kind else {}
        check_error(client.post("/v1/completions", content=content, headers=headers), 415)


# -- limits of time and room ---------------------------------------------------------------------


def test_leaving_frees_the_slot(tmp_path: Path) -> None:
    with served(tmp_path) as found, found.client() as client:
        slowed(found.system, 0.2)
        for path, row in (("/v1/completions", body(n=3)), ("/v1/chat/completions", chat(n=3))):
            for stream in (True, False):
                _leave(found, path, {**row, "max_tokens": 200, "stream": stream})
                wait_for(found.idle)
        found.system.engine.refresh = lambda: None
        assert complete(client)["choices"][0]["finish_reason"] == "length"
        assert _aborted(client) == 12


@pytest.mark.parametrize("more", [b"\r\n", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"])
def test_leaving_after_the_next_request_frees_the_slot(tmp_path: Path, more: bytes) -> None:
    with served(tmp_path) as found, found.client() as client:
        slowed(found.system, 0.2)
        _leave(found, "/v1/completions", body(n=3, max_tokens=200), more)
        wait_for(found.idle)
        found.system.engine.refresh = lambda: None
        assert _aborted(client) == 3


def _aborted(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    (count,) = (line.split()[-1] for line in lines if 'finished_reason="abort"' in line)
    return float(count)


def _leave(found: Served, path: str, row: dict[str, Any], more: bytes = b"") -> None:
    content = json.dumps(row).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with socket.create_connection(found.address) as connection:
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        wait_for(lambda: found.worker.snapshot().running == 3)
        connection.sendall(more)


def _taken(found: Served) -> tuple[int, int]:
    now = found.worker.snapshot()
    return now.running, now.waiting


def test_too_many_are_told_when_to_come_again(tmp_path: Path) -> None:
    with served(tmp_path, max_waiting=2) as found, found.client() as client:
        slowed(found.system)
        row = body(max_tokens=100, stream=True)
        threads = [
            threading.Thread(target=lambda: client.post("/v1/completions", json=row)) for _ in range(6)
        ]
        for number, thread in enumerate(threads, 1):  # one after the other: the queue holds two
            thread.start()
            wait_for(lambda number=number: _taken(found) == (min(number, 4), max(number - 4, 0)))
        for stream in (True, False):
            refused = client.post("/v1/completions", json=body(stream=stream))
            check_error(refused, 429)
            assert int(refused.headers["retry-after"]) >= 1
        check_error(client.post("/v1/chat/completions", content=b"not even JSON"), 429)
        _refused_unread(found)
        for path in ("/ready", "/v1/models"):
            assert client.get(path).status_code == 200
        found.system.engine.refresh = lambda: None
        for thread in threads:
            thread.join(30)
        wait_for(found.idle)


def _refused_unread(found: Served) -> None:
    """The answer comes before the body does; what comes of the body later disturbs nobody."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with socket.create_connection(found.address, timeout=30) as connection:
        connection.sendall(f"{head}content-length: 100\r\n\r\n".encode())
        said = b""
        while not said.endswith(b"}}"):  # head and body may come one after the other
            said += connection.recv(65536)
        assert said.startswith(b"HTTP/1.1 429 ")
        connection.sendall(b"x" * 100 + b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_request_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with served(tmp_path, request_timeout=0.3) as found, found.client() as client:
        slowed(found.system, 0.2)
        check_error(client.post("/v1/completions", json=body(max_tokens=200)), 504)
        with client.stream("POST", "/v1/completions", json=body(max_tokens=200, stream=True)) as response:
            assert events(response)[-1]["error"]["code"] == "timeout"
        wait_for(found.idle)


def test_prompts_that_are_prepared_have_a_deadline_and_take_up_room(tmp_path: Path) -> None:
    """A crowd of long prompts waits for the threads that tokenise, before it waits for the engine."""
    go, statuses = threading.Event(), list[int]()
    with served(tmp_path, request_timeout=2.0, max_waiting=0) as found:
        prompts: PromptPreparer = found.app.state.context.prompts
        prompts._short.submit(go.wait)
        slots = found.worker.snapshot().slots

        def ask(path: str, row: dict[str, Any]) -> None:
            with found.client() as client:
                statuses.append(client.post(path, json=row).status_code)

        asked = [("/v1/chat/completions", chat()), ("/v1/completions", body())]
        threads = [threading.Thread(target=ask, args=asked[i % 2]) for i in range(slots)]
        for thread in threads:
            thread.start()
        wait_for(lambda: prompts.waiting == slots)
        with found.client() as client:
            check_error(client.post("/v1/completions", json=body()), 429)
        for thread in threads:
            thread.join(30)
        assert statuses == [504] * slots
        assert prompts.waiting == 0
        go.set()
        with found.client() as client:
            assert complete(client)["choices"]


def test_draining_takes_nothing_new_and_finishes_the_rest(tmp_path: Path) -> None:
    with served(tmp_path, shutdown_timeout=100) as found, found.client() as client:
        slowed(found.system, 0.2)
        row = body(max_tokens=200, stream=True)
        with client.stream("POST", "/v1/completions", json=row) as response:
            wait_for(lambda: found.worker.snapshot().running == 1)
            found.server.handle_exit(signal.SIGTERM, None)
            wait_for(lambda: found.worker.snapshot().draining)
            assert check_error(client.post("/v1/completions", json=body()), 503)
            assert client.get("/ready").json() == {"status": "draining"}
            assert client.get("/health").status_code == 200
            found.system.engine.refresh = lambda: None
            assert events(response)[-1]["choices"][0]["finish_reason"] == "length"
        wait_for(lambda: found.server.should_exit)


def test_a_second_signal_ends_what_runs(tmp_path: Path) -> None:
    with served(tmp_path, shutdown_timeout=60) as found, found.client() as client:
        slowed(found.system, 0.2)
        with client.stream("POST", "/v1/completions", json=body(max_tokens=200, stream=True)) as response:
            wait_for(lambda: found.worker.snapshot().running == 1)
            for _ in range(2):
                found.server.handle_exit(signal.SIGTERM, None)
            with suppress(httpx.HTTPError, IndexError):  # cut off before it could be said
                assert events(response)[-1]["error"]["code"] == "aborted"
        wait_for(found.idle)


def test_a_step_that_fails_is_an_error_and_the_server_lives(tmp_path: Path) -> None:
    with served(tmp_path) as found, found.client() as client:
        found.system.engine.refresh = lambda: 1 / 0
        message = check_error(client.post("/v1/completions", json=body()), 500)
        assert "zero" not in message
        with client.stream("POST", "/v1/completions", json=body(stream=True)) as response:
            assert events(response)[-1]["error"]["type"] == "server_error"
        found.system.engine.refresh = lambda: None
        assert complete(client)["choices"]
        assert client.get("/ready").status_code == 200


def test_ready_tells_a_frozen_step(tmp_path: Path) -> None:
    with served(tmp_path, stall_seconds=0.2) as found, found.client() as client:
        assert client.get("/ready").json() == {"status": "ready"}
        thaw = threading.Event()
        found.system.engine.refresh = lambda: thaw.wait(60)
        thread = threading.Thread(target=lambda: client.post("/v1/completions", json=body()))
        thread.start()
        wait_for(lambda: client.get("/ready").status_code == 503)
        assert client.get("/ready").json() == {"status": "stalled"}
        assert client.get("/health").status_code == 200
        thaw.set()
        thread.join(30)
        wait_for(lambda: client.get("/ready").status_code == 200)


# -- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capture", "store", "kept"), [(True, None, 1), (True, False, 0), (False, True, 0), (True, True, 1)]
)
def test_what_is_kept_to_learn_from(tmp_path: Path, capture: bool, store: bool | None, kept: int) -> None:
    with served(tmp_path, capture=capture) as found, found.client() as client:
        complete(client, store=store)
        found.system.recorder.flush()
        assert found.system.store.replay.count() == kept


def test_prompts_are_in_no_log_and_no_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "moedraft")
    with served(tmp_path) as found, found.client() as client:
        complete(client, prompt="hunter2 4 5")
        client.post("/v1/completions", json=body(prompt="hunter2", frobnicate=1))
        client.post("/v1/completions", json=body(prompt="hunter2 " * 2000))
        found.system.engine.refresh = lambda: 1 / 0
        client.post("/v1/completions", json=body(prompt="hunter2 4 5"))
        metrics = client.get("/metrics").text
    assert "moedraft_request_success_total" in metrics
    assert "hunter2" not in metrics
    assert caplog.records
    assert "hunter2" not in caplog.text


def test_metrics_count_what_was_served(tmp_path: Path) -> None:
    with served(tmp_path) as found, found.client() as client:
        answers = [complete(client, prompt="def function number 3", max_tokens=8) for _ in range(3)]
        text = client.get("/metrics").text
        found.system.recorder.flush()
        stored = found.system.store.requests.summary()
    spec = [answer["metrics"]["speculative_decoding"] for answer in answers]
    labels = 'expert="code",lang="latin",model_name="mini"'
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    accepted = sum(one["num_accepted_tokens"] for one in spec)
    # What was drafted before a request was routed counts for the shared adapter.
    counted = [float(value) for name, value in rows.items() if "num_accepted_tokens_total" in name]
    assert sum(counted) == sum(one.accepted_tokens for one in stored.values()) == accepted
    assert float(rows[f"moedraft_target_steps_total{{{labels}}}"]) == stored["code"].steps
    assert float(rows[f"moedraft_generation_tokens_total{{{labels}}}"]) == stored["code"].tokens == 24
    by_position = [float(value) for name, value in rows.items() if "per_pos_total" in name]
    assert sum(by_position) == accepted
    assert float(rows['moedraft_request_success_total{finished_reason="length",model_name="mini"}']) == 3
    assert float(rows['moedraft_time_to_first_token_seconds_count{model_name="mini"}']) == 3
    assert float(rows['moedraft_num_requests_running{model_name="mini"}']) == 0


def test_the_engine_stays_exact_under_http(client: httpx.Client, tmp_path: Path) -> None:
    """The same prompts through a second system's `generate`, plain."""
    from serve_fakes import tiny_system

    system = tiny_system(tmp_path / "other")
    prompts = [f"{i} {i + 1}" for i in range(6)]
    expected = system.engine.generate(prompts, SamplingParams(max_tokens=12), draft=False)
    answer = complete(client, prompt=prompts, max_tokens=12)
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in expected]
    system.close()


# -- beside the engine ---------------------------------------------------------------------------


@pytest.fixture
def threads(tiny: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The threads in which prompts are tokenised and routed."""
    seen: dict[str, list[str]] = {"tokenised": [], "routed": []}

    def watch(kind: str, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            seen[kind].append(threading.current_thread().name)
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    watch("tokenised", type(tiny.system.engine.tokenizer), "__call__")
    watch("routed", tiny.system.router, "route")
    return seen


def test_a_prompt_is_tokenised_once_and_not_by_the_engine(
    client: httpx.Client, threads: dict[str, list[str]]
) -> None:
    assert len(complete(client, n=3, max_tokens=2)["choices"]) == 3
    assert len(threads["tokenised"]) == 1
    assert threads["tokenised"][0].startswith("prompts")


@pytest.mark.parametrize("content", ["7" * 100_000, [{"type": "text", "text": "7" * 50_000}] * 2])
def test_a_prompt_too_long_for_its_letters_is_not_tokenised(
    tiny: Served,
    client: httpx.Client,
    threads: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    content: Any,
) -> None:
    monkeypatch.setattr(tiny.app.state.context.prompts, "_most_letters", 99_999)
    messages = [{"role": "user", "content": content}]
    refused = client.post("/v1/chat/completions", json=chat(messages=messages))
    assert "has 100000 characters, which are more than 255 tokens" in check_error(refused, 400)
    assert threads["tokenised"] == []


def test_a_long_prompt_that_is_cut_never_comes_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tiny_system(tmp_path / "home", long_prompts="truncate")
    system.engine.truncate_prompts = True
    with served(tmp_path / "home", system=system, long_prompts="truncate") as tiny, tiny.client() as client:
        taken: list[int] = []
        plain = tiny.worker.submit

        async def submit(prompt: Any, params: Any, **options: Any) -> Any:
            taken.append(len(options["ids"]))
            return await plain(prompt, params, **options)

        monkeypatch.setattr(tiny.worker, "submit", submit)
        assert complete(client, prompt="1 2 " * 10_000)["usage"]["prompt_tokens"] == 255
        assert complete(client, prompt=[1, 2] * 10_000)["usage"]["prompt_tokens"] == 255
        assert taken == [255, 255]


def test_a_seeded_request_is_routed_beside_the_engine(
    client: httpx.Client, threads: dict[str, list[str]]
) -> None:
    for prompt in ("def function number 3", [1, 2]):
        complete(client, prompt=prompt, seed=7, temperature=0.7, n=2)
    assert len(threads["routed"]) == 2
    assert all(name.startswith("moedraft-routes") for name in threads["routed"])


def test_pieces_with_many_logprobs_are_built_beside_the_event_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    plain = Reply.piece

    def piece(reply: Reply, *args: Any) -> Any:
        seen.append(threading.current_thread().name)
        return plain(reply, *args)

    monkeypatch.setattr(Reply, "piece", piece)
    for few, beside in ((1000, False), (3, True)):
        monkeypatch.setattr("moedraft.serve.http.answering.FEW_LOGPROBS", few)
        seen.clear()
        with client.stream("POST", "/v1/completions", json=body(stream=True, logprobs=5)) as response:
            assert len(events(response)) == len(seen)
        assert ("AnyIO" in seen[0]) == beside


def test_a_router_that_fails_costs_a_seeded_request_its_expert_only(
    client: httpx.Client, tiny: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny.system.router, "route", lambda texts: 1 / 0)
    found = complete(client, prompt="def function number 3", seed=7, temperature=0.7)
    assert found["metrics"]["speculative_decoding"]["expert"] == "shared"


def test_a_fixed_selector_asks_no_router_for_seeded_requests_either(tmp_path: Path) -> None:
    """As for all others: the shared draft serves whoever names no expert."""
    for selector, expert in (("fixed", "shared"), ("classifier", "code")):
        system = tiny_system(tmp_path / selector)
        if selector == "fixed":
            system.engine.selector = UnaskedSelector(system.router)
        home = tmp_path / selector
        with served(home, system=system, selector=selector) as found, found.client() as client:
            answer = complete(client, prompt="def function number 3", seed=7, temperature=0.7)
            assert answer["metrics"]["speculative_decoding"]["expert"] == expert
            named = complete(client, model=f"{TARGET}:prose", seed=7, temperature=0.7)
            assert named["metrics"]["speculative_decoding"]["expert"] == "prose"


def test_slow_views_and_long_prompts_hold_up_no_short_prompt(tmp_path: Path) -> None:
    """Each has threads of its own."""
    gate = threading.Event()
    with served(tmp_path) as found, found.client() as client:
        prompts = found.app.state.context.prompts
        held = [VIEWS.submit(gate.wait, 20) for _ in range(8)] + [prompts._long.submit(gate.wait, 20)]
        try:
            row = {"model": TARGET, "messages": [{"role": "user", "content": "1 2"}], "max_tokens": 3}
            assert client.post("/v1/chat/completions", json=row).status_code == 200
            assert not any(one.done() for one in held)
        finally:
            gate.set()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "'messages[0].content[0].type': Input should be 'text'.",
        ),
        (
            [{"role": "tool", "content": "a", "tool_call_id": "x"}],
            "'messages[0].role': Input should be 'system', 'developer', 'user' or 'assistant'.",
        ),
        (
            [{"role": "user", "content": 3}],
            "'messages[0].content': Input should be a valid string or Input should be a valid list.",
        ),
        ([], "'messages': List should have at least 1 item after validation, not 0."),
        (
            [{"role": "user", "content": [{"text": "a"}]}],
            "'messages[0].content[0].type': Field required.",
        ),
    ],
)
def test_of_a_wrong_message_the_innermost_field_is_named(
    client: httpx.Client, messages: list[Any], message: str
) -> None:
    body = {"model": TARGET, "messages": messages}
    error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["message"], error["param"]) == (message, "messages")
    required = "missing_required_parameter"
    assert error["code"] == (required if message.endswith("required.") else "invalid_value")


def test_of_a_part_that_is_nearly_right_the_fault_is_named(client: httpx.Client) -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    body = {"model": TARGET, "messages": [{"role": "user", "content": [part]}]}
    error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert error["message"] == "The field 'cache_control' is not supported; leave it out."
    assert error["code"] == "unsupported_parameter"
    body = {"model": TARGET, "prompt": ["a", 3]}
    error = client.post("/v1/completions", json=body).json()["error"]
    assert error["message"] == "'prompt[1]': Input should be a valid string."
